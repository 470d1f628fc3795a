"""The bytes that a rank holds on one device: one answer for engines, plans and searches.

`rank_bytes` adds up the sizes of a rank's arrays. A built engine has them to the byte, from shapes;
`sizes_of` estimates them for layouts that are not built, and `layer_bytes` for the ranks of
executor=mpmd on any placement. The bytes of temporaries are estimates in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from ppctl.executors.work.planned_step import Step
from ppctl.schedule.placement_costs import LayerBytes

SLOTS_OF_X = ("act", "grad", "value")  # names of slots for values between stages
NO_SLOTS: Mapping[str, float] = MappingProxyType({})
VALUES = 4  # number of values in transit at a rank of executor=mpmd, each an activation or gradient


@dataclass(frozen=True)
class RankSizes:
    """Bytes of a rank's arrays on one device; those of slots are for one microbatch."""

    parameters: float = 0.0
    optimizer: float = 0.0
    weights: float = 0.0  # copies of parameters in the compute dtype
    gradients: float = 0.0  # sums of gradients
    batch: float = 0.0
    stash: float = 0.0  # a slot of a chunk's forward
    pending: float = 0.0  # a slot of a chunk's I
    x: float = 0.0  # a slot of an activation or gradient between stages

    @property
    def held(self) -> float:
        """Return the bytes held at all times."""
        return self.parameters + self.optimizer + self.weights + self.gradients + self.batch


@dataclass(frozen=True)
class RankShare:
    """The share of a model that a rank holds."""

    layers: float = 0.0  # layers that its tasks read, with sums of gradients
    stored: float = 0.0  # layers of its train state, with padding
    gathered: float = 0.0  # layers that gather=layer gathers at a time, besides its shards
    embed_head: float = 0.0  # bytes of its part of embedding and head
    trained_embed_head: float = 0.0  # bytes of the trained parameters in it
    over: int = 1  # number of devices that divide the state of this part
    batch: float = 0.0  # bytes of the batch


def rank_bytes(
    sizes: RankSizes, slots: Mapping[str, float] = NO_SLOTS, temporaries: int | None = None
) -> dict[str, int]:
    """Return the bytes on one device by part. slots: number of slots by name.

    >>> rank_bytes(RankSizes(parameters=8, stash=3), {"stash": 2}, 1)["activations"]
    6
    """
    kept = slots.get("stash", 0) * sizes.stash + slots.get("pending", 0) * sizes.pending
    parts = {
        "parameters": sizes.parameters,
        "optimizer": sizes.optimizer,
        "weights": sizes.weights,
        "gradients": sizes.gradients,
        "activations": kept,
        "transfers": sizes.x * sum(slots.get(name, 0) for name in SLOTS_OF_X),
        "batch": sizes.batch,
    }
    parts |= {} if temporaries is None else {"temporaries": temporaries}
    return {part: round(size) for part, size in parts.items()}


def sizes_of(step: Step, share: RankShare | None = None) -> RankSizes:
    """Return the estimated sizes of a rank's arrays; share=None: of executor=spmd's padded ranks.

    The slots are those of the largest chunk (`PlannedLayout.chunk_layers`).
    """
    params, layout, work, microbatch = step.params, step.layout, step.work, step.microbatch
    fsdp, chunk, remat = layout.mesh.fsdp, layout.chunk_layers, microbatch.remat
    if share is None:
        share = RankShare(
            layers=layout.rank_layers,
            stored=layout.rank_layers,
            gathered=min(2, chunk),
            embed_head=params.embed_head,
            trained_embed_head=params.trained_embed_head,
            over=layout.mesh.along(layout.embed_head_axes),
            batch=microbatch.example_bytes * microbatch.examples * microbatch.number,
        )
    copied = share.layers / fsdp + share.gathered if step.gathers_by_layer else share.layers
    trained = share.stored * params.trained_layer / fsdp + share.trained_embed_head / share.over
    stash = 0 if remat.keeps_input_only else work.stash_bytes[remat]
    return RankSizes(
        parameters=share.stored * params.layer / fsdp + share.embed_head / share.over,
        optimizer=trained * params.moments,
        weights=(copied * params.layer + share.embed_head) * params.compute_ratio,
        gradients=share.layers * params.trained_layer + share.trained_embed_head,
        batch=share.batch,
        stash=microbatch.examples * stash * chunk,
        pending=microbatch.examples * work.pending_bytes[remat] * chunk,
        x=microbatch.examples * work.x_bytes,
    )


def layer_bytes(step: Step, ends: Sequence[RankShare] = ()) -> LayerBytes:
    """Return the bytes of a model's pieces on ranks of executor=mpmd.

    ends: the shares of the embedding and of the head. Without them the result is a lower bound: it
    also leaves out temporaries and values in transit.
    """
    step = step.with_layers(1, 1)
    layer, padded = sizes_of(step, RankShare(layers=1)), sizes_of(step, RankShare(stored=1))
    least = LayerBytes(layer.held, padded.held, layer.stash, layer.pending)
    if not ends:
        return least
    embed, head = (sizes_of(step, share).held for share in ends)
    return replace(
        least,
        # with remat=full stages keep only their inputs
        stage_stash=layer.x if step.microbatch.remat.keeps_input_only else 0.0,
        embed=embed,
        head=head,
        rank=VALUES * layer.x,
        temporaries=partial(task_bytes, step),
    )


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
    # 1. gathered layers, logits and gradients
    remat, gathered = step.microbatch.remat, 0
    if step.gathers_by_layer and kind != "W":
        gathered = min(2, layers) * round(step.params.layer * step.params.compute_ratio)
    runs_head = has_head and kind in (("B", "I") if remat.keeps_input_only else ("F", "forward"))
    logits, gradients = step.head_bytes if runs_head else 0.0, 0.0
    if kind in ("B", "W") and not step.adds_in_place(layers):
        gradients = layers * step.params.trained_layer * step.params.compute_ratio
    if kind == "W":
        return round(gradients)

    # 2. residuals
    rest = _elementwise_bytes(step)
    if kind in ("F", "forward"):
        return gathered + round(max(rest, logits))  # one layer at a time, then the head
    if kind == "I" and remat.recomputes:
        # recomputed residuals are results for W, not temporaries
        return gathered + round(logits)
    live = remat.live_residual_layers(layers) * step.work.residual_bytes * step.microbatch.examples
    return gathered + round(live + max(rest + gradients + step.expert_bytes, logits))


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
