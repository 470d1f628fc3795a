"""The printed form of `ppctl plan` and `ppctl rehearse`: lines and tables."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ppctl.planner.make_plan import ExpertsPart, Prediction, StagePart
from ppctl.planner.rehearsal.rehearse_ranks import Rehearsal, RehearsedRank
from ppctl.reports.terminal_output import (
    OutputConsole,
    bubble_text,
    seconds_column,
    seconds_text,
    show_lines,
    show_table,
    size_text,
)
from ppctl.schedule.partition.partition import ranks_text, stages_text
from ppctl.training.pipeline.engines.step_programs import PARTS

ABOUT = {
    "parameters": "as the optimizer keeps them, sharded",
    "optimizer": "its moments, sharded likewise",
    "weights": "copies read by tasks: whole layers, compute dtype",
    "gradients": "sums over microbatches, whole",
    "activations": "values kept for backwards, and from I for W",
    "transfers": "values between stages",
    "batch": "examples of the global batch",
    "temporaries": "other memory of programs",
}
SMALLER = "more and smaller microbatches"
REMEDIES = {
    "parameters": "shard them with mesh.fsdp, or use more ranks (mesh.pp).",
    "optimizer": "shard it with mesh.fsdp, or use more ranks (mesh.pp).",
    "weights": "use more ranks (mesh.pp), or executor.gather=layer with mesh.fsdp.",
    "gradients": "use more ranks (mesh.pp).",
    "activations": f"use executor.remat=layer or full, {SMALLER}, or another schedule.",
    "transfers": f"use {SMALLER} (schedule.num_microbatches).",
    "batch": "use a smaller data.batch_size, or more replicas (mesh.dp).",
    "temporaries": f"use {SMALLER} (schedule.num_microbatches), or more replicas (mesh.dp).",
}
PREDICTED = "total, predicted"
IN_BACKWARD = "in backward"
MOST_COLUMNS = 8
MOST_STAGES = 16


class TextTable(NamedTuple):
    """A table for the terminal or a page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show_plan(found: Prediction, note: str | None = None) -> None:
    """Print a prediction as lines and tables. note: a line about evaluations."""
    console = OutputConsole()
    show_lines(console, *(f"{name:<10}{text}" for name, text in plan_lines(found)))
    if found.stages:
        show_table(console, *stage_table(found.stages))
    memory = memory_table(found)
    about = [ABOUT.get(row[0], "") for row in memory.rows]
    rows = [(*row, text) for row, text in zip(memory.rows, about, strict=True)]
    few = {f"rank {rank}" for rank in shown_ranks(found, 3)}
    least = ["content", *(name for name in reversed(memory.columns) if name not in few)]
    show_table(console, memory.title, (*memory.columns, "content"), rows, least)
    assumed, width = "; ".join(found.assumes), max(console.width - 10, 40)
    for i, text in enumerate(textwrap.wrap(assumed, width, break_long_words=False)):
        show_lines(console, f"{'' if i else 'assumes':10}{text}")
    if note is not None:
        show_lines(console, f"note      {note}")
    show_lines(console, fit_text(found))


