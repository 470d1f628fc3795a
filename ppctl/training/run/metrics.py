"""The metrics of a run: `metrics.jsonl`, `eval.jsonl`, and lines on the terminal."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ppctl.model.layer_inputs import LOSS
from ppctl.reports import terminal_output as terminal
from ppctl.reports.run_status import append
from ppctl.training.run.run_environment import writing
from ppctl.training.run.trackers import BackgroundTracker, RunFacts

FILES = ("metrics.jsonl", "eval.jsonl")
SKIPPED = "skipped.jsonl"  # steps without an update, with the numbers of their examples
Record = Mapping[str, Any]  # a number, a list of numbers by layer, or None, by name


class Metrics:
    """The records of one run. A context manager.

    Writes a JSON object to `metrics.jsonl` for each training step, and to `eval.jsonl` for each
    evaluation. Numbers that are not finite become null; values of None are left out. When `log`
    returns, the line survives a kill of the process. At a start, lines of steps after start_step
    and lines torn by a kill are dropped, so a resumed run has each step exactly once.

    run_dir: directory of the files; None (all processes but 0) records nothing. num_steps: steps of
    the whole run. start_step: steps finished before this start. log_every: steps between lines on
    the terminal. trackers: names of TRACKERS, which get the run's name and settings. ConfigError if
    run_dir cannot be written.
    """

    def __init__(
        self,
        run_dir: Path | str | None,
        *,
        num_steps: int,
        start_step: int,
        log_every: int,
        trackers: Sequence[str] = (),
        name: str = "",
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ):
        self.is_finished = False  # True once the run has reached its last step
        self._num_steps, self._first_step, self._log_every = num_steps, start_step + 1, log_every
        self._console = console or terminal.OutputConsole()
        self._unshown: list[Record] = []  # the steps since the last line on the terminal
        self._files: tuple[FileIO, ...] = ()
        self._bar: Progress | None = None  # progress bar below the lines, on a terminal
        self.num_skipped = 0  # steps without an update, over all starts
        self._trackers: list[BackgroundTracker] = []
        if run_dir is not None:
            with writing(run_dir := Path(run_dir)):
                run_dir.mkdir(parents=True, exist_ok=True)
                self._files = tuple(_continue_file(run_dir / name, start_step) for name in FILES)
                self._skipped = run_dir / SKIPPED
                if self._skipped.exists():
                    _continue_file(self._skipped, start_step).close()
                    self.num_skipped = len(self._skipped.read_bytes().splitlines())
            run = RunFacts(run_dir, name, settings or {}, start_step + 1)
            self._trackers = [BackgroundTracker(each, run, self.note) for each in trackers]

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal and self._files:
            parts = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
            self._bar = Progress(*parts, TextColumn("left"), console=self._console, transient=True)
            self._bar.add_task("steps", total=self._num_steps, completed=self._first_step - 1)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        for tracker in self._trackers:
            tracker.close(is_finished=self.is_finished)
        for file in self._files:
            file.close()

    def log(self, record: Record, attached: Sequence[str] = ()) -> None:
        """Write and show one training step. `record["step"]` counts finished steps, from 1.

        A line shows the mean time of the steps since the previous line. attached: names of the
        losses that layers attach, shown after the loss.
        """
        if not self._files:
            return
        step = int(record["step"] or 0)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        append(self._files[0], _line(record))
        self._track(record, step, _train_tag)
        self._unshown.append(record)
        if step in (self._first_step, self._num_steps) or step % self._log_every == 0:
            self.note(f"step {self._counted(step)}  {_shown(_mean(self._unshown), attached)}")
            self._unshown.clear()

    def log_skipped(self, record: Record, examples: Sequence[int]) -> None:
        """Write and show a step without an update. Means over steps leave it out."""
        step = int(record["step"] or 0)
        self.num_skipped += 1
        if not self._files:
            return
        append(self._files[0], _line(record))
        with self._skipped.open("ab", buffering=0) as file:
            append(file, json.dumps({"step": step, "examples": [*examples]}).encode() + b"\n")
        numbers = f"loss={record['loss']}, grad_norm={record['grad_norm']}"
        self.note(f"step {self._counted(step)}  {numbers}: skipped, see {self._skipped.name}")

    def log_eval(self, step: int, record: Record) -> None:
        """Write and show one evaluation, after `step` finished steps. Keys start with `eval_`."""
        if not self._files:
            return
        append(self._files[1], _line({"step": step, **record}))
        self._track(record, step, lambda key: f"eval/{key.removeprefix('eval_')}")
        self.note(f"eval {self._counted(step)}  {_shown(record)}")

    def _track(self, record: Record, step: int, tag: Callable[[str], str]) -> None:
        values: dict[str, Any] = {tag(key): a for key, a in record.items() if key != "step"}
        for name in [name for name in values if isinstance(values[name], list)]:
            values |= {f"{name}_layer_{l:02d}": a for l, a in enumerate(values.pop(name))}
        values = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(values, step)

    def note(self, text: str) -> None:
        """Print a line."""
        terminal.show_lines(self._console, text)

    def _counted(self, step: int) -> str:
        return f"{step:>{len(str(self._num_steps))}}/{self._num_steps}"


def _continue_file(path: Path, last_step: int) -> FileIO:
    """Open a file for appending, unbuffered, with only the records of steps <= last_step."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_kept(line, last_step)]
        if len(kept) < len(lines):
            terminal.replace_file(path, b"".join(kept))
    return path.open("ab", buffering=0)


