"""The words that go on with a run: as it was started, wherever it stands now."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from ppctl.cli.resume_command import resumption, started_with
from ppctl.launch.local_processes import STARTED_WITH

WORDS = ["--config-dir=mine", "recipes=big", "run.name=a b", "schedule=gpipe"]


@pytest.fixture
def run_of(tmp_path):
    """A function that makes a run of these words and settings of `run`."""

    def make(words, directory=None, parts=None, **run):
        run_dir = tmp_path / "runs" / "x"
        run_dir.mkdir(parents=True)
        (run_dir / "config.yaml").write_text(
            yaml.safe_dump({"run": {"dir": str(run_dir), "resume": "auto"} | run} | (parts or {}))
        )
        records = [
            {"status": "started", "overrides": ["of an earlier start"]},
            {"status": "failed"},
        ]
        start = {"status": "started", "overrides": words}
        records += [start if directory is None else start | {"directory": directory}]
        records += [{"status": "interrupted"}]
        (run_dir / "status.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        return run_dir

    return make


def test_a_run_resumes_by_the_words_of_its_newest_start(run_of):
    found = resumption(run_of(WORDS))
    assert (list(found.words), list(found.notes)) == (WORDS, [])
    assert shlex.split(found.command) == ["ppctl", "train", *WORDS]


@pytest.mark.parametrize(
    ("parts", "is_relative"),
    [
        ({"data": {"path": "texts/a.txt"}}, True),
        ({"data": {"path": "/a.txt", "tokenizer": "bytes", "cache_dir": "~/cache"}}, False),
        ({"data": {"path": "/a.txt", "tokenizer": "tokenizer.json"}}, True),
        ({"data": {"parts": [{"path": "/a.txt", "weight": 1.0}, {"path": "b.txt"}]}}, True),
        ({"run": {"start_from": "imported"}}, True),
        ({"run": {"start_from": "/imported"}}, False),
        ({"schedule": {"name": "csv", "path": "mine.csv"}}, True),
    ],
)
def test_the_line_that_resumes_a_run_goes_where_its_relative_paths_begin(
    run_of, parts, is_relative, monkeypatch, tmp_path
):
    """`cd` was printed for custom code and --config-dir only: data.path=a.txt was not found."""
    monkeypatch.chdir(tmp_path)
    run_dir = run_of(["run.name=x"], "/started here", {"run": {"dir": "runs/x"}} | parts)
    line = resumption(run_dir).command
    assert line.startswith("cd '/started here' && ppctl train ") == is_relative
    assert f"run.dir={run_dir}" in line


def test_a_moved_run_resumes_in_its_new_place(run_of, tmp_path):
    run_of([*WORDS, "run.dir=elsewhere"])
    there = (tmp_path / "runs").rename(tmp_path / "moved, there") / "x"
    assert list(resumption(there).words) == [*WORDS, f'run.dir="{there}"']


@pytest.mark.parametrize("typed", [["run.resume=never"], []], ids=["typed", "of a recipe"])
def test_a_run_with_resume_never_resumes_from_its_checkpoints(run_of, typed):
    assert list(resumption(run_of([*WORDS, *typed], resume="never")).words) == [
        *WORDS,
        "run.resume=auto",
    ]


@pytest.mark.parametrize(
    ("run", "notes"),
    [
        ({"distributed": "off"}, []),
        ({"distributed": "explicit", "coordinator": "127.0.0.1:4711", "num_processes": 2}, []),
        (
            {"distributed": "explicit", "coordinator": "host:1", "num_processes": 2},
            ["2 processes: each with a different run.process_id=0, 1, ..."],
        ),
        ({"distributed": "auto"}, ["several processes: start it in each of them"]),
    ],
)
def test_the_number_of_a_process_is_not_the_runs(run_of, run, notes):
    found = resumption(run_of([*WORDS, "run.process_id=0"], **run))
    assert (list(found.words), list(found.notes)) == (WORDS, notes)


def test_the_launchers_words_are_stored_by_its_processes(monkeypatch):
    assert started_with("mine", ["a=1"]) == ["--config-dir=mine", "a=1"]
    assert started_with(None, ["a=1"]) == ["a=1"]
    monkeypatch.setenv(STARTED_WITH, json.dumps(["launch.processes=2"]))
    assert started_with(None, ["run.process_id=1"]) == ["launch.processes=2"]


def test_a_run_without_settings_has_no_command_to_resume(tmp_path):
    found = resumption(Path(tmp_path))
    assert (found.command, list(found.notes)) == ("", ["config.yaml is missing"])
