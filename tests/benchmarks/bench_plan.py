"""How good are predictions? Steps of many layouts of a model, predicted by `ppctl rehearse`, which
runs each rank on one device, and measured. `make bench-plan`

All layouts train the same model on the same batch, so that their ranking means something: the
plan's choice is the layout with the shortest prediction, its regret its time over the fastest.
Simulated devices share cores with whatever else the machine does, so CPU seconds are printed next
to seconds, and the noise of each next to the errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import combinations

import jax

from ppctl.cli.compose import compose
from ppctl.planner.rehearsal.rehearse_ranks import rehearse
from ppctl.training.pipeline.job import TrainingJob, assemble

MODEL = (
    "recipes=bench",
    "model.num_layers=16",
    "model.d_model=128",
    "model.num_heads=4",
    "model.seq_len=128",
    "data.batch_size=32",
    "data.vocab_size=256",
    "run.platform=cpu",
)
LAYOUTS = (  # mesh, schedule, microbatches, remat, executor
    "mesh=1x1 schedule=1f1b schedule.num_microbatches=4 executor.remat=none",
    "mesh=2x1 schedule=1f1b schedule.num_microbatches=4 executor.remat=none",
    "mesh=4x1 schedule=1f1b schedule.num_microbatches=2 executor.remat=full",
    "mesh=1x2 schedule=1f1b schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x2 schedule=gpipe schedule.num_microbatches=4 executor.remat=full",
    "mesh=1x2 schedule=zb_h1 schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=8 executor.remat=layer",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=8 executor.remat=full",
    "mesh=1x4 schedule=gpipe schedule.num_microbatches=8 executor.remat=full",
    "mesh=1x4 schedule=eager_1f1b schedule.num_microbatches=16 executor.remat=none",
    "mesh=1x4 schedule=interleaved schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x4 schedule=zb_h1 schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=32 executor.remat=full",
    "mesh=2x2 schedule=interleaved schedule.num_microbatches=4 executor.remat=none",
    "mesh=2x4 schedule=interleaved schedule.num_microbatches=8 executor.remat=full",
    "mesh=1x4x2 schedule=1f1b schedule.num_microbatches=8 executor.remat=none",
    "mesh=2x2x2 schedule=1f1b schedule.num_microbatches=4 executor.remat=layer",
    "mesh=1x2 schedule=1f1b schedule.num_microbatches=8 executor=mpmd executor.remat=none",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=8 executor=mpmd executor.remat=none",
    "mesh=1x4 schedule=1f1b schedule.num_microbatches=8 executor=mpmd executor.remat=full",
    "mesh=1x4 schedule=zb_h1 schedule.num_microbatches=8 executor=mpmd executor.remat=none",
    "mesh=2x2 schedule=interleaved schedule.num_microbatches=4 executor=mpmd executor.remat=layer",
    "mesh=1x2x1x1x2 schedule=1f1b schedule.num_microbatches=8 executor.remat=none",
    "mesh=1x2x1x1x2 schedule=1f1b schedule.num_microbatches=8 executor=mpmd executor.remat=layer",
    "mesh=1x2x1x1x1x2 schedule=1f1b schedule.num_microbatches=8 executor.remat=full",
)
STEPS = 16  # timed, half of them before the prediction and half after it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="layouts with this text")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    layouts = [layout for layout in LAYOUTS if options.only is None or options.only in layout]
    rows = list(map(compared, layouts))
    found = {
        "wall": figures(rows, "predicted_s", "taken_s"),
        "cpu": figures(rows, "predicted_cpu_s", "taken_cpu_s"),
    }
    if options.json:
        print(json.dumps({"layouts": rows, **found}))
        return 0
    for name, what in (("cpu", "CPU seconds"), ("wall", "seconds")):
        print(
            "{}: "
            "error median "
            "{median:.1%}, "
            "p90 "
            "{p90:.1%}, "
            "worst "
            "{worst:.1%}; "
            "noise median "
            "{noise:.1%}, "
            "worst "
            "{worst_noise:.1%}; "
            "Kendall tau "
            "{tau:.2f}; "
            "regret "
            "{regret:.1%} "
            "({choice})".format(what, **found[name])
        )
    return 0


def compared(layout: str) -> dict:
    """Return one layout, predicted and measured."""
    config = compose([*MODEL, "partition=uniform", *layout.split()])
    run = steps(assemble(config))
    before = run()
    predicted, _ = rehearse(config)
    wall, cpu = ([*early, *late] for early, late in zip(before, run(), strict=True))
    half = len(wall) // 2
    row = {
        "layout": layout,
        "predicted_s": predicted.step_time_s,
        "taken_s": statistics.median(wall),
        "noise": abs(statistics.median(wall[:half]) / statistics.median(wall[half:]) - 1),
        "predicted_cpu_s": predicted.step_cpu_s or 0.0,
        "taken_cpu_s": statistics.median(cpu),
        "cpu_noise": abs(statistics.median(cpu[:half]) / statistics.median(cpu[half:]) - 1),
    }
    print(
        f"{layout:92} CPU s {row['taken_cpu_s']:.3f} predicted {row['predicted_cpu_s']:.3f} "
        f"{row['predicted_cpu_s'] / row['taken_cpu_s'] - 1:+.1%} (noise {row['cpu_noise']:.1%}) "
        f"s {row['taken_s']:.3f} predicted {row['predicted_s']:.3f} "
        f"{row['predicted_s'] / row['taken_s'] - 1:+.1%} (noise {row['noise']:.1%})",
        file=sys.stderr,
        flush=True,
    )
    return row


def steps(job: TrainingJob) -> Callable[[], tuple[list[float], list[float]]]:
    """Return a function that runs half of the steps and returns their seconds and CPU seconds."""
    engine = job.pipe.engine
    engine.compile(evaluate=False)
    state, batch = engine.new_state(), engine.batches.put(next(job.data.batches()))

    def half() -> tuple[list[float], list[float]]:
        nonlocal state
        wall, cpu = [], []
        for _ in range(STEPS // 2 + 1):
            began, cpu_began = time.perf_counter(), time.process_time()
            state, _ = running = engine.step(state, batch)
            jax.block_until_ready(running)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
        return wall[1:], cpu[1:]

    return half


def figures(rows: list[dict], predicted: str, measured: str) -> dict:
    """Return errors, ranking and regret of predictions."""
    errors = sorted(abs(row[predicted] / row[measured] - 1) for row in rows)
    noise = [row["noise" if measured == "taken_s" else "cpu_noise"] for row in rows]
    chosen = min(rows, key=lambda row: row[predicted])
    return {
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "worst": errors[-1],
        "noise": statistics.median(noise),
        "worst_noise": max(noise),
        "tau": kendall_tau([row[predicted] for row in rows], [row[measured] for row in rows]),
        "regret": chosen[measured] / min(row[measured] for row in rows) - 1,
        "choice": chosen["layout"],
    }


def kendall_tau(a: list[float], b: list[float]) -> float:
    """Return pairs ranked alike less pairs ranked otherwise, over all: 1 where two rankings agree,
    -1 where never.

    >>> kendall_tau([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in combinations(range(len(a)), 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


if __name__ == "__main__":
    sys.exit(main())
