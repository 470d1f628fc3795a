"""`ppctl runs --columns, --sort`: the order of runs and their settings; and refusals."""

from __future__ import annotations

import json

import pytest
from support.run_dirs import make

from ppctl import cli

pytestmark = pytest.mark.usefixtures("in_empty_directory")


@pytest.fixture
def runs(in_empty_directory):
    make(
        "a",
        "schedule=gpipe",
        "optim.lr=1e-3",
        loss=9.0,
        started_s=1.8e9,
        age_s=7500,
        ending={"status": "finished"},
    )
    make(
        "b",
        "schedule=1f1b",
        "optim.lr=3e-4",
        "mesh=2x4x2",
        loss=3.0,
        age_s=4000,
        ending={"status": "failed"},
    )
    make("c", "schedule=1f1b", "optim.lr=0.01", "data.batch_size=16", steps=0, age_s=10)


def rows(capsys, *words):
    """The cells of each row of the list."""
    assert cli.main(["runs", *words]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    found = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return [cells for cells in found if cells and cells[0] in "abc"]


def names(capsys, *words):
    assert cli.main(["runs", *words, "--json"]) == 0
    return "".join(run["name"] for run in json.loads(capsys.readouterr().out)["runs"])


def refused(capsys, *words):
    assert cli.main(["runs", *words]) == 2
    out, err = capsys.readouterr()
    assert (bool(out), err.count("\n")) == ("--json" in words, 1)
    return err.removeprefix("ppctl: ").rstrip()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("loss", "bac"),  # c has none
        ("loss:desc", "abc"),
        ("lr", "bac"),
        ("optim.lr:desc", "cab"),
        ("schedule,lr:desc", "cba"),
        ("schedule:desc,name", None),
        ("age", "cba"),
        ("started", "abc"),
        ("active", "abc"),
        ("status", "bac"),
        ("mesh", "acb"),
        ("run:desc", "cba"),
    ],
)
def test_runs_are_sorted_by_any_column_and_those_without_a_value_are_last(
    runs, order, expected, capsys
):
    if expected is None:
        assert refused(capsys, "--sort", order).startswith(
            "--sort name: no run has such a setting. Did you mean run.name?"
        )
    else:
        assert names(capsys, "--sort", order) == expected


def test_columns_replace_the_usual_ones_and_with_a_plus_follow_them(runs, capsys):
    assert rows(capsys, "--columns", "optim.lr,data.batch_size,mesh,run.dtype") == [
        ["c", "0.01", "16", "2x4", "null"],
        ["b", "0.0003", "32", "2x4x2", "null"],
        ["a", "0.001", "32", "2x4", "null"],
    ]
    [*_, last] = rows(capsys, "--columns", "+started,schedule.num_microbatches")
    assert last == [
        "a",
        "finished",
        "3 of 200",
        "3.0000",
        "2x4",
        "gpipe",
        "0.001",
        "2 h",
        "2027-01-15T08:00:00Z",
        "8",
    ]


def test_a_column_that_some_runs_lack_is_empty_there(in_empty_directory, capsys):
    make("a", "schedule=gpipe")
    make("b", "schedule=interleaved", "schedule.num_chunks=4", age_s=9)
    assert rows(capsys, "--columns", "schedule.num_chunks") == [["a"], ["b", "4"]]
    assert names(capsys, "--sort", "schedule.num_chunks") == "ba"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--columns", "optim.lrr"],
            "--columns optim.lrr: no run has such a setting. Did you mean optim.lr? (run, status",
        ),
        (
            ["--columns", "num_layers"],
            "--columns num_layers: no run has such a setting. Did you mean model.num_layers?",
        ),
        (
            ["--columns", "partition.layers"],
            "--columns partition.layers: no run has such a setting.",
        ),
        (["--columns", "optim.lr,"], "--columns : no run has such a setting."),
        (
            ["--columns", "run.checkpoint"],
            "--columns run.checkpoint: no run has such a setting. Did you mean run.checkpoint",
        ),
        (["--sort", "los"], "--sort los: no run has such a setting. Did you mean loss?"),
        (
            ["--sort", "loss:down"],
            "--sort loss:down: no run has such a setting. Did you mean loss?",
        ),
        (
            ["--columns", "lr", "--json"],
            "--columns lr: --json has all settings of every run. Leave out one of the two.",
        ),
        (["--yes"], "--yes: not an option of the list. Leave it out."),
        (
            ["show", "a", "--sort", "loss", "--yes"],
            "--sort and --yes: not an option of `ppctl runs show`. Leave it out.",
        ),
        (["rm", "a", "--sort", "lr"], "--sort: not an option of `ppctl runs rm`. Leave it out."),
    ],
)
def test_columns_that_no_run_has_are_refused_with_similar_names(runs, words, message, capsys):
    assert refused(capsys, *words).startswith(message)


def test_runs_without_settings_are_listed(runs, in_empty_directory, capsys):
    (in_empty_directory / "runs/b/config.yaml").unlink()
    assert names(capsys, "--sort", "lr") == "acb"


def test_a_name_is_listed_as_it_is(capsys):
    make("a:car:[bold]é模")
    assert cli.main(["runs"]) == 0
    assert "a:car:[bold]é模  " in capsys.readouterr().out
