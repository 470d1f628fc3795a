"""Completion in bash, zsh and fish: their scripts, and what may follow a half-typed line."""

from __future__ import annotations

import os
from importlib import import_module

from ppctl.cli.choices import DRAWN_COSTS
from ppctl.cli.command_options import general_options
from ppctl.cli.commands import COMMANDS, OTHERS
from ppctl.errors import ConfigError

# Each asks `ppctl -sc` with the line so far in COMP_LINE, as bash does. What ends in = or . goes
# on, all else is whole; where there is no candidate, a file may follow.
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_ppctl() {
  local -a found
  found=(${=$(COMP_LINE="${(j: :)words[1,CURRENT]}" $words[1] -sc query=zsh 2> /dev/null)})
  compadd -S '' -- ${(M)found:#*[=./]}
  compadd -- ${found:#*[=./]}
  (( $#found )) || _files
}
compdef _ppctl ppctl"""
FISH = """\
function __ppctl_complete
    set -lx COMP_LINE (commandline -cp)
    set -l words (commandline -opc)
    set -l found ($words[1] -sc query=fish 2> /dev/null | string split -n ' ')
    if set -q found[1]
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c ppctl -f -a '(__ppctl_complete)'"""
HOW = {
    "bash": 'eval "$(ppctl --completion bash)"',
    "zsh": 'eval "$(ppctl --completion zsh)"',
    "fish": "ppctl --completion fish | source",
}


def complete() -> int:
    """Print the candidates for the line in COMP_LINE; return 0."""
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
    plain = [word for word in rest if not word.startswith("-")]
    found = None if module is None else module.completions(plain)
    if found is not None:
        print(" ".join(found))
        return 0
    from ppctl.cli.compose import print_candidates

    # Hydra knows neither the command nor ppctl's own options.
    overrides = [word for word in plain if "=" in word]
    drawn = [f"costs={DRAWN_COSTS}"] if command == "schedule" else []
    print_candidates(" ".join(["ppctl", *drawn, *overrides, last]))
    return 0


def print_script(words: list[str]) -> int:
    """Print what a shell evaluates to complete ppctl's lines; return 0."""
    if len(words) != 1 or words[0] not in HOW:
        shown = " ".join(words) or "nothing"
        raise ConfigError(f"--completion takes {', '.join(HOW)}, not {shown}: {HOW['bash']}")
    if words == ["bash"]:
        from ppctl.cli.compose import print_completion_script

        print_completion_script()
    else:
        print({"zsh": ZSH, "fish": FISH}[words[0]])
    return 0
