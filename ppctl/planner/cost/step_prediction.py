"""The prediction for a request, as `ppctl plan --json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.planner.search.advise_partition import Proposal
from ppctl.planner.search.token_budget import TokenBudget


@dataclass(frozen=True)
class StagePart:
    """A stage: its layers, its submesh, and the seconds of a microbatch there."""

    first_layer: int
    num_layers: int
    rank: int
    devices: tuple[int, ...]  # of the submesh, by number; () of a topology only predicted
    forward_s: float | None  # None: unknown; 0 of a last stage: in its backward (remat=full)
    backward_s: float | None  # the sum of the next two
    input_grad_s: float | None
    weight_grad_s: float | None


@dataclass(frozen=True)
class LayerPart:
    """The contents of a network's layer, embedding or head."""

    name: str  # "embedding", "0", "1", ..., "head"
    stage: int
    cost: float  # FLOPs of matrix products, forward and backward, over the mean layer's
    params: Mapping[str, tuple[int, ...]]  # shapes by the author's names
    operations: Mapping[str, int]  # number of each


@dataclass(frozen=True)
class Prediction:
    """The prediction for a request."""

    schedule: str
    auto: str | None  # the choice of schedule=auto, in a line
    partition: tuple[int, ...]  # layers of each stage
    rank_of: tuple[int, ...]  # the rank of each stage
    stages: tuple[StagePart, ...]  # () without a pipeline
    layers: tuple[LayerPart, ...]  # of a network, which was cut into layers; () of other models
    ideal_bubble_fraction: float | None  # 0..1: equal stages, no transfers; None: no pipeline
    predicted_bubble_fraction: float | None  # 0..1: by the step time's seconds; None: unknown
    num_parameters: int
    step_flops: int  # of the model, nothing recomputed
    devices: str
    hardware: str | None  # name of the description used
    costs: str  # source of the seconds: analytic
    step_time_s: float | None
    transfer_s: float | None  # from a task's end to its value on the next rank; None: no pipeline
    per_step_overhead_s: float | None  # a part: parameters gathered, gradients summed, optimizer
    unknown: str | None  # why the step time is unknown
    unit: str  # tokens_per_s | rows_per_s
    tokens_per_s: float | None  # or examples, by `unit`
    token_budget: TokenBudget | None  # of plan.tokens; None: not set, or the step time is unknown
    mfu_fraction: float | None  # 0..1: of the hardware's peak; None: unknown, as of CPUs
    mfu_causal_fraction: float | None  # the same, attention to later tokens not counted
    memory_bytes: tuple[Mapping[str, int], ...]  # for each rank, of one device, by part
    total_bytes: tuple[int, ...]  # for each rank
    is_compiled: bool  # memory is that of the compiled program (plan.compile), not predicted
    predicted_bytes: tuple[int, ...]  # for each rank, as in `ppctl tune` and `ppctl train`
    limit_bytes: int | None  # memory of a device
    limit_source: str | None
    limit_fraction: float | None  # share of a GPU's memory: run.memory_fraction or JAX's default
    fitting_memory_fraction: float | None  # a larger run.memory_fraction with which it would fit
    fits: bool | None  # None: the memory of a device is unknown
    compile_s: float | None
    refusal: str | None  # the compiler's, if the program does not fit
    assumes: tuple[str, ...]  # a line each
    proposal: Proposal | None  # a better partition
