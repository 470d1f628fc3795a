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
    """The views of the programs that `ppctl inspect` shows."""

    # summary | program | jaxpr | stablehlo | hlo; None: the first two
    what: str | None = None
    # executor=mpmd: 2F: F of stage 2; 2: all of stage 2 and its rank; F, finish, ...: of all
    task: str | None = None

    WHAT: ClassVar[tuple[str, ...]] = ("summary", "program", "jaxpr", "stablehlo", "hlo")

    def check(self) -> None:
        if self.what is not None:
            choice("inspect.what", self.what, self.WHAT)
        if self.task is not None and TASK.fullmatch(self.task) is None:
            raise ConfigError(
                f"inspect.task={self.task} is not a stage, a kind of task, or both, as in 2F."
            )

    @property
    def stage_and_kind(self) -> tuple[int | None, str | None]:
        """The stage and the kind of `task`, None for all.

        >>> Inspect(task="2F").stage_and_kind, Inspect(task="finish").stage_and_kind
        ((2, 'F'), (None, 'finish'))
        """
        found = TASK.fullmatch(self.task or "")
        stage, kind = (None, None) if found is None else found.groups()
        return int(stage) if stage else None, kind or None
