"""Costs of a real model, read for `ppctl schedule`; no JAX."""

import json
import os
from pathlib import Path

import pytest

from ppctl import cli
from ppctl.reports import measured_timeline_file as timeline_io
from ppctl.reports.model_costs import costs_from
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import build
from ppctl.schedule.simulator import simulate

PLAN = {
    "transfer_s": 0.25,
    "stages": [
        {"forward_s": f, "input_grad_s": 1.5, "weight_grad_s": 0.5} for f in (1.0, 2.0, 1.0, 4.0)
    ],
}
COSTS = Costs((1.0, 2.0, 1.0, 4.0), (1.5,) * 4, (0.5,) * 4, transfer_s=0.25)


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))


def shown(capsys, *words):
    assert cli.main(["schedule", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_plan_gives_the_costs_of_1_over_p_of_the_model(capsys):
    drawn, err = shown(capsys, "show", "schedule=zb_h1", "mesh=1x2", "--costs-from", "plan.json")
    of_half = {"forward_s": 4.0, "input_grad_s": 3.0, "weight_grad_s": 1.0, "transfer_s": 0.25}
    assert {name: drawn["costs"][name] for name in of_half} == of_half
    assert err == "costs predicted in plan.json, equal stages\n"


def test_a_setting_counts_more_than_the_plan(capsys):
    drawn, _ = shown(
        capsys,
        "show",
        "schedule=gpipe",
        "mesh=1x4",
        "costs.transfer_s=0",
        "--costs-from",
        "plan.json",
    )
    assert (drawn["costs"]["forward_s"], drawn["costs"]["transfer_s"]) == (2.0, 0.0)


def test_a_file_of_a_schedule_takes_the_costs_of_its_own_number_of_ranks(capsys):
    assert (
        cli.main(
            ["schedule", "show", "schedule=1f1b", "mesh=1x8", "--format", "csv", "--out", "own.csv"]
        )
        == 0
    )
    drawn, _ = shown(capsys, "show", "own.csv", "--costs-from", "plan.json")
    assert drawn["costs"]["forward_s"] == 1.0


@pytest.mark.parametrize("name", ["zb_h1", "1f1b"])
def test_a_measured_timeline_gives_back_what_it_was_made_with(name):
    timeline_io.write_timeline(Path("run/timeline"), simulate(build(name, 4, 8), COSTS))
    found = costs_from(Path("run"))
    assert found[:2] == pytest.approx((8.0, 6.0 if name == "zb_h1" else 4.0))
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(8.0)
    assert found.transfer_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--costs-from x.json cannot be read: No such file or directory."),
        ("{", "--costs-from x.json cannot be read: "),
        ("[]", "it has no stages"),
        ('{"stages": []}', "it has no stages"),
        ('{"stages": [{"forward_s": null}], "transfer_s": 0}', "its stages have no times"),
        (json.dumps({**PLAN, "transfer_s": -1}), "its stages have no times"),
    ],
)
def test_what_has_no_costs_is_refused(content, message, capsys):
    if content is not None:
        Path("x.json").write_text(content)
    assert cli.main(["schedule", "list", "mesh=1x4", "--costs-from", "x.json"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert (
        "It takes what `ppctl plan ... --json` prints, or the directory of a run with "
        "run.timeline=true." in err
    )


def test_a_run_without_a_timeline_is_refused(capsys):
    os.mkdir("run")
    assert cli.main(["schedule", "show", "--costs-from", "run"]) == 2
    assert (
        "--costs-from run cannot be read: this run has no measured timeline. It takes"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", ["curves --costs-from plan.json", "check own.csv --costs-from plan.json"]
)
def test_other_subcommands_refuse_them(words, capsys):
    assert cli.main(["schedule", *words.split()]) == 2
    assert (
        "--costs-from only goes with `ppctl schedule show|list|compare`." in capsys.readouterr().err
    )
