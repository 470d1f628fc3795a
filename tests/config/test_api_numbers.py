"""Numbers out of reach are refused in the Python API as on the command line, before any work."""

import math

import numpy as np
import optax
import pytest

import ppctl
from ppctl import Costs, PpctlError, Schedule, Task, build_schedule

BATCH = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros((8, 2), np.float32)}
F0 = ((Task(0, "F", 0),),)


def mlp(**sizes):
    return ppctl.mlp(**{"num_layers": 2, "d_model": 8, "input_dim": 4, "target_dim": 2} | sizes)


def pipe(**how):
    how = {"optimizer": optax.sgd(0.1), "batch": BATCH, "num_microbatches": 2} | how
    return ppctl.pipeline(mlp(), ppctl.mesh(pp=1), **how)


def tune(**how):
    return ppctl.tune(mlp(), 1, optax.sgd(0.1), batch=BATCH, **how)


REFUSED = {
    "microbatches": (lambda: build_schedule("1f1b", 2, 10**12), "= 4,000,000,000,000 tasks"),
    "ranks": (lambda: build_schedule("zb_h1", 10**12, 2), r"3\*10+\*1\*2 = 6,0"),
    "chunks": (lambda: build_schedule("interleaved", 2, 4, num_chunks=10**12), "tasks are more"),
    "waves": (lambda: build_schedule("hanayo", 2, 4, num_waves=10**12), "tasks are more"),
    "stages of a V": (lambda: build_schedule("zb_v", 2, 50_000), r"3\*2\*2\*50000 = 600,000"),
    "whole ranks": (lambda: build_schedule("1f1b", 2.5, 2), "num_ranks=2.5 is not a whole number"),
    "text": (lambda: build_schedule("1f1b", 2, "4"), "num_microbatches='4' is not a whole number"),
    "no time": (lambda: Costs(0, 0, 0), "forward_s=input_grad_s=weight_grad_s=0: give one"),
    "bytes": (lambda: Costs(activation_bytes=1e300), "activation_bytes=1e.300 is not a size"),
    "empty": (lambda: ppctl.simulate(Schedule("x", (), (), 0), Costs()), "there are 0"),
    "values": (lambda: ppctl.simulate(Schedule("x", F0, (0,), 10**12), Costs()), "there are 1"),
    "ticks": (lambda: ppctl.ticks(Schedule("x", F0, (0,), 10**12), Costs()), "there are 1"),
    "rank": (lambda: ppctl.simulate(Schedule("x", F0, (10**9,), 1), Costs()), "on rank 1000000000"),
    "task": (
        lambda: ppctl.simulate(Schedule("x", ((Task(9, "F", 0),),), (0,), 1), Costs()),
        "9F0 is outside stages 0..0",
    ),
    "whole mesh": (lambda: ppctl.mesh(pp=2.5), "mesh.pp=2.5 is of type float"),
    "width": (lambda: mlp(input_dim=10**12), "input_dim=1000000000000 is not a whole number"),
    "adapters": (lambda: ppctl.Lora(rank=0), "rank=0 of adapters"),
    "alpha": (lambda: ppctl.Lora(alpha=math.nan), "alpha=nan of adapters"),
    "window": (lambda: ppctl.attention(window=2.5), "window=2.5 is not a whole number"),
    "draw": (lambda: ppctl.dropout(None, np.ones(2), 0.5, draw=-1), "draw=-1"),
    "partition": (lambda: pipe(partition=[2.0]), "stage 0 has 2.0 layers"),
    "no examples": (
        lambda: pipe(batch={name: array[:0] for name, array in BATCH.items()}),
        "batch size 0 is not a multiple of .* = 2. Use 2,",
    ),
    "memory": (lambda: tune(memory_gib=1e308), "memory_gib=1e.308 is out of reach"),
    "no memory": (
        lambda: ppctl.plan(pipe(), memory_gib=math.nan),
        "memory_gib=nan must be a finite",
    ),
    "family": (lambda: tune(schedules=["x"]), "schedule=x is not one of gpipe"),
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
def test_a_number_out_of_reach_is_refused(request_):
    call, message = request_
    with pytest.raises(PpctlError, match=message):
        call()
