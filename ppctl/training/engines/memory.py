"""The parts of a device's memory in a step."""

from __future__ import annotations

from collections.abc import Mapping

from ppctl.executors.mpmd.rank import SHARED

PARTS = ("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch", "temporaries")
NAMES = {  # parts by the names of values in a plan of executor=mpmd
    "params": "parameters",
    "next_params": "parameters",
    "next_optimizer": "optimizer",
    "optimizer": "optimizer",
    "inputs": "batch",
    "targets": "batch",
    **dict.fromkeys(("w", "ends_in", "ends_out", "ends"), "weights"),
    **dict.fromkeys(("acc", "acc_in", "acc_out", "acc_ends", "sum", "grads", *SHARED), "gradients"),
    **dict.fromkeys(("x", "y", "gx", "gy"), "transfers"),
    **dict.fromkeys(("stash", "pending", "logits"), "activations"),
}


def by_part(held: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part, in the order of PARTS, from bytes by the names of values.

    >>> by_part({"params": 8, "stash": 2, "temporaries": 1})["activations"]
    2
    """
    found: dict[str, int] = dict.fromkeys(PARTS[:-1], 0)
    for name, size in held.items():
        part = name if name in PARTS else NAMES.get(name, "transfers")  # a few numbers have no other name
        found[part] = found.get(part, 0) + size
    return found
