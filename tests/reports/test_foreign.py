"""Run files that others wrote: halves of surrogates, escape sequences, pipes, files in the place of directories."""

import json
import os
import subprocess
import sys

import pytest

from ppctl import cli
from ppctl.reports import run_files
from ppctl.reports.foreign import open_file, printable

HOSTILE = "bad \\ud800 \\u001b[31mred\\u001b]0;title\\u0007 \\u009b2J"


def make_run(path):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("model:\n  name: mlp\nrun:\n  num_steps: 5\n")
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    return path


def test_texts_of_a_run_are_made_printable(tmp_path, capsys):
    run = make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/\x1b[2J")
    (run / "status.jsonl").write_text(
        f'{{"status": "started", "step": 0, "host": "{HOSTILE}", "pid": 1, "at": 1.0}}\n'
        f'{{"status": "failed", "reason": "{HOSTILE}", "at": 2.0}}\n'
    )
    (run / "memory.json").write_text(f'{{"ranks": [{{"{HOSTILE}": 1}}]}}')
    page = tmp_path / "page.html"
    for words in (["runs", str(tmp_path / "runs")], ["runs", "show", "a", str(tmp_path / "runs")]):
        assert cli.main(words) == 0
    assert cli.main(["report", str(run), "--out", str(page)]) == 0
    shown = capsys.readouterr().out + page.read_text()
    assert "\\x1b[31mred" in shown
    assert "\\x1b[2J" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl", "status.jsonl", "config.yaml", "memory.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, file, capsys):
    run = make_run(tmp_path / "runs/a")
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    assert cli.main(["runs", str(tmp_path / "runs")]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) in (0, 2)
    with pytest.raises(OSError, match="No plain file"):
        open_file(run / file)


def test_only_a_directory_is_a_checkpoint(tmp_path):
    (tmp_path / "7").write_text("")
    (tmp_path / "8").mkdir()
    assert run_files.checkpoint_steps(tmp_path) == (8,)


def test_letters_of_all_languages_stay():
    assert printable("Größe 模型 \u00a0\U0001f680\n\t") == "Größe 模型 \u00a0\U0001f680\n\t"


def test_output_to_a_full_disk_is_said_in_a_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "ppctl.cli", "schedule", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "ppctl: the output cannot be written: No space left on device.\n"
