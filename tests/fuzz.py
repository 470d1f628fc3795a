"""Random requests through plan, verify and five train steps: `python tests/fuzz.py N SEED`.

Each request is served by the three commands, as the command line serves them, and its losses are
compared with those of executor=reference on one device. The commands must refuse an impossible one in
the same line, with exit code 2 and nothing written. A traceback, a warning, a hang or a
difference is a finding: it is printed with the command line that repeats it (typed in the root),
and the exit code is 1.

Requests run in processes that serve many each: JAX starts once, and programs are compiled by the
quickest means.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import resource
import select
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from support.fuzz_requests import Request

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("plan", "verify", "train")
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "bfloat16": 5e-2,
}  # relative, of losses, norms and rates of 5 steps
MANY = 25  # requests that one process serves
LIMIT_S = 900  # seconds for a request, on a busy machine; a quiet one needs a few
REFUSED = 2


class Served(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    error: str


class Finding(NamedTuple):
    """A fault: its kind, the command line that repeats it, and the output."""

    what: str
    words: Sequence[str]
    printed: str = ""


# --- one request --------------------------------------------------------------------------------


def tried(made: Request, directory: Path) -> tuple[str, Finding | None]:
    """Return the result of a request in a word, and its fault, if any."""
    run_dir = directory / "run"
    lines = {command: [command, *made.words, f"run.dir={run_dir}"] for command in COMMANDS}
    # runs in bfloat16 are verified in float64: of models 4 wide some gradients are rounding,
    # 7 % of themselves
    lines["verify"] = [word for word in lines["verify"] if word != "run.dtype=bfloat16"]
    with _composed_once(), _x64_restored():
        found = {command: served([*lines[command], "--json"]) for command in COMMANDS}
        for command, each in found.items():
            if "Traceback" in each.error or each.code not in (0, REFUSED):
                return "failed", Finding(
                    f"{command} ends with {each.code}", lines[command], each.error or each.out
                )
        if any(each.code == REFUSED for each in found.values()):
            return "refused", _refusal(found, lines, run_dir)
        return "equal", _difference(made, found, lines, run_dir)


def _refusal(
    found: dict[str, Served], lines: dict[str, list[str]], run_dir: Path
) -> Finding | None:
    """Return the fault of a request that a command has refused."""
    first = found["train"].error if found["train"].code == REFUSED else found["plan"].error
    for command, each in found.items():
        if each.code != REFUSED:
            others = ", ".join(name for name in COMMANDS if found[name].code == REFUSED)
            return Finding(f"{command} accepts what {others} refuses", lines[command], first)
        if not each.error.startswith("ppctl: ") or each.error.count("\n") != 1:
            return Finding(f"{command} refuses in other than one line", lines[command], each.error)
        if each.error != first:
            return Finding(
                f"{command} gives another reason than train", lines[command], each.error + first
            )
    if run_dir.exists():
        return Finding("a request that was refused left a run directory", lines["train"], first)
    return None


def _difference(
    made: Request, found: dict[str, Served], lines: dict[str, list[str]], run_dir: Path
) -> Finding | None:
    """Return where the numbers of a request differ from the reference's, or between commands."""
    planned = json.loads(found["plan"].out)["predicted_bubble_fraction"]
    trained = _records(run_dir / "metrics.jsonl")[-1].get(
        "predicted_bubble_fraction"
    )  # without a pipeline: no such setting
    if planned != trained:
        return Finding(f"plan says a bubble of {planned}, train of {trained}", lines["plan"])
    if made.processes > 1:
        shutil.rmtree(run_dir)
        lines["train"].append(f"launch.processes={made.processes}")
        launched = _in_processes(lines["train"])
        if launched.code:
            return Finding(
                f"train ends with {launched.code}", lines["train"], launched.out + launched.error
            )
    unlike = _unlike(lines["train"], run_dir)
    if unlike is None or "float64" in unlike:
        return unlike and Finding(unlike, lines["train"])
    # a narrow model with dropout amplifies rounding ten thousandfold: a fault shows in float64 too
    shutil.rmtree(run_dir)
    left_out = ("run.dtype=", "launch.processes=")
    again = [word for word in lines["train"] if not word.startswith(left_out)]
    again.append("run.dtype=float64")
    code = served([*again, "--json"]).code
    return Finding(unlike, lines["train"]) if code or _unlike(again, run_dir) else None


