"""TensorBoard's log of a run: scalars of each step; as text and figures, what `ppctl report` shows too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from ppctl.reports.charts.drawing import Drawing
from ppctl.reports.charts.image import bar_pixels, gantt_pixels
from ppctl.schedule.ir import Schedule

MOST_TASKS = 10_000  # of a schedule that is drawn: twice as many take half a second
MOST_BARS = 64
MIB = 1 << 20


class TensorBoardLog:
    """The events of one start of a run, in a directory. What is drawn belongs to a step, as scalars do.

    Args:
        directory: Created if it is not there.
        first_step: The first step of this start. TensorBoard hides what an earlier start wrote of this step and later
            ones, so that a step which is done again is there once. Files are whole; a kill loses ten seconds.
    """

    def __init__(self, directory: Path, first_step: int):
        self.first_step = first_step
        self._writer = SummaryWriter(
            str(directory),
            purge_step=first_step,
            flush_secs=10,
            filename_suffix=f".{first_step}",  # a resume within the same second must not overwrite
        )

    def scalars(self, values: Mapping[str, float | None], step: int, tag: Callable[[str], str]) -> None:
        """Add each value that is known, by the tag of its key."""
        for key, value in values.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(tag(key), value, step)

    def request(self, overrides: Sequence[str], config_yaml: str, environment: Mapping[str, Any]) -> None:
        """Add as text the overrides, the whole config, and the machine and versions of this start."""
        self._text("run/asked", _block("\n".join(overrides) or "nothing but the defaults"))  # a tag: as in older logs
        self._text("run/config", _block(config_yaml))
        versions = {f"version of {name}": version for name, version in environment.get("versions", {}).items()}
        facts = {name: value for name, value in environment.items() if name != "versions"} | versions
        self._text("run/environment", _table(("", ""), facts.items()))

    def gantt(self, tag: str, schedule: Schedule, draw: Callable[[], Sequence[Drawing]], step: int) -> None:
        """Add a figure of the drawings that `draw` returns, below each other, or text where the tasks are too many."""
        num_tasks = sum(map(len, schedule.ranks))
        if num_tasks > MOST_TASKS:
            self._text(f"{tag}_text", f"{num_tasks:,} tasks are too many for a figure: see `ppctl report`.", step)
            return
        self._writer.add_image(tag, gantt_pixels(draw()), step, dataformats="HWC")

    def memory(self, of_ranks: Sequence[int], predicted_bytes: int) -> None:
        """Add bars of the bytes that a device of each rank takes as compiled; 0: not known here, left out."""
        known = [(f"rank {rank}", size / MIB) for rank, size in enumerate(of_ranks) if size]
        if not known:
            return
        title = "Memory of a device of each rank, as compiled"
        if len(known) > MOST_BARS:
            known, title = sorted(known, key=lambda each: -each[1])[:MOST_BARS], f"{title}: the fullest {MOST_BARS}"
        pixels = bar_pixels(title, known, "MiB", [("predicted for the fullest", predicted_bytes / MIB)])
        self._writer.add_image("memory/ranks", pixels, self.first_step, dataformats="HWC")

    def step_times(self, seconds: Sequence[float], step: int) -> None:
        """Add a histogram of step times."""
        self._writer.add_histogram("speed/step_times_s", np.asarray(list(seconds)), step)

    def close(self) -> None:
        """Write all that is pending, and close the file."""
        self._writer.close()

    def _text(self, tag: str, text: str, step: int | None = None) -> None:
        self._writer.add_text(tag, text, self.first_step if step is None else step)


def _block(text: str) -> str:
    """Return text that Markdown leaves as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _table(head: Sequence[str], entries: Any) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *entries]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
