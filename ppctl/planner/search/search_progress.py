"""The progress of a long search, printed, and its early end by a time limit or a signal."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppctl.planner.search.layout_search import LayoutSearch

SAY_EVERY_S = 10.0  # seconds between lines


class SearchEnded(Exception):
    """Raised in a search that ends before it is complete."""


@dataclass
class SearchProgress:
    """Prints lines during a search, and ends it after max_s seconds or when `stopped_by` is set."""

    say: Callable[[str], None]
    max_s: float | None = None  # None: no limit
    stopped_by: str | None = None  # name of the signal that ends the search
    began_s: float = field(default_factory=time.monotonic)
    said_s: float = field(default_factory=time.monotonic)

    def begin(self, search: LayoutSearch, rows: Sequence[Any], best: int) -> None:
        """Watch a search. rows: its results, which grow until there are `best`."""
        self.began_s = self.said_s = time.monotonic()
        search.watch = lambda: self._watch(search, rows, best)

    @property
    def early_end(self) -> str | None:
        """Return the reason why the search ends early; None while it runs on."""
        if self.stopped_by is not None:
            return self.stopped_by
        is_over = self.max_s is not None and time.monotonic() - self.began_s >= self.max_s
        return f"tune.max_s={self.max_s:g}" if is_over else None

    def _watch(self, search: LayoutSearch, rows: Sequence[Any], best: int) -> None:
        if self.early_end is not None:
            raise SearchEnded
        now_s = time.monotonic()
        if now_s - self.said_s >= SAY_EVERY_S:
            self.said_s = now_s
            self.say(
                f"search    {now_s - self.began_s:.0f} s: {search.num_simulated:,} of at most "
                f"{len(search.layouts):,} layouts simulated, {len(rows)} of the best {best} found"
            )
