"""The command line: `ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]`.

Nothing of JAX is imported before the request is known to be right, so that a wrong one is refused at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ppctl.choices import (
    GROUPS,
    PARTS,
    Setting,
    all_settings,
    default_option,
    did_you_mean,
    options,
    schema_of,
    settings_of,
    shown,
    wrong_option,
)
from ppctl.config import Config, Run
from ppctl.errors import ConfigError, PpctlError

COMMANDS = {  # command: module that serves it, one line
    "train": ("ppctl.run", "train a model; metrics and checkpoints go to run.dir, and the same line resumes"),
    "verify": ("ppctl.verify", "show that the pipelined gradients equal those of the un-pipelined model"),
    "bench": ("ppctl.bench", "time the training step beside its prediction and the un-pipelined model"),
}
EXAMPLES = {
    "train": (
        "ppctl train recipes=tiny",
        "ppctl train model=transformer mesh=2x4 schedule=interleaved schedule.num_microbatches=16",
        "ppctl train data=text data.path=notes.txt run.name=notes run.num_steps=1000",
        "ppctl train --multirun schedule=gpipe,eager_1f1b mesh=1x2,1x4",
    ),
    "verify": (
        "ppctl verify mesh=1x4 schedule=1f1b run.dtype=float64 --json",
        "ppctl verify recipes=tiny schedule=gpipe",
    ),
    "bench": (
        "ppctl bench mesh=1x4 schedule=gpipe",
        "ppctl bench --multirun schedule=gpipe,interleaved --json",
    ),
}
MOST_USED = (
    "model.num_layers",
    "model.d_model",
    "model.seq_len",
    "schedule.num_microbatches",
    "schedule.num_chunks",
    "executor.remat",
    "optim.lr",
    "optim.warmup_steps",
    "data.batch_size",
    "run.name",
    "run.dir",
    "run.num_steps",
    "run.seed",
    "run.dtype",
    "run.platform",
    "run.resume",
    "run.eval_every",
    "run.checkpoint.every",
    "run.profile.start",
)
FLAGS = """\
  --json            print the result as JSON on stdout
  --cfg job         print the composed config as YAML and stop (--resolve: with ${...} filled in)
  --info TOPIC      where the config comes from: config, defaults, defaults-tree, plugins, searchpath
  -m, --multirun    run every combination of KEY=A,B,...: each in a process and a run.dir of its own
  --config-dir DIR  look for groups and recipes in DIR too (DIR/recipes/x.yaml is recipes=x)
  -h, --help        this text; with part names (`--help model run`): all settings of these"""
EXIT_CODES = """\
  0  done
  1  the check failed (verify), training met a loss that is not finite, a job of a sweep failed, or a bug
  2  the request is wrong; nothing was started
  130, 143  interrupted (Ctrl-C, SIGTERM), after saving a checkpoint if training had begun"""


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command line; `argv` is without the program's name."""
    try:
        return _serve(sys.argv[1:] if argv is None else argv)
    except PpctlError as error:
        _debug()
        print(f"ppctl: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        _debug()
        print("ppctl: interrupted.", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        print(
            f"ppctl: this is a bug in ppctl, not in your request: {type(error).__name__}: {_one_line(str(error))}. "
            f"Please report it with the lines above and: ppctl {' '.join(argv or sys.argv[1:])}",
            file=sys.stderr,
        )
        return 1


def console_script() -> NoReturn:
    """Ends the process with the exit code of its command line."""
    signal.signal(signal.SIGINT, _end_at_once)
    code = main()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        # Orbax's threads of a save that failed would hold up the exit for minutes, or for ever.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Answers Ctrl-C until a command sets a handler of its own, as training does.

    JAX takes no KeyboardInterrupt: raised in its import it becomes an ImportError, in its garbage collector's callback
    it is lost, while it compiles the process may crash when it exits.
    """
    if "jax" not in sys.modules:
        raise KeyboardInterrupt
    if _is_debugging():
        traceback.print_stack(frame)
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a spinner hides it
    os.write(2, show_cursor + b"ppctl: interrupted.\n")
    os._exit(128 + number)


def _serve(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"ppctl {version('ppctl')}")
        return 0
    if argv[0] in ("--completion", "-sc", "--shell-completion"):  # the last two are what Hydra's bash script calls
        return _complete(argv[1:], is_query=argv[0] != "--completion")
    command, *rest = argv
    if command not in COMMANDS:
        if "=" in command:
            raise ConfigError(f"{command}: a command comes first, for example ppctl train {command}.")
        raise ConfigError(f"{command} is not a command.{did_you_mean(command, COMMANDS)} ({', '.join(COMMANDS)})")
    asked = _parse(rest)
    if asked.help:
        print(_help(command, asked.overrides))
        return 0
    if asked.config_dir is not None and not Path(asked.config_dir).is_dir():
        raise ConfigError(f"--config-dir {asked.config_dir}: there is no such directory.")

    from ppctl.hydra_glue import compose

    config = compose(asked.overrides, _hydra_flags(asked), words=[command, *_job_flags(asked)])
    return config if isinstance(config, int) else _dispatch(command, config, as_json=asked.json)


def _dispatch(command: str, config: Config, *, as_json: bool) -> int:
    """The exit code of the command. Its module is imported here and not above because it imports JAX."""
    return getattr(import_module(COMMANDS[command][0]), command)(config, as_json=as_json)


# --- the command line's own options ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ppctl", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-i", "--info", choices=["config", "defaults", "defaults-tree", "plugins", "searchpath"])
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    return parser


def _parse(words: list[str]) -> argparse.Namespace:
    """The options and overrides in `words`, in any order; ConfigError for options that there are not."""
    asked, unknown = _parser().parse_known_intermixed_args(words)
    if unknown:
        known, bad = _option_names(), unknown[0].partition("=")[0]
        raise ConfigError(f"{bad} is not an option.{did_you_mean(bad, known)} ({', '.join(known)})")
    modes = [f"--{name}" for name in ("cfg", "info", "multirun") if getattr(asked, name)]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other.")
    if asked.resolve and asked.cfg is None:
        raise ConfigError("--resolve only goes with --cfg.")
    return asked


def _hydra_flags(asked: argparse.Namespace) -> list[str]:
    flags = ["--multirun"] * asked.multirun + ["--resolve"] * asked.resolve
    for name in ("cfg", "info", "config_dir"):
        if getattr(asked, name) is not None:
            flags += [f"--{name.replace('_', '-')}", getattr(asked, name)]
    return flags


def _job_flags(asked: argparse.Namespace) -> list[str]:
    """The options that each job of a sweep shares with the sweep."""
    return ["--json"] * asked.json + (["--config-dir", asked.config_dir] if asked.config_dir else [])


# --- help ------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    lines = [f"  {name:7} {about}" for name, (_, about) in COMMANDS.items()]
    examples = [f"  {lines[0]}" for lines in EXAMPLES.values()]
    return "\n".join(
        [
            "Pipeline-parallel training in JAX.",
            "",
            "Usage: ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]",
            "",
            "Commands:",
            *lines,
            "",
            "Examples:",
            *examples,
            "",
            "`ppctl COMMAND --help` shows groups, settings and options; `ppctl --version` the version.",
            'Completion in bash: eval "$(ppctl --completion bash)"',
        ]
    )


def _help(command: str, words: Sequence[str]) -> str:
    """The help of a command, or all settings of the parts named by `words` (`model`, `model=mlp`, `run`)."""
    if words:
        return "\n\n".join(_part_help(word) for word in words)
    known = all_settings()
    groups = [f"  {group:9} {_options_text(group)}" for group in GROUPS]
    used = _table([known[key] for key in MOST_USED])
    return "\n".join(
        [
            f"ppctl {command}: {COMMANDS[command][1]}.",
            "",
            f"Usage: ppctl {command} [GROUP=OPTION ...] [SETTING=VALUE ...] [--json]",
            "",
            "Groups (the first option is the default):",
            *groups,
            "",
            f"Settings most used, with defaults (all of a part: ppctl {command} --help model; all: --cfg job):",
            used,
            "",
            "Options:",
            FLAGS,
            "",
            "Examples:",
            *(f"  {line}" for line in EXAMPLES[command]),
            "",
            "Exit codes:",
            EXIT_CODES,
        ]
    )


def _options_text(group: str) -> str:
    if group == "mesh":
        return f"{default_option('mesh')} | any DPxPP or DPxPPxFSDP: data-parallel rows x pipeline ranks x shards"
    return " | ".join(options(group)) if group != "recipes" else ", ".join(options(group)) + " (complete runs)"


def _part_help(word: str) -> str:
    """All settings of a part, for each of its options unless `word` names one."""
    key, _, option = word.partition("=")
    part = key.split(".")[0]
    if part == "run":
        return f"run: {Run.__doc__}\n{_table(settings_of('run', Run).values())}"
    if part not in PARTS:
        raise ConfigError(f"{part} is not a part with settings.{did_you_mean(part, [*PARTS, 'run'])}")
    one = part == "mesh" or (option and part == key)
    names = [option or default_option(part)] if one else options(part)
    if part != "mesh" and not set(names) <= set(options(part)):
        raise ConfigError(wrong_option(part, option, options(part)))
    schemas = {name: schema_of(part, name) for name in names}
    return "\n\n".join(
        f"{part}={name}: {cls.__doc__}\n{_table(settings_of(part, cls).values())}" for name, cls in schemas.items()
    )


def _table(settings: Iterable[Setting]) -> str:
    rows = [
        (f"{s.key}={'...' if s.default == '???' else shown(s.default)}", s.about.replace("None", "null"))
        for s in settings
    ]
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"  {left:{width}}  {about}".rstrip() for left, about in rows)


# --- odds and ends ---------------------------------------------------------------------------------------------------


def _complete(words: list[str], *, is_query: bool) -> int:
    """0 after printing bash's completion script, or the candidates for bash's COMP_LINE."""
    from ppctl import hydra_glue

    if not is_query:
        if words != ["bash"]:
            raise ConfigError('--completion takes bash: eval "$(ppctl --completion bash)"')
        hydra_glue.completion_script()
        return 0
    line = os.environ.get("COMP_LINE", "")
    before, last = line.split()[1:], ""
    if before and not line.endswith(" "):
        last = before.pop()
    if not before:
        print(" ".join([*COMMANDS, "--help", "--version"]))
    elif last.startswith("-"):
        print(" ".join(_option_names()))
    else:
        # Hydra knows neither the command nor ppctl's own options.
        overrides = [word for word in before[1:] if "=" in word and not word.startswith("-")]
        hydra_glue.completions(" ".join(["ppctl", *overrides, last]))
    return 0


def _option_names() -> list[str]:
    return [name for action in _parser()._actions for name in action.option_strings]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _debug() -> None:
    """Prints the traceback of the exception being handled if PPCTL_DEBUG is set."""
    if _is_debugging():
        traceback.print_exc()


def _is_debugging() -> bool:
    return os.environ.get("PPCTL_DEBUG", "0") not in ("", "0")


if __name__ == "__main__":
    console_script()
