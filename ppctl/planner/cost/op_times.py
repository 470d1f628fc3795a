"""Seconds of the pieces of a step, by counting: embedding, a layer, head, and per-step overhead.

A rehearsal measures tasks instead, and counts only exchanges. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Self

from ppctl.planner.cost.planned_step import Step
from ppctl.planner.cost.roofline import Op, PieceWork
from ppctl.schedule.ir import Kind


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a microbatch through embedding, a layer or head, on a device working alone.

    Recomputation is part of the input gradient.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


FREE = PieceTimes(0.0, 0.0, 0.0)


class LayerGathers(NamedTuple):
    """Gathers over fsdp of layers that a task reads (executor.gather=layer)."""

    layer_s: float  # of one layer
    is_ahead: bool  # the next layer is gathered while one is computed; else nothing is meanwhile
    once_more: bool = False  # layers are scanned: the last one's turn gathers it once more

    def through_s(self, layers: float, layer_s: float) -> float:
        """Return the seconds of a task through so many layers, layer_s each without gathers.

        >>> [LayerGathers(2.0, is_ahead).through_s(3, 5.0) for is_ahead in (True, False)]
        [17.0, 21.0]
        """
        if not layers:
            return 0.0
        if not self.is_ahead:
            return layers * layer_s + (layers + self.once_more) * self.layer_s
        last_s = max(layer_s, self.layer_s) if self.once_more else layer_s
        return self.layer_s + (layers - 1) * max(layer_s, self.layer_s) + last_s


@dataclass(frozen=True)
class OpTimes:
    """Seconds of all pieces of a step, for one size of microbatch and one setting of remat.

    embed, head: of the whole vocabulary, on the first and the last stage; free where it is divided.
    """

    embed: PieceTimes
    layer: PieceTimes
    head: PieceTimes
    task_s: float  # of a task, besides its layers
    hop_s: float  # from the end of a task until its value can be read on the next rank
    overhead_s: float  # per step: gathering parameters, reducing gradients, the optimizer
    capacity: float = inf  # devices at full speed at the same time; simulated ones share cores
    gathers: LayerGathers | None = None  # of layers in each task; None: they are whole before it
    parts: Mapping[Kind, float] = field(
        default_factory=dict[Kind, float]
    )  # of a part of the vocabulary, if any

    def in_parts(self, number: int) -> Self:
        """Return the times where each of `number` ranks has a part of the vocabulary.

        embed and head are those of one part. Of the head's three products S makes one, T two; and
        each task sums an activation over the ranks, round the ring.
        """
        embed, head, summed_s = self.embed, self.head, 2 * (number - 1) / number * self.hop_s
        parts: dict[Kind, float] = {
            "E": embed.forward_s + summed_s,
            "S": head.all_s / 3 + summed_s,
            "T": head.all_s * 2 / 3 + summed_s,
            "G": embed.input_grad_s + embed.weight_grad_s + summed_s,
        }
        return replace(self, embed=FREE, head=FREE, parts=parts)

    def embed_head_s(self, num_ranks: int) -> float:
        """Return the seconds of embedding and head of a microbatch, of all ranks together."""
        return self.embed.all_s + self.head.all_s + num_ranks * sum(self.parts.values())

    def forward_s(self, layers: float) -> float:
        """Return the seconds of a forward through so many layers."""
        return self._through_s(layers, self.layer.forward_s)

    def input_grad_s(self, layers: float, *, keeps_input: bool, split: bool) -> float:
        """Return the seconds of a backward through so many layers, without weight gradients.

        keeps_input: it runs the forward first, and its last layer need not be gathered again.
        split: weight gradients are a separate task without parameters; else they too overlap with
        gathers.
        """
        if self.gathers is None or not layers:
            return layers * self.layer.input_grad_s
        weight_grad_s = 0.0 if split else self.layer.weight_grad_s
        seconds = self.layer.input_grad_s + weight_grad_s
        if not keeps_input:
            return self._through_s(layers, seconds) - layers * weight_grad_s
        again_s = self.layer.forward_s
        both_s = self._through_s(layers, again_s) + self._through_s(layers, seconds - again_s)
        return both_s - self.gathers.layer_s - layers * weight_grad_s

    def _through_s(self, layers: float, layer_s: float) -> float:
        return layers * layer_s if self.gathers is None else self.gathers.through_s(layers, layer_s)


def op_times(step: Step) -> OpTimes:
    """Return the op times of a step."""
    # 1. pieces
    machine, examples, layer = step.known_machine, step.microbatch.examples, step.work.layer
    speed = replace(machine.speed, adds=step.adds_in_place(step.layout.rank_layers))

    def sent_s(op: Op) -> float:
        """Return the seconds of sends between devices that divide a stage."""
        return op.sent_s(examples, *step.ring(op.axes)) if op.axes else 0.0

    def seconds(piece: PieceWork, again: tuple[Op, ...] = ()) -> PieceTimes:
        parts = piece.forward, (*again, *piece.input_grad), piece.weight_grad
        f, i, w = ((speed.seconds(ops, examples), sum(map(sent_s, ops))) for ops in parts)
        # products wait for sends, but in W: gathers travel while its other products are computed
        return PieceTimes(sum(f), sum(i), max(w) if machine.gathers_ahead else sum(w))

    remat, again = step.microbatch.remat, ()
    if remat.recomputes:  # of a stage (remat=full) the input of each layer is recomputed too
        again = layer.forward if layer.redo is None or remat.keeps_input_only else layer.redo

    # 2. transfers, gathers and per-step overhead
    ranks, x_bytes = step.ring(("pp",)), examples * step.work.x_bytes
    (link, size), gathers = step.ring(("fsdp",)), None
    if step.gather == "layer" and size > 1:
        layer_s = link.gather_s(step.params.layer * step.params.compute_ratio, size)
        is_scanned = step.layout.rank_layers > step.unroll
        gathers = LayerGathers(layer_s, machine.gathers_ahead, once_more=is_scanned)
    times = OpTimes(
        embed=seconds(step.work.embed),
        layer=seconds(layer, again),
        head=seconds(step.work.head),
        task_s=machine.task_s,
        hop_s=ranks.link.hop_s(x_bytes) if ranks.size > 1 else 0.0,
        overhead_s=overhead_s(step),
        capacity=inf if machine.cores is None else float(machine.cores),
        gathers=gathers,
    )
    return times.in_parts(step.layout.vocab_parts) if step.layout.vocab_parts else times


def overhead_s(step: Step) -> float:
    """Return the per-step overhead: `exchange_s` and the optimizer."""
    # gradients are read twice, once for their norm
    update = step.trained_bytes * (2 * (1 + step.params.moments) + 2)
    return exchange_s(step) + update / step.known_machine.speed.bytes_per_s


def exchange_s(step: Step) -> float:
    """Return the seconds in which parameters are cast and gathered, gradients summed over replicas.

    Parameters travel in the dtype of compute, gradients in that of the parameters. Tasks read
    copies of layers, whole unless each task gathers them (gather=layer). Embedding and head are
    divided over pp and fsdp (a part of a divided vocabulary over fsdp), a rank's layers over fsdp.
    Collectives of single arrays count as one, as
    compilers combine them.
    """
    # 1. gathers of parameters, and sums of gradients that are scattered
    params, layout = step.params, step.layout
    layers, embed_head = layout.rank_layers * params.layer, params.embed_head

    def moved_s(axes: tuple[str, ...], there: float | None, back: float) -> float:
        link, size = step.ring(axes)
        there_s = 0.0 if there is None else link.gather_s(there * params.compute_ratio, size)
        return there_s + (link.gather_s(back, size) if back else 0.0)

    gathered = layers if step.gather == "step" else None
    trained = layout.rank_layers * params.trained_layer
    seconds = moved_s(("fsdp",), gathered, trained)
    seconds += moved_s(layout.embed_head_axes, embed_head, params.trained_embed_head)

    # 2. sums over replicas, and casts
    sum_s = sum(ring.link.sum_s(each, ring.size) for ring, each in step.summed_bytes)
    copied = layers / layout.mesh.fsdp if step.gather == "layer" else layers
    cast = step.casts * (copied + embed_head) * (1 + params.compute_ratio)
    return seconds + sum_s + cast / step.known_machine.speed.bytes_per_s