def plan_lines(found: Prediction) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the lines above the tables."""
    # 1. the request
    request, microbatches = found.request, f"{found.request.num_microbatches} microbatches"
    flops = f"{flop_text(found.step_flops)} a step, recomputing not counted"
    size = f"{request.num_layers} layers, {found.num_parameters:,} parameters"
    yield "model", f"{request.model}, {size}, {request.sizes}, {flops}"
    yield "mesh", f"{request.axes} on {found.devices}"
    if found.ideal_bubble_fraction is None:
        yield "schedule", f"none: executor=reference has no pipeline; {microbatches}"
    else:
        bubble = bubble_text(found.ideal_bubble_fraction, found.predicted_bubble_fraction)
        how = f"{microbatches}, bubble {bubble}, executor={request.executor}"
        yield "schedule", f"{found.schedule}, {how}"
        if found.auto is not None:
            yield "auto", found.auto
        stages = stages_text(found.partition, found.vocab_parts)
        yield "stages", f"{stages}, on ranks {ranks_text(found.rank_of)}"

    # 2. its prediction
    yield "step", time_text(found)
    if (costs := costs_text(found)) is not None:
        yield "costs", costs
    if found.experts is not None:
        yield "experts", experts_text(found.experts)
    if found.token_budget is not None:
        yield "tokens", found.token_budget.text


def experts_text(experts: ExpertsPart) -> str:
    """Return a line about the experts of a layer: a device's rows and seconds."""
    rows = f"{experts.num_rows:,} rows a device, room for {experts.most_rows:,}"
    text = f"{experts.num_experts}, {experts.top_k} a token: {rows}"
    if experts.compute_s is None or experts.sent_s is None:
        return text
    text += f"; a microbatch in a layer: products {seconds_text(experts.compute_s)}"
    if experts.sent_s:
        text += f", dispatch {seconds_text(experts.sent_s)}"
    if experts.remedy is not None:
        text += f". Dispatch takes longer than products: {experts.remedy}"
    return text


def flop_text(flops: float) -> str:
    """Return a number of FLOPs in three digits and a unit.

    >>> flop_text(15_200), flop_text(2.36e17), flop_text(9.999e14), flop_text(4.2e21)
    ('15.2 kFLOP', '236 PFLOP', '1 PFLOP', '4,200 EFLOP')
    """
    for unit in ("", "k", "M", "G", "T", "P"):
        if float(f"{flops:.3g}") < 1000:
            return f"{flops:.3g} {unit}FLOP"
        flops /= 1000
    return f"{float(f'{flops:.3g}'):,.4g} EFLOP"


def memory_table(found: Prediction) -> TextTable:
    """Return a table of the memory of one device of each shown rank, by part."""
    ranks, memory = shown_ranks(found, MOST_COLUMNS), found.memory_bytes
    rows = {part: [each.get(part, 0) for each in memory] for part in PARTS}
    rows = {name: sizes for name, sizes in rows.items() if any(sizes[r] for r in ranks)}
    rows["total, compiled" if found.is_compiled else PREDICTED] = [*found.total_bytes]
    if found.is_compiled:
        rows[PREDICTED] = [*found.predicted_bytes]
    cells = [(name, *(size_text(sizes[r]) for r in ranks)) for name, sizes in rows.items()]
    return TextTable("memory of one device", ("", *(rank_name(found, r) for r in ranks)), cells)


def costs_text(found: Prediction) -> str | None:
    """Return the overrides that pass a plan's costs to `ppctl schedule`; None if unknown.

    Costs are relative to a forward through 1/p of the model. They hold for this mesh and for
    microbatches of this size.
    """
    kinds = ("forward_s", "input_grad_s", "weight_grad_s")
    sums = [sum(getattr(stage, name) or 0.0 for stage in found.stages) for name in kinds]
    if found.transfer_s is None or not sums or not sums[0]:
        return None
    forward_s = sums[0] / len(found.total_bytes)
    is_equal = not found.request.mesh.startswith("[")
    words = [f"mesh={found.request.mesh if is_equal else f'1x{len(found.total_bytes)}'}"]
    words.append(f"schedule.num_microbatches={found.request.num_microbatches}")
    words += [f"costs.{name}={each / sums[0]:.3g}" for name, each in zip(kinds, sums, strict=True)]
    words.append(f"costs.transfer_s={found.transfer_s / forward_s:.2g}")
    unit = f"a forward through 1/p of the model, {seconds_text(forward_s)}"
    return f"{' '.join(words)} for `ppctl schedule`: relative to {unit}"


