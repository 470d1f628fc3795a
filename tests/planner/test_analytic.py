"""Op times by counting against sums by hand; links against the hosts that devices stand on."""

import itertools
import random
from dataclasses import replace
from functools import partial
from math import inf, prod
from types import SimpleNamespace

import numpy as np
import pytest
from support.steps import planned_step

from ppctl.executors.device_mesh import laid_out
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import Machine, PlannedLayout
from ppctl.executors.work.roofline import Link, ModelWork, Op, PieceWork, Speed
from ppctl.planner.cost import step_time as counting
from ppctl.planner.cost.step_time import op_times
from ppctl.schedule.costs import LayerGathers, OpTimes, PieceTimes
from ppctl.schedule.mesh_axes import MeshSizes

NEAR, FAR = Link(0.001, 100.0), Link(0.01, 10.0)
MACHINE = Machine(Speed(1000.0, 50.0), NEAR, FAR, host_devices=8, task_s=0.25)
EMBED = PieceWork((Op(0.0, 4.0),), (), (Op(0.0, 2.0, 8.0),))
LAYER = PieceWork((Op(500.0, 5.0),), (Op(500.0, 5.0), Op(0.0, 1.0)), (Op(500.0, 5.0, 30.0),))
HEAD = PieceWork((), (Op(3000.0, 1.0),), ())
WORK = ModelWork(EMBED, LAYER, HEAD, x_bytes=6, stash_bytes={}, pending_bytes={})
PARAMS = ParamBytes(layer=120, embed_head=480, moments=2.0, compute_ratio=0.5)


def counted(layout, machine=MACHINE, examples=2, remat="none", **options):
    step = planned_step(WORK, PARAMS, machine, layout, examples=examples, remat=remat, **options)
    return op_times(step)


def overhead_s(params, machine, layout, **options):
    return counting.overhead_s(planned_step(WORK, params, machine, layout, **options))


