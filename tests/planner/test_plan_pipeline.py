"""`ppctl.plan` predicts pipelines of the API as `ppctl plan` predicts the same request."""

import numpy as np
import optax
import pytest
from support.selection import full

import ppctl
from ppctl.config import Config, Mesh, Mpmd, Run, Schedule, Synthetic, Transformer
from ppctl.planner.make_plan import predicted
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.known_hardware import known
from ppctl.training.pipeline.optimizers import make_optimizer

SIZES = {"num_layers": 4, "d_model": 64, "num_heads": 2}
TOKENS = np.zeros((8, 16), np.int32)


def pipeline(**request):
    usual = {"mesh": ppctl.mesh(dp=2, pp=2), "schedule": "zb_h1", "num_microbatches": 2}
    usual |= {"batch": {"inputs": TOKENS, "targets": TOKENS}, "optimizer": optax.adamw(1e-3)}
    stack = ppctl.transformer(vocab_size=64, **SIZES)
    return ppctl.pipeline(stack, **(usual | {"executor": "mpmd", "dtype": "bfloat16"} | request))


@pytest.mark.full
@pytest.mark.parametrize("hardware", [full("h100"), "host"])
def test_numbers_of_the_python_api_equal_the_command_lines(hardware):
    dtype = "bfloat16" if hardware == "h100" else "float32"
    config = Config(
        model=Transformer(seq_len=16, **SIZES),
        data=Synthetic(batch_size=8, vocab_size=64, num_sequences=512),
        mesh=Mesh(2, 2),
        schedule=Schedule(name="zb_h1", num_microbatches=2),
        executor=Mpmd(),
        run=Run(dtype=dtype),
        hardware=known()[hardware],
    )
    expected = predicted(assemble(config, only_planned=True))
    optimizer, _ = make_optimizer(config.optim, config.run.num_steps)
    found = ppctl.plan(pipeline(dtype=dtype, optimizer=optimizer), hardware=hardware)
    assert found.step_s == expected.step_time_s > 0
    assert found.overhead_s == expected.per_step_overhead_s
    assert found.memory == expected.memory_bytes
    assert (found.bubble, found.fits) == (expected.predicted_bubble_fraction, expected.fits)
    assert (found.hardware, found.limit_bytes) == (hardware, expected.limit_bytes)


def test_a_custom_stack_is_predicted():
    pipe = pipeline(executor="spmd", schedule="1f1b", dtype="float32")
    found = ppctl.plan(pipe, memory_gib=0.001)
    assert found.step_s > 0
    assert found.hardware == "host"
    assert found.fits is False
    assert found.total_bytes == tuple(sum(of_rank.values()) for of_rank in found.memory)


def test_unknown_hardware_is_refused():
    with pytest.raises(ppctl.PpctlError, match=r"^hardware=h10 is not described\. Did you mean h1"):
        ppctl.plan(pipeline(), hardware="h10")


@pytest.mark.parametrize("executor", [ppctl.spmd(), full(ppctl.mpmd())], ids=["spmd", "mpmd"])
def test_layouts_are_ranked_by_their_plans_digit_for_digit(executor):
    stack = ppctl.mlp(num_layers=6, d_model=16, input_dim=4, target_dim=2)
    batch = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros((8, 2), np.float32)}
    of_all = {"optimizer": optax.adamw(1e-3), "batch": batch}
    choice = {"executor": executor, "schedules": ["1f1b", "gpipe"], "best": 3}
    rows = ppctl.tune(stack, 4, **of_all, **choice)
    seconds = [row.plan.step_s for row in rows]
    assert len(rows) == 3
    assert seconds == sorted(seconds)
    pipe = ppctl.pipeline(stack, ppctl.mesh(**rows[-1].mesh), **of_all, **rows[-1].arguments)
    assert ppctl.plan(pipe).step_s == seconds[-1]
    assert ppctl.plan(pipe).memory == rows[-1].plan.memory


def test_a_search_of_one_layout_is_refused():
    with pytest.raises(ppctl.PpctlError, match=r"has one layout\. Use ppctl\.spmd\(\) or"):
        ppctl.tune(None, 2, optax.sgd(1.0), batch=None, executor=ppctl.reference())
