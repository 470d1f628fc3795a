"""The settings of `ppctl tune`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.checks import above_zero, at_least, choice, tokens
from ppctl.config.schedule import Schedule
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat


@dataclass
class Tune:
    """The search of a layout: its devices and choices, and the recipe that it writes."""

    devices: int | None = None  # how many; None: those of the mesh
    memory_gib: float | None = None  # of a device; None: that of the hardware
    tokens: float | None = None  # to train on: shows days, device-hours and energy of the best; None: only a step
    schedules: list[str] | None = None  # families to choose from, and auto (a search); None: all that the executor runs
    remat: list[str] | None = None  # settings of executor.remat to choose from; None: all
    max_chunks: int = 4  # stages a rank, at most
    vocab: list[str] | None = None  # settings of schedule.vocab to choose from; None: all that executor and model have
    tp: list[int] | None = None  # sizes of mesh.tp to choose from; None: those that suit the model, inside a host
    cp: list[int] | None = None  # sizes of mesh.cp to choose from; None: those that leave 4096 tokens a device
    best: int = 10  # how many layouts are shown
    measure: int = 0  # how many of the best are run here for a few steps, and ranked by their measured step time
    recipe: str | None = "tuned"  # the best one is written to ./recipes/NAME.yaml; None: to no file
    launch: str | None = None  # its job script is written next to the recipe: slurm | kubernetes | tpu; None: none is

    LAUNCH: ClassVar[tuple[str, ...]] = ("slurm", "kubernetes", "tpu")
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        at_least("tune.devices", self.devices, 1)
        above_zero("tune.memory_gib", self.memory_gib)
        tokens("tune.tokens", self.tokens)
        at_least("tune.max_chunks", self.max_chunks, 1)
        for name, sizes in (("tp", self.tp), ("cp", self.cp)):
            if sizes == []:
                raise ConfigError(f"tune.{name}=[] leaves nothing to choose from. Use null, or sizes such as [1,2,4].")
            for size in sizes or ():
                at_least(f"tune.{name}", size, 1)
        at_least("tune.best", self.best, 1)
        at_least("tune.measure", self.measure, 0)
        if self.measure > self.best:
            raise ConfigError(
                f"tune.measure={self.measure} runs more layouts than tune.best={self.best} shows. Use "
                f"tune.best={self.measure} or more, or a smaller tune.measure."
            )
        for name in self.remat or ():
            if name not in self.REMAT:
                raise ConfigError(f"tune.remat: {name} is not one of {', '.join(self.REMAT)}.")
        if self.vocab == []:
            raise ConfigError("tune.vocab=[] leaves nothing to choose from. Use null, [whole], or [whole,parallel].")
        for name in self.vocab or ():
            choice("tune.vocab", name, Schedule.VOCAB)
        if self.recipe is not None and re.fullmatch(r"[\w-]+", self.recipe) is None:
            raise ConfigError(
                f"tune.recipe={self.recipe} is not a name. Use letters, digits, _ and -; the file is "
                "./recipes/NAME.yaml."
            )
        if self.launch is not None:
            choice("tune.launch", self.launch, self.LAUNCH)
        if self.launch is not None and self.recipe is None:
            raise ConfigError(
                f"tune.launch={self.launch} writes a job script next to the recipe, but tune.recipe=null. Give the "
                "recipe a name, or leave out tune.launch."
            )
