"""Descriptions agree with data sheets, and are found by device, by topology and by name."""

import re

import pytest

from ppctl.cli.compose import compose
from ppctl.config import AutoHardware, Config, Hardware
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError
from ppctl.training.pipeline.known_hardware import known, of_device, resolved
from ppctl.training.pipeline.mfu import mfu_peak_flops

# The data sheet of each kind: peak FLOP/s (float32, bfloat16), memory in GiB or GB, bytes/s
# of memory.
SHEETS = {
    "NVIDIA A100-SXM4-40GB": (156e12, 312e12, 40, 1.555e12),
    "NVIDIA A100-SXM4-80GB": (156e12, 312e12, 80, 2.039e12),
    "NVIDIA A100-PCIE-40GB": (156e12, 312e12, 40, 1.555e12),
    "NVIDIA A100 80GB PCIe": (156e12, 312e12, 80, 1.935e12),
    "NVIDIA H100 80GB HBM3": (494.7e12, 989.4e12, 80, 3.35e12),
    "NVIDIA H100 PCIe": (378e12, 756e12, 80, 2.0e12),
    "NVIDIA H200": (494.7e12, 989.4e12, 141, 4.8e12),
    "NVIDIA B200": (1.1e15, 2.25e15, 180, 8e12),
    "NVIDIA GB200": (1.25e15, 2.5e15, 186, 8e12),
    "TPU v4": (275e12, 275e12, 32, 1.2e12),
    "TPU v5 lite": (197e12, 197e12, 16, 819e9),
    "TPU v5e": (197e12, 197e12, 16, 819e9),
    "TPU v5": (459e12, 459e12, 96, 2.765e12),
    "TPU v5p": (459e12, 459e12, 96, 2.765e12),
    "TPU v6 lite": (918e12, 918e12, 32, 1.64e12),
    "TPU v6e": (918e12, 918e12, 32, 1.64e12),
    "TPU7x": (1153.5e12, 1153.5e12, 96, 3.69e12),  # half a chip
}
names = pytest.mark.parametrize("name", known())


@pytest.mark.parametrize("kind", SHEETS)
def test_peak_and_memory_equal_the_data_sheets(kind):
    float32, bfloat16, memory, memory_bytes_per_s = SHEETS[kind]
    found = of_device(kind)
    assert found is not None
    assert (found.peak_flops["float32"], found.peak_flops["bfloat16"]) == (float32, bfloat16)
    assert found.memory_bytes_per_s == memory_bytes_per_s
    assert found.memory_gib is not None
    # XLA keeps a little of a TPU's, and JAX takes three quarters of a GPU's
    least, most = (0.95, 1.0) if kind.startswith("TPU") else (0.67, 0.75)
    assert least <= found.memory_gib / memory <= most
    for dtype, flops in (("float32", float32), ("bfloat16", bfloat16), ("float64", None)):
        assert mfu_peak_flops(AutoHardware(), kind, dtype) == flops


# watts of a device at most, as data sheets say; of the other TPUs Google states none
POWER_W = {
    "a100": 400,
    "a100_40gb": 400,
    "a100_pcie": 300,
    "a100_pcie_40gb": 250,
    "h100": 700,
    "h100_pcie": 350,
    "h200": 700,
    "b200": 1000,
    "gb200": 1200,
    "v4": 192,
}


@names
def test_power_is_from_the_data_sheet_or_unknown(name):
    assert known()[name].power_w == POWER_W.get(name)


def test_no_kind_of_device_has_two_descriptions_and_all_are_tested():
    kinds = [kind for hardware in known().values() for kind in hardware.device_kinds]
    assert sorted(kinds) == sorted([*SHEETS, "cpu"])


@names
def test_hydra_reads_the_same(name):
    config = compose([f"hardware={name}"])
    assert isinstance(config, Config)
    assert config.hardware == known()[name]
    config.hardware.check()


@names
def test_links_are_slower_than_memory_and_networks_than_links(name):
    hardware = known()[name]
    assert hardware.link_bytes_per_s < hardware.memory_bytes_per_s
    is_gpu = name[0] in "abgh" and name != "host"
    assert (hardware.host_devices is not None) == is_gpu  # TPUs are joined by links
    if hardware.hosts is not None:
        assert hardware.hosts.bytes_per_s < hardware.link_bytes_per_s
        assert hardware.hosts.latency_s > hardware.link_latency_s


@names
def test_every_number_of_an_accelerator_has_its_source(name):
    text = (ROOT / f"conf/hardware/{name}.yaml").read_text()
    numbers = re.findall(r"^ *(?!name)\w+: .*\d.*$", text.partition("\ncuda:")[0], re.MULTILINE)
    assert numbers
    if name == "host":
        assert "nominal" in text
        return
    assert [line for line in numbers if "#" not in line and "host_devices" not in line] == []


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Quadro", ""])
def test_an_unknown_device_has_no_peak_and_no_description(kind):
    assert of_device(kind) is None
    assert mfu_peak_flops(AutoHardware(), kind, "float32") is None
    with pytest.raises(
        ConfigError, match=f"hardware=auto: no description of {kind}. Use hardware=NAME .a100, "
    ):
        resolved(AutoHardware(), kind)


def test_nominal_numbers_give_no_mfu_and_given_ones_do():
    host = known()["host"]
    assert host.peak_flops["float32"] == 1e11
    assert mfu_peak_flops(AutoHardware(), "cpu", "float32") is None
    assert mfu_peak_flops(host, "cpu", "float32") is None
    given = Hardware(**{**vars(host), "peak_flops": {**host.peak_flops, "float32": 3e12}})
    assert mfu_peak_flops(given, "cpu", "float32") == 3e12
    assert mfu_peak_flops(given, "cpu", "bfloat16") is None


def test_hardware_is_as_requested_or_of_the_topology_or_of_the_devices():
    auto, all_known = AutoHardware(), known()
    assert resolved(auto, "cpu") == all_known["host"]
    assert resolved(auto, "NVIDIA H200") == all_known["h200"]
    assert resolved(auto, "cpu", "v5e:4x4") == all_known["v5e"]
    assert resolved(all_known["h100"], "cpu") == all_known["h100"]
    mine = Hardware(**{**vars(all_known["v5e"]), "name": "mine", "reached": {"flops": 0.5}})
    assert resolved(mine, "cpu", "v5e:2x2") is mine


@pytest.mark.parametrize(
    ("asked", "topology", "message"),
    [
        (
            known()["h100"],
            "v5e:4x4",
            "hardware=h100 is not that of plan.topology=v5e:4x4. Use hardware=auto",
        ),
        (known()["v6e"], "v5p:2x2x2", "hardware=v6e is not that of plan.topology=v5p:2x2x2"),
        (known()["v6e"], "v9:2x2", "hardware=v6e is not that of plan.topology=v9:2x2"),
        (
            AutoHardware(),
            "v9:2x2",
            r"hardware=auto: no description of plan.topology=v9:2x2. Use hardware=NAME \(a100",
        ),
    ],
)
def test_a_topology_of_other_or_unknown_hardware_is_refused(asked, topology, message):
    with pytest.raises(ConfigError, match=message):
        resolved(asked, "cpu", topology)
