"""Steps, predictions, ranks, traces and kernels on one accelerator, next to the bars set for an
H100. `make bench-gpu`

Every row is printed and written to OUT/rows.jsonl as soon as it is known, with its command; what
fails is a row, too. Groups can be run one at a time (--only steps,ranks), and none begins after
--minutes. With --tiny all of it runs on a CPU with a tiny model: to try this script, not to time
anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree


@dataclass(frozen=True)
class Bar:
    """What a number must be; of_time: it says nothing where the model is a tiny one."""

    text: str
    holds: Callable[[float], bool]
    of_time: bool = True


def at_most(number: float, *, of_time: bool = True) -> Bar:
    return Bar(f"<= {number}", lambda value: value <= number, of_time)


def at_least(number: float) -> Bar:
    return Bar(f">= {number}", lambda value: value >= number)


def one_within(error: float) -> Bar:
    return Bar(f"1 +- {error}", lambda value: abs(value - 1) <= error)


MODEL = (  # 0.94 B parameters; 197.6 TFLOP in a step of 16 sequences, full attention counted
    "model.num_layers=16 model.d_model=2048 model.num_heads=16 model.seq_len=2048 "
    "run.dtype=bfloat16"
)
TINY = (
    "model.num_layers=16 model.d_model=32 model.num_heads=4 model.seq_len=32 run.dtype=bfloat16 "
    "run.platform=cpu"
)
DATA, TINY_DATA = "data=synthetic data.vocab_size=32000", "data=synthetic data.vocab_size=64"
MICROBATCHES = 8
STEPS, WARM_UP = 14, 4
LAYOUTS = {  # name: words, the bar of its seconds, of its MFU (full attention counted)
    "spmd none": ("executor.remat=none", at_most(0.345), at_least(0.58)),
    "spmd full": ("executor.remat=full", None, None),
    "spmd layer": ("executor.remat=layer", None, None),
    "spmd none, 4 a microbatch": ("executor.remat=none data.batch_size=32", None, at_least(0.62)),
    "mpmd none": ("executor=mpmd executor.remat=none", None, None),
    "mpmd none zb_h1": ("executor=mpmd executor.remat=none schedule=zb_h1", None, None),
    "reference none": ("executor=reference executor.remat=none", None, None),
    "reference layer": ("executor=reference executor.remat=layer", None, None),
    "spmd none, no flags": ("executor.remat=none executor.xla_flags=none", None, None),
}
PREDICTED = ("spmd none", "spmd full", "spmd layer", "mpmd none", "reference none")
RANKS = ("eager_1f1b", "interleaved", "zb_h1")  # of 4 ranks, bar 1.03
STEP_ERROR, MEMORY_ERROR, RANK_RATIO = 0.10, 0.05, 1.03
KERNEL_ERROR = 0.01  # of bfloat16, relative to the norm
KERNELS = Path(__file__).with_name("attention_kernels.py")


class Bench:
    """The model, the directory of what is found, and the clock."""

    def __init__(self, out: Path, *, tiny: bool, minutes: float):
        self.out, self.tiny = out, tiny
        self.runs: dict[str, dict | None] = {}
        self.ends_s = time.monotonic() + 60 * minutes
        self.model = (TINY if tiny else MODEL).split()
        out.mkdir(parents=True, exist_ok=True)

    def words(self, *words: str) -> list[str]:
        """Return the words of a request; of each setting the last, and data of its own instead of
        the synthetic.
        """
        given = " ".join(words).split()
        data = (
            ()
            if any(word.startswith("data=") for word in given)
            else (TINY_DATA if self.tiny else DATA).split()
        )
        size = [
            "mesh=1x1",
            "schedule=1f1b",
            f"schedule.num_microbatches={MICROBATCHES}",
            "data.batch_size=16",
        ]
        cache = f"run.compilation_cache={self.out / 'cache'}"
        return list(
            {
                word.partition("=")[0]: word for word in [*self.model, *data, *size, cache, *given]
            }.values()
        )

    def row(self, what: str, value: float | None, unit: str, command: str, bar: Bar | None = None):
        is_judged = bar is not None and value is not None and not (self.tiny and bar.of_time)
        holds = bar.holds(value) if is_judged else None
        text = "" if bar is None else bar.text
        row = {
            "what": what,
            "value": value,
            "unit": unit,
            "bar": text,
            "holds": holds,
            "command": command,
        }
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = "failed" if value is None else f"{value:.4g}"
        state = {None: "", True: "holds", False: "MISSED"}[holds]
        print(f"{what:52} {shown:>10} {unit:10} {text:18} {state}", flush=True)

    def ppctl(self, what: str, *words: str) -> str | None:
        """Return what a command prints; None, and a row, where it fails or takes too long."""
        command = ["ppctl", *words]
        left_s = max(30.0, self.ends_s - time.monotonic())
        try:
            run = [sys.executable, "-m", "ppctl.cli", *words]
            done = subprocess.run(run, capture_output=True, text=True, timeout=left_s, check=False)
            failed, text = done.returncode != 0, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            failed, text = True, f"longer than the {left_s:.0f} s that were left"
        if not failed:
            return done.stdout
        with (self.out / "failed.txt").open("a") as file:
            file.write(f"$ {' '.join(command)}\n{text}\n")
        print("\n".join(text.splitlines()[-3:]), file=sys.stderr)
        self.row(what, None, "", " ".join(command))
        return None

    def json_of(self, what: str, command: str, *words: str) -> dict | None:
        text = self.ppctl(what, command, *self.words(*words), "--json")
        return None if text is None else json.loads(text)

    def trained(self, name: str, words: str) -> dict | None:
        """Return medians of a run's last steps, and the memory that the compiler planned for it;
        None: it failed.

        A run of a name is made once.
        """
        if name not in self.runs:
            self.runs[name] = self._train(name, words)
        return self.runs[name]

    def _train(self, name: str, words: str) -> dict | None:
        run_dir = self.out / name.replace(" ", "_").replace(",", "")
        rmtree(run_dir, ignore_errors=True)
        quiet = (
            "run.eval_every=null run.checkpoint.enabled=false run.trackers=[] run.log_every=1000"
        )
        asked = ["train", *self.words(words, quiet, f"run.num_steps={STEPS} run.dir={run_dir}")]
        if self.ppctl(name, *asked) is None:
            return None
        records = [
            json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        last = records[WARM_UP:]
        keys = ("step_time_s", "mfu_fraction", "mfu_causal_fraction")
        found = {
            key: statistics.median(r[key] for r in last)
            for key in keys
            if last[0].get(key) is not None
        }
        times = [record["step_time_s"] for record in last]
        found["spread"] = max(times) / min(times) - 1
        found["losses"] = [record["loss"] for record in records]
        found["memory_bytes"] = records[-1]["memory_bytes"]
        return found | {"command": "ppctl " + " ".join(asked), "run_dir": run_dir}


def steps(bench: Bench):
    """The train step, un-pipelined and in a pipeline of one rank, which has all the work of one."""
    for name, (words, bar_s, bar_mfu) in LAYOUTS.items():
        found = bench.trained(name, words)
        if found is None:
            continue
        step_s, mfu = found["step_time_s"], found.get("mfu_fraction")
        bench.row(name, step_s, "s", found["command"], bar_s)
        bench.row(
            f"{name}: slowest of {STEPS - WARM_UP} steps over fastest",
            found["spread"],
            "",
            found["command"],
        )
        if mfu is not None:
            bench.row(f"{name}: MFU, full attention", mfu, "", found["command"], bar_mfu)
            bench.row(f"{name}: MFU, causal", found["mfu_causal_fraction"], "", found["command"])
        bench.row(
            f"{name}: memory compiled", found["memory_bytes"] / 2**30, "GiB", found["command"]
        )


def predictions(bench: Bench):
    """Predictions of `ppctl plan`: of these steps over the measured ones, of memory over the
    compiler's.
    """
    for name in PREDICTED:
        words = LAYOUTS[name][0]
        ran = bench.trained(name, words)
        what = f"{name}: ppctl plan"
        plan = bench.json_of(what, "plan", words)
        if plan is None or ran is None:
            continue
        command = f"ppctl plan {' '.join(bench.words(words))}"
        ratio = plan["step_time_s"] / ran["step_time_s"]
        bench.row(f"{what}, step predicted / measured", ratio, "", command, one_within(STEP_ERROR))
        ratio = max(plan["predicted_bytes"]) / ran["memory_bytes"]
        bench.row(f"{what}, memory / compiled", ratio, "", command, one_within(MEMORY_ERROR))


def ranks(bench: Bench):
    """A rank's own work in a pipeline of 4, over a quarter of the best un-pipelined step of the
    same batch.
    """
    batch = "data.batch_size=32 schedule.num_microbatches=16"
    words = f"executor.remat=none {batch}"
    whole = [
        bench.trained(f"{each}, 16 microbatches", f"executor={each} {words}")
        for each in ("reference", "spmd")
    ]
    known = [found["step_time_s"] for found in whole if found is not None]
    if not known:
        return
    quarter_s = min(known) / 4
    bench.row(
        "a quarter of the un-pipelined step", quarter_s, "s", "the better of the two runs above"
    )
    for schedule in RANKS:
        words = f"mesh=1x4 schedule={schedule} executor.remat=none {batch}"
        found = bench.json_of(f"rehearse {schedule}", "rehearse", words)
        if found is None:
            continue
        command = f"ppctl rehearse {' '.join(bench.words(words))}"
        # layers are equal, so a rank has a quarter of the work, and the last the head besides
        work = [rank["tasks_s"] + rank["update_s"] for rank in found["ranks"]]
        for r, seconds in enumerate(work):
            bench.row(
                f"{schedule}, rank {r}: its work over a quarter", seconds / quarter_s, "", command
            )
        ratio = statistics.mean(work) / quarter_s
        bench.row(
            f"{schedule}: mean of the ranks over a quarter", ratio, "", command, at_most(RANK_RATIO)
        )


def rehearsals(bench: Bench):
    """Pipelines that one accelerator does not hold, and the vocabulary on all ranks."""
    for words in (
        "mesh=1x8 schedule=zb_v executor=mpmd executor.remat=none data.batch_size=32 "
        "schedule.num_microbatches=16",
        "mesh=1x4 schedule=1f1b schedule.vocab=parallel executor.remat=none data.batch_size=32 "
        "schedule.num_microbatches=16",
        "mesh=1x1 schedule=1f1b executor.remat=none",
    ):
        found = bench.json_of(f"rehearse {words}", "rehearse", words)
        if found is None:
            continue
        command = f"ppctl rehearse {' '.join(bench.words(words))}"
        name = " ".join(words.split()[:3])
        bench.row(f"rehearse {name}", found["step_time_s"], "s", command)
        ratio = found["step_time_s"] / found["analytic_step_time_s"]
        bench.row(f"rehearse {name}: over ppctl plan", ratio, "", command)
        if (
            "mesh=1x1" in words
            and (ran := bench.trained("spmd none", LAYOUTS["spmd none"][0])) is not None
        ):
            ratio = found["step_time_s"] / ran["step_time_s"]
            bench.row(f"rehearse {name}: over the run", ratio, "", command, one_within(STEP_ERROR))


def traces(bench: Bench):
    """The tasks that a profiler's trace tells: two for each microbatch of each traced step."""
    num_steps = 2
    found = bench.trained("traced", f"executor.remat=none run.profile=6-{5 + num_steps}")
    if found is None:
        return
    files = list((found["run_dir"] / "profile").glob("tasks.perfetto.json"))
    events = json.loads(files[0].read_text())["traceEvents"] if files else []
    tasks, due = [event for event in events if event["ph"] == "X"], 2 * MICROBATCHES * num_steps
    bench.row(
        "tasks in the trace",
        len(tasks),
        "",
        found["command"],
        Bar(f"= {due}", lambda value: value == due, of_time=False),
    )
    if tasks:
        seconds = sum(event["dur"] for event in tasks) / 1e6 / num_steps
        bench.row(
            "tasks of a step in the trace, of its time",
            seconds / found["step_time_s"],
            "",
            found["command"],
        )