def _unlike(line: Sequence[str], run_dir: Path) -> str | None:
    """Return the first number of a run that is not the reference's, and the dtype; None: equal."""
    expected, dtype = reference(line[1:])
    for name, wanted in expected.items():
        records = _records(run_dir / name)
        if [each["step"] for each in records] != [each["step"] for each in wanted]:
            return f"{name} has the steps {[each['step'] for each in records]}"
        for a, b in zip(records, wanted, strict=True):
            for key in b.keys() - (
                {"grad_norm"} if dtype == "bfloat16" else set()
            ):  # a norm of rounding there
                if not math.isclose(
                    a[key], b[key], rel_tol=TOLERANCE[dtype], abs_tol=1e-3 * TOLERANCE[dtype]
                ):
                    values = f"{a[key]}, the reference's {b[key]}"
                    return f"{key} of step {a['step']} is {values} ({dtype})"
    return None


def reference(words: Sequence[str]) -> tuple[dict[str, list[dict[str, float]]], str]:
    """Return the metrics and evaluations of the un-pipelined model on one device, by a plain loop;
    and the dtype.
    """
    from ppctl.cli import compose
    from ppctl.config import Config, Launch, Schedule
    from ppctl.training.pipeline.job import assemble, without_pipeline

    config = compose.compose([*words])
    assert isinstance(config, Config)
    schedule = Schedule("gpipe", config.schedule.num_microbatches)
    job = assemble(replace(without_pipeline(config), schedule=schedule, launch=Launch()))
    metrics, evaluations = [], []
    state, run = job.pipe.init(), config.run
    for step, batch in zip(range(1, run.num_steps + 1), job.data.batches(), strict=False):
        state, numbers = job.pipe.step(state, batch)
        names = ("loss", *job.pipe.attached_losses, "grad_norm", "lr")
        metrics.append({"step": step} | {name: float(numbers[name]) for name in names})
        if run.eval_every is not None and step % run.eval_every == 0:
            losses = [
                float(job.pipe.loss(state, each))
                for each in job.data.eval_batches(run.eval_batches)
            ]
            evaluations.append({"step": step, "eval_loss": sum(losses) / len(losses)})
    return {"metrics.jsonl": metrics, "eval.jsonl": evaluations}, str(job.pipe.dtype)


@contextlib.contextmanager
def _composed_once() -> Iterator[None]:
    """Let Hydra compose the same words once in the body: it takes half a second, and does the same
    each time.
    """
    from ppctl.cli import compose

    made, usual = {}, compose.compose

    def remembered(overrides: list[str], config_dir: str | None = None) -> Any:
        key = (*overrides, config_dir)
        if key not in made:
            made[key] = usual(overrides, config_dir)
        return copy.deepcopy(made[key])

    compose.compose = remembered
    try:
        yield
    finally:
        compose.compose = usual


@contextlib.contextmanager
def _x64_restored() -> Iterator[None]:
    """Leave to other tests of the process what commands set."""
    import jax

    before = jax.config.jax_enable_x64
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def served(words: list[str]) -> Served:
    """Return the result of a command in this process, warnings being errors, as in the tests."""
    import jax

    from ppctl import cli

    jax.config.update(
        "jax_enable_x64", False
    )  # the value at the start of a process; a command may set it
    out, error = io.StringIO(), io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", "Error reading persistent compilation cache entry", UserWarning
        )
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        code = cli.main(words)
    return Served(code, out.getvalue(), error.getvalue())


