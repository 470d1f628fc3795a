"""Seconds of a model's pieces (embedding, layer, head, gathers), and stages' costs from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Self

from ppctl.schedule.costs import OF_PARTS, Costs
from ppctl.schedule.ir import Kind


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of a microbatch through one piece, on one device while the others are idle."""

    forward_s: float
    input_grad_s: float  # seconds, recomputation included
    weight_grad_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.input_grad_s + self.weight_grad_s


FREE = PieceTimes(0.0, 0.0, 0.0)


class LayerGathers(NamedTuple):
    """All-gathers over fsdp of the layers of a task (executor.gather=layer)."""

    layer_s: float  # seconds to gather one layer
    is_ahead: bool  # whether a gather overlaps the previous layer's compute; else it is exposed
    once_more: bool = False  # whether the layer scan's last iteration gathers one layer too many

    def through_s(self, layers: float, layer_s: float) -> float:
        """Return the seconds of a task through `layers` layers of layer_s each, with their gathers.

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
    """Seconds of all pieces of a step, for one microbatch size and one setting of remat.

    embed, head: times of the whole vocabulary, on the first and the last stage; `FREE` if divided.
    """

    embed: PieceTimes
    layer: PieceTimes
    head: PieceTimes
    task_s: float = 0.0  # seconds a task, on top of layers
    hop_s: float = 0.0  # seconds from the end of a task until the next rank can read its value
    overhead_s: float = 0.0  # seconds a step: gathers, reductions of gradients, the optimizer
    capacity: float = inf  # number of devices that can run at full speed at once
    gathers: LayerGathers | None = None  # gathers inside tasks; None: all run before the tasks
    parts: Mapping[Kind, float] = field(
        default_factory=dict[Kind, float]
    )  # seconds of E, S, T and G of a vocabulary part; empty: the vocabulary is whole

    def in_parts(self, number: int) -> Self:
        """Return the times with the vocabulary divided over `number` ranks.

        `embed` and `head` must be the times of one part. S runs one of the head's three matrix
        products, T two; each task also all-reduces an activation around the ring.
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
        """Return the seconds of a microbatch in embedding and head, summed over the ranks."""
        return self.embed.all_s + self.head.all_s + num_ranks * sum(self.parts.values())

    def forward_s(self, layers: float) -> float:
        """Return the seconds of a forward through `layers` layers."""
        return self._through_s(layers, self.layer.forward_s)

    def input_grad_s(self, layers: float, *, keeps_input: bool, split: bool) -> float:
        """Return the seconds of a backward through `layers` layers, weight gradients excluded.

        keeps_input: the backward reruns the forward first; both use one gather of the last layer.
        split: weight gradients are a separate task that reads no parameters. Otherwise they run in
        the backward, where they too overlap with gathers.
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


def costs_of_stages(
    op_times: OpTimes, sizes: Sequence[float], *, keeps_input: bool, split: bool = False
) -> Costs:
    """Return the costs of each stage's tasks. sizes: layers of each stage, or their relative cost.

    The last stage's forward includes the head's forward and backward. With keeps_input (remat=full)
    the last stage's backward includes them instead, and the first stage's backward embeds again.
    split: W is a separate task, not a part of B.

    >>> from ppctl.schedule.piece_times import FREE, PieceTimes
    >>> one, two = (PieceTimes(s, s, s) for s in (1.0, 2.0))
    >>> op_times = OpTimes(FREE, one, two, task_s=0.0, hop_s=0.0, overhead_s=0.0)
    >>> costs_of_stages(op_times, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    last, embed, head = len(sizes) - 1, op_times.embed, op_times.head
    forward, input_grad, weight_grad = list[float](), list[float](), list[float]()

    # 1. layers, plus the embedding in the first stage and the head in the last
    for s, n in enumerate(sizes):
        f = op_times.forward_s(n) + op_times.task_s + (embed.forward_s if s == 0 else 0.0)
        i = op_times.input_grad_s(n, keeps_input=keeps_input, split=split) + op_times.task_s
        if s == 0:
            i += embed.input_grad_s + embed.weight_grad_s
            i += embed.forward_s if keeps_input else 0.0
        if s == last and keeps_input and not op_times.parts:
            f, i = 0.0, i + head.all_s
        elif s == last:
            f += head.all_s
        forward.append(f)
        input_grad.append(i)
        weight_grad.append(n * op_times.layer.weight_grad_s + (op_times.task_s if split else 0.0))

    # 2. tasks of vocabulary parts
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=op_times.hop_s)
    return replace(costs, **{OF_PARTS[kind]: s for kind, s in op_times.parts.items()})
