"""The printed form of `ppctl plan`: a prediction for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console

from ppctl.config import Config
from ppctl.planner.network_layers import COLUMNS as LAYERS_COLUMNS
from ppctl.planner.network_layers import TITLE as LAYERS_TITLE
from ppctl.planner.network_layers import layer_rows
from ppctl.planner.prediction import Prediction, StagePart
from ppctl.reports.bubbles import bubble_text
from ppctl.reports.terminal import OutputConsole, show_table, size_text
from ppctl.schedule.partition.partition import ranks_text, stages_text
from ppctl.training.engines.memory import PARTS
from ppctl.training.prediction import by_measured_text

ABOUT = {
    "parameters": "as the optimizer keeps them, sharded",
    "optimizer": "its moments, sharded likewise",
    "weights": "copies that tasks read: whole layers, in the dtype of compute",
    "gradients": "sums over microbatches, whole",
    "activations": "what forwards keep for backwards, and I for W",
    "transfers": "values between stages",
    "batch": "examples of the global batch",
    "temporaries": "all else that programs need, counted, or as compiled",
}
REMEDIES = {
    "parameters": "shard them with mesh.fsdp, or use more ranks (mesh.pp).",
    "optimizer": "shard it with mesh.fsdp, or use more ranks (mesh.pp).",
    "weights": "use more ranks (mesh.pp), or executor.gather=layer with mesh.fsdp.",
    "gradients": "use more ranks (mesh.pp).",
    "activations": "use executor.remat=layer or full, more and smaller microbatches, or another schedule.",
    "transfers": "use more and smaller microbatches (schedule.num_microbatches).",
    "batch": "use a smaller data.batch_size, or more replicas (mesh.dp).",
    "temporaries": "use more and smaller microbatches (schedule.num_microbatches), or more replicas (mesh.dp).",
}
PREDICTED = "total, predicted"
IN_BACKWARD = "in backward"
LEFT_TO_BACKWARD = f"{IN_BACKWARD}: with executor.remat=full the last stage's forward runs in its backward"
MOST_COLUMNS = 8
MOST_STAGES = 16
MOST_DEVICES = 8


def show_plan(found: Prediction, config: Config) -> None:
    """Print a prediction for people."""
    console = OutputConsole()
    bubble = bubble_text(found.ideal_bubble_fraction, found.predicted_bubble_fraction)
    lines = [
        f"model     {config.model.name}, {config.model.num_layers} layers, {found.num_parameters:,} parameters, "
        f"{found.step_flops / 1e12:,.3g} TFLOP a step",
        f"mesh      {config.mesh.axes_text} on {found.devices}",
    ]
    microbatches = f"{config.schedule.num_microbatches} microbatches"
    if not config.executor.IS_PIPELINED:
        lines.append(f"schedule  none: executor=reference has no pipeline; {microbatches}")
    else:
        stages = f"{stages_text(found.partition)}, on ranks {ranks_text(found.rank_of)}"
        lines += [
            f"schedule  {found.schedule}, {microbatches}, bubble {bubble}, executor={config.executor.name}",
            *([] if found.auto is None else [f"auto      {found.auto}"]),
            f"stages    {stages}",
        ]
    lines.append(f"step      {time_text(found)}")
    costs = costs_text(found)
    if costs is not None:
        lines.append(f"costs     {costs}")
    if found.token_budget is not None:
        lines.append(f"tokens    {found.token_budget.text}")
    elif config.plan.tokens is not None:
        lines.append("tokens    not known, as the step")
    proposal = better(found, config)
    if proposal is not None:
        lines.append(f"better    {proposal}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.stages:
        show_stages(console, found.stages, config.mesh.submesh_text)
    if found.layers:
        show_table(console, LAYERS_TITLE, LAYERS_COLUMNS, layer_rows(found.layers))
    ranks = shown_ranks(found, MOST_COLUMNS)
    columns = [f"rank {r}" for r in ranks] if len(set(map(str, found.memory_bytes))) > 1 else ["every rank"]
    rows = [
        (f"{part}: {ABOUT[part]}", *(size_text(found.memory_bytes[r].get(part, 0)) for r in ranks))
        for part in PARTS
        if any(found.memory_bytes[r].get(part) for r in ranks)
    ]
    rows.append((total_name(found), *(size_text(found.total_bytes[r]) for r in ranks)))
    if found.is_compiled:
        rows.append((PREDICTED, *(size_text(found.predicted_bytes[r]) for r in ranks)))
    show_table(console, "memory of one device", ("", *columns), rows)
    assumed = textwrap.wrap("; ".join(found.assumes), max(console.width - 10, 40), break_long_words=False)
    for i, text in enumerate(assumed):
        console.print(f"{'' if i else 'assumes':10}{text}", markup=False, highlight=False, soft_wrap=True)
    console.print(fit_text(found), markup=False, highlight=False, soft_wrap=True)


def costs_text(found: Prediction) -> str | None:
    """Return the costs of the model relative to a forward through 1/p of it, as words of `ppctl schedule`, or None."""
    kinds = ("forward_s", "input_grad_s", "weight_grad_s")
    sums = [sum(getattr(stage, name) or 0.0 for stage in found.stages) for name in kinds]
    if found.transfer_s is None or not sums or not sums[0]:
        return None
    forward_s = sums[0] / len(found.total_bytes)
    words = [f"costs.{name}={each / sums[0]:.3g}" for name, each in zip(kinds, sums, strict=True)]
    words.append(f"costs.transfer_s={found.transfer_s / forward_s:.2g}")
    return f"{' '.join(words)} for `ppctl schedule`: relative to a forward through 1/p of the model, {forward_s:.3g} s"


def show_stages(console: Console, stages: Sequence[StagePart], submesh: str) -> None:
    """Print the stages, up to `MOST_STAGES`, else the first, the slowest and the last. submesh: its axes."""
    last = len(stages) - 1
    slowest = max(range(last + 1), key=lambda s: (stages[s].forward_s or 0.0) + (stages[s].backward_s or 0.0))
    which = range(last + 1) if last < MOST_STAGES else sorted({0, slowest, last})
    have_devices = any(stage.devices for stage in stages)
    rows = [
        (
            str(s),
            _range(stages[s].first_layer, stages[s].num_layers),
            str(stages[s].rank),
            submesh,
            *([_devices(stages[s].devices)] if have_devices else []),
            forward_text(stages[s]),
            seconds_text(stages[s].backward_s),
        )
        for s in which
    ]
    title = "stages, with seconds of a microbatch" + (f" ({len(rows)} of {last + 1})" if len(rows) <= last else "")
    devices = ["devices"] if have_devices else []
    show_table(console, title, ("stage", "layers", "rank", "submesh", *devices, "forward s", "backward s"), rows)
    if stages[-1].forward_s == 0:
        console.print(LEFT_TO_BACKWARD, markup=False, highlight=False, soft_wrap=True)


def seconds_text(seconds: float | None) -> str:
    """Return seconds of a task as a table has them."""
    return "not known" if seconds is None else f"{seconds:.3g}"


def forward_text(stage: StagePart) -> str:
    """Return the seconds of a stage's forward, or where it runs instead."""
    return IN_BACKWARD if stage.forward_s == 0 else seconds_text(stage.forward_s)


