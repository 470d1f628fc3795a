"""Bytes of what a device holds in a step, from sizes of a layer and of an example. Standard library only."""

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
    work: ModelWork, params: ParamBytes, layout: PlannedLayout, microbatch: Microbatch, slots: Mapping[str, float]
) -> dict[str, int]:
    """Return the bytes by part on one device, without temporaries; `slots` as `schedule.ticks` counts them.

    With executor=spmd all ranks are padded to the largest.
    """
    layers, examples, remat = layout.rank_layers * params.layer, microbatch.examples, microbatch.remat
    state = layers / layout.fsdp + params.embed_head / (layout.fsdp * layout.pp)
    stashes = 0 if Remat.of(remat).keeps_input_only else slots.get("stash", 0)
    stash = stashes * work.stash_bytes[remat] * layout.chunk_layers
    pending = slots.get("pending", 0) * work.pending_bytes[remat] * layout.chunk_layers
    return {
        "parameters": round(state),
        "optimizer": round(state * params.moments),
        "weights": round((layers + params.embed_head) * params.compute_ratio),
        "gradients": layers + params.embed_head,
        "activations": round(examples * (stash + pending)),
        "transfers": round(examples * work.x_bytes * sum(slots.get(name, 0) for name in SLOTS_OF_X)),
        "batch": microbatch.example_bytes * examples * microbatch.number,
    }


def workspace_bytes(work: ModelWork, params: ParamBytes, layout: PlannedLayout, microbatch: Microbatch) -> int:
    """Return an estimate of temporaries: gradients of a chunk before they are added, and recomputed activations."""
    recomputed = Remat.of(microbatch.remat).live_residual_layers(layout.chunk_layers)
    kept = (1 + recomputed) * work.stash_bytes["none"] * microbatch.examples
    return round(layout.chunk_layers * params.layer * params.compute_ratio + kept)
