"""A command line reaches its command, and how it ends: exit codes, tracebacks, processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppctl import cli
from ppctl.cli.command_options import COMPOSED
from ppctl.config import Config, Interleaved
from ppctl.errors import CheckpointError, NonFiniteError

PPCTL = str(Path(sys.executable).parent / "ppctl")
pytestmark = pytest.mark.usefixtures("in_empty_directory")


def test_a_request_reaches_its_command_as_dataclasses(served):
    assert (
        cli.main(["train", "mesh=1x4", "schedule.num_microbatches=16", "--json", "run.name=x"]) == 0
    )
    [(command, config, as_json)] = served
    assert (command, as_json) == ("train", True)
    assert isinstance(config, Config)
    assert config.schedule == Interleaved(num_microbatches=16)
    assert (config.mesh.text, config.run.dir) == ("1x4", "runs/x")


@pytest.mark.parametrize("command", COMPOSED)
def test_every_command_is_served_and_leaves_no_files(command, served, in_empty_directory):
    before = os.environ.copy(), list(sys.argv)
    assert cli.main([command]) == 0
    assert [name for name, _, _ in served] == [command]
    assert list(in_empty_directory.iterdir()) == []
    assert (os.environ.copy(), sys.argv) == before


def raising(error):
    def serve(config, words=(), *, as_json):
        raise error

    return serve


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckpointError("no checkpoint\nin runs/x."), 2, "ppctl: no checkpoint in runs/x.\n"),
        (NonFiniteError("loss=nan at step 3."), 4, "ppctl: loss=nan at step 3.\n"),
        (KeyboardInterrupt(), 130, "ppctl: interrupted.\n"),
    ],
)
def test_a_commands_errors_have_their_exit_codes(error, code, text, served, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["ppctl.cli.commands.train"], "train", raising(error))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback_and_requests_a_report(served, capsys, monkeypatch):
    monkeypatch.setattr(
        sys.modules["ppctl.cli.commands.train"], "train", raising(RuntimeError("boom"))
    )
    assert cli.main(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ppctl: this is a bug in ppctl, not in your request: RuntimeError: boom" in err


def test_a_wrong_request_loads_no_jax_and_is_fast():
    code = (
        "import sys; from ppctl.cli import main; c = main(['train', 'model.layrs=3']); print(c, "
        "'jax' in sys.modules)"
    )
    before = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert os.times().children_user - before < 2  # CPU seconds: a busy machine does not count


def test_the_console_script_and_the_module_are_the_same_program():
    for program in ([PPCTL], [sys.executable, "-m", "ppctl.cli"]):
        done = subprocess.run(
            [*program, "train", "mesh=2x"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("ppctl: mesh=2x is not a mesh")


def test_letters_that_the_output_has_not_are_escaped(tmp_path):
    directory = tmp_path / "Läufe"
    directory.mkdir()
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "20", "TERM": "dumb"}
    words = [PPCTL, "runs", str(directory)]
    done = subprocess.run(words, capture_output=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"L\\xe4ufe.\n")


@pytest.mark.parametrize(
    "words", [("schedule", "list", "mesh=1x4"), ("schedule", "show"), ("train", "--help")]
)
def test_a_closed_pipe_ends_a_command_as_it_ends_other_programs(words):
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [PPCTL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, b"")


def test_an_output_that_is_closed_is_dropped(tmp_path):
    command = f"{shlex.quote(PPCTL)} runs {shlex.quote(str(tmp_path))} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


ENDING = """
import atexit, sys, types
from ppctl.cli import entry

class Loud:
    def __del__(self):
        print("torn down")

loud = Loud()
entry.main = lambda: 7
entry.end_with_starter = lambda: atexit.register(print, "a handler of others")
if sys.argv[1:]:
    of_one = types.SimpleNamespace(is_initialized=lambda: False)
    sys.modules["jax"] = types.SimpleNamespace(distributed=of_one)
entry.console_script()
"""


def test_where_jax_was_handlers_run_at_the_end_and_the_interpreter_is_not_torn_down():
    for words, said in (
        ((), ["a handler of others", "torn down"]),
        (("jax",), ["a handler of others"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", ENDING, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.splitlines(), done.stderr) == (7, said, "")


@pytest.mark.parametrize("command", ["runs", "train recipes=tiny", "init x", "import m --out x"])
def test_a_removed_current_directory_is_named_in_one_line(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(command.split()) == 2
    line = "ppctl: the current directory was removed. Go to another one.\n"
    assert capsys.readouterr().err == line
