"""Predicted bytes of a step on a device: temporaries of programs, and arrays of unbuilt layouts.

For a built job, `Engine.memory` gives the exact bytes of arrays. Standard library only.
"""

from collections.abc import Mapping

from ppctl.executors.work.planned_step import Step

SLOTS_OF_X = ("act", "grad", "value")  # names of slots for values between stages


def array_bytes(step: Step, slots: Mapping[str, float]) -> dict[str, int]:
    """Return the bytes on one device by part, without temporaries. slots: number of slots by name.

    With executor=spmd all ranks are padded to the largest.
    """
    # 1. the state, and copies of parameters
    params, layout, work, microbatch = step.params, step.layout, step.work, step.microbatch
    layers, remat = layout.rank_layers, microbatch.remat
    copied = layers  # number of layers in the compute dtype
    # gather=layer: the current and the next layer, and this device's shards of all layers
    if layout.mesh.fsdp > 1 and step.gather == "layer":
        copied = min(2, layout.chunk_layers) + layers / layout.mesh.fsdp
    copies = copied * params.layer + params.embed_head
    sums = layers * params.trained_layer + params.trained_embed_head

    # 2. values of microbatches
    stashes = 0 if remat.keeps_input_only else slots.get("stash", 0)
    kept = stashes * work.stash_bytes[remat] + slots.get("pending", 0) * work.pending_bytes[remat]
    sent = work.x_bytes * sum(slots.get(name, 0) for name in SLOTS_OF_X)
    return {
        "parameters": round(step.kept(params.layer, params.embed_head)),
        "optimizer": round(step.trained_bytes * params.moments),
        "weights": round(copies * params.compute_ratio),
        "gradients": sums,
        "activations": round(microbatch.examples * kept * layout.chunk_layers),
        "transfers": round(microbatch.examples * sent),
        "batch": microbatch.example_bytes * microbatch.examples * microbatch.number,
    }


# temporaries


def workspace_bytes(step: Step) -> int:
    """Return an estimate of the bytes of executor=spmd's temporaries.

    It is the larger of the peaks at a forward's end and at a backward's start. A forward holds its
    stash until it is written to its slot; the last stage's also holds the head's logits. A backward
    holds recomputed residuals (with remat=full the head's too), and the gradients of a chunk until
    they are added, unless products add them (`Step.adds`). With experts it also holds several
    arrays of token rows at their full size, and a copy of the stash from its slot.
    """
    work, layers, remat = step.work, step.layout.chunk_layers, step.microbatch.remat
    examples, gradients = step.microbatch.examples, 0.0
    if not step.adds_in_place(step.layout.rank_layers):
        gradients = layers * step.params.trained_layer * step.params.compute_ratio
    recomputed = remat.live_residual_layers(layers) * work.residual_bytes * examples
    kept = layers * work.stash_bytes[remat] * examples
    experts = step.expert_bytes + (kept if step.expert_bytes else 0.0)
    if remat.keeps_input_only:
        return round(recomputed + max(step.head_bytes, gradients + experts))
    gradients += experts
    return round(max(kept + step.head_bytes, recomputed + _elementwise_bytes(step) + gradients))


def task_bytes(step: Step, kind: str, layers: int, *, has_head: bool) -> int:
    """Return an estimate of the bytes of one task's temporaries (executor=mpmd), without results.

    kind: F, "forward" (which keeps nothing), B, I or W. layers: number of the stage's layers.
    has_head: whether the stage has the head, which runs forward and backward in the stage's
    forward, or with remat=full in its backward.
    """
    # 1. logits and gradients
    remat = step.microbatch.remat
    runs_head = has_head and kind in (("B", "I") if remat.keeps_input_only else ("F", "forward"))
    logits, gradients = step.head_bytes if runs_head else 0.0, 0.0
    if kind in ("B", "W") and not step.adds_in_place(layers):
        gradients = layers * step.params.trained_layer * step.params.compute_ratio
    if kind == "W":
        return round(gradients)

    # 2. residuals
    rest = _elementwise_bytes(step)
    if kind in ("F", "forward"):
        return round(max(rest, logits))  # one layer at a time, then the head
    if kind == "I" and remat.recomputes:
        return round(logits)  # recomputed residuals are results for W, not temporaries
    live = remat.live_residual_layers(layers) * step.work.residual_bytes * step.microbatch.examples
    return round(live + max(rest + gradients + step.expert_bytes, logits))


def _elementwise_bytes(step: Step) -> float:
    """Return the bytes of a layer's element-wise results, which remat=none recomputes."""
    remat, work = step.microbatch.remat, step.work
    if remat.recomputes:
        return 0.0
    return max(0.0, work.residual_bytes - work.stash_bytes[remat]) * step.microbatch.examples


def reference_bytes(step: Step) -> int:
    """Return an estimate of executor=reference's bytes, without state and batch.

    The peak is at the start of a backward: parameters in the compute dtype, sums of gradients, the
    residuals of all layers, and the head's logits. Later, gradients take the place of parameters
    that are no longer read.
    """
    work, params, layers = step.work, step.params, step.layout.rank_layers
    whole = layers * params.layer + params.embed_head
    sums = layers * params.trained_layer + params.trained_embed_head
    kept = work.x_bytes if step.microbatch.remat.keeps_layer_inputs else work.residual_bytes
    values = layers * kept * step.microbatch.examples
    return round(sums + whole * params.compute_ratio + values + step.head_bytes)
