"""Bytes that a device holds in a step, from sizes of a layer and an example. Standard library only.

`rank_memory` has a request's arrays by their shapes, and temporaries as counted here. `held_bytes`
is the search's estimate of the same arrays, for layouts that are not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.planner.cost.counted_costs import ParamBytes, PlannedLayout
from ppctl.planner.cost.roofline import ModelWork
from ppctl.schedule.remat import Remat

SLOTS_OF_X = ("act", "grad", "value")  # slots for values between stages


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of one device."""

    examples: int
    number: int  # microbatches a step
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
    """Return the bytes by part on one device, without temporaries; `slots` by name: their number.

    gather: as executor.gather. With executor=spmd all ranks are padded to the largest.
    """
    # 1. the state, and copies of parameters
    examples, remat, layers = microbatch.examples, microbatch.remat, layout.rank_layers
    state = layers * params.layer / layout.mesh.fsdp + params.embed_head / layout.end_devices
    sums = layers * params.trained_layer, params.trained_embed_head
    trained = sums[0] / layout.mesh.fsdp + sums[1] / layout.end_devices
    copies = copied_layers(layout, gather) * params.layer + params.embed_head

    # 2. values of microbatches
    stashes = 0 if Remat.of(remat).keeps_input_only else slots.get("stash", 0)
    stash = stashes * work.stash_bytes[remat] * layout.chunk_layers
    pending = slots.get("pending", 0) * work.pending_bytes[remat] * layout.chunk_layers
    sent = work.x_bytes * sum(slots.get(name, 0) for name in SLOTS_OF_X)
    return {
        "parameters": round(state),
        "optimizer": round(trained * params.moments),
        "weights": round(copies * params.compute_ratio),
        "gradients": sum(sums),
        "activations": round(examples * (stash + pending)),
        "transfers": round(examples * sent),
        "batch": microbatch.example_bytes * examples * microbatch.number,
    }


def copied_layers(layout: PlannedLayout, gather: str) -> float:
    """Return the number of layers in the copies that tasks read.

    gather=step: all of a rank; layer: one and the next, besides the shards of all.
    """
    if layout.mesh.fsdp == 1 or gather == "step":
        return layout.rank_layers
    return min(2, layout.chunk_layers) + layout.rank_layers / layout.mesh.fsdp


def workspace_bytes(
    work: ModelWork,
    params: ParamBytes,
    layout: PlannedLayout,
    microbatch: Microbatch,
    *,
    adds: bool = False,
) -> int:
    """Return an estimate of executor=spmd's temporaries, at a forward's end or a backward's start.

    The larger counts. A forward holds its stash before that is in its slot, and the last one the
    head's logits. A backward holds recomputed residuals (with remat=full the head's too), and the
    gradients of a chunk before they are added, unless products add them (`Speed.adds`).
    """
    setting, layers, examples = Remat.of(microbatch.remat), layout.chunk_layers, microbatch.examples
    head = max(0.0, work.head_bytes.of(examples))
    recomputed = setting.live_residual_layers(layers) * work.residual_bytes * examples
    gradients = 0.0 if adds else layers * params.trained_layer * params.compute_ratio
    if setting.keeps_input_only:
        return round(recomputed + max(head, gradients))
    kept = layers * work.stash_bytes[setting] * examples
    if not setting.recomputes:  # element-wise results
        recomputed += max(0.0, work.residual_bytes - work.stash_bytes[setting]) * examples
    return round(max(kept + head, recomputed + gradients))


def task_bytes(
    work: ModelWork,
    params: ParamBytes,
    kind: str,
    layers: int,
    examples: int,
    remat: str,
    *,
    head: bool,
    adds: bool,
) -> int:
    """Return an estimate of the temporaries of one task's program (executor=mpmd); no results.

    kind: F, "forward" (which keeps nothing), B, I or W, of a stage with so many layers. head: it
    runs the head, forward and backward; adds: products add gradients to their sums.
    """
    # 1. logits and gradients
    setting, logits, gradients = Remat.of(remat), 0.0, 0.0
    if head:
        logits = max(0.0, work.head_bytes.of(examples))
    if not adds and kind in ("B", "W"):
        gradients = layers * params.trained_layer * params.compute_ratio
    if kind == "W":
        return round(gradients)

    # 2. residuals
    rest = 0.0
    if setting.keeps_residuals:
        rest = max(0.0, work.residual_bytes - work.stash_bytes[setting]) * examples
    if kind in ("F", "forward"):
        return round(max(rest, logits))  # of one layer after the other, then of the head
    if kind == "I" and setting.recomputes:
        return round(logits)  # recomputed residuals are handed to W
    recomputed = setting.live_residual_layers(layers) * work.residual_bytes * examples
    return round(recomputed + max(rest + gradients, logits))


def reference_bytes(
    work: ModelWork, params: ParamBytes, layout: PlannedLayout, microbatch: Microbatch
) -> int:
    """Return an estimate of executor=reference's bytes, without state and batch.

    At the start of a backward: parameters in the dtype of compute, sums of gradients, the residuals
    of all layers, and the head's logits. Later gradients replace parameters that are read no more.
    """
    layers, examples = layout.rank_layers, microbatch.examples
    whole = layers * params.layer + params.embed_head
    sums = layers * params.trained_layer + params.trained_embed_head
    kept = work.x_bytes if Remat.of(microbatch.remat).keeps_layer_inputs else work.residual_bytes
    head = max(0.0, work.head_bytes.of(examples))
    return round(sums + whole * params.compute_ratio + layers * kept * examples + head)
