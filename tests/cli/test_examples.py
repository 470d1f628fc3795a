"""`ppctl examples`: each is a command that composes."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from ppctl import cli
from ppctl.cli.command_options import COMMANDS, EXAMPLES


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [command for _, command in EXAMPLES])
def test_every_example_composes(command, capsys):
    program, *words = shlex.split(command)
    assert program == "ppctl"
    if words[0] == "init":
        assert cli.main(words) == 0
        assert os.listdir() == words[1:2]
    elif words[0] == "tokenize":
        Path("notes.txt").write_text("notes to learn from")
        assert cli.main(words) == 0
        assert Path("tokenizer/tokenizer.json").exists()
    elif words[0] == "runs":
        Path("runs/tiny").mkdir(parents=True)
        Path("runs/tiny/metrics.jsonl").touch()
        assert cli.main(words) == 0
        assert "tiny" in capsys.readouterr().out
    elif words[0] == "report":
        Path("runs/tiny").mkdir(parents=True)
        Path("runs/tiny/metrics.jsonl").touch()
        assert cli.main(words) == 0
        assert Path("runs/tiny/report.html").exists()
    elif words[0] in (
        "import",
        "export",
        "generate",
        "evaluate",
        "stop",
    ):  # only a missing file is wrong
        assert cli.main(words) == 2
        assert re.search(
            r"(DIR|tiny).* (is no run|is not there|has no config.json)", capsys.readouterr().err
        )
    elif words[0] == "schedule":  # starts no JAX: it may as well run
        assert cli.main(words) == 0
        assert "bubble" in capsys.readouterr().out
    else:
        if "--multirun" in words:  # each combination is a job; the first one stands for them
            words = [word.split(",")[0] for word in words if word != "--multirun"]
        assert cli.main([*words, "--cfg", "job"]) == 0
        assert "num_microbatches" in capsys.readouterr().out
        assert os.listdir() == []


def test_every_command_has_an_example():
    commands = {command.split()[1] for _, command in EXAMPLES}
    assert commands == {*COMMANDS} - {"examples"}


def test_example_commands_are_printed_to_be_copied(capsys):
    assert cli.main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ppctl ")] == [
        command for _, command in EXAMPLES
    ]
    assert all(re.match(r"# |ppctl |$", line) for line in lines)
    assert max(map(len, lines)) <= 120
    assert cli.main(["examples", "--json"]) == 0
    assert [each["command"] for each in json.loads(capsys.readouterr().out)] == [
        command for _, command in EXAMPLES
    ]


def test_ppctl_without_a_command_shows_three_examples_and_names_the_list(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    shown = [line.strip() for line in out.splitlines() if line.startswith("  ppctl")]
    assert [line.split()[1] for line in shown] == ["train", "schedule", "plan"]
    assert {*shown} <= {command for _, command in EXAMPLES}
    assert "`ppctl examples` has more" in out


@pytest.mark.parametrize("word", ["tune", "x=1"])
def test_other_words_are_refused(word, capsys):
    assert cli.main(["examples", word]) == 2
    assert capsys.readouterr().err == f"ppctl: `ppctl examples` takes no words, not {word}.\n"
