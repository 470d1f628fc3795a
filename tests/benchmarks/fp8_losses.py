"""The losses of `recipes=stdlib_2x4` with linear maps in 8 bits, next to bfloat16 and float32.

    python tests/benchmarks/fp8_losses.py [STEPS]   # default 200; 3 runs, 9 CPU minutes in all

Writes docs/images/fp8_losses.svg and prints the losses of docs/benchmarks.md.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from ppctl.reports.charts.image_charts import Panel, panels

PICTURE = Path(__file__).resolve().parents[2] / "docs/images/fp8_losses.svg"
RUNS = {
    "float32": ["run.dtype=float32"],
    "bfloat16": ["run.dtype=bfloat16"],
    "fp8": ["run.dtype=bfloat16", "model.linear_dtype=fp8"],
}
MEAN_OF = 10  # steps of each mean in the panel of differences


def trained(directory: Path, name: str, num_steps: int) -> tuple[list[float], float]:
    """Return (loss of each step, last eval_loss) of a run."""
    command = [sys.executable, "-m", "ppctl.cli", "train", "recipes=stdlib_2x4", *RUNS[name]]
    command += [f"run.num_steps={num_steps}", "run.log_every=1", "run.profile=null"]
    command += [f"run.dir={directory / name}", "run.checkpoint.every=1000"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def recorded(file: str, key: str) -> list[float]:
        lines = (directory / name / file).read_text().splitlines()
        return [json.loads(line)[key] for line in lines]

    return recorded("metrics.jsonl", "loss"), recorded("eval.jsonl", "eval_loss")[-1]


def means(values: list[float]) -> list[tuple[int, float]]:
    """Return (last step, mean) of every MEAN_OF steps."""
    firsts = range(0, len(values), MEAN_OF)
    return [(i + MEAN_OF, mean(values[i : i + MEAN_OF])) for i in firsts]


def main(num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: trained(Path(folder), name, num_steps) for name in RUNS}
    print(f"{'':20} last {MEAN_OF} losses   eval_loss   largest difference of {MEAN_OF} losses")
    for name, (losses, evaluated) in found.items():
        far = [b - a for a, b in zip(found["float32"][0], losses, strict=True)]
        worst = max((abs(value) for _, value in means(far)), default=0.0)
        print(f"{name:20} {mean(losses[-MEAN_OF:]):14.4f} {evaluated:11.4f} {worst:16.4f}")
    lines = {name: means(losses) for name, (losses, _) in found.items()}
    whole = dict(lines["float32"])
    apart = {
        name: [(step, abs(value - whole[step])) for step, value in line]
        for name, line in lines.items()
    }
    drawn = [
        Panel(f"loss, mean of {MEAN_OF} steps", "nats a token", lines),
        Panel("absolute difference from float32", "nats a token", apart),
    ]
    PICTURE.write_bytes(panels("recipes=stdlib_2x4, same seed", drawn, "step", "svg"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
