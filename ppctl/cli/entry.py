"""The command line: `ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]`.

Nothing of JAX is imported before the request is known to be right, so that a wrong one is refused at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ppctl.cli.choices import DRAWN_COSTS, did_you_mean, shown
from ppctl.cli.commands import examples, init, report, runs, schedule
from ppctl.cli.help import COMMANDS, HEEDED_BY, help_text, overview
from ppctl.cli.options import hydra_flags, job_flags, option_names, parse
from ppctl.cli.overrides import asked as words_of
from ppctl.config import Config
from ppctl.errors import ConfigError, ElsewhereError, PpctlError
from ppctl.launch.local import launch
from ppctl.launch.supervise import end_with_starter

OTHERS = {
    "schedule": schedule,
    "runs": runs,
    "report": report,
    "examples": examples,
    "init": init,
}  # the commands that compose no whole config
OF_SEVERAL_PROCESSES = ("train", "doctor")  # the commands that may run as some; any other is one


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command line; `argv` is without the program's name."""
    try:
        code = _serve(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of `ppctl ... | head` has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end
        return 128 + signal.SIGPIPE
    except ElsewhereError as error:
        return error.exit_code
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
    end_with_starter()
    signal.signal(signal.SIGINT, _end_at_once)
    code = main()
    has_threads = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    jax = sys.modules.get("jax")
    if has_threads or (jax is not None and jax.distributed.is_initialized()):
        # Orbax's threads of a save that failed would hold up the exit for minutes, or for ever. So would JAX where this
        # process leaves a run of several early: it would wait for the others.
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
        print(overview({name: module.ABOUT for name, module in OTHERS.items()}))
        return 0
    if argv[0] == "--version":
        print(f"ppctl {version('ppctl')}")
        return 0
    if argv[0] in ("--completion", "-sc", "--shell-completion"):  # the last two are what Hydra's bash script calls
        return _complete(argv[1:], is_query=argv[0] != "--completion")
    command, *rest = argv
    if command in OTHERS:
        return OTHERS[command].serve(rest)
    if command not in COMMANDS:
        known = [*COMMANDS, *OTHERS]
        if "=" in command:
            raise ConfigError(f"{command}: a command comes first, for example ppctl train {command}.")
        raise ConfigError(f"{command} is not a command.{did_you_mean(command, known)} ({', '.join(known)})")
    asked = parse(rest)
    if asked.help:
        print(help_text(command, asked.overrides))
        return 0
    if asked.config_dir is not None and not Path(asked.config_dir).is_dir():
        raise ConfigError(f"--config-dir {asked.config_dir}: there is no such directory.")

    from ppctl.cli.compose import compose

    config = compose(asked.overrides, hydra_flags(asked), words=[command, *job_flags(asked)])
    if config is None:
        return 0
    if not isinstance(config, Config):
        for job in config.jobs if config.study is None else config.study.samples():
            if job.config is not None:
                refuse_unheeded(command, job.config)
        return import_module("ppctl.launch.sweep.sweep").serve(config, report.write_report_of)
    refuse_unheeded(command, config)
    if not config.launch.is_used:
        return _dispatch(command, config, as_json=asked.json)
    if command != "train" and config.launch.max_restarts:
        raise ConfigError(
            f"launch.max_restarts={config.launch.max_restarts}: only `ppctl train` is started again. Leave it out."
        )
    return launch(config, [command, *job_flags(asked), *asked.overrides], as_json=asked.json)


def refuse_unheeded(command: str, config: Config) -> None:
    """ConfigError for what a request says to other commands, which this one would ignore."""
    default = Config()
    for part, commands in HEEDED_BY.items():
        said = _difference(part, getattr(config, part), getattr(default, part))
        if said and command not in commands:
            *others, last = (f"`ppctl {name}`" for name in commands)
            only = f"{', '.join(others)} and {last}" if others else last
            raise ConfigError(f"{said}: only {only} heed{'s' * (len(commands) == 1)} this. Leave it out.")


def _difference(part: str, asked: Any, default: Any) -> str:
    """The choice or the settings of a part that are not the default, as one types them; nothing where all are."""
    values, usual = asdict(asked), asdict(default)
    if values.get("name") != usual.get("name"):
        return f"{part}={asked.name}"
    return " ".join(f"{part}.{key}={shown(value)}" for key, value in values.items() if value != usual[key])


def _dispatch(command: str, config: Config, *, as_json: bool) -> int:
    """The exit code of the command. Its module is imported here and not above because it imports JAX."""
    if command not in OF_SEVERAL_PROCESSES and config.run.distributed != "off":
        raise ConfigError(
            f"ppctl {command} runs in one process, but run.distributed={config.run.distributed}. "
            "Use run.distributed=off; simulated devices stand in for those of other processes."
        )
    function = getattr(import_module(f"ppctl.cli.commands.{command}"), command)
    if command == "train":
        function = partial(function, words=words_of(asdict(config), config.run.dir).words)
    return function(config, as_json=as_json)


def _complete(words: list[str], *, is_query: bool) -> int:
    """0 after printing bash's completion script, or the candidates for bash's COMP_LINE."""
    from ppctl.cli import compose

    if not is_query:
        if words != ["bash"]:
            raise ConfigError('--completion takes bash: eval "$(ppctl --completion bash)"')
        compose.completion_script()
        return 0
    line = os.environ.get("COMP_LINE", "")
    before, last = line.split()[1:], ""
    if before and not line.endswith(" "):
        last = before.pop()
    if not before:
        print(" ".join([*COMMANDS, *OTHERS, "--help", "--version"]))
    elif last.startswith("-"):
        print(" ".join(OTHERS[before[0]].option_names() if before[0] in OTHERS else option_names()))
    elif before[0] == "runs":
        print(" ".join(runs.completions([word for word in before[1:] if not word.startswith("-")])))
    elif before[0] == "report":
        print(" ".join(report.completions()))
    elif before == ["schedule"]:
        print(" ".join(schedule.SUBCOMMANDS))
    elif before[0] != "examples":
        # Hydra knows neither the command nor ppctl's own options.
        overrides = [word for word in before[1:] if "=" in word and not word.startswith("-")]
        if before[0] == "schedule":
            overrides.insert(0, f"costs={DRAWN_COSTS}")
        compose.completions(" ".join(["ppctl", *overrides, last]))
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _debug() -> None:
    """Prints the traceback of the exception being handled if PPCTL_DEBUG is set."""
    if _is_debugging():
        traceback.print_exc()


def _is_debugging() -> bool:
    return os.environ.get("PPCTL_DEBUG", "0") not in ("", "0")
