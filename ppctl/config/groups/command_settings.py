"""The settings of single commands: launch, verify, plan, tune and inspect."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

from ppctl.config.field_checks import above_zero, at_least, choice, tokens
from ppctl.config.groups.schedule_settings import Schedule
from ppctl.errors import ConfigError
from ppctl.schedule.mesh_axes import STAGE_AXES, axes_record
from ppctl.schedule.remat import Remat

TOPOLOGY = re.compile(r"\w+:\d+(x\d+){1,2}")


@dataclass
class Launch:
    """Local processes of `ppctl train`, which the command starts and watches without JAX."""

    processes: int = 1  # local processes that share the mesh's devices evenly
    max_restarts: int = 0  # restarts of a crashed run from its newest checkpoint

    @property
    def is_used(self) -> bool:
        return self.processes > 1 or self.max_restarts > 0

    def check(self) -> None:
        at_least("launch.processes", self.processes, 1)
        at_least("launch.max_restarts", self.max_restarts, 0)


def not_launched() -> list[str]:
    """Return the overrides that make any request launch nothing."""
    return [f"launch.{field.name}={field.default}" for field in fields(Launch)]


@dataclass
class Verify:
    """The train steps that `ppctl verify` compares after the gradients of the first batch."""

    steps: int = 3  # train steps to compare with plain optax; 0: only gradients

    def check(self) -> None:
        at_least("verify.steps", self.steps, 0)


@dataclass
class Plan:
    """The programs that `ppctl plan` compiles, the memory of a device, and a page to write."""

    # compile the train step too, for the compiler's plan of memory; None: with plan.topology
    compile: bool | None = None
    # devices to compile for: TPUs, v5e:16x16; GPUs, hosts x GPUs a host, h100:2x8
    topology: str | None = None
    # and tune: memory of a device; None: as hardware or the device states
    memory_gib: float | None = None
    # and tune: to train on; adds days, device-hours and energy; None: only a step
    tokens: float | None = None
    html: str | None = None  # and rehearse: file of a self-contained page for browsers

    def check(self) -> None:
        above_zero("plan.memory_gib", self.memory_gib)
        tokens("plan.tokens", self.tokens)
        if self.topology is not None and TOPOLOGY.fullmatch(self.topology) is None:
            raise ConfigError(
                f"plan.topology={self.topology} is not a topology. Write the kind of chip and its "
                "number each way (v5e:4x4, v5p:2x2x2); of GPUs hosts x GPUs of a host (h100:2x8)."
            )

    @property
    def compiles(self) -> bool:
        """Whether to compile: as requested, by default only for a topology."""
        return self.topology is not None if self.compile is None else self.compile

    @property
    def only_predicts_topology(self) -> bool:
        """Whether a topology is only predicted for, without a compiler of its devices."""
        return self.topology is not None and not self.compiles

    @property
    def topology_shape(self) -> tuple[int, ...]:
        """The chips of the topology each way; of GPUs the hosts and the GPUs of a host.

        >>> Plan(topology="h100:2x8").topology_shape
        (2, 8)
        """
        assert self.topology is not None
        return tuple(map(int, self.topology.partition(":")[2].split("x")))


@dataclass
class Tune(
    axes_record(STAGE_AXES, list[int] | None, None, "sizes of mesh.{name}; None: {tuned_about}")
):
    """The search of a layout: its devices and choices, and the recipe that it writes."""

    devices: int | None = None  # how many; None: those of the mesh
    schedules: list[str] | None = None  # families; None: all of the executor
    remat: list[str] | None = None  # values of executor.remat; None: all
    max_chunks: int = 4  # stages a rank, at most
    vocab: list[str] | None = None  # values of schedule.vocab; None: all of executor and model
    best: int = 10  # layouts shown
    measure: int = 0  # of the best: run for a few steps, and ranked by measured step time
    recipe: str | None = "tuned"  # the best layout goes to ./recipes/NAME.yaml; None: to no file
    launch: str | None = None  # job script written next to the recipe: slurm | kubernetes | tpu

    LAUNCH: ClassVar[tuple[str, ...]] = ("slurm", "kubernetes", "tpu")
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        self._check_choices()
        self._check_recipe()
        at_least("tune.devices", self.devices, 1)
        at_least("tune.max_chunks", self.max_chunks, 1)
        at_least("tune.best", self.best, 1)
        at_least("tune.measure", self.measure, 0)
        if self.measure > self.best:
            raise ConfigError(
                f"tune.measure={self.measure} runs more layouts than tune.best={self.best} "
                f"shows. Use tune.best={self.measure} or more, or a smaller tune.measure."
            )

    def _check_choices(self) -> None:
        for name in STAGE_AXES:
            sizes = getattr(self, name)
            if sizes == []:
                remedy = "Use null, or sizes such as [1,2,4]."
                raise ConfigError(f"tune.{name}=[] leaves nothing to choose from. {remedy}")
            for size in sizes or ():
                at_least(f"tune.{name}", size, 1)
        for name in self.remat or ():
            choice("tune.remat", name, self.REMAT)
        if self.vocab == []:
            remedy = "Use null, [whole], or [whole,parallel]."
            raise ConfigError(f"tune.vocab=[] leaves nothing to choose from. {remedy}")
        for name in self.vocab or ():
            choice("tune.vocab", name, Schedule.VOCAB)

    def _check_recipe(self) -> None:
        if self.recipe is not None and re.fullmatch(r"[\w-]+", self.recipe) is None:
            raise ConfigError(
                f"tune.recipe={self.recipe} is not a name. Use letters, digits, _ and -; the "
                "file is ./recipes/NAME.yaml."
            )
        if self.launch is not None:
            choice("tune.launch", self.launch, self.LAUNCH)
        if self.launch is not None and self.recipe is None:
            raise ConfigError(
                f"tune.launch={self.launch} writes a job script next to the recipe, but "
                "tune.recipe=null. Give the recipe a name, or leave out tune.launch."
            )


@dataclass
class Inspect:
    """The views of the programs that `ppctl inspect` shows."""

    # summary | program (ticks) | jaxpr | stablehlo | hlo; None: the first two
    what: str | None = None

    WHAT: ClassVar[tuple[str, ...]] = ("summary", "program", "jaxpr", "stablehlo", "hlo")

    def check(self) -> None:
        if self.what is not None:
            choice("inspect.what", self.what, self.WHAT)
