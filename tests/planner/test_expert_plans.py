"""Mixtures of experts in predictions: FLOPs, sends, memory and layouts against closed forms."""

from dataclasses import replace
from functools import cache

import pytest
from support.plans import planned
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose, compose_drawing
from ppctl.errors import ConfigError
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Step
from ppctl.executors.work.roofline import Link, Op, Speed
from ppctl.planner.cost.predict_step import predict_job, step_of
from ppctl.planner.search.device_models import stage_divisions
from ppctl.planner.show.plan_terminal import experts_text
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.mfu import model_flops

D, F, E, K, T, LAYERS = 64, 32, 8, 4, 128, 4
MODEL = (
    f"model.num_layers={LAYERS} model.d_model={D} model.num_heads=2 model.activation=swiglu "
    f"model.mlp_width={F} model.seq_len={T} data=synthetic data.vocab_size=256 data.batch_size=16 "
    "hardware=h100 run.dtype=bfloat16 schedule=1f1b schedule.num_microbatches=2"
)
EXPERTS = f"model.moe.num_experts={E} model.moe.top_k={K}"
EP4 = "mesh=1x2x1x4", "costs.expert_imbalance=1.5"  # settings that several tests share
WEIGHT, NUMBER, VALUE = 4, 4, 2  # bytes of a router's weight, of a number, of an activation


@cache
def job(*words, experts=EXPERTS):
    return assemble(compose([*f"{MODEL} {experts}".split(), *words]), only_planned=True)


def layer_of(*words):
    return step_of(job(*words)).work.layer


def flops_of_experts(ops):
    return sum(op.flops for op in ops if op.kernel == "experts")


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "load"),
    [
        full(((), 1.0)),
        full((("mesh=1x2x1x4",), 1.0)),
        full((EP4, 1.5)),
        full((("mesh=1x2x1x4", "costs.expert_imbalance=1.5", "model.moe.capacity=1.25"), 1.25)),
        (("costs.expert_imbalance=1.5",), 1.0),  # a single device computes all its tokens
        full((("mesh=1x2x1x4", "model.moe.dispatch=alltoall"), 1.0)),
    ],
)
def test_products_of_experts_count_the_rows_of_the_most_loaded_device(words, load):
    work = layer_of(*words)
    for ops in (work.forward, work.input_grad, work.weight_grad):
        assert flops_of_experts(ops) == pytest.approx(6 * T * K * D * F * load, rel=1e-12)
    products = [op for op in work.once if op.kernel == "experts"]
    assert len(products) == 9
    of_shapes = [
        2 * o.rows.each * o.columns.fixed * o.depth.fixed * o.number.fixed
        for o in (op.shape for op in products[:6])
    ]
    assert of_shapes == pytest.approx([op.flops for op in products[:6]])


def sent_bytes(words, ops):
    """Bytes that a device sends over ep, of an example."""
    step = step_of(job(*words))
    machine = replace(step.machine, link=Link(0.0, 1.0), network=None)
    one = replace(step, machine=machine, microbatch=replace(step.microbatch, examples=1))
    assert all(op.axes in ((), ("ep",)) for op in ops)
    return sum(map(one.sent_s, ops))


@pytest.mark.parametrize("ep", [full(2), 4])
def test_gather_sends_every_token_to_every_device_and_back(ep):
    words = (f"mesh=1x2x1x{ep}", *EP4[1:])
    rows = T * D * VALUE  # rows of a device's tokens
    routing = T * K * (WEIGHT + NUMBER)
    assert sent_bytes(words, layer_of(*words).forward) == (ep - 1) * (2 * rows + routing)


@pytest.mark.full
@pytest.mark.parametrize("capacity", [full(1.0), 2.0])
def test_alltoall_sends_each_row_to_its_expert_and_back(capacity):
    ep = 4
    words = (f"mesh=1x2x1x{ep}", "model.moe.dispatch=alltoall", f"model.moe.capacity={capacity}")
    row = 2 * D * VALUE + WEIGHT  # there and back, and its weight
    found = sent_bytes(words, layer_of(*words).forward)
    expected = K * T * capacity * row * (ep - 1) / ep
    assert found == pytest.approx(expected, abs=E * NUMBER)  # and counts by expert


def test_between_hosts_an_exchange_uses_one_adapter_a_device_and_a_gather_all():
    """8 devices in two hosts: of an exchange half leaves the host."""
    machine = Machine(Speed(1.0, 1.0), Link(0.0, 1e30), Link(0.0, 10.0), 4, 0.0)
    layout = PlannedLayout(MeshSizes(ep=8), 1, 1)
    step = Step(None, None, layout, Microbatch(1, 1, 0, Remat.NONE), machine)
    exchange = Op(0.0, 80.0, axes=("ep",), collective="exchange")
    assert step.sent_s(exchange) == pytest.approx(80 / 2 / 10)
    gather = Op(0.0, 80.0, axes=("ep",), collective="gather")
    assert step.sent_s(gather) == pytest.approx(80 * 7 / 8 / (4 * 10))


def test_mfu_counts_the_experts_that_a_token_chooses():
    """As a dense model whose MLP is as wide as all of them, and the router."""
    dense = job(f"model.mlp_width={K * F}", experts="")
    router = 3 * 2 * 16 * T * D * E * LAYERS
    whole = model_flops(job(*EP4[1:]))
    assert whole.full == model_flops(dense).full + router
    assert model_flops(job(*EP4)) == whole


