"""`ppctl schedule curves`: cells equal the closed forms, figures show them, and wrong requests are refused in one line."""

import json
import re

import pytest

from ppctl import cli

HALVES = "costs.input_grad_s=0.5 costs.weight_grad_s=0.5"  # B = F


def curves(capsys, line):
    assert cli.main(["schedule", "curves", *line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found, {(cell["num_ranks"], cell["num_microbatches"]): cell for cell in found["cells"]}


@pytest.mark.parametrize("costs", ["", HALVES])
def test_gpipe_is_its_formula_at_every_size(costs, capsys):
    found, cells = curves(capsys, f"schedule=gpipe {costs} --kept-mb 30,10")
    work_s = 2 if costs else 3
    assert len(cells) == 4 * 7
    assert found["over"] == "microbatches"
    for (p, m), cell in cells.items():
        assert cell["bubble_fraction"] == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert cell["efficiency_fraction"] == pytest.approx(m / (m + p - 1), abs=1e-12)
        assert cell["speedup"] == pytest.approx(p / (1 + (p - 1) / m), rel=1e-12)
        assert cell["makespan_s"] == pytest.approx((m + p - 1) * work_s)
        assert (cell["peak_activations"], cell["all_activations"]) == (m, p * m)
        assert (cell["peak_mb"], cell["all_mb"]) == ([30 * m, 10 * m], [30 * p * m, 10 * p * m])


def test_ranks_that_hold_less_than_the_fullest_count_so(capsys):
    _, cells = curves(capsys, "schedule=1f1b --ranks 8 --microbatches 32")
    assert cells[8, 32]["peak_activations"] == 8
    assert cells[8, 32]["all_activations"] == sum(range(1, 9))
    _, cells = curves(
        capsys, "schedule=interleaved schedule.num_chunks=4 --ranks 8 --microbatches 32"
    )
    assert cells[8, 32]["makespan_s"] == 101.25


def test_sizes_that_a_schedule_refuses_are_gaps_with_a_note(capsys):
    line = "schedule=interleaved --ranks 3,4 --microbatches 4,6"
    found, cells = curves(capsys, line)
    assert sorted(cells) == [(3, 6), (4, 4)]
    refused = {
        (each["num_ranks"], each["num_microbatches"]): each["why"] for each in found["refused"]
    }
    assert "num_microbatches=6 is not a multiple of num_ranks=4" in refused[4, 6]
    assert cli.main(["schedule", "curves", *line.split()]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^4 +\d+\.\d% *$", shown, re.MULTILINE)  # m=4: only p=4
    assert "p=4 m=6: num_microbatches=6 is not a multiple" in shown


def test_tables_and_figures_show_the_same_lines(capsys, tmp_path):
    words = f"schedule=gpipe {HALVES} --ranks 2-16 --microbatches 4,8,16,32 --kept-mb 30,10".split()
    assert cli.main(["schedule", "curves", *words]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"ranks +m=4 +m=8 +m=16 +m=32", shown
    )  # more ranks than microbatches: they run down
    assert re.search(r"^4 +42.9% +27.3% +15.8% +8.6%", shown, re.MULTILINE)
    assert re.search(r"memory of all ranks \(MB\)\s+ranks +m=4, 30 MB .*m=8, 10 MB", shown)
    out = tmp_path / "c.svg"
    assert cli.main(["schedule", "curves", *words, "--out", str(out)]) == 0
    text = out.read_text()
    for each in (
        "bubble, idle share",
        "efficiency",
        "speedup over one rank",
        "memory of all",
        "m=32",
        "m=8, 30 MB",
    ):
        assert each in text, each
    assert cli.main(["schedule", "curves", *words, "--out", str(tmp_path / "d.svg")]) == 0
    assert (tmp_path / "d.svg").read_text() == text


WRONG = {
    "gpipe": "gpipe is not KEY=VALUE. Use schedule=gpipe",
    "mesh=1x8": "mesh: `ppctl schedule curves` takes several sizes. Use --ranks",
    "schedule.num_microbatches=8": "schedule.num_microbatches: .* Use --microbatches",
    "--ranks 0": "--ranks 0: write numbers and ranges from 1 to 1024, as in 2,4,8-12",
    "--ranks 4-2": "--ranks 4-2: write numbers",
    "--microbatches many": "--microbatches many: write numbers",
    "--kept-mb=-3,1": "--kept-mb -3,1: write numbers above 0",
    "--kept-mb x": "--kept-mb x: write numbers above 0",
    "--format html": "--format html is not one of text, json, svg, pdf, png",
    "--format png": "--format png is not text. Add --out FILE.png",
    "schedule=interleaved --ranks 3 --microbatches 4": "interleaved is impossible at all of these sizes. num_microbatches=4 is not",
    "--ranks 1-17 --microbatches 1-20 --format svg": "17 lines are more than the 16",
    "--ranks 1024 --microbatches 1024": "1024 ranks, 2 stages each, 1024 microbatches: .* = 4,194,304 tasks are more than the 500,000",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_request_of_curves_is_refused_in_one_line(line, capsys):
    assert cli.main(["schedule", "curves", *line.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(WRONG[line], err), err


def test_options_of_curves_are_refused_by_other_subcommands(capsys):
    assert cli.main(["schedule", "show", "--kept-mb", "3"]) == 2
    assert "--kept-mb only goes with `ppctl schedule curves`" in capsys.readouterr().err