def _in_processes(words: list[str]) -> Served:
    """Return the result of a command line that starts processes."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
    }
    ended = subprocess.run(
        [sys.executable, "-m", "ppctl.cli", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return Served(ended.returncode, ended.stdout, ended.stderr)


def _typed(words: Sequence[str]) -> str:
    return f"ppctl {shlex.join(words)}"


# --- many requests ------------------------------------------------------------------------------


def work(seed: int, numbers: Sequence[int], directory: Path) -> None:
    """Serve requests, and print a line of JSON at the begin and end of each."""
    from support.fuzz_requests import request

    for number in numbers:
        print(json.dumps({"number": number}), flush=True)
        place = directory / f"{seed}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        made = request(seed, number, place)
        print(json.dumps({"words": made.words, "place": str(place)}), flush=True)
        began = _cpu_s()
        result, finding = tried(made, place)
        if finding is None:
            shutil.rmtree(place, ignore_errors=True)
        line = {"result": result, "finding": finding, "cpu_s": _cpu_s() - began}
        print(json.dumps(line | {"mistake": made.mistake}), flush=True)


def _cpu_s() -> float:
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def fuzz(
    seed: int, first: int, count: int, directory: Path, many: int = MANY, limit_s: float = LIMIT_S
) -> int:
    """Serve `count` requests of a seed from `first` on; print each finding, and at the end how all
    went.

    Return the number of findings.
    """
    counts: Counter[str] = Counter()
    left, num_findings, cpu_s = list(range(first, first + count)), 0, 0.0
    while left:
        done = 0
        for line in _lines_of(seed, left[:many], directory, limit_s):
            finding = line["finding"] and Finding(*line["finding"])
            counts[line["result"]] += 1
            cpu_s += line["cpu_s"]
            done += 1
            if finding is not None:
                num_findings += 1
                _show(seed, line["number"], finding)
            else:
                mistake = f" ({line['mistake']})" if line["mistake"] else ""
                how = f"{line['result']}{mistake}, {line['cpu_s']:.1f} CPU s"
                print(f"{seed} {line['number']}: {how}", flush=True)
        left = left[done:]
    shown = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    print(
        f"{count} requests of seed {seed} from {first} on: {shown}; {num_findings} findings, "
        f"{cpu_s:.0f} CPU s"
    )
    return num_findings


def _show(seed: int, number: int, finding: Finding) -> None:
    printed = "\n".join(finding.printed.strip().splitlines()[-30:])
    print(
        f"FINDING {seed} {number}: {finding.what}\n  {_typed(finding.words)}\n{printed}", flush=True
    )


def _lines_of(
    seed: int, numbers: Sequence[int], directory: Path, limit_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a line for each request, until all are served, or one ended or held up its process: it
    is the last.
    """
    where = ["--seed", str(seed), "--dir", str(directory)]
    command = [sys.executable, __file__, "--serve", *map(str, numbers), *where]
    errors = directory / "stderr"
    line: dict[str, Any] = {}
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as it,
    ):
        assert it.stdout is not None
        try:
            while True:
                if not select.select([it.stdout], [], [], limit_s)[0]:
                    why = f"no end after {limit_s:.0f} s"
                    break
                text = it.stdout.readline()
                if not text:
                    if ("result" in line or not line) and it.wait() == 0:
                        return
                    why = f"its process ends with {it.wait()}"
                    break
                if "number" in (new := json.loads(text)):
                    line = {}
                line |= new
                if "result" in new:
                    yield line
        finally:
            it.kill()
    words = ["train", *line.get("words", ["?"]), f"run.dir={line.get('place')}/run"]
    finding = Finding(why, words, errors.read_text(errors="replace"))
    yield (
        {"number": numbers[0], "cpu_s": 0.0, "mistake": None}
        | line
        | {"result": "failed", "finding": finding}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random requests through plan, verify and five train steps."
    )
    parser.add_argument("count", type=int, nargs="?", default=30, help="requests")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first request, to repeat one"
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "runs/fuzz", help="where requests with findings are kept"
    )
    parser.add_argument("--serve", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--seed", dest="of_seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.serve is not None:
        work(args.of_seed, args.serve, args.dir)
        return 0
    import conftest  # noqa: F401  eight simulated devices, and a cache of compiled programs for all processes

    began = time.monotonic()
    num_findings = fuzz(args.seed, args.first, args.count, args.dir)
    print(f"{time.monotonic() - began:.0f} s")
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())
