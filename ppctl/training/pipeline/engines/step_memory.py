"""The memory of a step: totals of the compiled programs, and bytes by part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppctl.executors.mpmd.dispatch_plan import ProgramId
from ppctl.executors.mpmd.plan_values import value_kind

PARTS = (
    *("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch"),
    "temporaries",
)
# program, or None for the program of a whole step -> bytes of temporaries on one device
Temporaries = Callable[[ProgramId | None], int]


@dataclass(frozen=True)
class Footprint:
    """The memory of a step's compiled programs."""

    temp_bytes: int  # bytes of temporaries on the device that needs most
    total_bytes: tuple[int, ...]  # bytes of one device of each rank, all parts; 0: remote rank
    text: str  # text of the compiled program; "" for a step of many programs


def by_part(held: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part, in the order of PARTS, from bytes by value name.

    >>> by_part({"params": 8, "stash": 2, "temporaries": 1})["activations"]
    2
    """
    found: dict[str, int] = dict.fromkeys(PARTS[:-1], 0)
    for name, size in held.items():
        part = name if name == "temporaries" else value_kind(name).memory
        found[part] = found.get(part, 0) + size
    return found
