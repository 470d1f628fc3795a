"""Peak speeds are dense and exact to the device; a stage's costs are times."""

import dataclasses
import math
import subprocess
import sys

import pytest

from ppctl.costs import PEAK_FLOPS, Costs, peak_flops
from ppctl.errors import ConfigError


@pytest.mark.parametrize("kind", PEAK_FLOPS)
def test_every_device_knows_both_training_dtypes_and_is_no_slower_in_bfloat16(kind):
    assert set(PEAK_FLOPS[kind]) == {"float32", "bfloat16"}
    ratio = PEAK_FLOPS[kind]["bfloat16"] / PEAK_FLOPS[kind]["float32"]
    # TF32 runs at half the speed of bfloat16 (2.2 of 4.5 as NVIDIA rounds it); TPUs run float32 as bfloat16.
    assert ratio == pytest.approx(1.0 if kind.startswith("TPU") else 2.0, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "dtype", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA B200", "bfloat16", 2.25e15),
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v6 lite", "float32", 918e12),
    ],
)
def test_peaks_are_the_dense_ones_of_the_data_sheets(kind, dtype, flops):
    assert peak_flops(kind, dtype) == flops


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Quadro", ""])
def test_an_unknown_device_has_no_peak(kind):
    assert peak_flops(kind, "float32") is None


def test_a_dtype_without_a_figure_has_no_peak():
    assert peak_flops("NVIDIA H200", "float64") is None


def test_names_of_one_chip_agree():
    for one, other in [("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("TPU v6 lite", "TPU v6e")]:
        assert PEAK_FLOPS[one] == PEAK_FLOPS[other]


def test_a_full_backward_costs_both_of_its_parts():
    assert Costs() == Costs(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, transfer_s=0.0)
    assert Costs(input_grad_s=0.25, weight_grad_s=0.5).backward_s == 0.75


TIMES = [f.name for f in dataclasses.fields(Costs) if f.name.endswith("_s") and "bytes" not in f.name]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_cost_that_is_not_a_time_is_refused(name, value):
    with pytest.raises(ConfigError) as error:
        Costs(**{name: value})
    assert str(error.value) == f"{name}={value} is not a time. Use a finite number of seconds, at least 0."


def test_costs_need_the_standard_library_only():
    code = "import sys, ppctl.costs; sys.exit(bool({'jax', 'numpy', 'hydra'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
