"""A function of the user's, which returns a model or a data set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class UserFunction:
    """A function of the user's, and its arguments."""

    target: str = "???"  # package.module.function, looked for in the current directory first
    # other arguments: +PART.options.NAME=VALUE
    options: dict[str, Any] = field(default_factory=dict[str, Any])
