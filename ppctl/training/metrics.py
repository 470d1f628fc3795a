"""The metrics of a run, recorded and shown: `metrics.jsonl`, `eval.jsonl`, `tensorboard/`, progress on the terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ppctl.errors import ConfigError
from ppctl.reports.terminal import OutputConsole, replace_file
from ppctl.training.tensorboard import TensorBoardLog
from ppctl.training.trackers import BackgroundTracker

Record = Mapping[str, float | int | None]


class Metrics:
    """The records of one run; use it as a context manager. In a run of several processes only the first has one.

    Args:
        run_dir: Holds `metrics.jsonl` (one object a training step), `eval.jsonl` (one object an evaluation) and
            `tensorboard/`. Created if it is not there.
        num_steps: Training steps of the whole run.
        start_step: Finished steps at the start: 0, or the step of the checkpoint resumed from. Lines of later steps,
            and what a kill left of a last line, are dropped, so that a resumed run has each step exactly once.
        log_every: Steps between lines on a terminal that cannot show a progress bar; the first and last step are shown.
        tensorboard: Whether to write for TensorBoard.
        trackers: Names of those in `training.trackers` that get metrics too; each starts with its `begin`.
        console: Where progress is shown; None: standard output.

    Raises:
        ConfigError: `run_dir` cannot be written.

    Each line is on disk (as far as a kill of the process goes) when `log` returns. A number that is not finite is
    written as null, because JSON has none, and its key stays; a value of None is left out.
    """

    tensorboard: TensorBoardLog | None = None  # for text and figures too
    trackers: Sequence[BackgroundTracker] = ()

    def __init__(
        self,
        run_dir: Path | str,
        *,
        num_steps: int,
        start_step: int,
        log_every: int,
        tensorboard: bool,
        trackers: Sequence[str] = (),
        console: Console | None = None,
    ):
        run_dir = Path(run_dir)
        self._num_steps = num_steps
        self._first_step = start_step + 1
        self._log_every = log_every
        self._console = console or OutputConsole()
        self._unshown_s: list[float] = []  # step times since the last line
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._train_file = _continue_file(run_dir / "metrics.jsonl", start_step)
            self._eval_file = _continue_file(run_dir / "eval.jsonl", start_step)
        except OSError as error:
            raise ConfigError(
                f"run.dir={run_dir} cannot be written: {error.strerror}. Use another run.dir, or make it writable."
            ) from error
        if tensorboard:
            self.tensorboard = TensorBoardLog(run_dir / "tensorboard", self._first_step)
        self.trackers = [BackgroundTracker(name, self.note) for name in trackers]
        self._progress = None
        if self._console.is_interactive:
            self._progress = _progress_bar(self._console)
            self._bar = self._progress.add_task("train", total=num_steps, completed=start_step, shown="")
            self._progress.start()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def log(self, record: Record) -> None:
        """Write and show one training step. `record["step"]` counts finished steps, from 1.

        A line shows the mean time of the steps since the line before: when a single one was done is seen only roughly.
        """
        step = int(_step(record))
        self._train_file.write(_line(record))
        self._track(record, step, _train_tag)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=_shown(record, _ON_BAR))
            return
        self._unshown_s.append(record.get("step_time_s") or 0.0)
        if step in (self._first_step, self._num_steps) or step % self._log_every == 0:
            self.note(f"step {self._counted(step)}  {_shown(_at(record, statistics.fmean(self._unshown_s)))}")
            self._unshown_s.clear()

    def log_eval(self, step: int, record: Record) -> None:
        """Write and show one evaluation, after `step` finished steps. Keys start with `eval_`."""
        self._eval_file.write(_line({"step": step, **record}))
        self._track(record, step, _eval_tag)
        self.note(f"eval {self._counted(step)}  {_shown(record)}")

    def _track(self, record: Record, step: int, tag: Callable[[str], str]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.scalars(record, step, tag)
        for tracker in self.trackers:
            tracker.log(record, step, tag)

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the files and give the terminal back. May be called again."""
        if self._progress is not None:
            self._progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = None
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
    """Open a file for appending, after dropping every line that is no record of a step up to `last_step`.

    A kill meanwhile leaves the old or the new one. Writes are not buffered: each line is
    one write, which a kill of the process cannot lose.
    """
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _is_kept(line, last_step)]
        if len(kept) < len(lines):
            replace_file(path, b"".join(kept))
    return path.open("ab", buffering=0)


def _is_kept(line: bytes, last_step: int) -> bool:
    """Return whether a line is a whole record of a step up to `last_step`.

    >>> _is_kept(b'{"step": 2, "loss": 1.5}\\n', 2), _is_kept(b'{"step": 3}\\n', 2), _is_kept(b'{"step": 1', 2)
    (True, False, False)
    """
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= last_step
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _line(record: Record) -> bytes:
    finite = {key: value if math.isfinite(value) else None for key, value in record.items() if value is not None}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _step(record: Record) -> float:
    step = record["step"]
    assert step is not None
    return step


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

    >>> _shown({"step": 10, "loss": 3.1416, "lr": 1e-3, "tokens_per_s": 12345.0, "step_time_s": 0.123})
    'loss 3.1416  lr 1.0e-03  12,345 tok/s  0.123 s/step'
    """
    return "  ".join(_SHOWN[key](record[key]) for key in keys if key in record and record[key] is not None)


def _at(record: Record, step_time_s: float) -> Record:
    """Return a record as if its step had taken so long.

    >>> _at({"loss": 1.5, "tokens_per_s": 100.0, "step_time_s": 2.0}, 4.0)
    {'loss': 1.5, 'tokens_per_s': 50.0, 'step_time_s': 4.0}
    """
    own_s = record.get("step_time_s")
    if not own_s or not step_time_s:
        return record
    speeds = {key: value * own_s / step_time_s for key in _SPEEDS if (value := record.get(key)) is not None}
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
