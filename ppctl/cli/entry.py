"""The command line: `ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]`.

`ppctl train mesh=1x4` goes from `main` to `_serve_composed`: Hydra composes a `Config`
(`ppctl.cli.compose`), and `_run` calls `ppctl.cli.commands.train`. With launch.processes=2,
`ppctl.launch.local_processes` starts the processes. With --multirun, `ppctl.launch.sweep` starts
the jobs. JAX is imported only after the request is checked, so a wrong request fails at once.
"""

import atexit
import errno
import gc
import importlib.metadata
import io
import json
import os
import signal
import sys
import threading
import traceback
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from types import FrameType
from typing import NoReturn

from ppctl import errors
from ppctl.cli import command_options
from ppctl.cli.choices import PARTS, default_option, did_you_mean, request_words
from ppctl.cli.command_options import APPLIES_TO, COMMANDS, COMPOSED, command_help, parse
from ppctl.cli.resume_command import started_with
from ppctl.config import Config
from ppctl.errors import INTERRUPTED, ConfigError, one_line
from ppctl.launch.local_processes import launch, leave_error
from ppctl.launch.supervisor import end_with_starter
from ppctl.schedule.families.registry import build

# new objects before Python looks for garbage: with its default of 700, a fifth of the CPU time of a
# start is a search among modules and traces, which stay
COLLECT_AFTER = 50_000
OF_SEVERAL_PROCESSES = ("train", "doctor")  # commands that may run in several processes


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]) and return its exit code."""
    argv, directory = sys.argv[1:] if argv is None else argv, None
    try:
        with suppress(FileNotFoundError):
            directory = os.getcwd()
        if directory is None:
            raise ConfigError("the current directory was removed. Go to another one.")
        with errors.written_as(errors.as_setting):
            code = _serve(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `ppctl ... | head`: the reader has closed the pipe
        _drop_output()
        return 128 + signal.SIGPIPE
    except errors.ElsewhereError as error:
        return error.exit_code
    except errors.PpctlError as error:
        from ppctl.reports.foreign_files import printable  # the message may quote foreign files

        show_error(error.kind, printable(one_line(error)), argv)
        return error.exit_code
    except KeyboardInterrupt:
        show_error(INTERRUPTED, "interrupted.", argv)
        return 130
    except Exception as error:
        return _show_unexpected(error, argv)


def _show_unexpected(error: Exception, argv: list[str]) -> int:
    """Print an error: a full disk, a missing permission, or else a bug; return its exit code."""
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if is_full and _drop_unwritable():
        why = f"the output cannot be written: {os.strerror(errno.ENOSPC)}."
        show_error(errors.OUTPUT, why, argv)
        return 1
    if isinstance(error, PermissionError) and error.filename is not None:
        remedy = "Change its permissions, or those of its directory."
        show_error(ConfigError.kind, f"{error.filename}: {error.strerror}. {remedy}", argv)
        return ConfigError.exit_code
    traceback.print_exc()
    what = f"{type(error).__name__}: {one_line(error)}"
    report = f"Please report it with the lines above and: ppctl {' '.join(argv)}"
    show_error(errors.BUG, f"this is a bug in ppctl, not in your request: {what}. {report}", argv)
    return 1


def _drop_unwritable() -> bool:
    """Return whether stdout is unwritable, as on a full disk; if so, redirect it to os.devnull."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    """Redirect stdout to os.devnull: Python complains if its flush at exit fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console_script() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    code = 1
    gc.set_threshold(COLLECT_AFTER)
    # Python 3.11 aborts, once in thousands of runs, if an XLA thread takes the interpreter lock
    # during shutdown. So a process that imported JAX skips the shutdown. Registered first, this
    # handler runs last.
    atexit.register(lambda: _leave(code) if "jax" in sys.modules else None)
    end_with_starter()
    signal.signal(signal.SIGINT, _end_at_once)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):  # escapes for characters outside the encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    others = {*threading.enumerate()} - {threading.main_thread()}
    has_threads = not all(thread.daemon for thread in others)
    jax = sys.modules.get("jax")
    if has_threads or (jax is not None and jax.distributed.is_initialized()):
        # Orbax's threads of a failed save would delay the exit for minutes, or forever. So would
        # JAX if this process leaves a run of several processes early: it waits for the others.
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """Flush the output, then end the process without Python's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C until a command installs another handler, as training does.

    JAX cannot handle a KeyboardInterrupt: in its import, the exception becomes an ImportError; in
    its garbage collector's callback, it is lost; in compilation, the process may crash at exit.
    """
    if "jax" not in sys.modules:
        raise KeyboardInterrupt
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # show the cursor, which a spinner hides
    show_error(INTERRUPTED, "interrupted.", sys.argv, in_handler=True)
    os._exit(128 + number)


