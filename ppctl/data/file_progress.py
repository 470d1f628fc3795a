"""Progress of long work on files: a bar on a terminal, elsewhere a line now and then, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

EVERY_S = 15.0  # between two lines


@contextmanager
def progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function of the bytes that are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, what, num_bytes)
        return
    sizes = bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()
    columns = bars.TextColumn(what), bars.BarColumn(), *sizes
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda done: bar.update(task, completed=done)


def _lines(console: Console, what: str, num_bytes: int) -> Callable[[int], None]:
    began = last = time.monotonic()

    def show(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S:
            last = now
            share = f"{100 * done // max(1, num_bytes)} % of {num_bytes / 1e6:.1f} MB"
            console.print(f"{what} ... {share}, {now - began:.0f} s", markup=False, highlight=False)

    return show
