"""`ppctl plan`: what a request takes, before it trains: its stages, its bubble, and the memory of each rank by part.

Parts that follow from shapes are exact. What else a program needs (its temporaries) only its compiler knows. XLA's for
CPUs is asked at once, without the code being made that training runs (`runtime.effort`): an estimate for CPUs, which
simulated devices are. plan.compile=true compiles what training runs, for the devices of this machine or for TPUs that
are not here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import jax
from rich.console import Console

from ppctl.advise import Proposal, propose
from ppctl.assemble import Parts, assemble, model_flops
from ppctl.config import Config
from ppctl.engine.mpmd import Mpmd
from ppctl.engine.one_program import OneProgram
from ppctl.engine.post_validation import PostValidated
from ppctl.report import show_json, show_table
from ppctl.request import label
from ppctl.runtime.memory import shard_bytes, spmd_bytes

PARTS = ("parameters", "optimizer", "weights", "gradients", "activations", "transfers", "batch", "temporaries")
ABOUT = {
    "parameters": "as the optimizer keeps them, sharded",
    "optimizer": "its moments, sharded likewise",
    "weights": "copies that tasks read: whole layers, in the dtype of compute",
    "gradients": "sums over microbatches, whole",
    "activations": "what forwards keep for backwards, and I for W",
    "transfers": "values between stages",
    "batch": "rows of the global batch",
    "temporaries": "all else that the compiler plans",
}
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
AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)")  # as XLA's compiler for TPUs refuses
REMEDIES = {
    "parameters": "shard them with mesh.fsdp, or use more ranks (mesh.pp).",
    "optimizer": "shard it with mesh.fsdp, or use more ranks (mesh.pp).",
    "weights": "use more ranks (mesh.pp), or executor.gather=tick with executor=spmd.",
    "gradients": "use more ranks (mesh.pp).",
    "activations": "use executor.remat=layer or full, more and smaller microbatches, or another schedule.",
    "transfers": "use more and smaller microbatches (schedule.num_microbatches).",
    "batch": "use a smaller data.batch_size, or more rows (mesh.dp).",
    "temporaries": "use more and smaller microbatches (schedule.num_microbatches), or more rows (mesh.dp).",
}
GIB = 2**30
MOST_COLUMNS = 8
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Prediction:
    """What `ppctl plan` says of a request."""

    schedule: str
    partition: tuple[int, ...]  # layers of each stage
    rank_of: tuple[int, ...]  # the rank of each stage
    bubble_fraction: float | None  # 0..1; None without a pipeline
    num_parameters: int
    step_flops: int  # of the model, nothing recomputed
    devices: str
    memory_bytes: tuple[Mapping[str, int], ...]  # for each rank, of one device, by part
    total_bytes: tuple[int, ...]  # for each rank; without "temporaries" it is what is needed at least
    is_complete: bool  # whether temporaries are known, be it by estimate
    is_compiled: bool  # whether they are those of the program that training runs
    estimated_bytes: tuple[int, ...] | None  # for each rank; None for devices other than this machine's CPUs
    limit_bytes: int | None  # memory of a device
    fits: bool | None  # None: not known
    compile_s: float | None
    refusal: str | None  # the compiler's, where it found that the program does not fit
    proposal: Proposal | None  # a better partition


def plan(config: Config, *, as_json: bool) -> int:
    """0 where the request fits, or may for all that is known, else 1; prints what it takes."""
    found = predict(config)
    if as_json:
        show_json(asdict(found))
    else:
        show(found, config)
    return int(found.fits is False)


def predict(config: Config) -> Prediction:
    """The prediction for a request. ConfigError or ScheduleError for what cannot be."""
    parts = assemble(config)
    total, compile_s, refusal = _compile(parts) if config.plan.compile else (None, None, None)
    memory, estimated = _weighed(parts)
    if total is not None or estimated is None:
        memory = _by_part(parts, total)
    needed = total or estimated or tuple(sum(of_rank.values()) for of_rank in memory)
    is_complete = total is not None or estimated is not None
    limit = _limit(parts, refusal)
    fits = None if limit is None else max(needed) <= limit
    if fits and not is_complete:
        fits = None  # what is known fits; temporaries may not
    elif limit is None and total is not None and config.plan.topology is not None:
        fits = True  # the compiler for TPUs refuses what does not
    return Prediction(
        schedule=label(config.schedule),
        partition=tuple(map(len, parts.states.layout.partition)),
        rank_of=tuple(parts.schedule.rank_of),
        bubble_fraction=parts.bubble_fraction,
        num_parameters=sum(a.size for a in jax.tree.leaves(parts.states.natural["params"])),
        step_flops=model_flops(parts),
        devices=f"{parts.mesh.size} x {parts.mesh.devices.flat[0].device_kind}",
        memory_bytes=memory,
        total_bytes=needed,
        is_complete=is_complete,
        is_compiled=total is not None,
        estimated_bytes=estimated,
        limit_bytes=limit,
        fits=False if refusal else fits,
        compile_s=compile_s,
        refusal=refusal,
        proposal=propose(parts, limit),
    )


def _compile(parts: Parts) -> tuple[tuple[int, ...] | None, float, str | None]:
    """(bytes of one device of each rank, seconds, None), or (None, seconds, why) where the compiler refuses."""
    began = time.perf_counter()
    try:
        total = parts.engine.compile(evaluate=False).total_bytes
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = " ".join(str(error).split("\n")[0].split()).removeprefix("RESOURCE_EXHAUSTED: ")
        return None, time.perf_counter() - began, said
    return total, time.perf_counter() - began, None


def _weighed(parts: Parts) -> tuple[tuple[dict[str, int], ...], tuple[int, ...] | None]:
    """For each rank bytes of one device by part, and of all, as estimated; None on other devices than CPUs here."""
    engine = parts.engine
    if parts.config.plan.topology is not None or parts.mesh.devices.flat[0].platform != "cpu":
        return (), None
    if isinstance(engine, Mpmd | PostValidated):
        memory = tuple(map(_grouped, engine.held(engine.weigh())))
        return memory, tuple(sum(of_rank.values()) for of_rank in memory)
    assert isinstance(engine, OneProgram), "there are two kinds of engine"
    total = (engine.weigh(),) * parts.schedule.num_ranks
    return _by_part(parts, total), total


def _by_part(parts: Parts, total: Sequence[int] | None) -> tuple[dict[str, int], ...]:
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


def _limit(parts: Parts, refusal: str | None) -> int | None:
    """Bytes of a device: as asked, as the compiler says that refuses, or as the device states."""
    if parts.config.plan.memory_gib is not None:
        return round(parts.config.plan.memory_gib * GIB)
    if refusal is not None:
        stated = AVAILABLE.search(refusal)
        return None if stated is None else round(float(stated[1]) * UNITS[stated[2]])
    if parts.config.plan.topology is not None:
        return None
    stats = parts.mesh.devices.flat[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def show(found: Prediction, config: Config) -> None:
    """Nothing; prints a prediction for people."""
    console = Console()
    bubble = "" if found.bubble_fraction is None else f", bubble {found.bubble_fraction:.1%}"
    lines = [
        f"model     {config.model.name}, {config.model.num_layers} layers, {found.num_parameters:,} parameters, "
        f"{found.step_flops / 1e12:,.3g} TFLOP a step",
        f"mesh      dp={config.mesh.dp} pp={config.mesh.pp} fsdp={config.mesh.fsdp} on {found.devices}",
    ]
    microbatches = f"{config.schedule.num_microbatches} microbatches"
    if config.executor.name == "reference":
        lines.append(f"schedule  none: executor=reference has no pipeline; {microbatches}")
    else:
        stages = f"{' '.join(map(str, found.partition))} layers on ranks {' '.join(map(str, found.rank_of))}"
        lines += [
            f"schedule  {found.schedule}, {microbatches}{bubble}, executor={config.executor.name}",
            f"stages    {stages}",
        ]
    if found.proposal is not None:
        layers = ",".join(map(str, found.proposal.partition))
        lines.append(
            f"better    partition=explicit partition.layers=[{layers}] takes {found.proposal.time_ratio:.2f} times as "
            "long a step, by simulation with costs from FLOPs"
            + ("" if found.limit_bytes is None or config.executor.name != "mpmd" else ", and fits without temporaries")
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    ranks = _shown_ranks(found)
    columns = [f"rank {r}" for r in ranks] if len(set(map(str, found.memory_bytes))) > 1 else ["every rank"]
    rows = [
        (f"{part}: {ABOUT[part]}", *(_size(found.memory_bytes[r].get(part, 0)) for r in ranks))
        for part in PARTS
        if any(found.memory_bytes[r].get(part) for r in ranks)
    ]
    total = "total" if found.is_compiled else "total, estimated" if found.is_complete else "at least"
    rows.append((total, *(_size(found.total_bytes[r]) for r in ranks)))
    if found.is_compiled and found.estimated_bytes is not None:
        rows.append(("estimated, without plan.compile", *(_size(found.estimated_bytes[r]) for r in ranks)))
    show_table(console, "memory of one device", ("", *columns), rows)
    console.print(verdict(found), markup=False, highlight=False, soft_wrap=True)


def verdict(found: Prediction) -> str:
    """Whether the request fits, by how much, and what to do where it does not, in a line."""
    worst = max(range(len(found.total_bytes)), key=lambda r: found.total_bytes[r])
    need = found.total_bytes[worst]
    took = "" if found.compile_s is None else f" (compiled in {found.compile_s:.1f} s)"
    if found.refusal is not None:
        return f"does not fit{took}: {found.refusal.rstrip('.')}. {_remedy(found.memory_bytes[worst])}"
    if found.fits and found.limit_bytes is None:
        return f"fits: {_size(need)} a device, which the compiler for {found.devices} accepts{took}."
    estimated = "" if found.is_compiled or not found.is_complete else f", as estimated for {found.devices}"
    if found.limit_bytes is None:
        unknown = "the memory of a device is not known: say plan.memory_gib=N."
        return f"needs {'' if found.is_complete else 'at least '}{_size(need)} a device{estimated}{took}; {unknown}"
    share = f"{_size(need)} of {_size(found.limit_bytes)}"
    if found.fits is None:
        return f"may fit: {share} ({need / found.limit_bytes:.0%}) without temporaries; plan.compile=true counts these."
    if found.fits:
        return f"fits{estimated}: {share} ({need / found.limit_bytes:.0%}){took}."
    over = f"{_size(need - found.limit_bytes)} too much on rank {worst}"
    return f"does not fit{estimated}{took}: {share}, {over}. {_remedy(found.memory_bytes[worst])}"


def _remedy(held: Mapping[str, int]) -> str:
    """What makes the largest part smaller."""
    largest = max(held, key=lambda part: held[part])
    return f"Most are {largest}: {REMEDIES[largest]}"


def _shown_ranks(found: Prediction) -> list[int]:
    """All ranks where they differ and are few; of many, the first, the largest and the last."""
    num_ranks, total = len(found.memory_bytes), found.total_bytes
    if len(set(map(str, found.memory_bytes))) == 1:
        return [0]
    if num_ranks <= MOST_COLUMNS:
        return [*range(num_ranks)]
    return sorted({0, max(range(num_ranks), key=total.__getitem__), num_ranks - 1})


def _size(num_bytes: int) -> str:
    """Bytes as people read them, in units of 1024.

    >>> _size(1536), _size(15_750_000_000)
    ('1.5 KiB', '14.7 GiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
