"""Steps, predictions, ranks, traces, kernels, experts and 8-bit products on one accelerator, next to
the bars set for an H100: `make bench-gpu`

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
    """The bound of a number; of_time: meaningless with a tiny model."""

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
FP8 = "model.linear_dtype=fp8"
EXPERTS = "model.num_layers=8 model.moe.num_experts=8 model.moe.top_k=2 model.moe.width=4096"
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
    "spmd none, fp8": (f"executor.remat=none {FP8}", None, None),
    "mpmd none, fp8": (f"executor=mpmd executor.remat=none {FP8}", None, None),
    "experts": (f"executor.remat=none {EXPERTS}", None, None),
}
PREDICTED = ("spmd none", "spmd full", "spmd layer", "mpmd none", "reference none")
PREDICTED += ("spmd none, fp8", "experts")
RANKS = ("eager_1f1b", "interleaved", "zb_h1")  # families with 4 ranks, bar 1.03
ENGINES = ("executor=spmd", "executor=mpmd schedule=zb_h1")
STEP_ERROR, MEMORY_ERROR, RANK_RATIO = 0.10, 0.05, 1.03
KERNEL_SCRIPTS = {  # bar of a kernel's time, as a fraction of a dense product's
    "attention_kernels.py": None,
    "expert_kernels.py": at_least(0.7),
    "fp8_kernels.py": None,
}
FP8_STEPS, MEAN_OF, FP8_LOSS = 200, 10, 0.05  # nats; between means of MEAN_OF steps


class Bench:
    """The model, the directory of results, and the clock."""

    def __init__(self, out: Path, *, tiny: bool, minutes: float):
        self.out, self.tiny = out, tiny
        self.runs: dict[str, dict | None] = {}
        self.ends_s = time.monotonic() + 60 * minutes
        self.model = (TINY if tiny else MODEL).split()
        out.mkdir(parents=True, exist_ok=True)

    def words(self, *words: str) -> list[str]:
        """Return the words of a request; of each setting the last, and custom data."""
        given = " ".join(words).split()
        data = (TINY_DATA if self.tiny else DATA).split()
        if any(word.startswith("data=") for word in given):
            data = []
        size = ["mesh=1x1", "schedule=1f1b", f"schedule.num_microbatches={MICROBATCHES}"]
        size += ["data.batch_size=16", f"run.compilation_cache={self.out / 'cache'}"]
        found = {word.partition("=")[0]: word for word in [*self.model, *data, *size, *given]}
        return list(found.values())

    def row(self, what: str, value: float | None, unit: str, command: str, bar: Bar | None = None):
        is_judged = bar is not None and value is not None and not (self.tiny and bar.of_time)
        holds = bar.holds(value) if is_judged else None
        text = "" if bar is None else bar.text
        row = {"what": what, "value": value, "unit": unit, "bar": text, "holds": holds}
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row | {"command": command}) + "\n")
        shown = "failed" if value is None else f"{value:.4g}"
        state = {None: "", True: "holds", False: "MISSED"}[holds]
        print(f"{what:52} {shown:>10} {unit:10} {text:18} {state}", flush=True)

    def ppctl(self, what: str, *words: str) -> str | None:
        """Return a command's output; None, and a row, where it fails or takes too long."""
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
        quiet = f"run.eval_every=null run.checkpoint.enabled=false run.num_steps={STEPS}"
        quiet += f" run.trackers=[] run.log_every=1000 run.dir={run_dir}"
        asked = ["train", *self.words(quiet, words)]
        if self.ppctl(name, *asked) is None:
            return None
        records = list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))
        last = records[WARM_UP:]
        keys = ("step_time_s", "mfu_fraction", "mfu_causal_fraction")
        known = [key for key in keys if last[0].get(key) is not None]
        found = {key: statistics.median(record[key] for record in last) for key in known}
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
        what = f"{name}: slowest of {STEPS - WARM_UP} steps over fastest"
        bench.row(what, found["spread"], "", found["command"])
        if mfu is not None:
            bench.row(f"{name}: MFU, full attention", mfu, "", found["command"], bar_mfu)
            bench.row(f"{name}: MFU, causal", found["mfu_causal_fraction"], "", found["command"])
        gib = found["memory_bytes"] / 2**30
        bench.row(f"{name}: memory compiled", gib, "GiB", found["command"])


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
    names = ("reference", "spmd")
    whole = [
        bench.trained(f"{each}, 16 microbatches", f"executor={each} {words}") for each in names
    ]
    known = [found["step_time_s"] for found in whole if found is not None]
    if not known:
        return
    quarter_s, of_both = min(known) / 4, "the better of the two runs above"
    bench.row("a quarter of the un-pipelined step", quarter_s, "s", of_both)
    for schedule in RANKS:
        words = f"mesh=1x4 schedule={schedule} executor.remat=none {batch}"
        found = bench.json_of(f"rehearse {schedule}", "rehearse", words)
        if found is None:
            continue
        command = f"ppctl rehearse {' '.join(bench.words(words))}"
        # layers are equal, so a rank has a quarter of the work, and the last the head besides
        work = [rank["tasks_s"] + rank["update_s"] for rank in found["ranks"]]
        for r, seconds in enumerate(work):
            what = f"{schedule}, rank {r}: its work over a quarter"
            bench.row(what, seconds / quarter_s, "", command)
        what, ratio = (
            f"{schedule}: mean of the ranks over a quarter",
            statistics.mean(work) / quarter_s,
        )
        bench.row(what, ratio, "", command, at_most(RANK_RATIO))


