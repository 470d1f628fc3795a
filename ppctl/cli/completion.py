"""Completion in bash: the script, and what may follow a half-typed line."""

from __future__ import annotations

import os
from importlib import import_module

from ppctl.cli.choices import DRAWN_COSTS
from ppctl.cli.commands import COMMANDS, OTHERS
from ppctl.cli.options import general_options
from ppctl.errors import ConfigError


def complete(words: list[str]) -> int:
    """Print the candidates for bash's COMP_LINE; return 0. `words`: of Hydra's own script, which calls this."""
    del words
    line = os.environ.get("COMP_LINE", "")
    before, last = line.split()[1:], ""
    if before and not line.endswith(" "):
        last = before.pop()
    if not before:
        print(" ".join([*COMMANDS, "--help", "--version"]))
        return 0
    command, *rest = before
    module = import_module(f"ppctl.cli.commands.{command}") if command in OTHERS else None
    if last.startswith("-"):
        print(" ".join(general_options() if module is None else module.option_names()))
        return 0
    found = None if module is None else module.completions([word for word in rest if not word.startswith("-")])
    if found is not None:
        print(" ".join(found))
        return 0
    from ppctl.cli.compose import print_candidates

    # Hydra knows neither the command nor ppctl's own options.
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    drawn = [f"costs={DRAWN_COSTS}"] if command == "schedule" else []
    print_candidates(" ".join(["ppctl", *drawn, *overrides, last]))
    return 0


def print_script(words: list[str]) -> int:
    """Print what bash evaluates to complete ppctl's lines; return 0."""
    if words != ["bash"]:
        raise ConfigError('--completion takes bash: eval "$(ppctl --completion bash)"')
    from ppctl.cli.compose import print_completion_script

    print_completion_script()
    return 0