def test_sends_of_weight_gradients_overlap_their_products_with_gathers_ahead():
    sends = Op(0.0, 100.0, axes=("tp",))
    work = replace(
        WORK,
        layer=PieceWork((*LAYER.forward, sends), LAYER.input_grad, (*LAYER.weight_grad, sends)),
    )
    layout = PlannedLayout(MeshSizes(tp=2), 1, 1)

    def one(work, machine=MACHINE):
        return op_times(planned_step(work, PARAMS, machine, layout, examples=2)).layer

    alone, waits = one(WORK), one(work)
    beside = one(work, replace(MACHINE, gathers_ahead=True))
    sent_s = NEAR.gather_s(200.0, 2)
    assert waits == PieceTimes(
        alone.forward_s + sent_s, alone.input_grad_s, alone.weight_grad_s + sent_s
    )
    assert beside == replace(waits, weight_grad_s=max(alone.weight_grad_s, sent_s))


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["auto", "dp-pp-fsdp", "fsdp-dp-pp"])
@pytest.mark.parametrize("host_devices", [1, 2, 4, 6, 8])
def test_an_axis_has_the_slow_link_where_any_of_its_groups_leaves_a_host(host_devices, order):
    """As the devices of a mesh are laid out."""
    machine = replace(MACHINE, host_devices=host_devices, order=order)
    for sizes in itertools.product((1, 2, 3, 4), repeat=3):
        number = prod(sizes)
        if number % host_devices and number > host_devices:
            continue
        devices = [
            SimpleNamespace(platform="gpu", slice_index=k // host_devices, process_index=0)
            for k in range(number)
        ]
        hosts = np.vectorize(lambda device: device.slice_index)(
            laid_out(devices, MeshSizes(*sizes), order)
        )[..., 0, 0, 0]
        dp, pp, fsdp = sizes
        lines = {  # the devices of a line communicate
            "dp": hosts.reshape(dp, -1).T,
            "pp": hosts.transpose(0, 2, 1).reshape(-1, pp),
            "fsdp": hosts.reshape(-1, fsdp),
            "both": hosts.reshape(dp, -1),
        }
        layout = PlannedLayout(MeshSizes(*sizes), 1, 1)
        step = planned_step(WORK, PARAMS, machine, layout)
        for name, line in lines.items():
            link, size = step.ring(("pp", "fsdp") if name == "both" else (name,))
            assert size == line.shape[1]
            if not (line != line[:, :1]).any():
                assert link == NEAR, (name, sizes)
                continue
            in_host = line.shape[1] // max(len(set(group)) for group in line.tolist())
            adapters = (
                in_host if name in ("dp", "fsdp") else 1
            )  # bytes between its devices in a host
            if name == "both":
                assert link.latency_s == FAR.latency_s, sizes
            else:
                bytes_per_s = min(NEAR.bytes_per_s, adapters * FAR.bytes_per_s)
                assert link == replace(FAR, bytes_per_s=bytes_per_s), (name, sizes)


def test_axes_of_hosts_that_are_not_full_have_the_slow_link():
    assert MACHINE.links({"dp": 3, "pp": 4, "fsdp": 1}) == {"dp": FAR, "pp": FAR, "fsdp": NEAR}


def test_ranks_that_divide_a_host_keep_its_links_on_hosts_that_are_not_full():
    machine, sizes = replace(MACHINE, host_devices=8), {"dp": 1, "pp": 3, "fsdp": 4}
    assert machine.links(sizes) == {"dp": NEAR, "pp": FAR, "fsdp": NEAR}
    fixed = replace(machine, order="fsdp-dp-pp")
    assert NEAR not in [link for axis, link in fixed.links(sizes).items() if axis != "dp"]


def test_without_hosts_or_a_network_all_transfers_use_one_link():
    sizes = {"dp": 64, "pp": 64, "fsdp": 1}
    assert set(replace(MACHINE, host_devices=None).links(sizes).values()) == {NEAR}
    assert set(replace(MACHINE, network=None).links(sizes).values()) == {NEAR}


# --- tasks --------------------------------------------------------------------------------------


def test_pieces_cost_their_operations_and_a_backward_its_recomputation():
    times = counted(PlannedLayout(MeshSizes(1, 2, 1), 4, 4))
    assert times.embed == PieceTimes(2 * 4 / 50, 0.0, (2 * 2 + 8) / 50)
    assert times.layer == PieceTimes(
        1.0, 1.0 + 2 / 50, 1.0
    )  # 2 examples of 500 FLOPs; W moves (10 + 30) / 50 in less
    assert times.head == PieceTimes(0.0, 6.0, 0.0)
    for remat in ("layer", "full"):
        assert counted(PlannedLayout(MeshSizes(1, 2, 1), 4, 4), remat=remat).layer == PieceTimes(
            1.0, 2.0 + 2 / 50, 1.0
        )
        assert (
            counted(PlannedLayout(MeshSizes(1, 2, 1), 4, 4), remat=remat).head == times.head
        )  # nothing of it is recomputed
    assert times.task_s == 0.25


def test_products_of_a_scan_over_layers_add_to_no_sum():
    layer = replace(LAYER, weight_grad=(Op(500.0, 5.0, sum_bytes=25.0),))
    step = planned_step(
        replace(WORK, layer=layer),
        PARAMS,
        MACHINE,
        PlannedLayout(MeshSizes(1, 2, 1), 4, 4),
        examples=2,
        unroll=4,
        adds=True,
    )
    times = {n: op_times(step.with_layers(n, n)).layer.weight_grad_s for n in (4, 5)}
    assert times == {4: 1.0, 5: 1.0 + 25 / 50}


def test_a_backward_recomputes_the_needed_part_of_a_layer_and_all_of_a_stage():
    work = replace(WORK, layer=replace(LAYER, redo=(Op(100.0, 1.0),)))
    layout = PlannedLayout(MeshSizes(1, 2, 1), 4, 4)
    again = {
        remat: op_times(
            planned_step(work, PARAMS, MACHINE, layout, examples=2, remat=remat)
        ).layer.input_grad_s
        for remat in ("none", "layer", "full")
    }
    assert again["layer"] - again["none"] == pytest.approx(2 * 100.0 / 1000)
    assert again["full"] - again["none"] == pytest.approx(2 * 500.0 / 1000)


def test_a_hop_crosses_hosts_where_pp_does():
    assert counted(PlannedLayout(MeshSizes(1, 4, 2), 4, 4)).hop_s == NEAR.hop_s(2 * 6)
    assert counted(PlannedLayout(MeshSizes(1, 4, 4), 4, 4)).hop_s == FAR.hop_s(2 * 6)
    assert counted(PlannedLayout(MeshSizes(8, 1, 2), 4, 4)).hop_s == 0


def test_ranks_share_the_cores_of_the_machine():
    layout = PlannedLayout(MeshSizes(1, 2, 1), 4, 4)
    assert counted(layout).capacity == inf
    assert counted(layout, replace(MACHINE, cores=2)).capacity == 2.0


# --- per-step overhead --------------------------------------------------------------------------


def test_per_step_overhead_by_hand():
    # 2 x 2 x 4 devices on two hosts: fsdp and dp within one, pp across. 3 layers of 120 bytes on a
    # rank,
    # embedding and head of 480
    layout = PlannedLayout(MeshSizes(2, 2, 4), rank_layers=3, chunk_layers=3)
    # shares go round 4 devices in 3 messages, and round 8 in 7; parameters travel at half the size
    # bytes of gradients
    gathered, layers = (3 * (0.001 + size / 4 / 100) for size in (180, 360))
    gathered_embed_head, embed_head = (7 * (0.01 + size / 8 / 10) for size in (240, 480))
    held = 360 / 4 + 480 / 8
    replicas = 2 * (0.001 + held / 2 / 100)  # 2 devices send each other a half, twice
    cast = (360 + 480) * 1.5 / 50  # read, and written at half the size
    update = (
        3 * held * 2 + 2 * held
    ) / 50  # parameters and two moments there and back, gradients twice
    by_hand = gathered + layers + gathered_embed_head + embed_head + replicas + cast + update
    assert overhead_s(PARAMS, MACHINE, layout) == pytest.approx(by_hand)
    assert counted(layout).overhead_s == overhead_s(PARAMS, MACHINE, layout)
    by_layer = counted(layout, gather="layer")
    assert by_layer.overhead_s == pytest.approx(
        by_hand - gathered - (360 - 360 / 4) * 1.5 / 50
    )  # shards are cast
    assert by_layer.gathers == LayerGathers(3 * (0.001 + 60 / 4 / 100), is_ahead=False)
    assert counted(replace(layout, mesh=MeshSizes(2, 2)), gather="layer").gathers is None


def walked_s(visits, gather_s, *, is_ahead):
    """Seconds of layers one after the other, (seconds, is gathered) of each, gathered once the one
    before begins.
    """
    if not is_ahead:
        return sum(seconds + gather_s * is_gathered for seconds, is_gathered in visits)
    there, done = gather_s, 0.0  # the first one's gather
    for (seconds, _), (_, next_is_gathered) in itertools.zip_longest(
        visits, visits[1:], fillvalue=(0.0, False)
    ):
        begin = max(there, done)
        there, done = begin + gather_s * next_is_gathered, begin + seconds
    return done


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_task_gathers_one_layer_ahead(is_ahead):
    rng = random.Random(0)
    for n, split in itertools.product((1, 2, 5), (True, False)):
        g, f, again, i, w = (rng.random() for _ in range(5))
        layer = PieceTimes(f, i + again, w)
        times = OpTimes(
            layer, layer, layer, 0.0, 0.0, 0.0, gathers=LayerGathers(g, is_ahead=is_ahead)
        )
        walk = partial(walked_s, gather_s=g, is_ahead=is_ahead)
        assert times.forward_s(n) == pytest.approx(walk([(f, True)] * n))
        rest = 0.0 if split else n * w
        found = times.input_grad_s(n, keeps_input=False, split=split) + rest
        assert found == pytest.approx(walk([(i + again + rest / n, True)] * n))
        times = replace(
            times, layer=PieceTimes(f, i + f, w)
        )  # a stage's forward is run again, then its backward
        found = times.input_grad_s(n, keeps_input=True, split=split) + rest
        backward = i + rest / n
        assert found == pytest.approx(
            walk([(f, True)] * n + [(backward, False)] + [(backward, True)] * (n - 1))
        )


def test_embedding_and_head_leave_the_host_where_layers_do_not():
    layout = PlannedLayout(MeshSizes(1, 2, 4), rank_layers=3, chunk_layers=3)
    spread = overhead_s(PARAMS, replace(MACHINE, host_devices=4), layout) - overhead_s(
        PARAMS, MACHINE, layout
    )
    both_ways = (link.gather_s(240, 8) + link.gather_s(480, 8) for link in (FAR, NEAR))
    assert spread == pytest.approx(next(both_ways) - next(both_ways))


def test_a_single_device_has_no_collectives():
    layout = PlannedLayout(MeshSizes(1, 1, 1), 3, 3)
    held = 360 + 480
    assert overhead_s(PARAMS, MACHINE, layout) == pytest.approx((held * 1.5 + held * 8) / 50)
    assert overhead_s(PARAMS, MACHINE, layout, casts=5) == pytest.approx(
        (held * 1.5 * 5 + held * 8) / 50
    )
    assert overhead_s(PARAMS, replace(MACHINE, link=Link(1e9, 1e-9)), layout) == overhead_s(
        PARAMS, MACHINE, layout
    )


def test_devices_of_a_rank_are_along_all_axes_but_pp():
    assert PlannedLayout(MeshSizes(3, 2, 4, tp=2), rank_layers=1, chunk_layers=1).rank_devices == 24
