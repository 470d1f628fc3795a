"""The source of task and transfer times: assumed, or from FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.field_checks import at_least, choice
from ppctl.errors import ConfigError

TIMES = ("forward_s", "input_grad_s", "weight_grad_s")
OF_LAYERS, OF_MEMORY = ("embed", "head"), ("activation_gib", "fixed_gib")


@dataclass
class Costs:
    """Seconds of one microbatch through 1/p of the model, as `ppctl schedule` assumes them. A chunk
    costs 1/V of it.

    With num_layers stages hold whole layers and differ: the model is its layers, an embedding
    before and a head after.
    """

    name: str = "unit"
    forward_s: float = 1.0  # F
    input_grad_s: float = 1.0  # I; a full backward B is I and W
    weight_grad_s: float = 1.0  # W
    transfer_s: float = 0.0  # one activation or gradient from a rank to the next
    num_layers: int | None = None  # layers of the model; None: stages are equal
    embed: float = 0.0  # F, I and W of the embedding, in layers
    head: float = 0.0  # F, I and W of the head, in layers
    # layers over stages, with num_layers: balanced (the largest stage small) | uniform
    partition: str = "balanced"
    activation_gib: float = 0.0  # residuals of a forward through 1/p of the layers
    fixed_gib: float = 0.0  # parameters, optimizer and gradient sums of 1/p of the layers

    PARTITIONS: ClassVar[tuple[str, ...]] = ("balanced", "uniform")

    def check(self) -> None:
        for key in (*TIMES, "transfer_s", *OF_LAYERS, *OF_MEMORY):
            at_least(f"costs.{key}", getattr(self, key), 0)
        choice("costs.partition", self.partition, self.PARTITIONS)
        at_least("costs.num_layers", self.num_layers, 1)
        unused = [f"costs.{key}={getattr(self, key):g}" for key in OF_LAYERS if getattr(self, key)]
        unused += [f"costs.partition={self.partition}"] * (self.partition != self.PARTITIONS[0])
        if unused and self.num_layers is None:
            raise ConfigError(
                f"{unused[0]} is for a model of layers, but costs.num_layers=null: stages are "
                "equal. Set costs.num_layers, such as 16."
            )
        if not any(getattr(self, key) for key in TIMES):
            times = "=".join(f"costs.{key}" for key in TIMES)
            raise ConfigError(f"{times}=0: give one of them a time.")


@dataclass
class Analytic:
    """Seconds from the FLOPs and bytes of tasks and the speeds of `hardware`."""

    name: str = "analytic"

    def check(self) -> None:
        """Accept all values: there are none besides the name."""
