"""The settings of `ppctl inspect`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ppctl.config.field_checks import choice
from ppctl.errors import ConfigError

TASK = re.compile(r"(?=.)(\d*)([^\W\d]*)")


@dataclass
class Inspect:
    """The views of the programs that `ppctl inspect` shows, and a directory for them."""

    # summary | program | jaxpr | stablehlo | hlo; None: the first two, in inspect.out all
    what: str | None = None
    # executor=mpmd: 2F: F of stage 2; 2: all of stage 2 and its rank; F, finish, ...: of all
    task: str | None = None
    out: str | None = None  # a new or empty directory, a file each; None: to the terminal

    WHAT: ClassVar[tuple[str, ...]] = ("summary", "program", "jaxpr", "stablehlo", "hlo")

    def check(self) -> None:
        if self.what is not None:
            choice("inspect.what", self.what, self.WHAT)
        if self.task is not None and TASK.fullmatch(self.task) is None:
            raise ConfigError(
                f"inspect.task={self.task} is not a stage, a kind of task, or both, as in 2F."
            )
        if self.out == "":
            remedy = "Write inspect.out=DIR, or leave it out."
            raise ConfigError(f"inspect.out= names no directory. {remedy}")

    @property
    def stage_and_kind(self) -> tuple[int | None, str | None]:
        """The stage and the kind of `task`, None for all.

        >>> Inspect(task="2F").stage_and_kind, Inspect(task="finish").stage_and_kind
        ((2, 'F'), (None, 'finish'))
        """
        found = TASK.fullmatch(self.task or "")
        stage, kind = (None, None) if found is None else found.groups()
        return int(stage) if stage else None, kind or None
