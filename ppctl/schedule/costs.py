"""Costs of tasks: seconds and bytes, for simulator, search and planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ppctl.errors import ConfigError
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