def rehearsals(bench: Bench):
    """Pipelines that one accelerator does not hold, and the vocabulary on all ranks."""
    batch = "executor.remat=none data.batch_size=32 schedule.num_microbatches=16"
    for words in (
        f"mesh=1x8 schedule=zb_v executor=mpmd {batch}",
        f"mesh=1x4 schedule=1f1b schedule.vocab=parallel {batch}",
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
        if "mesh=1x1" not in words:
            continue
        if (ran := bench.trained("spmd none", LAYOUTS["spmd none"][0])) is not None:
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
    bar = Bar(f"= {due}", lambda value: value == due, of_time=False)
    bench.row("tasks in the trace", len(tasks), "", found["command"], bar)
    if tasks:
        share = sum(event["dur"] for event in tasks) / 1e6 / num_steps / found["step_time_s"]
        bench.row("tasks of a step in the trace, of its time", share, "", found["command"])


def equality(bench: Bench):
    """Loss and gradients next to the un-pipelined model's."""
    size = "model.num_layers=4 model.d_model=256 model.seq_len=256 data.vocab_size=512"
    experts = "model.moe.num_experts=4 model.moe.top_k=2"
    exact, near = ("float64", 1e-10), ("bfloat16", 0.05)
    compared = [(words, *dtype) for words in ENGINES for dtype in (exact, near)]
    compared += [(f"{words} {extra}", *exact) for words in ENGINES for extra in (FP8, experts)]
    for words, dtype, most in compared:
        what, small = f"verify {words} {dtype}", "" if bench.tiny else size
        found = bench.json_of(what, "verify", small, words, f"run.dtype={dtype}")
        if found is None:
            continue
        error = max(found["loss_error"], found["worst"]["error"])
        bench.row(what, error, "", f"ppctl {what}", at_most(most, of_time=False))


def documents(bench: Bench):
    """Training on packed documents, by plain attention and by chunks: the same losses."""
    losses = []
    for kernel in ("xla", "chunked"):
        words = f"data=stdlib data.packing=true model.attention={kernel} executor.remat=none"
        found = bench.trained(f"packed {kernel}", words)
        if found is None:
            return
        losses.append(found["losses"])
        what = f"packed documents, attention={kernel}"
        bench.row(what, found["step_time_s"], "s", found["command"])
    error = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    bar = at_most(0.01, of_time=False)
    bench.row("packed documents: losses, largest difference", error, "", "the two runs above", bar)


def losses(bench: Bench):
    """Losses of a small model in 8 bits next to bfloat16's, from the same seed."""
    means, size = [], "" if bench.tiny else "model.num_layers=4 model.d_model=512 model.seq_len=256"
    for recipe in ("null", "fp8"):
        words = f"data=stdlib {size} model.linear_dtype={recipe} run.num_steps={FP8_STEPS}"
        found = bench.trained(f"losses {recipe}", words)
        if found is None:
            return
        each = found["losses"]
        firsts = range(0, len(each), MEAN_OF)
        means.append([statistics.mean(each[i : i + MEAN_OF]) for i in firsts])
        what = f"linear_dtype={recipe}: mean of the last {MEAN_OF} of {FP8_STEPS} losses"
        bench.row(what, means[-1][-1], "", found["command"])
    apart = max(abs(a - b) for a, b in zip(*means, strict=True))
    bar = at_most(FP8_LOSS, of_time=False)
    bench.row(
        f"linear_dtype=fp8: means of {MEAN_OF} losses, farthest", apart, "", "the runs above", bar
    )


def kernels(bench: Bench):
    """Attention, products of experts and in 8 bits: errors against float32, and times."""
    for script, bar in KERNEL_SCRIPTS.items():
        command, shown = [sys.executable, str(Path(__file__).with_name(script))], f"python {script}"
        command += ["--tiny"] * bench.tiny
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            bench.row(script, None, "", shown)
        for found in map(json.loads, done.stdout.splitlines()):
            what, most = found["what"], at_most(found["most_error"], of_time=False)
            bench.row(f"{what}: error", found["error"], "", shown, most)
            bench.row(f"{what}: time", 1e3 * found["seconds"], "ms", shown)
            if "calls" in found:
                exactly = Bar(f"= {found['wanted_calls']}", found["wanted_calls"].__eq__)
                bench.row(f"{what}: calls in 8 bits", found["calls"], "", shown, exactly)
            if "of_dense" in found:
                bench.row(
                    f"{what}: {found['tflops']:.0f} TFLOP/s, of dense",
                    found["of_dense"],
                    "",
                    shown,
                    bar,
                )


GROUPS = {
    "kernels": kernels,
    "steps": steps,
    "predictions": predictions,
    "ranks": ranks,
    "rehearsals": rehearsals,
    "traces": traces,
    "equality": equality,
    "documents": documents,
    "losses": losses,
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
