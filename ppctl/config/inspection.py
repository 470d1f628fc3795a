"""The settings of `ppctl inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.checks import at_least, choice
from ppctl.errors import ConfigError


@dataclass
class Inspect:
    """The parts that `ppctl inspect` shows of the programs that would run, and a directory for them."""

    what: str | None = None  # summary | program | jaxpr | stablehlo | hlo; None: the first two, in inspect.out all
    stage: int | None = None  # executor=mpmd: of this stage and its rank alone; None: of all
    task: str | None = None  # executor=mpmd: F, B, I or W, or prepare, finish, update, ... alone; None: all
    out: str | None = None  # a directory, new or empty, for one file each; None: to the terminal

    WHAT: ClassVar[tuple[str, ...]] = ("summary", "program", "jaxpr", "stablehlo", "hlo")

    def check(self) -> None:
        if self.what is not None:
            choice("inspect.what", self.what, self.WHAT)
        at_least("inspect.stage", self.stage, 0)
        if self.out == "":
            raise ConfigError("inspect.out= names no directory. Write inspect.out=DIR, or leave it out.")
