"""Memory of a request: bytes of one device of each rank by part, from shapes, with temporaries where they are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppctl.executors.spmd.memory import shard_bytes, spmd_bytes
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.engines.post_validation import PostValidated
from ppctl.training.job import Parts

PARTS = ("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch", "temporaries")
NAMES = {  # parts by the names of values in a plan of executor=mpmd
    "params": "parameters",
    "next_params": "parameters",
    "next_optimizer": "optimizer",
    "optimizer": "optimizer",
    "inputs": "batch",
    "targets": "batch",
    "stash": "activations",
    **dict.fromkeys(("w", "ends_in", "ends_out"), "weights"),
    **dict.fromkeys(("acc", "acc_in", "acc_out", "grads", "tied", "tied_head", "tied_sum"), "gradients"),
    **dict.fromkeys(("x", "y", "gx", "gy"), "transfers"),
    "pending": "activations",
}


def weighed(parts: Parts) -> tuple[tuple[dict[str, int], ...], tuple[int, ...] | None]:
    """For each rank bytes of one device by part, and of all, as estimated; None on other devices than CPUs here."""
    engine = parts.engine
    if parts.config.plan.topology is not None or parts.mesh.devices.flat[0].platform != "cpu":
        return (), None
    if isinstance(engine, Mpmd | PostValidated):
        memory = tuple(map(_grouped, engine.held(engine.weigh())))
        return memory, tuple(sum(of_rank.values()) for of_rank in memory)
    assert isinstance(engine, OneProgram), "there are two kinds of engine"
    total = (engine.weigh(),) * parts.schedule.num_ranks
    return by_part(parts, total), total


def by_part(parts: Parts, total: Sequence[int] | None) -> tuple[dict[str, int], ...]:
    """For each rank bytes of one device by part, in the order of PARTS."""
    engine = parts.engine
    if isinstance(engine, Mpmd | PostValidated):
        return tuple(map(_grouped, engine.held()))
    staged = parts.states.staged
    of_rank: dict[str, int] = {
        "parameters": shard_bytes(staged["params"]),
        "optimizer": shard_bytes(staged["optimizer"]),
    }
    if parts.ticks is not None:
        of_rank |= spmd_bytes(parts.model, parts.states.layout, parts.ticks)
    assert isinstance(engine, OneProgram), "there are two kinds of engine"
    of_rank["batch"] = shard_bytes(engine.placed_batch)
    if total is not None:
        rest = total[0] - sum(of_rank.values())
        if rest < 0:  # layers are read where the parameters are
            of_rank["weights"] = max(0, of_rank.get("weights", 0) + rest)
        of_rank["temporaries"] = max(0, rest)
    return (of_rank,) * parts.schedule.num_ranks


def _grouped(held: Mapping[str, int]) -> dict[str, int]:
    """Bytes by part, from bytes by the names of values."""
    found: dict[str, int] = dict.fromkeys(PARTS[:-1], 0)
    for name, size in held.items():
        part = name if name in PARTS else NAMES.get(name, "transfers")  # a few numbers have no other name
        found[part] = found.get(part, 0) + size
    return found
