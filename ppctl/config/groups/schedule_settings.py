"""The schedules: families and their knobs, schedules found by search, and schedules in files; and
the costs that `ppctl schedule` assumes, since it has no model.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, FromOne, Natural, Positive, Settings, SomePath
from ppctl.errors import ConfigError
from ppctl.schedule.costs import OF_STAGES, check_cost, check_work

VOCAB = ("whole", "parallel")
OF_UNEQUAL = "1f1b"  # the family of tune.groups=unequal
MaxChunks = Annotated[int, checks.up_to(64, "each number of chunks is searched")]


@dataclass
class Schedule(Settings):
    """A family without knobs (gpipe, 1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v)."""

    name: str = "gpipe"
    num_microbatches: Count = 8  # microbatches per step of each data-parallel replica
    # embedding and head: whole, on the first and the last stage | parallel, a part on each rank
    vocab: Annotated[str, checks.one_of(*VOCAB)] = "whole"

    VOCAB: ClassVar[tuple[str, ...]] = VOCAB
    KNOBS: ClassVar[tuple[str, ...]] = ("num_chunks", "num_waves", "warmup_hops")

    def knobs(self) -> dict[str, Any]:
        """Return the arguments of the family's generator that not all families have."""
        return {key: getattr(self, key) for key in self.KNOBS if hasattr(self, key)}


@dataclass
class Eager1F1B(Schedule):
    """1F1B with a longer warm-up: `warmup_hops` forwards for each later rank."""

    name: str = "eager_1f1b"
    # forwards per later rank: from 1 (1F1B, fewest activations) to 2 (hides transfers)
    warmup_hops: Annotated[float, partial(checks.within, least=1, most=2)] = 2.0


@dataclass
class Chunked(Schedule):
    """A family whose ranks hold `num_chunks` stages each (looped_bfs, interleaved_zb, gis)."""

    name: str = "looped_bfs"
    # stages a rank
    num_chunks: Annotated[int, checks.up_to(1024, "each is a stage, with a layer at least")] = 2


@dataclass
class Interleaved(Eager1F1B, Chunked):
    """Megatron-LM's interleaved 1F1B: each rank holds `num_chunks` stages."""

    name: str = "interleaved"


@dataclass
class Hanayo(Schedule):
    """Hanayo: each rank holds two stages per wave."""

    name: str = "hanayo"
    # waves: each goes down the ranks and back up
    num_waves: Annotated[int, checks.up_to(512, "each is two stages of a rank")] = 1


@dataclass
class Auto(Schedule):
    """The shortest schedule found under a memory cap: all families, and a search of orders."""

    name: str = "auto"
    # cap of a rank, in activations of one microbatch through 1/pp of the model; None: mesh.pp
    max_activations: Positive | None = None
    # cap of a device's memory, weights included, instead of max_activations
    max_memory_gib: Positive | None = None
    max_chunks: MaxChunks = 4  # maximum stages per rank

    def check(self) -> None:
        super().check()
        if self.max_activations is not None and self.max_memory_gib is not None:
            raise ConfigError(
                f"schedule.max_activations={self.max_activations:g} and schedule.max_memory_gib="
                f"{self.max_memory_gib:g} are two caps on the same memory. Leave one of them out."
            )


@dataclass
class Csv(Schedule):
    """A CSV file with a line per rank and PyTorch's cells, `2F0`, `0B3`, `1I2`, `1W2`. If no mesh
    is stated, the file sets the number of ranks.
    """

    name: str = "csv"
    num_microbatches: Natural = 0  # microbatches per step; 0: as in the file
    path: SomePath = "???"  # path of the file


AnySchedule = Schedule | Eager1F1B | Chunked | Interleaved | Hanayo | Auto | Csv

Cost = Annotated[float, check_cost]
CostGib = Annotated[float, partial(check_cost, largest=1e90)]  # finite in bytes


@dataclass
class Costs(Settings):
    """Seconds and memory of one microbatch through 1/p of the model, assumed by `ppctl schedule`.
    A chunk costs 1/V of that.
    """

    forward_s: Cost = 1.0  # F, seconds of a forward
    input_grad_s: Cost = 1.0  # I, seconds of the gradient of inputs; backward B is I and W
    weight_grad_s: Cost = 1.0  # W, seconds of the gradient of weights
    transfer_s: Cost = 0.0  # seconds to send an activation or gradient to the next rank
    activation_gib: CostGib = 0.0  # residuals of a forward through 1/p of the layers
    fixed_gib: CostGib = 0.0  # parameters, optimizer and gradient sums of 1/p of the layers
    # rows of experts on the most loaded device, over the mean; read by predictions for a model only
    expert_imbalance: FromOne = 1.0

    OF_MODELS: ClassVar[str] = "expert_imbalance"  # read by all commands but `ppctl schedule`

    def check(self) -> None:
        super().check()
        check_work({f"costs.{name}": getattr(self, name) for name in OF_STAGES.values()})