def _range(first: int, count: int) -> str:
    return "none" if not count else str(first) if count == 1 else f"{first}-{first + count - 1}"


def _devices(devices: Sequence[int]) -> str:
    listed = " ".join(map(str, devices))
    return listed if len(devices) <= MOST_DEVICES else f"{len(devices)} from {devices[0]} to {devices[-1]}"


def better(found: Prediction, config: Config) -> str | None:
    """Return the proposed partition and what it gains, in a line; None where there is none."""
    if found.proposal is None:
        return None
    layers = ",".join(map(str, found.proposal.partition))
    fits = "" if found.limit_bytes is None or not config.executor.DISPATCHES_TASKS else ", and fits without temporaries"
    return (
        f"partition=explicit partition.layers=[{layers}] takes {found.proposal.time_ratio:.2f} times as long a step, "
        f"by simulation with costs from FLOPs{fits}"
    )


def total_name(found: Prediction) -> str:
    """Return the name of the sums of parts."""
    return "total, compiled" if found.is_compiled else PREDICTED


def time_text(found: Prediction) -> str:
    """Return seconds, speed and MFU of a step, and where they come from, in a line."""
    if found.step_time_s is None or found.tokens_per_s is None or found.per_step_overhead_s is None:
        return f"not known: {found.unknown}"
    speed = speed_text(found.step_time_s, found.tokens_per_s, found.unit, found.mfu_fraction, found.mfu_causal_fraction)
    timed = by_measured_text(found.step_time_by_measured_costs_s)
    overhead = overhead_text(found.per_step_overhead_s, found.step_time_s)
    return f"{speed}{timed}; {overhead} (costs={found.costs}, hardware={found.hardware})"


