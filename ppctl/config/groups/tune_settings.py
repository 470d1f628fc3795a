"""The settings of `ppctl tune`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.field_checks import at_least, choice
from ppctl.config.groups.schedule_settings import Schedule
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat


@dataclass
class Tune:
    """The search of a layout: its devices and choices, and the recipe that it writes."""

    devices: int | None = None  # how many; None: those of the mesh
    schedules: list[str] | None = None  # families; None: all of the executor
    remat: list[str] | None = None  # values of executor.remat; None: all
    max_chunks: int = 4  # stages a rank, at most
    vocab: list[str] | None = None  # values of schedule.vocab; None: all of executor and model
    tp: list[int] | None = None  # sizes of mesh.tp; None: those that suit the model, inside a host
    cp: list[int] | None = None  # sizes of mesh.cp; None: those that leave 4096 tokens a device
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
        for name, sizes in (("tp", self.tp), ("cp", self.cp)):
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
