"""run.memory_fraction: passed to JAX, counted in plans, and refused elsewhere."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ppctl import config
from ppctl.errors import ConfigError
from ppctl.planner.cost.target_devices import Target
from ppctl.training.pipeline.jax_start import check_memory_fraction, set_memory_fraction
from ppctl.training.pipeline.known_hardware import known, planned_for

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H100 = SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA H100 80GB HBM3",
    memory_stats=lambda: {"bytes_limit": 60 * 2**30},
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "x")  # so that it is as before afterwards
        monkeypatch.delenv(name)


def request(fraction=None, hardware=None):
    asked = config.Config(run=config.Run(memory_fraction=fraction))
    return asked if hardware is None else replace(asked, hardware=known()[hardware])


def test_a_memory_fraction_is_passed_in_one_variable_and_only_if_set(monkeypatch):
    monkeypatch.setenv(NAMES[1], "0.5")
    set_memory_fraction(None)
    assert [os.environ.get(name) for name in NAMES] == [None, "0.5"]
    set_memory_fraction(0.9)
    assert [os.environ.get(name) for name in NAMES] == ["0.9", None]


@pytest.mark.parametrize(
    ("hardware", "device", "planned", "devices"),
    [
        (None, CPU, False, "cpu"),
        (None, CPU, True, "cpu"),
        ("h100", CPU, False, "cpu"),  # it would train on these
        ("h100", CPU, True, None),
        ("v5e", CPU, True, "hardware=v5e"),
        ("v5e", H100, True, "hardware=v5e"),
        ("h200", H100, False, None),
        (None, H100, False, None),
    ],
)
def test_a_memory_fraction_is_for_attached_gpus_or_plans_of_described_ones(
    hardware, device, planned, devices
):
    wanted, kind = request(None, hardware).hardware, device.device_kind
    there = planned_for(wanted, kind, None) if planned else None
    check_memory_fraction(None, device, there)
    if devices is None:
        check_memory_fraction(0.9, device, there)
        return
    with pytest.raises(
        ConfigError,
        match=f"^run.memory_fraction=0.9 is for GPUs, but the devices are {devices}. Leave",
    ):
        check_memory_fraction(0.9, device, there)


@pytest.mark.parametrize(("topology", "is_gpu"), [("h100:2x8", True), ("v5e:4x4", False)])
def test_of_a_topology_its_devices_count(topology, is_gpu):
    there = planned_for(request(0.9).hardware, CPU.device_kind, topology)
    if is_gpu:
        check_memory_fraction(0.9, CPU, there)
        return
    with pytest.raises(ConfigError, match="the devices are hardware=v5e"):
        check_memory_fraction(0.9, CPU, there)


def device_limit(asked, device):
    number, fraction = asked.mesh.num_devices, asked.run.memory_fraction
    target = Target(asked.hardware, device, number, "float32", memory_fraction=fraction)
    return target.limit


def test_a_limit_states_its_share_of_the_memory_and_its_setting(monkeypatch):
    default = "run.memory_fraction=null, JAX's default"
    described = device_limit(request(None, "h100"), CPU)
    assert described is not None
    assert described.size_bytes == round(59.3 * 2**30)
    assert (described.source, described.fraction) == (
        f"75% of the 79.1 GiB of hardware=h100: {default}",
        0.75,
    )
    larger = device_limit(request(0.925, "h100"), CPU)
    assert larger is not None
    assert larger.source == "92.5% of the 79.1 GiB of hardware=h100: run.memory_fraction=0.925"

    def here(asked):
        found = device_limit(asked, H100)
        assert found is not None
        return found

    assert here(request()).source == f"75% of the 80.0 GiB of NVIDIA H100 80GB HBM3: {default}"
    monkeypatch.setenv(NAMES[0], "0.6")
    assert (
        here(request()).source
        == "60% of the 100.0 GiB of NVIDIA H100 80GB HBM3: XLA_CLIENT_MEM_FRACTION=0.6"
    )
    assert here(request(None, "h100")).fraction == 0.6  # attached
    assert here(request(0.75)).fraction == 0.75
    assert here(request(None, "h200")).fraction == 0.75  # not attached


@pytest.mark.parametrize("hardware", ["v5e", "host"])
def test_other_devices_have_no_share(hardware):
    limit = device_limit(request(None, hardware), CPU)
    assert limit is not None
    assert limit.fraction is None


def test_the_memory_of_hardware_that_does_not_state_it_is_not_known():
    unknown = replace(known()["h100"], name="mine", memory_gib=None)
    assert device_limit(replace(request(), hardware=unknown), CPU) is None  # and not this machine's
