"""The page of a run: where it ran, its speed and memory, and how its file is replaced."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.report_of_a import report, run_of_two_steps

from ppctl import cli


@pytest.fixture(autouse=True)
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return run_of_two_steps()


# --- where it ran -------------------------------------------------------------------------------


def test_each_start_has_its_devices_and_changed_versions(run_dir, capsys):
    start = {
        "status": "started",
        "host": "n1",
        "at": 1.8e9,
        "step": 0,
        "num_devices": 8,
        "num_processes": 2,
    }
    start |= {
        "device_kind": "H100",
        "platform": "gpu",
        "system": "Linux",
        "versions": {"python": "3.12", "jax": "1.0"},
    }
    other = start | {
        "host": "n2",
        "step": 5,
        "num_processes": 1,
        "versions": {"python": "3.12", "jax": "1.1"},
    }
    old = {"status": "started", "host": "n0", "at": 1.7e9, "step": 0}
    (run_dir / "status.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (old, start, other))
    )
    assert cli.main(["report", "a", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["runs"]
    assert said["versions"] == {"python": "3.12", "jax": "1.1"}
    assert [each["step"] for each in said["starts"]] == [0, 0, 5]
    seen = re.sub(r"\s+", " ", report(capsys)[1])
    assert (
        "08:00:00Z step 0 n1 8 x H100 (gpu), 2 processes, Linux python 3.12, jax 1.0 2027" in seen
    )
    assert "step 5 n2 8 x H100 (gpu), Linux jax 1.1" in seen
    assert "step 0 n0" in seen


# --- speed, and files ---------------------------------------------------------------------------


def test_a_report_that_cannot_be_replaced_stays_whole(run_dir, capsys, monkeypatch):
    file = run_dir / "report.html"
    assert cli.main(["report", "a"]) == 0
    before = file.read_bytes()
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    assert cli.main(["report", "a"]) == 2
    assert "report.html cannot be written: No space left on device" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert [path.name for path in run_dir.iterdir() if path.suffix == ".part"] == []


def test_a_link_is_followed_when_a_file_is_replaced(tmp_path):
    from ppctl.reports.terminal_output import replace_file

    target = tmp_path / "there.txt"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to(target)
    replace_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
    replace_file(Path("/dev/null"), b"x")
    assert not Path("/dev/null").is_file()


def sizes(*of_ranks):
    return json.dumps(
        {"step": 0, "ranks": [{"parameters": a, "temporaries": b} for a, b in of_ranks]}
    )


@pytest.mark.parametrize(
    ("text", "names", "total"),
    [
        (sizes((1024, 2048), (1024, 2048)), ["every rank"], "3.0 KiB"),
        (sizes((1024, 2048), (4096, 0)), ["rank 0", "rank 1"], "4.0 KiB"),
        (
            sizes((0, 0), (4096, 0)),
            ["rank 1"],
            "4.0 KiB",
        ),  # several processes: another one has the ranks
        (
            sizes(*((k, 1024) for k in range(64))),
            [f"rank {k}" for k in range(48, 64)],
            "The fullest 16 of 64.",
        ),
    ],
)
def test_the_memory_of_each_rank_is_drawn_by_part(run_dir, capsys, text, names, total):
    (run_dir / "memory.json").write_text(text)
    assert "Memory of each rank" in report(capsys)[1]
    page = Path("runs/a/report.html").read_text(encoding="utf-8")
    bars = page.split("<h2>Memory of each rank</h2>")[1].split("</section>")[0]
    assert re.findall(r'(?:aria-label="|; )((?:every )?rank ?\d*): ', bars) == names
    assert total in bars


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"ranks": 3}', '{"ranks": [{"a": -1}]}', '{"ranks": [{"a": true}]}', "\xff"],
)
def test_an_unreadable_memory_file_is_named(run_dir, capsys, text):
    (run_dir / "memory.json").write_text(text, encoding="latin-1")
    told = report(capsys)[1]
    assert "memory.json cannot be read" in told
    assert "Memory of each rank" not in told


# --- balance of experts -------------------------------------------------------------------------


def test_experts_have_a_heat_map_and_dropped_tokens_one_if_any_were(run_dir, capsys):
    def written(dropped):
        loads = [[None, 2.5, 1.25], [None, 1.5, 3.75]]
        lines = [
            {"step": step, "loss": 1.0, "expert_load": load, "expert_dropped_tokens": dropped}
            for step, load in enumerate(loads, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run_dir / "metrics.jsonl").write_text(text)
        return report(capsys)[1], (run_dir / "report.html").read_text(encoding="utf-8")

    seen, page = written([None, 0, 0])
    assert "In the last column the most loaded expert has 3.75 times the mean, in layer 2." in seen
    assert "layer 1: 1: 2.5, 2: 1.5; layer 2: 1: 1.25, 2: 3.75" in page
    assert "layer 0:" not in page
    assert page.count("<image") == 1
    seen, page = written([None, 0, 4])
    assert "Tokens dropped by model.moe.capacity" in seen
    assert page.count("<image") == 2


def test_a_run_without_experts_has_no_section_of_them(capsys):
    assert "Balance of experts" not in report(capsys)[1]
