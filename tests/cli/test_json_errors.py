"""With `--json` what ends a command is one document on stdout too; the line on stderr and the exit
code stay.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import BY_USER

from ppctl import cli, errors
from ppctl.cli.command_options import COMMANDS, COMPOSED
from ppctl.cli.entry import show_error
from ppctl.errors import PpctlError, error_document
from ppctl.launch.local_processes import ERROR_FILE, error_of

pytestmark = pytest.mark.usefixtures("in_empty_directory")
ERRORS = [
    each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, PpctlError)
]
PAGE = Path(__file__).parents[2] / "docs/command-line.md"


def outcome(capsys, *words):
    code = cli.main([*words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_a_mistake_as_json_and_as_a_line(command, served, capsys):
    words = [command, "--no-such-option"]
    code, out, err = outcome(capsys, *words)
    assert (code, out) == (2, "")
    as_json, document, line = outcome(capsys, *words, "--json")
    assert (as_json, line) == (code, err)
    error = json.loads(document)["error"]
    assert [*error] == ["kind", "message", "remedy"]
    assert (error["kind"], f"ppctl: {error['message']}\n") == ("config", err)


@pytest.mark.parametrize("command", COMPOSED)
def test_a_setting_that_is_refused_has_its_remedy(command, served, capsys):
    code, out, _ = outcome(capsys, command, "model.layrs=3", "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (2, "config")
    assert error["remedy"].startswith("Did you mean model.num_layers? (settings: ")
    assert error["message"].endswith(error["remedy"])


def raising(error):
    def serve(config, words=(), *, as_json):
        raise error

    return serve


@pytest.mark.parametrize(
    "error", [*(each("x.") for each in ERRORS if each is not errors.DamagedError), KeyError("x")]
)
def test_kinds_are_stable_words_that_the_page_lists(error, served, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["ppctl.cli.commands.train"], "train", raising(error))
    code, out, err = outcome(capsys, "train", "--json")
    if isinstance(error, errors.ElsewhereError):  # another process prints it
        assert (code, out, err) == (2, "", "")
        return
    kind = json.loads(out)["error"]["kind"]
    assert kind == getattr(error, "kind", "bug")
    assert f"`{kind}`" in PAGE.read_text()
    assert code == getattr(error, "exit_code", 1)


def test_the_kinds():
    found = {each.__name__: each.kind for each in ERRORS}
    assert found == {
        "PpctlError": "request",
        "ElsewhereError": "request",
        "ConfigError": "config",
        "AgreedError": "config",
        "ScheduleError": "schedule",
        "DataError": "data",
        "CheckpointError": "checkpoint",
        "DamagedError": "checkpoint",
        "SaveError": "save",
        "NonFiniteError": "non_finite",
        "SkippedError": "non_finite",
        "LostError": "process_lost",
        "DeclinedError": "declined",
    }


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("optim.lr=0 must be positive. Use 1e-3.", "Use 1e-3."),
        (
            "a is a part of 2 names: ab, ba. Use a longer part of one, or a path.",
            "Use a longer part of one, or a path.",
        ),
        ("x is wrong. Did you mean y? (settings: y, z)", "Did you mean y? (settings: y, z)"),
        (
            "b is there. Move it away, or name another. It is of no run.",
            "Move it away, or name another. It is of no run.",
        ),
        ("`ppctl runs show` needs the name of a run; `ppctl runs` lists them.", None),
        ("a needs a run. `ppctl runs` lists them.", "`ppctl runs` lists them."),
        ("The loss is nan at step 3.", None),
        ("--out Use.html: no such directory", None),
        ("interrupted.", None),
    ],
)
def test_the_remedy_is_the_imperative_part_of_a_message(message, remedy):
    assert error_document("config", message)["error"] == {
        "kind": "config",
        "message": message,
        "remedy": remedy,
    }


def test_an_interrupt_and_a_full_disk_are_errors_too(served, capsys, monkeypatch):
    monkeypatch.setattr(
        sys.modules["ppctl.cli.commands.train"], "train", raising(KeyboardInterrupt())
    )
    code, out, err = outcome(capsys, "train", "--json")
    assert (code, json.loads(out)["error"]["kind"], err) == (
        130,
        "interrupted",
        "ppctl: interrupted.\n",
    )
    words = [sys.executable, "-m", "ppctl.cli", "schedule", "list", "--json"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=BY_USER)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)


def test_ctrl_c_while_jax_loads_is_printed_as_json():
    code = (
        "import os, signal, sys, types; sys.modules['jax'] = types.ModuleType('jax'); "
        "sys.argv[1:] = ['x', '--json']\n"
        "from ppctl.cli import entry; signal.signal(signal.SIGINT, entry._end_at_once); "
        "os.kill(os.getpid(), 2)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=BY_USER
    )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "ppctl: interrupted.\n")
    assert json.loads(ended.stdout)["error"]["kind"] == "interrupted"


# --- of several processes -----------------------------------------------------------------------


def test_a_process_that_was_launched_leaves_its_error_to_the_launcher(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "0"))
    show_error("data", "no data.", ["train", "--json"])
    assert capsys.readouterr() == ("", "ppctl: no data.\n")
    assert error_of(tmp_path, 2, "process 0 ended") == error_document("data", "no data.")


def test_the_launcher_prints_the_cause_of_a_failure_and_not_its_consequences(tmp_path):
    for number, kind in enumerate(("process_lost", "bug", "data")):
        (tmp_path / str(number)).write_text(json.dumps(error_document(kind, f"{kind}.")))
        os.utime(tmp_path / str(number), (number, number))
    assert error_of(tmp_path, 1, "") == error_document("bug", "bug.")


def test_the_launcher_names_a_killed_process(tmp_path):
    found = error_of(tmp_path, 3, "process 1 of 2 was killed by SIGKILL")
    assert found == error_document("process_lost", "process 1 of 2 was killed by SIGKILL.")
    assert error_of(tmp_path, 1, "") is None  # doctor has a result then


STAND_IN = """
import sys, types

def train(config, words=(), *, as_json):
    from ppctl.errors import DataError
    raise DataError("no data. Use other data.")

sys.modules["ppctl.cli.commands.train"] = types.ModuleType("ppctl.cli.commands.train")
sys.modules["ppctl.cli.commands.train"].train = train
"""


@pytest.mark.full
def test_a_run_of_two_processes_prints_one_document(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    env = BY_USER | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [
        "train",
        "mesh=1x2",
        "launch.processes=2",
        "launch.max_restarts=1",
        "run.platform=cpu",
        "--json",
    ]
    line = [sys.executable, "-m", "ppctl.cli", *words]
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert json.loads(done.stdout) == error_document("data", "no data. Use other data.")
    assert "ppctl: no data. Use other data.\n" in done.stderr
