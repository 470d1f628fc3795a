"""Costs of work: the seconds and bytes of one stage that simulator and planner use."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ppctl.errors import ConfigError
from ppctl.schedule.ir import Kind
from ppctl.schedule.remat import Remat

# the cost of each kind of task of a part of the vocabulary
OF_PARTS: dict[Kind, str] = {"E": "embedding_s", "S": "logits_s", "T": "logits_grad_s", "G": "embedding_grad_s"}
OfStages = float | tuple[float, ...]  # of one microbatch through 1/p of the model, or of each stage in model order


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch. The defaults are the unit of the pipeline papers: F = I = W = 1, free transfers.

    Each of the first four is a number, for one microbatch through 1/p of the model (of which each of a rank's V chunks
    costs 1/V), or a tuple with the cost of each stage in model order.

    >>> Costs().backward_s
    2.0
    >>> Costs(forward_s=(1.0, 3.0)).seconds("F", 1, num_chunks=2)
    3.0
    """

    forward_s: OfStages = 1.0  # F
    input_grad_s: OfStages = 1.0  # I
    weight_grad_s: OfStages = 1.0  # W
    transfer_s: float = 0.0  # latency of one activation or gradient from a rank to the next
    activation_bytes: OfStages = 0.0  # what a forward keeps for its backward
    transfer_bytes: float = 0.0  # size of one activation or gradient that crosses ranks
    transfer_bytes_per_s: float | None = None  # bandwidth of a hop; None: no limit
    link_hosts: tuple[int, ...] | None = None  # hops queue for links (`shared_links`): the host of each rank, or ()
    # where the vocabulary is divided, of one rank's part, or a tuple with the cost of each part
    embedding_s: OfStages = 0.0  # E
    logits_s: OfStages = 0.25  # S
    logits_grad_s: OfStages = 0.5  # T
    embedding_grad_s: OfStages = 0.0  # G

    def __post_init__(self) -> None:
        bandwidth = self.transfer_bytes_per_s
        if bandwidth is not None and not 0 < bandwidth < math.inf:  # written so that NaN fails
            raise ConfigError(f"transfer_bytes_per_s={bandwidth} is not a bandwidth. Use a number above 0, or None.")
        for field in dataclasses.fields(self):
            if field.name in ("transfer_bytes_per_s", "link_hosts"):
                continue
            value: OfStages = getattr(self, field.name)
            what, unit = ("time", "seconds") if field.name.endswith("_s") else ("size", "bytes")
            for number in value if isinstance(value, tuple) else (value,):
                if not 0 <= number < math.inf:  # written so that NaN fails
                    raise ConfigError(
                        f"{field.name}={number} is not a {what}. Use a finite number of {unit}, at least 0."
                    )

    @property
    def backward_s(self) -> float:
        """Seconds of a full backward through 1/p of the model: B = I + W. Only where both are numbers."""
        assert not isinstance(self.input_grad_s, tuple), "costs of each stage: see seconds"
        assert not isinstance(self.weight_grad_s, tuple), "costs of each stage: see seconds"
        return self.input_grad_s + self.weight_grad_s

    @property
    def hop_s(self) -> float:
        """Seconds from the end of a task until its value can be read on the next rank."""
        if self.transfer_bytes_per_s is None:
            return self.transfer_s
        return self.transfer_s + self.link_busy_s

    @property
    def link_busy_s(self) -> float:
        """Seconds in which a hop occupies its link."""
        return 0.0 if self.transfer_bytes_per_s is None else self.transfer_bytes / self.transfer_bytes_per_s

    def seconds(self, kind: str, stage: int, num_chunks: int) -> float:
        """Seconds of one task of `kind`: of F, B, I and W of a stage, of E, S, T and G of a part of the vocabulary."""
        if kind in OF_PARTS:
            cost: OfStages = getattr(self, OF_PARTS[kind])
            return cost[stage] if isinstance(cost, tuple) else cost
        if kind == "B":
            if isinstance(self.input_grad_s, tuple) or isinstance(self.weight_grad_s, tuple):
                return self.seconds("I", stage, num_chunks) + self.seconds("W", stage, num_chunks)
            return self.backward_s / num_chunks
        return _of_stage(
            {"F": self.forward_s, "I": self.input_grad_s, "W": self.weight_grad_s}[kind], stage, num_chunks
        )

    def stage_bytes(self, stage: int, num_chunks: int) -> float:
        """Bytes that one forward of `stage` keeps for its backward."""
        return _of_stage(self.activation_bytes, stage, num_chunks)

    def check(self, num_stages: int, num_parts: int = 0) -> None:
        """Raise ConfigError where a tuple has not one entry a stage, or a part of the vocabulary where it has some."""
        for field in dataclasses.fields(self):
            value: OfStages | None = getattr(self, field.name)
            if not isinstance(value, tuple) or field.name == "link_hosts":
                continue
            if field.name in OF_PARTS.values():
                if num_parts and len(value) != num_parts:
                    raise ConfigError(
                        f"{field.name} has {len(value)} entries for {num_parts} ranks, each with a part of the "
                        "vocabulary. Give one for each, or a number for all."
                    )
            elif len(value) != num_stages:
                raise ConfigError(
                    f"{field.name} has {len(value)} entries for {num_stages} stages. Give one for each stage, or a "
                    "number for 1/p of the model."
                )


def _of_stage(cost: OfStages, stage: int, num_chunks: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost / num_chunks


def task_costs(remat: Remat | str, trained: float = 1.0) -> Costs:
    """Return relative seconds of a stage's tasks: F = I = W = 1, and an I that recomputes runs a forward more.

    trained: the share of the layers' weights that are trained, 0..1, of which alone W computes gradients. ConfigError
    for another remat than none, layer or full.

    >>> task_costs("layer").backward_s, task_costs("none", trained=0.25).weight_grad_s
    (3.0, 0.25)
    """
    return Costs(forward_s=1.0, input_grad_s=1.0 + Remat.of(remat).recompute_forwards, weight_grad_s=trained)
