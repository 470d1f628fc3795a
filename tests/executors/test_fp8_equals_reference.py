"""Linear maps in 8 bits train the same function on every layout: losses and gradients equal those of
the un-pipelined model, in float64.
"""

import itertools

import pytest
from support.equality import TOLERANCE, difference
from support.selection import full

MODEL = {"num_layers": 2, "num_kv_heads": 2, "linear_dtype": "fp8"}
CASES = {
    "spmd dp tp": ({"dp": 2, "pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 4}),
    "mpmd fsdp tp": (
        {"pp": 2, "fsdp": 2, "tp": 2},
        {"executor": "mpmd", "schedule": "zb_h1", "gather": "layer"},
    ),
    "spmd fsdp": ({"pp": 2, "fsdp": 2}, {"schedule": "gpipe", "remat": "layer"}),
    "no pipeline": ({"pp": 1, "cp": 2}, {"num_microbatches": 8, "remat": "full"}),
}
*FEW, LAST = CASES.values()


@pytest.mark.parametrize(("mesh", "how"), [*FEW, full(LAST)], ids=CASES)
def test_the_function_is_the_same_on_every_layout(mesh, how):
    assert difference(mesh, MODEL, **how) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(
    ("executor", "schedule", "remat", "gather"),
    [
        *itertools.product(
            ["spmd", "mpmd"],
            ["1f1b", "interleaved", "zb_v", "dualpipe_v"],
            ["none", "layer", "full"],
            ["step", "layer"],
        )
    ],
)
def test_it_is_with_every_schedule_remat_and_gather(executor, schedule, remat, gather):
    how = {"executor": executor, "schedule": schedule, "remat": remat, "gather": gather}
    how |= {"num_chunks": 2} if schedule == "interleaved" else {}
    model = MODEL | {"num_layers": 4}
    assert difference({"pp": 2, "fsdp": 2, "tp": 2}, model, num_microbatches=4, **how) < TOLERANCE


def test_by_microbatch_it_is_the_same_only_for_the_same_microbatches():
    model = MODEL | {"linear_dtype": "fp8_by_microbatch"}
    schedule = {"schedule": "1f1b", "executor": "mpmd"}
    assert difference({"pp": 2}, model, num_microbatches=1, **schedule) < TOLERANCE
    assert difference({"pp": 2}, model, num_microbatches=4, **schedule) > TOLERANCE


def test_lora_adapters_train_beside_a_frozen_map_in_8_bits():
    import ppctl

    model = MODEL | {"lora": ppctl.Lora(rank=2)}
    assert difference({"pp": 2, "tp": 2}, model, schedule="zb_h1", executor="mpmd") < TOLERANCE
