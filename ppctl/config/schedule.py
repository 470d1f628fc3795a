"""The schedules: families and their knobs, schedules found by search, and those of a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ppctl.config.checks import above_zero, at_least, choice
from ppctl.errors import ConfigError


@dataclass
class Schedule:
    """A schedule family without knobs of its own (gpipe, 1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v)."""

    name: str = "gpipe"
    num_microbatches: int = 8  # microbatches a step, of each data-parallel replica
    vocab: str = "whole"  # embedding and head: whole, on the first and the last stage | parallel, a part on each rank

    VOCAB: ClassVar[tuple[str, ...]] = ("whole", "parallel")

    def check(self) -> None:
        at_least("schedule.num_microbatches", self.num_microbatches, 1)
        choice("schedule.vocab", self.vocab, self.VOCAB)

    def knobs(self) -> dict[str, Any]:
        """Return the keyword arguments of the family's generator, those of all families left out."""
        return {}


@dataclass
class Eager1F1B(Schedule):
    """1F1B with a longer warm-up: `warmup_hops` forwards for each rank behind this one."""

    name: str = "eager_1f1b"
    warmup_hops: float = 2.0  # 1: fewest activations (1F1B) .. 2: hides transfers

    def check(self) -> None:
        super().check()
        _hops(self.warmup_hops)

    def knobs(self) -> dict[str, Any]:
        return {"warmup_hops": self.warmup_hops}


@dataclass
class Chunked(Schedule):
    """A family whose ranks hold `num_chunks` stages each (looped_bfs, interleaved_zb)."""

    name: str = "looped_bfs"
    num_chunks: int = 2  # stages a rank

    def check(self) -> None:
        super().check()
        at_least("schedule.num_chunks", self.num_chunks, 1)

    def knobs(self) -> dict[str, Any]:
        return {"num_chunks": self.num_chunks}


@dataclass
class Interleaved(Chunked):
    """Megatron-LM's interleaved 1F1B: each rank holds `num_chunks` stages."""

    name: str = "interleaved"
    warmup_hops: float = 2.0  # 1: fewest activations .. 2: hides transfers
    group_size: int | None = None  # microbatches through a chunk before the next one; None: mesh.pp, the fewest

    def check(self) -> None:
        super().check()
        _hops(self.warmup_hops)
        at_least("schedule.group_size", self.group_size, 1)

    def knobs(self) -> dict[str, Any]:
        return super().knobs() | {"warmup_hops": self.warmup_hops, "group_size": self.group_size}


@dataclass
class Gis(Chunked):
    """PipeOffload's group-interleaved schedule."""

    name: str = "gis"
    group_size: int | None = None  # microbatches through a chunk before the next one; None: half of mesh.pp, the fewest

    def check(self) -> None:
        super().check()
        at_least("schedule.group_size", self.group_size, 1)

    def knobs(self) -> dict[str, Any]:
        return super().knobs() | {"group_size": self.group_size}


@dataclass
class Hanayo(Schedule):
    """Hanayo: each rank holds two stages a wave."""

    name: str = "hanayo"
    num_waves: int = 1  # times down the ranks and back up

    def check(self) -> None:
        super().check()
        at_least("schedule.num_waves", self.num_waves, 1)

    def knobs(self) -> dict[str, Any]:
        return {"num_waves": self.num_waves}


@dataclass
class Auto(Schedule):
    """The shortest schedule found under a cap on memory: of every family, and of a search among their orders."""

    name: str = "auto"
    max_activations: float | None = None  # a rank may hold, of one microbatch through 1/p of the model; None: mesh.pp
    max_memory_gib: float | None = None  # a device may hold, weights and all, in place of max_activations
    max_chunks: int = 4  # stages a rank, at most
    split_backward: bool = True  # may a backward be split into input and weight gradients
    objective: str = "makespan"  # the time to shorten: makespan | period (a step without barrier before the optimizer)

    OBJECTIVE: ClassVar[tuple[str, ...]] = ("makespan", "period")

    def check(self) -> None:
        super().check()
        choice("schedule.objective", self.objective, self.OBJECTIVE)
        at_least("schedule.max_chunks", self.max_chunks, 1)
        if self.max_activations is not None and not 0 < self.max_activations < math.inf:  # written so that NaN fails
            raise ConfigError(f"schedule.max_activations={self.max_activations} must be above 0.")
        above_zero("schedule.max_memory_gib", self.max_memory_gib)
        if self.max_activations is not None and self.max_memory_gib is not None:
            raise ConfigError(
                f"schedule.max_activations={self.max_activations:g} and schedule.max_memory_gib="
                f"{self.max_memory_gib:g} are two caps on the same memory. Leave one of them out."
            )


@dataclass
class Csv(Schedule):
    """A schedule of yours: a CSV file with a line a rank and PyTorch's cells, `2F0`, `0B3`, `1I2`, `1W2`."""

    name: str = "csv"
    num_microbatches: int = 0  # 0: as many as the file has
    path: str = "???"  # of the file

    def check(self) -> None:
        at_least("schedule.num_microbatches", self.num_microbatches, 0)
        choice("schedule.vocab", self.vocab, self.VOCAB)


def _hops(warmup_hops: float) -> None:
    if not 1 <= warmup_hops <= 2:  # written so that NaN fails
        raise ConfigError(f"schedule.warmup_hops={warmup_hops} must lie in [1, 2].")
