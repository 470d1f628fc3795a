"""The metrics of a run: `metrics.jsonl`, `eval.jsonl`, and progress on the terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ppctl.reports.terminal_output import OutputConsole, replace_file
from ppctl.training.run.run_environment import writing
from ppctl.training.run.trackers import BackgroundTracker

Record = Mapping[str, float | int | None]


class Metrics:
    """The records of one run, a context manager; only process 0 has one.

    Args:
        run_dir: Holds `metrics.jsonl` (one object a training step) and `eval.jsonl` (one object an
            evaluation). Created if missing.
        num_steps: Training steps of the whole run.
        start_step: Finished steps at the start. Lines of later steps, and half lines left by a
            kill, are dropped, so that a resumed run has each step exactly once.
        log_every: Steps between lines without a progress bar; first and last step are shown too.
        trackers: Names in `training.run.trackers`; each starts with its `begin`.
        console: Where progress is shown; None: standard output.

    ConfigError if `run_dir` cannot be written. A line survives a kill of the process when `log`
    returns. Numbers that are not finite are written as null, values of None are left out.
    """

    trackers: Sequence[BackgroundTracker] = ()

    def __init__(
        self,
        run_dir: Path | str,
        *,
        num_steps: int,
        start_step: int,
        log_every: int,
        trackers: Sequence[str] = (),
        console: Console | None = None,
    ):
        # 1. the files
        run_dir = Path(run_dir)
        self._num_steps, self._first_step, self._log_every = num_steps, start_step + 1, log_every
        self._console = console or OutputConsole()
        self._unshown_s: list[float] = []  # step times since the last line
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._train_file = _continue_file(run_dir / "metrics.jsonl", start_step)
            self._eval_file = _continue_file(run_dir / "eval.jsonl", start_step)
        # 2. trackers and progress
        self.trackers = [BackgroundTracker(name, self.note) for name in trackers]
        self._progress = None
        if self._console.is_interactive:
            self._progress = _progress_bar(self._console)
            self._bar = self._progress.add_task(
                "train", total=num_steps, completed=start_step, shown=""
            )
            self._progress.start()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def log(self, record: Record) -> None:
        """Write and show one training step. `record["step"]` counts finished steps, from 1.

        A line shows the mean time of the steps since the line before.
        """
        step = int(record["step"] or 0)
        self._train_file.write(_line(record))
        self._track(record, step, _train_tag)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=_shown(record, _ON_BAR))
            return
        self._unshown_s.append(record.get("step_time_s") or 0.0)
        if step in (self._first_step, self._num_steps) or step % self._log_every == 0:
            mean = _at(record, statistics.fmean(self._unshown_s))
            self.note(f"step {self._counted(step)}  {_shown(mean)}")
            self._unshown_s.clear()

    def log_eval(self, step: int, record: Record) -> None:
        """Write and show one evaluation, after `step` finished steps. Keys start with `eval_`."""
        self._eval_file.write(_line({"step": step, **record}))
        self._track(record, step, _eval_tag)
        self.note(f"eval {self._counted(step)}  {_shown(record)}")

    def _track(self, record: Record, step: int, tag: Callable[[str], str]) -> None:
        for tracker in self.trackers:
            tracker.log(record, step, tag)

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the files and give the terminal back. May be called again."""
        if self._progress is not None:
            self._progress.stop()
        for tracker in self.trackers:
            tracker.close()
        self._train_file.close()
        self._eval_file.close()

    def _counted(self, step: int) -> str:
        return f"{step:>{len(str(self._num_steps))}}/{self._num_steps}"


class NoMetrics(Metrics):
    """The metrics of a process that does not lead: it records and shows nothing."""

    def __init__(self) -> None: ...

    def log(self, record: Record) -> None: ...

    def log_eval(self, step: int, record: Record) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def _continue_file(path: Path, last_step: int) -> FileIO:
    """Open a file for appending, unbuffered, with only the records of steps <= last_step."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_kept(line, last_step)]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
    return path.open("ab", buffering=0)


def _is_kept(line: bytes, last_step: int) -> bool:
    """Return whether a line is a whole record of a step up to `last_step`.

    >>> [_is_kept(line, 2) for line in (b'{"step": 2}\\n', b'{"step": 3}\\n', b'{"step": 1')]
    [True, False, False]
    """
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= last_step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _line(record: Record) -> bytes:
    known = {key: value for key, value in record.items() if value is not None}
    finite = {key: value if math.isfinite(value) else None for key, value in known.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _train_tag(key: str) -> str:
    """Return TensorBoard's tag of a key: speeds and times in one group, the rest in another.

    >>> _train_tag("loss"), _train_tag("tokens_per_s"), _train_tag("mfu_fraction")
    ('train/loss', 'speed/tokens_per_s', 'speed/mfu_fraction')
    """
    return f"speed/{key}" if key.endswith("_s") or key.startswith("mfu") else f"train/{key}"


def _eval_tag(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}"


def _number(value: float) -> str:
    """Return four decimals, or an exponent where they would show little.

    >>> _number(3.14159), _number(0.00012345)
    ('3.1416', '1.234e-04')
    """
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3e}"


# The text of each value of a record on the terminal, in this order.
_SHOWN = {
    "loss": lambda value: f"loss {_number(value)}",
    "eval_loss": lambda value: f"eval_loss {_number(value)}",
    "grad_norm": lambda value: f"grad_norm {value:.3f}",
    "lr": lambda value: f"lr {value:.1e}",
    "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "rows_per_s": lambda value: f"{value:,.0f} rows/s",
    "mfu_fraction": lambda value: f"mfu {value:.1%}",
    "mfu_causal_fraction": lambda value: f"({value:.1%} causal)",
    "step_time_s": lambda value: f"{value:.3f} s/step",
}


_SPEEDS = ("tokens_per_s", "rows_per_s", "mfu_fraction", "mfu_causal_fraction")
_ON_BAR = ("loss", "tokens_per_s", "rows_per_s")


def _shown(record: Record, keys: tuple[str, ...] = tuple(_SHOWN)) -> str:
    """Return the text of a record on the terminal.

    >>> _shown({"step": 10, "loss": 3.1416, "lr": 1e-3, "tokens_per_s": 12345.0})
    'loss 3.1416  lr 1.0e-03  12,345 tok/s'
    """
    return "  ".join(_SHOWN[key](record[key]) for key in keys if record.get(key) is not None)


def _at(record: Record, step_time_s: float) -> Record:
    """Return a record as if its step had taken step_time_s.

    >>> _at({"loss": 1.5, "tokens_per_s": 100.0, "step_time_s": 2.0}, 4.0)
    {'loss': 1.5, 'tokens_per_s': 50.0, 'step_time_s': 4.0}
    """
    before_s = record.get("step_time_s")
    if not before_s or not step_time_s:
        return record
    speeds = {key: value for key in _SPEEDS if (value := record.get(key)) is not None}
    speeds = {key: value * before_s / step_time_s for key, value in speeds.items()}
    return {**record, **speeds, "step_time_s": step_time_s}


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),  # the line fits into 80 columns
        TextColumn("{task.fields[shown]}", markup=False),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )
