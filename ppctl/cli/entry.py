"""The command line: `ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]`.

`ppctl train mesh=1x4` goes from `main` to `_serve_composed`, which lets Hydra compose a `Config`
(`ppctl.cli.compose`), and by `_run` to `ppctl.cli.commands.train`; with launch.processes=2 to `ppctl.launch.local`,
which starts such processes, and with --multirun to `ppctl.launch.sweep`, which starts such jobs. Nothing of JAX is
imported before the request is known to be right, so that a wrong one is refused at once.
"""

from __future__ import annotations

import atexit
import errno
import importlib.metadata
import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ppctl.cli import completion
from ppctl.cli.choices import did_you_mean, shown
from ppctl.cli.commands import COMMANDS, COMPOSED, OTHERS
from ppctl.cli.help import APPLIES_TO, command_help, overview
from ppctl.cli.options import hydra_flags, job_flags, parse
from ppctl.cli.overrides import started_with
from ppctl.cli.show_error import show_error
from ppctl.config import Config
from ppctl.errors import BUG, INTERRUPTED, OUTPUT, ConfigError, ElsewhereError, PpctlError
from ppctl.launch.local import launch
from ppctl.launch.supervise import end_with_starter

OF_SEVERAL_PROCESSES = ("train", "doctor")  # the commands that may run as some; any other is one


def main(argv: list[str] | None = None) -> int:
    """Serve a command line; return the exit code. `argv` is without the program's name."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _serve(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of `ppctl ... | head` has gone
        _drop_output()
        return 128 + signal.SIGPIPE
    except ElsewhereError as error:
        return error.exit_code
    except PpctlError as error:
        _debug()
        show_error(error.kind, _one_line(str(error)), argv)
        return error.exit_code
    except KeyboardInterrupt:
        _debug()
        show_error(INTERRUPTED, "interrupted.", argv)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None and _is_full():
            show_error(OUTPUT, f"the output cannot be written: {error.strerror}.", argv)
            return 1
        traceback.print_exc()
        show_error(
            BUG,
            f"this is a bug in ppctl, not in your request: {type(error).__name__}: {_one_line(str(error))}. "
            f"Please report it with the lines above and: ppctl {' '.join(argv)}",
            argv,
        )
        return 1


def _is_full() -> bool:
    """Return whether what was printed cannot be written, as to a full disk; it is dropped then."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end


def console_script() -> NoReturn:
    """Serve the command line of this process, and end it with the exit code."""
    code = 1
    # Python 3.11 aborts where a thread of XLA's asks for the interpreter while that is torn down, once in thousands of
    # runs: where JAX was, nothing is torn down. Registered before all others, this runs after them.
    atexit.register(lambda: _leave(code) if "jax" in sys.modules else None)
    end_with_starter()
    signal.signal(signal.SIGINT, _end_at_once)
    code = main()
    has_threads = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    jax = sys.modules.get("jax")
    if has_threads or (jax is not None and jax.distributed.is_initialized()):
        # Orbax's threads of a save that failed would hold up the exit for minutes, or for ever. So would JAX where this
        # process leaves a run of several early: it would wait for the others.
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Answer Ctrl-C until a command sets a handler of its own, as training does.

    JAX takes no KeyboardInterrupt: raised in its import it becomes an ImportError, in its garbage collector's callback
    it is lost, while it compiles the process may crash when it exits.
    """
    if "jax" not in sys.modules:
        raise KeyboardInterrupt
    if _is_debugging():
        traceback.print_stack(frame)
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a spinner hides the cursor
    show_error(INTERRUPTED, "interrupted.", sys.argv, in_handler=True)
    os._exit(128 + number)


def _serve(argv: list[str]) -> int:
    """Return the exit code of a command line, whose errors are still exceptions."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    command, *words = argv
    if command == "--version":
        print(f"ppctl {importlib.metadata.version('ppctl')}")
        return 0
    if command == "--completion":
        return completion.print_script(words)
    if command in ("-sc", "--shell-completion"):  # what Hydra's bash script calls
        return completion.complete(words)
    if command in OTHERS:
        return import_module(f"ppctl.cli.commands.{command}").serve(words)
    if command not in COMPOSED:
        if "=" in command:
            raise ConfigError(f"{command}: a command comes first, for example ppctl train {command}.")
        shown = command if command.strip() else repr(command)
        raise ConfigError(f"{shown} is not a command.{did_you_mean(command, COMMANDS)} ({', '.join(COMMANDS)})")
    return _serve_composed(command, parse(words))