def stage_table(stages: Sequence[StagePart]) -> TextTable:
    """Return a table of the stages; if more than MOST_STAGES, of the first, slowest and last."""
    # 1. the stages to show
    last, seconds = len(stages) - 1, [(s.forward_s or 0.0) + (s.backward_s or 0.0) for s in stages]
    slowest = max(range(last + 1), key=seconds.__getitem__)
    which = range(last + 1) if last < MOST_STAGES else sorted({0, slowest, last})

    # 2. their rows
    unknown = "not known"
    forwards = seconds_column([stages[s].forward_s for s in which], unknown)
    backwards = seconds_column([stages[s].backward_s for s in which], unknown)
    rows = []
    for s, forward, backward in zip(which, forwards, backwards, strict=True):
        stage = stages[s]
        first, last_layer = stage.first_layer, stage.first_layer + stage.num_layers - 1
        layers = "none" if not stage.num_layers else f"{first}-{last_layer}"
        layers = str(first) if first == last_layer else layers
        forward = IN_BACKWARD if stage.forward_s == 0 else forward
        place = [stage.place] if stage.place else []
        rows.append((str(s), layers, str(stage.rank), *place, forward, backward))
    places = ["devices"] if any(stage.place for stage in stages) else []
    title = "stages, with the times of a microbatch"
    title += f" ({len(rows)} of {last + 1})" if len(rows) <= last else ""
    return TextTable(title, ("stage", "layers", "rank", *places, "forward", "backward"), rows)


def time_text(found: Prediction) -> str:
    """Return a line with the seconds, speed, MFU and per-step overhead of a step."""
    if found.step_time_s is None or found.tokens_per_s is None or found.per_step_overhead_s is None:
        return f"not known: {found.unknown}"
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    return f"{speed_text(found)}; {overhead} (hardware={found.hardware})"


def speed_text(found: Prediction | Rehearsal) -> str:
    """Return the seconds, speed and MFU of a step whose time is known."""
    mfu, causal = found.mfu_fraction, found.mfu_causal_fraction
    mfu_text = "" if mfu is None or causal is None else f", MFU {mfu:.1%} ({causal:.1%} causal)"
    unit = "tok/s" if found.unit == "tokens_per_s" else "rows/s"
    assert found.step_time_s is not None, "`time_text` states why it is unknown"
    return f"{seconds_text(found.step_time_s)}, {found.tokens_per_s:,.0f} {unit}{mfu_text}"


def overhead_text(overhead_s: float, step_s: float) -> str:
    """Return the per-step overhead as a share of the step."""
    return f"of which {overhead_s / step_s:.1%} per-step overhead: parameters, gradients, optimizer"


def fit_text(found: Prediction) -> str:
    """Return a line: whether the request fits, its memory and the limit, and a remedy if not."""
    worst = found.fullest_rank
    need = found.total_bytes[worst]
    kind = "predicted" if found.compile_s is None else f"compiled in {found.compile_s:.1f} s"
    held, limit = found.memory_bytes[worst], found.limit_bytes
    largest = max(held, key=lambda part: held[part])
    remedy = f"Most are {largest}: {REMEDIES[largest]}"
    if found.refusal is not None:
        return f"does not fit ({kind}): {found.refusal.rstrip('.')}. {remedy}"
    if found.fits and limit is None:
        accepted = f"which the compiler for {found.devices} accepts"
        return f"fits: {size_text(need)} a device, {accepted} ({kind})."
    if limit is None:
        unknown = "the memory of a device is unknown: set plan.memory_gib=N."
        return f"needs {size_text(need)} a device ({kind}); {unknown}"
    share, source = f"{size_text(need)} of {size_text(limit)} a device", found.limit_source
    if found.fits:
        return f"fits: {share} ({need / limit:.0%}), {kind}; limit: {source}."
    over = f"{size_text(need - limit)} too much on rank {worst}"
    return f"does not fit: {share}, {kind}, {over}; limit: {source}. {remedy}"