def test_devices_along_ep_hold_parts_of_the_experts():
    matrices = 3 * E * D * F * 4
    of_rank = lambda *words: predict_job(job(*words)).memory[0]
    whole, quarters = of_rank("mesh=1x2"), of_rank(*EP4)
    for part, copies, width in (
        ("parameters", 1, 1),
        ("optimizer", 2, 1),
        ("gradients", 1, 1),
        ("weights", 1, 0.5),
    ):
        saved = copies * width * LAYERS / 2 * matrices * 3 / 4
        assert whole[part] - quarters[part] == pytest.approx(saved, abs=64), part


@pytest.mark.full
def test_layers_of_two_kinds_are_balanced_by_their_products():
    """Two dense layers, much wider than the experts of a token, then two with experts."""
    kinds = f"{EXPERTS} model.moe.first_dense=2 model.mlp_width={32 * F} model.moe.width={F}"
    found = job("partition=balanced", "mesh=1x2", experts=kinds)
    costs = found.pipe.relative_costs
    assert costs.layers[0] == costs.layers[1] > 3 * costs.layers[2] == 3 * costs.layers[3]
    assert [*map(len, found.pipe.partition)] == [1, 3]  # with the head the second still is faster
    mean = step_of(found).work.layer
    assert flops_of_experts(mean.forward) == pytest.approx(6 * T * K * D * F / 2)


@pytest.mark.full
def test_half_of_the_layers_send_half_as_much():
    def sent_s(experts):
        step = step_of(job("mesh=1x2x1x4", experts=experts))
        return sum(map(step.sent_s, step.work.layer.forward))

    assert sent_s(f"{EXPERTS} model.moe.first_dense=2") == pytest.approx(sent_s(EXPERTS) / 2)


@pytest.mark.full
def test_a_plan_notes_that_dispatch_takes_longer_than_products(capsys):
    near = planned(
        compose(
            [
                *f"{MODEL} {EXPERTS} mesh=1x2x1x4 model.d_model=2048 "
                "model.moe.width=16384 model.num_heads=16".split()
            ]
        )
    )
    text = experts_text(near.experts)
    assert text.startswith("8, 4 a token: 1,024 rows a device, room for 2,048; a microbatch in")
    assert "takes longer" not in text
    far = planned(compose([*f"{MODEL} {EXPERTS} mesh=1x2x1x8 model.moe.top_k=2".split()]))
    assert far.experts.sent_s > far.experts.compute_s
    assert ". Dispatch takes longer than products: use model.moe.dispatch=alltoall with" in (
        experts_text(far.experts)
    )
    words = "mesh=1x1x1x16 model.moe.num_experts=16 data.batch_size=32"
    over = planned(compose([*f"{MODEL} {EXPERTS} {words}".split()]))
    assert over.experts.remedy == "use mesh.ep=8, which stays inside a host"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{EXPERTS} mesh=1x1x1x3 data.batch_size=12",
            "model.moe.num_experts=8 is not a multiple of mesh.ep = 3",
        ),
        ("mesh=1x1x1x2", "mesh.ep=2 divides experts, and the model has no expert"),
        ("costs.expert_imbalance=0.9", "costs.expert_imbalance=0.9 must be a finite number of at"),
        ("costs.forward_s=2", "costs.forward_s=2: only `ppctl schedule` reads these costs"),
    ],
)
def test_a_wrong_request_for_experts_is_refused_in_one_line(words, message, capsys):
    assert cli.main(["plan", *MODEL.split(), *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_drawing_knows_no_experts():
    with pytest.raises(ConfigError, match="has no model with experts"):
        compose_drawing(["costs.expert_imbalance=2"])


# --- tune -----------------------------------------------------------------------------------------


def sizes_of_ep(monkeypatch, *words, experts=EXPERTS, devices=16, host=8):
    """The sizes of ep in the divisions that a search chooses from."""
    from ppctl.planner.search import tune_layouts

    found = list[MeshSizes]()

    def divisions(*args):
        found.extend(stage_divisions(*args[:-1], host))
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_layouts, "stage_divisions", divisions)
    with pytest.raises(KeyboardInterrupt):
        tune_layouts.tune_layouts(
            compose([*f"{MODEL} {experts}".split(), f"tune.devices={devices}", *words])
        )
    return sorted({division.ep for division in found})


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "how", "expected"),
    [
        ((), {}, [1, 2, 4, 8]),
        full(((), {"host": 4}, [1, 2, 4])),
        full(((), {"experts": EXPERTS.replace("=8", "=6"), "devices": 12}, [1, 2, 3, 6])),
        full((("tune.ep=[8]",), {"host": 4}, [8])),  # over hosts on request
        full((("tune.tp=[1]",), {"experts": ""}, [1])),
    ],
)
def test_a_search_divides_experts_inside_a_host(monkeypatch, words, how, expected):
    assert sizes_of_ep(monkeypatch, *words, **how) == expected


@pytest.mark.parametrize(
    ("words", "experts", "message"),
    [
        (
            "tune.ep=[16]",
            EXPERTS,
            r"num_experts=8 is not a multiple of tune.ep = 16: .* Use tune.ep=\[8\]",
        ),
        ("tune.ep=[2]", "", r"tune.ep=\[2\] divides experts, and the model has no expert"),
        ("tune.ep=[3]", EXPERTS, "tune.ep: 3 does not divide 16 devices"),
    ],
)
def test_a_wrong_size_of_ep_is_refused(monkeypatch, words, experts, message):
    with pytest.raises(ConfigError, match=message):
        sizes_of_ep(monkeypatch, words, experts=experts)


def test_models_without_experts_are_replicated_over_ep():
    """A perceptron computes the same on every device along ep: replicas, not parts."""
    words = "tune.devices=2 tune.ep=[2] model=mlp data=regression hardware=h100 data.batch_size=32"
    from ppctl.planner.search.tune_layouts import tune_layouts

    with pytest.raises(ConfigError, match="2 divides experts, and the model has no expert"):
        tune_layouts(compose(words.split()))
