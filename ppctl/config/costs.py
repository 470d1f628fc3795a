"""Where the seconds of tasks and transfers come from: assumed, from FLOPs and bytes, or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.checks import at_least, choice
from ppctl.errors import ConfigError

OF_LAYERS, OF_MEMORY = ("embed", "head"), ("activation_gib", "fixed_gib")


@dataclass
class Costs:
    """Seconds of one microbatch through 1/p of the model, as `ppctl schedule` assumes them. A chunk costs 1/V of it.

    With num_layers stages hold whole layers and differ: the model is its layers, an embedding before and a head after.
    """

    name: str = "unit"
    forward_s: float = 1.0  # F
    input_grad_s: float = 1.0  # I; a full backward B is I and W
    weight_grad_s: float = 1.0  # W
    transfer_s: float = 0.0  # one activation or gradient from a rank to the next
    link_s: float = 0.0  # of it, in which a transfer occupies its link; others on the link wait; 0: they never do
    host_ranks: int | None = None  # ranks of a host, which share its link to other hosts; None: each pair has its own
    num_layers: int | None = None  # layers of the model, which 1/p of it is a share of; None: stages are equal
    embed: float = 0.0  # the embedding costs as much as so many layers, in F, I and W
    head: float = 0.0  # the head likewise
    partition: str = "balanced"  # layers over stages, with num_layers: balanced (the largest stage small) | uniform
    activation_gib: float = 0.0  # what a forward through 1/p of the layers keeps for its backward
    fixed_gib: float = 0.0  # what 1/p of the layers takes always: parameters, optimizer, sums of gradients

    logits_s: float = 0.25  # S, of a rank's part of the vocabulary (schedule.vocab=parallel)
    logits_grad_s: float = 0.5  # T likewise
    embedding_s: float = 0.0  # E likewise
    embedding_grad_s: float = 0.0  # G likewise

    PARTITIONS: ClassVar[tuple[str, ...]] = ("balanced", "uniform")

    def check(self) -> None:
        tasks = "forward_s", "input_grad_s", "weight_grad_s", "logits_s", "logits_grad_s"
        for key in (*tasks, "embedding_s", "embedding_grad_s", "transfer_s", "link_s", *OF_LAYERS, *OF_MEMORY):
            at_least(f"costs.{key}", getattr(self, key), 0)
        at_least("costs.host_ranks", self.host_ranks, 1)
        if self.link_s > self.transfer_s:
            raise ConfigError(
                f"costs.link_s={self.link_s:g} is a part of costs.transfer_s={self.transfer_s:g}, and larger. "
                f"Use costs.transfer_s={self.link_s:g} or more."
            )
        if self.host_ranks is not None and not self.link_s:
            raise ConfigError(
                f"costs.host_ranks={self.host_ranks} says who shares a link, but costs.link_s=0: no transfer occupies "
                "any. Set costs.link_s."
            )
        choice("costs.partition", self.partition, self.PARTITIONS)
        at_least("costs.num_layers", self.num_layers, 1)
        unused = [f"costs.{key}={getattr(self, key):g}" for key in OF_LAYERS if getattr(self, key)]
        unused += [f"costs.partition={self.partition}"] * (self.partition != self.PARTITIONS[0])
        if unused and self.num_layers is None:
            raise ConfigError(
                f"{unused[0]} is for a model of layers, but costs.num_layers=null: stages are equal. "
                "Set costs.num_layers, such as 16."
            )
        if self.forward_s + self.input_grad_s + self.weight_grad_s == 0:
            raise ConfigError("costs.forward_s=costs.input_grad_s=costs.weight_grad_s=0: give one of them a time.")


@dataclass
class Analytic:
    """Seconds from the FLOPs and bytes of tasks and the speeds of `hardware`."""

    name: str = "analytic"
    doctor: str | None = None  # file of `ppctl doctor --json`, for links as measured; None: those of hardware

    def check(self) -> None:
        """Check nothing here: `ppctl.training.known_hardware.links_of` reads the file."""


@dataclass
class Measure(Analytic):
    """Seconds of tasks as measured on a device that is here; links as in costs=analytic."""

    name: str = "measure"
    cache_dir: str | None = None  # where measurements are kept; None: ~/.cache/ppctl, or XDG_CACHE_HOME's