def shown_ranks(found: Prediction, most: int) -> list[int]:
    """Return the ranks to show: one if all are alike, all if at most `most`, else a few.

    The few are the first rank, the one with the least room, and the last.
    """
    num_ranks = len(found.memory_bytes)
    if len(set(map(str, found.memory_bytes))) == 1:
        return [0]
    if num_ranks <= most:
        return [*range(num_ranks)]
    return sorted({0, found.fullest_rank, num_ranks - 1})


def rank_name(found: Prediction, rank: int) -> str:
    are_alike = len(set(map(str, found.memory_bytes))) == 1
    return "every rank" if are_alike else f"rank {rank}"


# rehearsals

MOST_RANKS = 16  # maximum number of ranks that the terminal's table shows in full
RANK_COLUMNS = ("rank", "ran as", "tasks", "update", "forward", "backward", "memory")


def show_rehearsal(found: Rehearsal) -> None:
    """Print a rehearsal as lines and a table."""
    console = OutputConsole()
    show_lines(console, *(f"{name:<10}{text}" for name, text in rehearsal_lines(found)))
    show_table(console, *rank_table(found, MOST_RANKS))


def rehearsal_lines(found: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the lines above the table."""
    request, number = found.request, len({each.ran_as for each in found.ranks})
    yield "model", f"{request.model}, {request.num_layers} layers, {request.sizes}"
    yield "mesh", f"{request.axes}, links as of hardware={found.hardware}"
    ran = f"{number} of {len(found.ranks)} ranks on one {found.device}"
    yield "ran here", f"{ran}; each of the others equals one of these"
    microbatches = f"{request.num_microbatches} microbatches"
    yield "schedule", f"{found.schedule}, {microbatches}, {request.executor}"
    cpu = "" if found.step_cpu_s is None else f", {seconds_text(found.step_cpu_s)} of the CPUs"
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    yield "step", f"{speed_text(found)}, bubble {found.bubble_fraction:.1%}{cpu}; {overhead}"
    if request.stage_axes:
        sent = "sends between the devices of a stage; only one device ran"
        yield (
            ", ".join(request.stage_axes),
            f"{seconds_text(found.sent_s)} of the step, counted: {sent}",
        )
    counted_s = found.analytic_step_time_s
    ratio = f"the rehearsed time is {found.step_time_s / counted_s:.2f} times that"
    yield "analytic", f"{seconds_text(counted_s)} as `ppctl plan` counts; {ratio}"
    worst = max(found.ranks, key=lambda each: each.total_bytes)
    limit = "" if found.limit_bytes is None else f" of {size_text(found.limit_bytes)}"
    yield "memory", f"{size_text(worst.total_bytes)}{limit} on rank {worst.rank}, which needs most"


def ranks_to_show(found: Rehearsal, most: int) -> tuple[RehearsedRank, ...]:
    """Return all ranks if at most `most`, else those that ran, the fullest and the last one."""
    ranks = found.ranks
    if len(ranks) <= most:
        return ranks
    fullest = max(ranks, key=lambda each: each.total_bytes)
    return tuple(each for each in ranks if each.ran_as == each.rank or each in (fullest, ranks[-1]))


def rank_table(found: Rehearsal, most: int) -> TextTable:
    """Return a table of the ranks; of more than `most`, only those that `ranks_to_show` picks."""
    ranks = ranks_to_show(found, most)
    title = "ranks, with the times of a step, and of a microbatch through each stage"
    title += "" if len(ranks) == len(found.ranks) else f" ({len(ranks)} of {len(found.ranks)})"
    columns = [
        [str(each.rank) for each in ranks],
        [str(each.ran_as) for each in ranks],
        seconds_column([each.tasks_s for each in ranks]),
        seconds_column([each.update_s for each in ranks]),
        [", ".join(map(seconds_text, each.forward_s)) for each in ranks],
        [", ".join(map(seconds_text, each.backward_s)) for each in ranks],
        [size_text(each.total_bytes) for each in ranks],
    ]
    return TextTable(title, RANK_COLUMNS, [*zip(*columns, strict=True)])