def _is_kept(line: bytes, last_step: int) -> bool:
    """Return whether a line is a complete record of a step <= last_step.

    >>> [_is_kept(line, 2) for line in (b'{"step": 2}\\n', b'{"step": 3}\\n', b'{"step": 1')]
    [True, False, False]
    """
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= last_step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _line(record: Record) -> bytes:
    known = {key: _finite(value) for key, value in record.items() if value is not None}
    return json.dumps(known, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """Return a number or a list of numbers, with None in place of non-finite numbers."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if value is not None and math.isfinite(value) else None


def _train_tag(key: str) -> str:
    """Return TensorBoard's tag of a key: in the group experts, speed or train.

    >>> _train_tag("loss"), _train_tag("tokens_per_s"), _train_tag("expert_load")
    ('train/loss', 'speed/tokens_per_s', 'experts/load')
    """
    if key.startswith("expert_"):
        return key.replace("expert_", "experts/", 1)
    return f"speed/{key}" if key.endswith("_s") or key.startswith("mfu") else f"train/{key}"


# The text of each value of a record on the terminal, in the order of the line.
_SHOWN = {
    "loss": lambda value: f"loss {terminal.decimal_text(value)}",
    "eval_loss": lambda value: f"eval_loss {terminal.decimal_text(value)}",
    "grad_norm": lambda value: f"grad_norm {value:.3f}",
    "lr": lambda value: f"lr {value:.1e}",
    "expert_load": lambda values: f"load {max(filter(None, values), default=0):.1f}",
    "expert_dropped_tokens": lambda values: (
        f"dropped {dropped:,.0f}" if (dropped := sum(filter(None, values))) else ""
    ),
    "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "rows_per_s": lambda value: f"{value:,.0f} rows/s",
    "mfu_fraction": lambda value: f"mfu {value:.1%}",
    "mfu_causal_fraction": lambda value: f"({value:.1%} causal)",
    "step_time_s": lambda value: f"{terminal.seconds_text(value, digits=3)}/step",
}
_SPEEDS = ("tokens_per_s", "rows_per_s", "mfu_fraction", "mfu_causal_fraction")


def _shown(record: Record, attached: Sequence[str] = ()) -> str:
    """Return the text of a record on the terminal; attached: as in `Metrics.log`.

    >>> _shown({"step": 10, "loss": 3.1416, "lr": 1e-3, "tokens_per_s": 12345.0})
    'loss 3.1416  lr 1.0e-03  12,345 tok/s'
    >>> _shown({"loss": 3.1416, "balance": 0.01, "lr": 1e-3}, ["balance"])
    'loss 3.1416  balance 0.0100  lr 1.0e-03'
    >>> _shown({"loss": 3.1416, "expert_load": [None, 1.2, 1.84], "expert_dropped_tokens": [0, 2]})
    'loss 3.1416  load 1.8  dropped 2'
    """
    losses = [f"{name} {terminal.decimal_text(record[name] or 0.0)}" for name in attached]
    known = {key: text(record[key]) for key, text in _SHOWN.items() if record.get(key) is not None}
    first = known.pop(LOSS, "")
    return "  ".join(filter(None, [first, *losses, *known.values()]))


def _mean(records: Sequence[Record]) -> Record:
    """Return the last record, with the mean step time and the harmonic mean speeds of all.

    >>> _mean([{"rows_per_s": 30, "step_time_s": 2.0}, {"rows_per_s": 60, "step_time_s": 1.0}])
    {'rows_per_s': 40.0, 'step_time_s': 1.5}
    """
    means = dict.fromkeys(_SPEEDS, harmonic_mean) | {"step_time_s": fmean}
    known = [key for key in means if records[-1].get(key) is not None]
    return {**records[-1]} | {key: means[key]([each[key] for each in records]) for key in known}