def speed_text(step_s: float, per_s: float, unit: str, mfu: float | None, causal: float | None) -> str:
    """Return seconds, speed and MFU of a step; unit: tokens_per_s | rows_per_s."""
    mfu_text = "" if mfu is None or causal is None else f", MFU {mfu:.1%} ({causal:.1%} causal)"
    return f"{step_s:.4g} s, {per_s:,.0f} {'tok/s' if unit == 'tokens_per_s' else 'rows/s'}{mfu_text}"


def overhead_text(overhead_s: float, step_s: float) -> str:
    """Return the per-step overhead as a share of the step."""
    return f"of which {overhead_s / step_s:.1%} per-step overhead: parameters, gradients, optimizer"


def fit_text(found: Prediction) -> str:
    """Return a line: whether the request fits, by how much, and what to do where it does not."""
    worst = max(range(len(found.total_bytes)), key=lambda r: found.total_bytes[r])
    need = found.total_bytes[worst]
    kind = "predicted" if found.compile_s is None else f"compiled in {found.compile_s:.1f} s"
    if found.refusal is not None:
        return f"does not fit ({kind}): {found.refusal.rstrip('.')}. {_remedy(found.memory_bytes[worst])}"
    if found.fits and found.limit_bytes is None:
        return f"fits: {size_text(need)} a device, which the compiler for {found.devices} accepts ({kind})."
    if found.limit_bytes is None:
        unknown = "the memory of a device is not known: say plan.memory_gib=N."
        return f"needs {size_text(need)} a device ({kind}); {unknown}"
    share = f"{size_text(need)} of {size_text(found.limit_bytes)} a device"
    if found.fits:
        return f"fits: {share} ({need / found.limit_bytes:.0%}), {kind}; limit: {found.limit_source}."
    over = f"{size_text(need - found.limit_bytes)} too much on rank {worst}"
    said = f"{share}, {kind}, {over}; limit: {found.limit_source}"
    return f"does not fit: {said}. {_remedy(found.memory_bytes[worst])}{_more_memory(found)}"


def _more_memory(found: Prediction) -> str:
    """Return a sentence: with which share of a GPU's memory the request would fit; "" where none is known."""
    fraction = found.fitting_memory_fraction
    if fraction is None or found.limit_bytes is None or found.limit_fraction is None:
        return ""
    size = size_text(round(found.limit_bytes / found.limit_fraction * fraction))
    return f" With run.memory_fraction={fraction:g}, which is {size}, it fits."


def _remedy(held: Mapping[str, int]) -> str:
    """Return how to make the largest part smaller."""
    largest = max(held, key=lambda part: held[part])
    return f"Most are {largest}: {REMEDIES[largest]}"


def shown_ranks(found: Prediction, most: int) -> list[int]:
    """Return the ranks to show: all, up to `most`, where they differ; of more, the first, the largest and the last."""
    num_ranks, total = len(found.memory_bytes), found.total_bytes
    if len(set(map(str, found.memory_bytes))) == 1:
        return [0]
    if num_ranks <= most:
        return [*range(num_ranks)]
    return sorted({0, max(range(num_ranks), key=total.__getitem__), num_ranks - 1})