def _serve(argv: list[str]) -> int:
    """Run a command line and return its exit code; errors are raised, not printed."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(command_options.overview())
        return 0
    command, *words = argv
    if command == "--version":
        print(f"ppctl {importlib.metadata.version('ppctl')}")
        return 0
    if command in command_options.OTHERS:
        module = import_module(f"ppctl.cli.commands.{command}")
        parser = module.parser()
        if {"-h", "--help"} & {*words}:
            parser.print_help()
            return 0
        return module.serve(parser.read(words))
    if command not in COMPOSED:
        if "=" in command:
            example = f"ppctl train {command}"
            raise ConfigError(f"{command}: a command comes first, for example {example}.")
        text, near = command if command.strip() else repr(command), did_you_mean(command, COMMANDS)
        raise ConfigError(f"{text} is not a command.{near} ({', '.join(COMMANDS)})")
    return _serve_composed(command, parse(command, words))


def _serve_composed(command: str, options: Namespace) -> int:
    """Compose and check a config; run the command in this process, in several or as a sweep."""
    # 1. requests without a config
    if options.help:
        print(command_help(command, options.overrides, shows_all=options.all))
        return 0
    # 2. the config, or the sweep
    import yaml

    from ppctl.cli.compose import compose

    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    words = [command, *["--json"] * options.json, *config_dir]
    if options.multirun:
        from ppctl.cli.commands.report import write_report_of
        from ppctl.cli.multirun import compose_sweep
        from ppctl.launch.sweep.run_sweep import run_sweep

        sweep = compose_sweep(options.overrides, options.config_dir, words)
        for job in sweep.jobs if sweep.study is None else sweep.study.samples():
            if job.config is not None:
                refuse_inapplicable(command, job.config)
        return run_sweep(sweep, write_report_of)
    # 3. the command, in this process or in several
    config = compose(options.overrides, options.config_dir)
    refuse_inapplicable(command, config)
    if options.cfg:
        print(yaml.safe_dump(asdict(config), sort_keys=False), end="")
        return 0
    if config.launch.is_used:
        if command != "train" and config.launch.max_restarts:
            key = f"launch.max_restarts={config.launch.max_restarts}"
            raise ConfigError(f"{key}: only `ppctl train` is started again. Leave it out.")
        stored = started_with(options.config_dir, options.overrides)
        return launch(config, [*words, *options.overrides], stored, as_json=options.json)
    return _run(command, config, options)


def _run(command: str, config: Config, options: Namespace) -> int:
    """Run a command on its config; return the exit code. The command's module imports JAX."""
    if command not in OF_SEVERAL_PROCESSES and config.run.distributed != "off":
        raise ConfigError(
            f"ppctl {command} runs in one process, but run.distributed={config.run.distributed}. "
            "Use run.distributed=off; simulated devices stand in for those of other processes."
        )
    if command == "train" and config.executor.ENGINE.is_pipelined:
        request = config.schedule
        if request.name not in ("auto", "csv"):  # checked before JAX is imported
            build(request.name, config.mesh.pp, request.num_microbatches, **request.knobs())
    function = getattr(import_module(f"ppctl.cli.commands.{command}"), command)
    if command == "train":
        stored = started_with(options.config_dir, options.overrides)
        return function(config, words=stored, as_json=options.json)
    return function(config, as_json=options.json)


def refuse_inapplicable(command: str, config: Config) -> None:
    """Raise ConfigError for settings of other commands, which this one would ignore."""
    for name, commands in APPLIES_TO.items():
        part = name.partition(".")[0]
        words = request_words({part: asdict(getattr(config, part))})
        changed = " ".join(word for word in words if word.startswith(name))
        if changed and command not in commands:
            *others, last = (f"`ppctl {each}`" for each in commands)
            names = f"{', '.join(others)} and {last}" if others else last
            or_use = f", or use {name}={default_option(name)}" if name in PARTS else ""
            raise ConfigError(f"{changed}: applies to {names} only. Leave it out{or_use}.")


def show_error(kind: str, message: str, words: Sequence[str], *, in_handler: bool = False) -> None:
    """Print an error to stderr, and as JSON to stdout if --json is in `words`, the command line.

    A child process or a job writes the JSON to a file for its parent instead. in_handler: called in
    a signal handler, which may have interrupted a write to Python's streams.
    """
    _print(2, f"ppctl: {message}\n", in_handler=in_handler)
    document = errors.error_document(kind, message)
    if not leave_error(document) and "--json" in words:
        with suppress(OSError):  # closed pipe, or full disk
            _print(1, json.dumps(document) + "\n", in_handler=in_handler)


def _print(number: int, text: str, *, in_handler: bool) -> None:
    if in_handler:
        os.write(number, text.encode(errors="backslashreplace"))
    else:
        print(text, end="", file=sys.stdout if number == 1 else sys.stderr, flush=True)