def equality(bench: Bench):
    """Loss and gradients next to the un-pipelined model's."""
    small = (
        ""
        if bench.tiny
        else "model.num_layers=4 model.d_model=256 model.seq_len=256 data.vocab_size=512"
    )
    for words in ("executor=spmd", "executor=mpmd schedule=zb_h1"):
        for dtype, bar in (("float64", 1e-10), ("bfloat16", 0.05)):
            found = bench.json_of(
                f"verify {words} {dtype}", "verify", small, words, f"run.dtype={dtype}"
            )
            if found is None:
                continue
            error = max(found["loss_error"], found["worst"]["error"])
            bench.row(
                f"verify {words} {dtype}",
                error,
                "",
                f"ppctl verify {words}",
                at_most(bar, of_time=False),
            )


def documents(bench: Bench):
    """Training on packed documents, by plain attention and by chunks: the same losses."""
    losses = []
    for kernel in ("xla", "chunked"):
        words = f"data=stdlib data.packing=true model.attention={kernel} executor.remat=none"
        found = bench.trained(f"packed {kernel}", words)
        if found is None:
            return
        losses.append(found["losses"])
        bench.row(
            f"packed documents, attention={kernel}", found["step_time_s"], "s", found["command"]
        )
    error = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    bar = at_most(0.01, of_time=False)
    bench.row("packed documents: losses, largest difference", error, "", "the two runs above", bar)