def _serve_composed(command: str, options: Namespace) -> int:
    """Compose the config that a command needs, check it, and run the command here, in processes or in jobs."""
    if options.help:
        print(command_help(command, options.overrides))
        return 0
    if options.published is not None:
        return _serve_published(command, options)
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        raise ConfigError(f"--config-dir {options.config_dir}: there is no such directory.")
    from ppctl.cli.compose import compose

    words = [command, *job_flags(options)]
    config = compose(options.overrides, hydra_flags(options), words=words)
    if config is None:  # Hydra has shown what its flags ask for
        return 0
    if not isinstance(config, Config):
        from ppctl.cli.commands.report import write_report_of
        from ppctl.cli.sweep_data import with_data_checked
        from ppctl.launch.sweep.sweep import run_sweep

        for job in config.jobs if config.study is None else config.study.samples():
            if job.config is not None:
                refuse_inapplicable(command, job.config)
        return run_sweep(config, write_report_of, with_data_checked)
    refuse_inapplicable(command, config)
    if config.launch.is_used:
        if command != "train" and config.launch.max_restarts:
            raise ConfigError(
                f"launch.max_restarts={config.launch.max_restarts}: only `ppctl train` is started again. Leave it out."
            )
        stored = started_with(options.config_dir, options.overrides)
        return launch(config, [*words, *options.overrides], stored, as_json=options.json)
    return _run(command, config, options)


def _serve_published(command: str, options: Namespace) -> int:
    """Run `ppctl plan --published FILE`, which takes its requests from the file."""
    option = f"--published {options.published}"
    if command != "plan":
        raise ConfigError(f"{option}: applies to `ppctl plan` only. Leave it out.")
    others = [*options.overrides, *(f"--{name}" for name in ("cfg", "info", "multirun") if getattr(options, name))]
    if others:
        raise ConfigError(
            f"{option}: the requests are those of the file, so that {others[0]} changes none. Leave it out."
        )
    published = import_module("ppctl.cli.commands.plan").published
    return published(options.published, options.picture, as_json=options.json)


def _run(command: str, config: Config, options: Namespace) -> int:
    """Run a command on its config; return the exit code. Its module is imported here because it imports JAX."""
    if command not in OF_SEVERAL_PROCESSES and config.run.distributed != "off":
        raise ConfigError(
            f"ppctl {command} runs in one process, but run.distributed={config.run.distributed}. "
            "Use run.distributed=off; simulated devices stand in for those of other processes."
        )
    function = getattr(import_module(f"ppctl.cli.commands.{command}"), command)
    if command == "train":
        stored = started_with(options.config_dir, options.overrides)
        return function(config, words=stored, as_json=options.json)
    return function(config, as_json=options.json)


def refuse_inapplicable(command: str, config: Config) -> None:
    """Raise ConfigError for settings that apply to other commands, and that this one would ignore."""
    default = Config()
    for part, commands in APPLIES_TO.items():
        usual = getattr(default, part)
        changed = _difference(part, getattr(config, part), usual)
        if changed and command not in commands:
            *others, last = (f"`ppctl {name}`" for name in commands)
            names = f"{', '.join(others)} and {last}" if others else last
            remedy = "Leave it out" + (f", or use {part}={usual.name}" if changed.startswith(f"{part}=") else "")
            raise ConfigError(f"{changed}: applies to {names} only. {remedy}.")


def _difference(part: str, value: Any, default: Any) -> str:
    """Return the choice or the settings of a part that are not the default, as one types them; empty where all are."""
    values, usual = asdict(value), asdict(default)
    if values.get("name") != usual.get("name"):
        return f"{part}={value.name}"
    return " ".join(f"{part}.{key}={shown(value)}" for key, value in values.items() if value != usual[key])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _debug() -> None:
    """Print the traceback of the exception being handled if PPCTL_DEBUG is set."""
    if _is_debugging():
        traceback.print_exc()


def _is_debugging() -> bool:
    return os.environ.get("PPCTL_DEBUG", "0") not in ("", "0")
