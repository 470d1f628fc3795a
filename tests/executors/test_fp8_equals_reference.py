"""Linear maps in 8 bits train the same function on every layout: losses and gradients equal those of
the un-pipelined model, in float64.
"""

import itertools
import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from support.equality import TOLERANCE, difference, make, make_batch, make_pipe
from support.selection import full

import ppctl
from ppctl import cli
from ppctl.config import Transformer
from ppctl.errors import ConfigError
from ppctl.training.run.run_lines import linear_text

MODEL = {"num_layers": 2, "num_kv_heads": 2, "linear_dtype": "fp8"}
CASES = {
    "mpmd fsdp tp": (
        {"pp": 2, "fsdp": 2, "tp": 2},
        {"executor": "mpmd", "schedule": "zb_h1", "gather": "layer"},
    ),
    "spmd dp tp": ({"dp": 2, "pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 4}),
    "spmd fsdp": ({"pp": 2, "fsdp": 2}, {"schedule": "gpipe", "remat": "layer"}),
    "no pipeline": ({"pp": 1, "cp": 2}, {"num_microbatches": 8, "remat": "full"}),
}
FIRST, *MORE = CASES.values()


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "how"), [FIRST, *map(full, MORE)], ids=CASES)
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
def test_fp8_equals_the_reference_with_every_schedule_remat_and_gather(
    executor, schedule, remat, gather
):
    how = {"executor": executor, "schedule": schedule, "remat": remat, "gather": gather}
    how |= {"num_chunks": 2} if schedule == "interleaved" else {}
    model = MODEL | {"num_layers": 4}
    assert difference({"pp": 2, "fsdp": 2, "tp": 2}, model, num_microbatches=4, **how) < TOLERANCE


@pytest.mark.full
def test_lora_adapters_train_with_a_frozen_map_in_8_bits():
    model = MODEL | {"lora": ppctl.Lora(rank=2)}
    assert difference({"pp": 2, "tp": 2}, model, schedule="zb_h1", executor="mpmd") < TOLERANCE


def test_lowered_tasks_multiply_in_8_bits():
    stack, batch = make(**MODEL), make_batch(16, 32)
    pipe = make_pipe(stack, batch, {"pp": 2}, executor="mpmd", schedule="zb_h1")
    found = {
        each.name: len(re.findall(r"dot_general.*f8E4M3FN", each.text("stablehlo")))
        for each in pipe.programs().programs
        if each.name.startswith(("fwd", "bwd"))
    }
    maps = 7  # query, key, value, out, up, gate, down of the stage's layer
    wanted = {"fwd": maps, "bwd_i": maps, "bwd_w": 0}
    assert found == {f"{kind} of stage {s}": n for kind, n in wanted.items() for s in range(2)}


def test_verify_needs_float64(capsys):
    pipe = make_pipe(make(**MODEL), make_batch(16, 32), {"pp": 2}, dtype=jnp.float32)
    with pytest.raises(ConfigError, match=r"^dtype=float32 with .*Use dtype=float64 to verify"):
        ppctl.verify(pipe, make_batch(16, 32))
    words = ["recipes=tiny", "model.linear_dtype=fp8", "run.dtype=bfloat16"]
    assert cli.main(["verify", *words]) == 2
    message = (
        "ppctl: run.dtype=bfloat16 with model.linear_dtype: roundings to 8 bits hide .*float64"
    )
    assert re.match(message, capsys.readouterr().err)


def test_devices_that_share_a_key_value_head_are_refused():
    message = r"linear_dtype.*fp8.* and .*tp.*2.*: devices that share a key-value head would each"
    with pytest.raises(ConfigError, match=message):
        difference({"pp": 1, "tp": 2}, MODEL | {"num_kv_heads": 1})


@pytest.mark.parametrize(
    ("platform", "kind", "is_emulated"),
    [
        ("cpu", "cpu", True),
        ("gpu", "NVIDIA H100 80GB HBM3", False),
        ("gpu", "NVIDIA A100-SXM4-80GB", True),
        ("gpu", "NVIDIA Unheard Of", False),
    ],
)
def test_a_run_prints_that_products_in_8_bits_are_emulated(platform, kind, is_emulated):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    text = linear_text(Transformer(linear_dtype="fp8"), device)
    emulated = f" (emulated: {kind} has no 8-bit products)" if is_emulated else ""
    assert text == f", linear maps in fp8{emulated}"
    assert linear_text(Transformer(), device) == ""
