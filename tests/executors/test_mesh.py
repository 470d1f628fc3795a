"""Devices of several hosts as a mesh: which axes go over hosts, and what their collectives cross
once compiled.
"""

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from support.cuda_plugin import needs_cuda_plugin

import ppctl
from ppctl import config
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import hosts_text, in_order, laid_out, mesh_of
from ppctl.executors.hlo_text import collectives
from ppctl.schedule.mesh_axes import AXES, MeshSizes
from ppctl.training.pipeline.job import assemble


def gpus(num_hosts, num_gpus):
    """As JAX gives them: each host is a slice."""
    return [
        SimpleNamespace(
            platform="gpu", id=k, slice_index=k // num_gpus, process_index=k // num_gpus
        )
        for k in range(num_hosts * num_gpus)
    ]


def ids(devices):
    return np.vectorize(lambda device: device.id)(devices)


def num_hosts_along(devices):
    """How many hosts each axis goes over."""
    hosts = np.vectorize(lambda device: device.slice_index)(devices)
    return {
        axis: len(np.unique(np.moveaxis(hosts, k, 0).reshape(hosts.shape[k], -1)[:, 0]))
        for k, axis in enumerate(AXES)
    }


@pytest.mark.parametrize(
    ("hosts", "shape", "order", "over"),
    [
        ((2, 4), (1, 2, 4), "auto", (1, 2, 1)),
        ((2, 4), (2, 2, 2), "auto", (1, 2, 1)),
        ((2, 4), (2, 1, 4), "auto", (2, 1, 1)),
        ((2, 4), (1, 8, 1), "auto", (1, 2, 1)),
        ((2, 4), (1, 1, 8), "auto", (1, 1, 2)),
        ((4, 8), (2, 2, 8), "auto", (2, 2, 1)),
        ((4, 8), (4, 8, 1), "auto", (1, 4, 1)),
        ((4, 8), (4, 8, 1), "dp-pp-fsdp", (4, 1, 1)),
        ((4, 8), (2, 8, 2), "fsdp-pp-dp", (1, 2, 2)),
        ((4, 6), (2, 3, 4), "auto", (2, 1, 2)),
    ],
)
def test_axes_go_over_hosts_in_their_order(hosts, shape, order, over):
    devices = gpus(*hosts)
    found = laid_out(devices, MeshSizes(*shape), order)
    assert found.shape == (*shape, 1, 1, 1)
    assert sorted(ids(found).flat) == list(range(len(devices)))
    assert tuple(num_hosts_along(found).values()) == (*over, 1, 1, 1)
    assert prod(over) == hosts[0]


@pytest.mark.parametrize("sizes", [{"dp": 3, "tp": 2}, {"fsdp": 6}])
def test_a_rank_takes_devices_in_order_also_of_two_hosts(sizes):
    devices = gpus(2, 4)[2:]  # two devices of the first host, four of the second
    rank = MeshSizes(**sizes)
    found = in_order(devices, rank)
    assert ids(found).ravel().tolist() == [*range(2, 8)]
    assert num_hosts_along(found)["tp"] == 1


def test_a_rank_whose_tp_would_span_hosts_is_refused():
    with pytest.raises(ConfigError, match="A rank would take 2 and 4 devices of hosts, but tp = 3"):
        in_order(gpus(2, 4)[2:], MeshSizes(dp=2, tp=3))


def test_neighbours_of_a_host_are_along_the_last_axis_of_the_order():
    assert ids(laid_out(gpus(2, 4), MeshSizes(2, 2, 2)))[:, 0, :, 0, 0, 0].tolist() == [
        [0, 1],
        [2, 3],
    ]
    assert ids(laid_out(gpus(2, 4), MeshSizes(2, 2, 2), "pp-fsdp-dp"))[
        :, 0, :, 0, 0, 0
    ].tolist() == [[0, 2], [1, 3]]
    assert ids(laid_out(gpus(1, 8), MeshSizes(2, 2, 2), "pp-dp-fsdp"))[
        0, :, 0, 0, 0, 0
    ].tolist() == [0, 4]
    assert ids(laid_out(gpus(1, 8), MeshSizes(2, 2, 2))).ravel().tolist() == [*range(8)]


def test_tp_stays_inside_a_host_and_takes_its_nearest_devices():
    assert ids(laid_out(gpus(2, 4), MeshSizes(1, 2, 1, tp=2, cp=2)))[0, :, 0, 0].tolist() == [
        [[0, 2], [1, 3]],
        [[4, 6], [5, 7]],
    ]
    with pytest.raises(
        ConfigError, match=r"^tp=8 would go over 2 hosts of 4 devices: .* Use tp=4, and more"
    ):
        laid_out(gpus(2, 4), MeshSizes(tp=8))


def test_hosts_of_different_sizes_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"^2 hosts of 2 to 4 devices cannot form a mesh of \(1, 6, 1, 1, 1, 1\). Use the",
    ):
        laid_out([*gpus(2, 4)][:6], MeshSizes(1, 6))


def test_slices_of_tpus_are_joined_by_pp():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", num_slices=2
    ).devices
    found = laid_out(devices, MeshSizes(2, 4, 2))
    assert tuple(num_hosts_along(found).values()) == (1, 2, 1, 1, 1, 1)
    assert hosts_text(mesh_of(found)) == "2 slices: pp over 2"


@needs_cuda_plugin
@pytest.mark.parametrize("order", ["auto", "dp-pp-fsdp"])
def test_a_program_for_two_hosts_crosses_hosts_along_the_axis_of_the_order(order):
    request = config.Config(
        model=config.MLP(num_layers=4, d_model=16),
        mesh=config.Mesh(2, 2, 2, order=order),
        schedule=config.Schedule("1f1b", 4),
        data=config.Regression(batch_size=64),
        plan=config.Plan(compile=True, topology="h100:2x4"),
    )
    job = assemble(request)
    found = collectives(
        job.pipe.engine.lower_train_step().compile().as_text(), job.pipe.meshes.storage.shape
    )
    is_pp = order == "auto"

    def crossing(kind):
        """Size of its groups -> whether they cross hosts."""
        axes = [each.axes for each in found if each.kind == kind]
        return {(2 ** len(along), ("pp" if is_pp else "dp") in along) for along in axes}

    devices = job.pipe.meshes.storage.devices
    over = [devices.take(k, axis=1 if is_pp else 0).ravel() for k in (0, 1)]
    assert [{device.process_index for device in half} for half in over] == [{0}, {1}]
    assert hosts_text(job.pipe.meshes.storage) == f"2 processes: {'pp' if is_pp else 'dp'} over 2"
    assert crossing("collective-permute") == {(2, is_pp)}
    # parameters and gradients of layers over fsdp, of embedding and head over pp and fsdp
    assert crossing("all-gather") == crossing("reduce-scatter") == {(2, False), (4, is_pp)}
    assert (2, not is_pp) in crossing("all-reduce")  # gradients over dp
    assert (2, is_pp) not in crossing("all-reduce")


def test_an_axis_that_no_mesh_has_is_refused():
    with pytest.raises(
        ConfigError, match=r"^xq=2 is not a mesh axis\. Use dp, pp, fsdp, ep, tp, cp\.$"
    ):
        ppctl.mesh(pp=2, xq=2)
