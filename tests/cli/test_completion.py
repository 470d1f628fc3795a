"""What the shells complete: names of commands, of options and of runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ppctl import cli

pytestmark = pytest.mark.usefixtures("in_empty_directory")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ppctl ru", {"runs", "examples", "train"}),
        ("ppctl runs ", {"show", "rm"}),
        ("ppctl runs --so", {"--sort", "--columns", "--yes"}),
        ("ppctl runs rm ", {"a", "sweep/lr=1"}),
        ("ppctl runs rm a ", {"sweep/lr=1"}),
        ("ppctl runs --js", {"--json", "--help"}),
        ("ppctl runs show ", {"a", "sweep/lr=1", "sweep"}),
        ("ppctl runs --json show sw", {"a", "sweep/lr=1"}),
        ("ppctl examples --js", {"--json", "--help"}),
    ],
)
def test_bash_completes(line, expected, capsys, monkeypatch):
    for name in ("a", "sweep/lr=1", "with a blank"):
        (Path("runs") / name).mkdir(parents=True)
        (Path("runs") / name / "metrics.jsonl").touch()
    Path("runs/sweep/multirun.yaml").touch()
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    found = set(capsys.readouterr().out.split())
    assert expected <= found
    assert "blank" not in found


def test_a_run_that_is_named_already_is_no_candidate(capsys, monkeypatch):
    for name in ("a", "b"):
        (Path("runs") / name).mkdir(parents=True)
        (Path("runs") / name / "metrics.jsonl").touch()
    for line, expected in {"ppctl runs rm a ": ["b"], "ppctl runs show a ": []}.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert cli.main(["-sc", "query=bash"]) == 0
        assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize(
    ("shell", "texts"),
    [
        ("bash", ["complete -o nospace"]),
        ("zsh", ["compdef _ppctl ppctl", "-sc query=zsh"]),
        ("fish", ["complete -c ppctl"]),
    ],
)
def test_each_shell_has_a_script(shell, texts, capsys):
    assert cli.main(["--completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in texts)
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=out, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "not nothing"), (["csh"], "not csh"), (["zsh", "fish"], "not zsh fish")],
)
def test_another_shell_is_refused(words, told, capsys):
    assert cli.main(["--completion", *words]) == 2
    assert f"--completion takes bash, zsh, fish, {told}: eval" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["ppctl runs show ", "ppctl runs show x ", "ppctl examples "])
def test_completion_without_candidates_is_silent(line, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.strip() == ""
