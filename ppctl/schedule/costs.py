"""Costs of tasks: seconds and bytes, for simulator, search and planner.

`costs_of_stages` makes them from the seconds of a model's pieces: embedding, layer, head, gathers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Real
from typing import Any, NamedTuple, Self

from ppctl.errors import ConfigError
from ppctl.schedule.ir import Kind
from ppctl.schedule.remat import Remat

# field of `Costs` for each kind of task
OF_STAGES = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s"}
OF_PARTS = {"E": "embedding_s", "S": "logits_s", "T": "logits_grad_s", "G": "embedding_grad_s"}
OfStages = float | tuple[float, ...]  # cost of 1/p of the model | cost of each stage
SMALLEST, LARGEST = 1e-100, 1e100  # costs above 0: sums and ratios of any two are finite floats


def check_cost(key: str, value: Any, largest: float = LARGEST) -> None:
    """Raise ConfigError unless `value` is 0, or a number from SMALLEST to `largest`."""
    number: Any = value if isinstance(value, Real) else -1
    if not (number == 0 or SMALLEST <= number <= largest):
        what = "time in seconds" if key.endswith("_s") else "size"
        use = f"Use 0, or a number from {SMALLEST:g} to {largest:g}"
        raise ConfigError(f"{key}={value} is not a {what}. {use}.")


def check_work(times_s: Mapping[str, OfStages]) -> None:
    """Raise ConfigError if the seconds of F, I and W, by name, are all 0."""
    if not any(any(each) if isinstance(each, tuple) else each for each in times_s.values()):
        raise ConfigError(f"{'='.join(times_s)}=0: give one of them a time.")


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch. Default: the papers' units, F = I = W = 1 and free transfers.

    A stage cost is a number, the cost of 1/p of the model for p ranks (each of a rank's V chunks
    costs 1/V of it), or a tuple with one cost for each stage in model order.

    >>> Costs().backward_s
    2.0
    >>> Costs(forward_s=(1.0, 3.0)).seconds("F", 1, num_chunks=2)
    3.0
    """

    forward_s: OfStages = 1.0  # seconds of F
    input_grad_s: OfStages = 1.0  # seconds of I
    weight_grad_s: OfStages = 1.0  # seconds of W
    transfer_s: float = 0.0  # seconds from the end of a task until the next rank can read its value
    activation_bytes: OfStages = 0.0  # bytes that a forward keeps for its backward
    # costs of a vocabulary part: a number for all parts, or a tuple with one for each
    embedding_s: OfStages = 0.0  # seconds of E
    logits_s: OfStages = 0.25  # seconds of S
    logits_grad_s: OfStages = 0.5  # seconds of T
    embedding_grad_s: OfStages = 0.0  # seconds of G

    def __post_init__(self) -> None:
        settings: dict[str, OfStages] = vars(self)
        for name, value in settings.items():
            for number in value if isinstance(value, tuple) and name != "transfer_s" else (value,):
                check_cost(name, number)
        check_work({name: settings[name] for name in OF_STAGES.values()})

    @property
    def backward_s(self) -> float:
        """Return the seconds of B = I + W through 1/p of the model; costs must be plain numbers."""
        i, w = self.input_grad_s, self.weight_grad_s
        if isinstance(i, tuple) or isinstance(w, tuple):
            raise AssertionError("costs differ by stage: use `seconds`")
        return i + w

    def seconds(self, kind: str, stage: int, num_chunks: int) -> float:
        """Return the seconds of a task: F, B, I, W of a stage; E, S, T, G of a vocabulary part."""
        if kind == "B":
            return self.seconds("I", stage, num_chunks) + self.seconds("W", stage, num_chunks)
        if kind in OF_PARTS:
            return _of_stage(getattr(self, OF_PARTS[kind]), stage, 1)
        return _of_stage(getattr(self, OF_STAGES[kind]), stage, num_chunks)

    def stage_bytes(self, stage: int, num_chunks: int) -> float:
        """Return the bytes that one forward of `stage` keeps for its backward."""
        return _of_stage(self.activation_bytes, stage, num_chunks)

    def check(self, num_stages: int, vocab_parts: int = 0) -> None:
        """Raise ConfigError unless each tuple has one entry for each stage, or vocabulary part."""
        stages = num_stages, "stages", "each stage, or a number for 1/p of the model"
        of_parts = "ranks, each with a part of the vocabulary", "each, or a number for all"
        settings: dict[str, OfStages] = vars(self)
        for name, value in settings.items():
            number, places, use = (vocab_parts, *of_parts) if name in OF_PARTS.values() else stages
            if isinstance(value, tuple) and number and len(value) != number:
                what = f"{name} has {len(value)} entries for {number} {places}"
                raise ConfigError(f"{what}. Give one for {use}.")


def _of_stage(cost: OfStages, stage: int, num_chunks: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost / num_chunks


def task_costs(remat: Remat | str, trained: float = 1.0) -> Costs:
    """Return relative costs: F = I = W = 1; I = 2 with remat=layer or full (it reruns the forward).

    trained: the trained share of the layers' weights, 0..1, which is the cost of W. ConfigError for
    an unknown remat.

    >>> task_costs("layer").backward_s, task_costs("none", trained=0.25).weight_grad_s
    (3.0, 0.25)
    """
    return Costs(1.0, 1.0 + Remat.of(remat).recomputes, weight_grad_s=trained)


# the pieces of a model


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
    op_times: OpTimes | Sequence[OpTimes],
    sizes: Sequence[float],
    *,
    keeps_input: bool,
    split: bool = False,
) -> Costs:
    """Return the costs of each stage's tasks. sizes: layers of each stage, or their relative cost.

    op_times: of all stages, or of each. All hops take as long as the slowest.

    The last stage's forward includes the head's forward and backward. With keeps_input (remat=full)
    the last stage's backward includes them instead, and the first stage's backward embeds again.
    split: W is a separate task, not a part of B.

    >>> from ppctl.schedule.costs import FREE, PieceTimes
    >>> one, two = (PieceTimes(s, s, s) for s in (1.0, 2.0))
    >>> op_times = OpTimes(FREE, one, two, task_s=0.0, hop_s=0.0, overhead_s=0.0)
    >>> costs_of_stages(op_times, (2, 1), keeps_input=False).forward_s
    (2.0, 7.0)
    """
    by_stage = [op_times] * len(sizes) if isinstance(op_times, OpTimes) else op_times
    last, first = len(sizes) - 1, by_stage[0]
    forward, input_grad, weight_grad = list[float](), list[float](), list[float]()

    # 1. layers, plus the embedding in the first stage and the head in the last
    for s, (n, op_times) in enumerate(zip(sizes, by_stage, strict=True)):
        embed, head = op_times.embed, op_times.head
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
    hop_s = max(each.hop_s for each in by_stage)
    costs = Costs(tuple(forward), tuple(input_grad), tuple(weight_grad), transfer_s=hop_s)
    return replace(costs, **{OF_PARTS[kind]: s for kind, s in first.parts.items()})