def kernels(bench: Bench):
    """The fused attention: errors against the plain form in float32, and its time."""
    command = [sys.executable, str(KERNELS), *["--tiny"] * bench.tiny]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = f"python {KERNELS.name}"
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        bench.row("attention's kernels", None, "", shown)
    for found in map(json.loads, done.stdout.splitlines()):
        worst, what = max(found["errors"].values()), found["what"]
        bench.row(f"{what}: error", worst, "", shown, at_most(KERNEL_ERROR, of_time=False))
        bench.row(f"{what}: both ways", 1e3 * found["seconds"], "ms", shown)


GROUPS = {
    "kernels": kernels,
    "steps": steps,
    "predictions": predictions,
    "ranks": ranks,
    "rehearsals": rehearsals,
    "traces": traces,
    "equality": equality,
    "documents": documents,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/accelerator"))
    parser.add_argument(
        "--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}; all by default"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="after which no group begins and none goes on"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    options = parser.parse_args()
    bench = Bench(options.out.resolve(), tiny=options.tiny, minutes=options.minutes)
    doctor = bench.ppctl("doctor", "doctor")
    print(doctor or "")
    for name in options.only.split(","):
        if time.monotonic() > bench.ends_s:
            print(f"{name} and what follows: no time left; go on with --only {name},...")
            break
        print(f"\n{name}: {GROUPS[name].__doc__}")
        GROUPS[name](bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
