"""The prediction for a request, as `ppctl plan --json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.planner.advise import Proposal
from ppctl.planner.token_budget import TokenBudget


@dataclass(frozen=True)
class StagePart:
    """A stage: its layers, its submesh, and the seconds of a microbatch there."""

    first_layer: int
    num_layers: int
    rank: int
    devices: tuple[int, ...]  # of the submesh, by number; () of a topology that no compiler is asked for
    forward_s: float | None  # None: not known; 0 of a last stage: a part of its backward (executor.remat=full)
    backward_s: float | None  # of which the next two are parts
    input_grad_s: float | None
    weight_grad_s: float | None


@dataclass(frozen=True)
class LayerPart:
    """What stands in a layer of a network, or in its embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    stage: int
    cost: float  # FLOPs of matrix products, forward and backward, over the mean layer's
    params: Mapping[str, tuple[int, ...]]  # shapes by the author's names
    operations: Mapping[str, int]  # how often each comes


@dataclass(frozen=True)
class Prediction:
    """The prediction for a request."""

    schedule: str
    auto: str | None  # what schedule=auto chose, in a line
    partition: tuple[int, ...]  # layers of each stage
    rank_of: tuple[int, ...]  # the rank of each stage
    stages: tuple[StagePart, ...]  # () without a pipeline
    layers: tuple[LayerPart, ...]  # of a network, which was cut into layers; () of other models
    ideal_bubble_fraction: float | None  # 0..1: of the schedule alone, equal stages; None without a pipeline
    predicted_bubble_fraction: float | None  # 0..1: by the same seconds as the step time; None where that is not known
    num_parameters: int
    step_flops: int  # of the model, nothing recomputed
    devices: str
    hardware: str | None  # whose description was used
    costs: str  # where seconds come from: analytic | measure
    step_time_s: float | None
    step_time_by_measured_costs_s: float | None  # where costs=measure has timed this request before
    transfer_s: (
        float | None
    )  # from the end of a task until its value can be read on the next rank; None without a pipeline
    per_step_overhead_s: float | None  # of it: gathering parameters, reducing gradients, the optimizer
    unknown: str | None  # why the step time is not known
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float | None  # or examples, as `unit` says
    token_budget: TokenBudget | None  # of plan.tokens; None where these are not set, or the step time is not known
    mfu_fraction: float | None  # 0..1: of the hardware's peak; None where that is not known, as of CPUs
    mfu_causal_fraction: float | None  # the same, attention to later tokens not counted
    memory_bytes: tuple[Mapping[str, int], ...]  # for each rank, of one device, by part
    total_bytes: tuple[int, ...]  # for each rank
    is_compiled: bool  # whether these are of the program that training runs (plan.compile), not predicted
    predicted_bytes: tuple[int, ...]  # for each rank, as `ppctl tune` and `ppctl train` predict it too
    limit_bytes: int | None  # memory of a device
    limit_source: str | None  # where that comes from
    limit_fraction: float | None  # of a GPU's memory that it is, by run.memory_fraction or JAX's default
    fitting_memory_fraction: float | None  # a larger run.memory_fraction with which it would fit
    fits: bool | None  # None: the memory of a device is not known
    compile_s: float | None
    refusal: str | None  # the compiler's, where it found that the program does not fit
    assumes: tuple[str, ...]  # what the prediction rests on, a line each
    proposal: Proposal | None  # a better partition
