"""A stage's costs are times."""

import dataclasses
import math
import subprocess
import sys

import pytest

from ppctl.errors import ConfigError
from ppctl.schedule.costs import Costs


def test_a_full_backward_costs_both_of_its_parts():
    assert Costs() == Costs(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, transfer_s=0.0)
    assert Costs(input_grad_s=0.25, weight_grad_s=0.5).backward_s == 0.75


TIMES = [
    f.name for f in dataclasses.fields(Costs) if f.name.endswith("_s") and "bytes" not in f.name
]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, 1e308, 1e-320, "1"])
def test_a_cost_that_is_not_a_time_is_refused(name, value):
    with pytest.raises(ConfigError) as error:
        Costs(**{name: value})
    assert (
        str(error.value)
        == f"{name}={value} is not a time in seconds. Use 0, or a number from 1e-100 to 1e+100."
    )


def test_costs_need_the_standard_library_only():
    code = (
        "import sys, ppctl.schedule.costs; "
        "sys.exit(bool({'jax', "
        "'numpy', "
        "'hydra'} "
        "& set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
