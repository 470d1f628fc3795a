"""Bytes of what a device holds in a step, from sizes of a layer and of an example. Standard library only.

`ppctl plan`, `train` and `tune` print what `planner.memory` says of a request: arrays by their shapes, and temporaries
as they are counted here. `held_bytes` is the search's estimate of the same arrays, for layouts that are not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.planner.analytic import ParamBytes, PlannedLayout
from ppctl.planner.roofline import ModelWork
from ppctl.schedule.remat import Remat

SLOTS_OF_X = ("act", "grad", "value")  # of the slots of `schedule.ticks`: those for values between stages


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of one device, and how many of them a step has."""

    examples: int
    number: int
    example_bytes: int  # of the data: inputs and targets
    remat: str


def held_bytes(
    work: ModelWork,
    params: ParamBytes,
    layout: PlannedLayout,
    microbatch: Microbatch,
    slots: Mapping[str, float],
    *,
    gather: str = "step",
) -> dict[str, int]:
    """Return the bytes by part on one device, without temporaries; `slots` as `schedule.ticks` counts them.

    gather: as executor.gather. With executor=spmd all ranks are padded to the largest.
    """
    layers, examples, remat = layout.rank_layers * params.layer, microbatch.examples, microbatch.remat
    state = layers / layout.fsdp + params.embed_head / layout.end_devices
    sums = layout.rank_layers * params.trained_layer, params.trained_embed_head
    trained = sums[0] / layout.fsdp + sums[1] / layout.end_devices
    stashes = 0 if Remat.of(remat).keeps_input_only else slots.get("stash", 0)
    stash = stashes * work.stash_bytes[remat] * layout.chunk_layers
    pending = slots.get("pending", 0) * work.pending_bytes[remat] * layout.chunk_layers
    return {
        "parameters": round(state),
        "optimizer": round(trained * params.moments),
        "weights": round((copied_layers(layout, gather) * params.layer + params.embed_head) * params.compute_ratio),
        "gradients": sum(sums),
        "activations": round(examples * (stash + pending)),
        "transfers": round(examples * work.x_bytes * sum(slots.get(name, 0) for name in SLOTS_OF_X)),
        "batch": microbatch.example_bytes * examples * microbatch.number,
    }


def copied_layers(layout: PlannedLayout, gather: str) -> float:
    """Return how many layers the copies amount to that tasks read.

    gather: step, all of a rank are whole; tick, those of a chunk, as gathered and as cut out; layer, one and the next,
    beside the shards of all.
    """
    if layout.fsdp == 1 or gather == "step":
        return layout.rank_layers
    if gather == "tick":
        return min(layout.rank_layers, 2 * layout.chunk_layers)
    return min(2, layout.chunk_layers) + layout.rank_layers / layout.fsdp


def workspace_bytes(
    work: ModelWork, params: ParamBytes, layout: PlannedLayout, microbatch: Microbatch, *, adds: bool = False
) -> int:
    """Return an estimate of temporaries of executor=spmd: at the end of a forward, or where a backward begins.

    The larger counts. A forward has made what it keeps before that is in its slot, and the last one's head its logits.
    A backward has the residuals that it has recomputed; with remat=full the head's too. And it has the gradients of a
    chunk before they are added, unless products add them (`Speed.adds`).
    """
    setting, layers, examples = Remat.of(microbatch.remat), layout.chunk_layers, microbatch.examples
    head = max(0.0, work.head_bytes.of(examples))
    recomputed = setting.live_residual_layers(layers) * work.residual_bytes * examples
    gradients = 0.0 if adds else layers * params.trained_layer * params.compute_ratio
    if setting.keeps_input_only:
        return round(recomputed + max(head, gradients))
    kept = layers * work.stash_bytes[setting] * examples
    element_wise = 0.0 if setting.recomputes else max(0.0, work.residual_bytes - work.stash_bytes[setting]) * examples
    return round(max(kept + head, recomputed + element_wise + gradients))


def task_bytes(
    work: ModelWork, params: ParamBytes, kind: str, layers: int, examples: int, remat: str, *, head: bool, adds: bool
) -> int:
    """Return an estimate of the temporaries of a task that is a program of its own (executor=mpmd).

    kind: F, "forward" (which keeps nothing), B, I or W, of a stage with so many layers. What a task keeps is a result,
    no temporary. head: whether it runs the head, there and back; adds: products add gradients to their sums.
    """
    setting = Remat.of(remat)
    logits = max(0.0, work.head_bytes.of(examples)) if head else 0.0
    gradients = 0.0 if adds or kind not in ("B", "W") else layers * params.trained_layer * params.compute_ratio
    if kind == "W":
        return round(gradients)
    rest = max(0.0, work.residual_bytes - work.stash_bytes[setting]) * examples if setting.keeps_residuals else 0.0
    if kind in ("F", "forward"):
        return round(max(rest, logits))  # of one layer after the other, then of the head
    if kind == "I" and setting.recomputes:
        return round(logits)  # what it has recomputed is handed to W
    return round(setting.live_residual_layers(layers) * work.residual_bytes * examples + max(rest + gradients, logits))


def reference_bytes(work: ModelWork, params: ParamBytes, layout: PlannedLayout, microbatch: Microbatch) -> int:
    """Return an estimate of what executor=reference needs besides state and batch, where a backward begins.

    The parameters in the dtype of compute, sums of gradients, what the forward keeps of all layers, and the head's
    logits: then gradients take the place of parameters that are no longer read.
    """
    layers, examples = layout.rank_layers, microbatch.examples
    whole, sums = layers * params.layer + params.embed_head, layers * params.trained_layer + params.trained_embed_head
    kept = work.x_bytes if Remat.of(microbatch.remat).keeps_layer_inputs else work.residual_bytes
    head = max(0.0, work.head_bytes.of(examples))
    return round(sums + whole * params.compute_ratio + layers * kept * examples + head)
