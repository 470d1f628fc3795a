"""Savings of a vocabulary on all ranks: a large head last, balanced, or divided.
`make bench-vocabulary`

Makespans are simulated from FLOPs, in forwards of a layer. Seconds of a rank are those of its tasks
in one step, run one program at a time (executor=mpmd), the least of the steps; CPU seconds of a
step are those of all simulated devices, the median, the variants in turn. Bytes are one device's:
state, batch, and temporaries of the compiled step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
import optax

import ppctl
from ppctl.executors.stage.jaxpr_flops import relative_costs
from ppctl.schedule.costs import OpTimes, PieceTimes, costs_of_stages
from ppctl.schedule.simulator import simulate

MODEL = {"num_layers": 16, "d_model": 256, "num_heads": 4, "activation": "swiglu"}
VOCAB_SIZE, NUM_TOKENS, NUM_RANKS = 16_384, 128, 4
ENDS = {  # arguments of `ppctl.pipeline`
    "whole, uniform": {"partition": "uniform"},
    "whole, balanced": {"partition": "balanced"},
    "parallel": {"partition": "uniform", "vocab": "parallel"},
}


def make(how, args):
    """Return a pipeline and a batch of two sequences a microbatch."""
    stack, number = ppctl.transformer(**MODEL, vocab_size=VOCAB_SIZE), args.microbatches
    tokens = np.random.default_rng(0).integers(
        VOCAB_SIZE, size=(2 * number, NUM_TOKENS + 1), dtype=np.int32
    )
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    settings = {
        "executor": args.executor,
        "schedule": args.schedule,
        "num_microbatches": number,
        "remat": "layer",
    }
    mesh = ppctl.mesh(pp=NUM_RANKS)
    return ppctl.pipeline(
        stack, mesh=mesh, batch=batch, optimizer=optax.adamw(1e-3), **settings, **how
    ), batch


def simulated(pipe):
    """Return the makespan of ranks that run free, by FLOPs, in forwards of a layer."""
    relative = relative_costs(pipe.stack, pipe.batch_shapes, pipe.dtype, recompute=True)
    free, layer = PieceTimes(0.0, 0.0, 0.0), PieceTimes(1.0, 1.0, 1.0)
    parts = pipe.schedule.vocab_parts
    third = (
        4 * relative.head / 3 / (parts or 1)
    )  # FLOPs of a layer are 4: it runs again in the backward
    op_times = OpTimes(
        free, layer, PieceTimes(third, third, third), task_s=0.0, hop_s=0.0, overhead_s=0.0
    )
    op_times = op_times.in_parts(parts) if parts else op_times
    sizes = [len(layers) for layers in pipe.partition]
    costs = costs_of_stages(op_times, sizes, keeps_input=False)
    return simulate(pipe.schedule, costs).makespan_s


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=("spmd", "mpmd"), default="mpmd")
    parser.add_argument("--schedule", default="eager_1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    pipes = {name: make(how, args) for name, how in ENDS.items()}
    states, taken, of_rank = {}, {name: [] for name in ENDS}, {name: [] for name in ENDS}
    for name, (pipe, _) in pipes.items():
        pipe.compile()
        states[name] = pipe.engine.new_state(0)
    for _ in range(args.steps):
        for name, (pipe, batch) in pipes.items():
            began = time.process_time()
            step = pipe.engine.step(states[name], pipe.put(batch))
            states[name], _ = jax.block_until_ready(step)
            taken[name].append(time.process_time() - began)
            if args.executor == "mpmd":
                states[name], _, seconds = pipe.engine.step_by_step(states[name], pipe.put(batch))
                ranks = range(NUM_RANKS)
                sums = [
                    sum(s for task, s in seconds.items() if pipe.schedule.rank_at(task) == r)
                    for r in ranks
                ]
                of_rank[name].append(sums)
    print(
        f"jax {jax.__version__}, {args.executor}, {args.schedule}, {args.microbatches} microbatches"
    )
    print(
        f"{'embed_head':16} {'layers':10} {'simulated':>9} {'CPU s a step':>12} "
        f"{'s of each rank':24} MiB of each rank"
    )
    for name, (pipe, _) in pipes.items():
        layers = " ".join(str(len(each)) for each in pipe.partition)
        seconds = " ".join(f"{min(each):.2f}" for each in zip(*of_rank[name], strict=True))
        size = " ".join(f"{each / 2**20:.0f}" for each in pipe.compile().total_bytes)
        cpu_s = statistics.median(taken[name])
        print(f"{name:16} {layers:10} {simulated(pipe):9.1f} {cpu_s:12.2f} {seconds:24} {size}")


if __name__ == "__main__":
    main()
