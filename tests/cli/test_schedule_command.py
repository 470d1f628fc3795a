"""`ppctl schedule`: numbers for scripts, files, help, and that it starts no JAX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from ppctl import cli
from ppctl.cli.command_options import examples_of
from ppctl.cli.commands.schedule import SUBCOMMANDS
from ppctl.cli.compose import compose
from ppctl.config import Costs as ConfigCosts
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.schedule_text import from_csv


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def ask(capsys, line):
    """Return the stdout of a command line, which must succeed."""
    assert cli.main(["schedule", *line.split()]) == 0
    return capsys.readouterr().out


def ask_json(capsys, line):
    return json.loads(ask(capsys, f"{line} --json"))


UNIT = "costs.forward_s=1 costs.input_grad_s=1 costs.weight_grad_s=1 costs.transfer_s=0"


@pytest.mark.parametrize(
    ("request_", "makespan", "period", "bound", "peak"),
    [
        ("schedule=gpipe", 117, 117, 117, 32),
        ("schedule=1f1b", 117, 117, 117, 8),
        ("schedule=eager_1f1b", 117, 117, 117, 15),
        ("schedule=interleaved", 106.5, 106.5, 106.5, 11.5),
        ("schedule=interleaved schedule.num_chunks=4", 101.25, 101.25, 101.25, 9.75),
        ("schedule=zb_h1", 103, 103, 103, 8),
        ("schedule=zb_h2", 103, 96, 103, 15),
        ("schedule=interleaved_zb", 99.5, 99.5, 99.5, 8),
        ("schedule=zb_v", 99.5, 96, 99.5, 8),
        ("schedule=v_half", 104.5, 104.5, 99.5, 5),
    ],
)
def test_the_numbers_of_eight_ranks_and_32_microbatches(
    request_, makespan, period, bound, peak, capsys
):
    said = ask_json(capsys, f"show {request_} mesh=1x8 schedule.num_microbatches=32 {UNIT}")
    assert said["makespan_s"] == makespan
    assert said["period_s"] == period
    assert said["lower_bound_s"] == bound
    assert said["bubble_fraction"] == [pytest.approx(1 - 96 / makespan)] * 8
    assert (max(said["peak_activations"]), len(said["peak_activations"])) == (peak, 8)
    assert [len(cells) for cells in said["ranks"]] == [len(said["ranks"][0])] * 8
    assert "0F0" in said["ranks"][0]


def test_costs_are_of_one_pth_of_the_model_and_a_chunk_costs_its_share(capsys):
    costs = "costs={forward_s:1,input_grad_s:1.05,weight_grad_s:0.75,transfer_s:0.1}"
    said = ask_json(capsys, f"show schedule=1f1b mesh=1x8 schedule.num_microbatches=32 {costs}")
    assert said["makespan_s"] == pytest.approx(116.0, abs=0.051)
    said = ask_json(
        capsys, f"show schedule=interleaved mesh=1x8 schedule.num_microbatches=32 {costs}"
    )
    assert said["makespan_s"] == pytest.approx(102.4, abs=0.051)


def test_the_default_costs_are_the_simulators():
    default, simulated = ConfigCosts(), Costs()
    for key in ("forward_s", "input_grad_s", "weight_grad_s", "transfer_s"):
        assert getattr(default, key) == getattr(simulated, key)


def test_a_recipe_gives_mesh_and_schedule(capsys):
    assert ask_json(capsys, "show recipes=tiny")["num_ranks"] == 2


def test_costs_come_from_a_users_recipe_too(capsys, empty_directory):
    file = empty_directory / "mine/recipes/slow.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ncosts: {forward_s: 3}\n")
    said = ask_json(
        capsys, "show schedule=gpipe mesh=1x2 --config-dir mine recipes=slow costs.transfer_s=1"
    )
    assert (said["costs"]["forward_s"], said["costs"]["transfer_s"]) == (3, 1)


# --- formats and files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.png", "x.json", "x.csv"])
def test_the_ending_of_the_file_chooses_the_format(name, capsys, empty_directory):
    assert cli.main(["schedule", "show", "schedule=gpipe", "mesh=1x2", "--out", name]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"ppctl: wrote {name} \([\d,]+ bytes\)\n", err)
    start = {"html": b"<!doctype", "svg": b"<?xml", "png": b"\x89PNG", "json": b"{", "csv": b"0F0,"}
    assert (empty_directory / name).read_bytes().startswith(start[name[2:]])


def test_a_schedule_written_as_csv_is_read_checked_and_simulated(capsys, empty_directory):
    ask(capsys, "show schedule=zb_h1 mesh=1x4 --out z.csv")
    assert from_csv((empty_directory / "z.csv").read_text(), "z").num_ranks == 4
    assert (
        ask(capsys, "check z.csv") == "z.csv: valid: 4 ranks, 8 microbatches, 4 stages, kinds FIW\n"
    )
    assert (
        ask_json(capsys, "show z.csv")["makespan_s"]
        == ask_json(capsys, "show schedule=zb_h1 mesh=1x4")["makespan_s"]
    )
    assert ask_json(capsys, "show z.csv costs.forward_s=2")["makespan_s"] > 27


# --- several ------------------------------------------------------------------------------------


def test_compare_puts_schedules_in_one_table(capsys):
    line = (
        "compare gpipe 1f1b interleaved interleaved:num_chunks=4 mesh=1x8 "
        "schedule.num_microbatches=32"
    )
    rows = [row.replace(" s ", " ").split() for row in ask(capsys, line).splitlines()]
    found = {" ".join(row[:-7]): row[-7:] for row in rows if len(row) > 7 and row[-3].endswith("%")}
    assert {
        label: (row[0], row[1], row[2], row[3], row[4], row[5]) for label, row in found.items()
    } == {
        "gpipe": ("117", "117", "117", "96", "17.9%", "32"),
        "1f1b": ("117", "117", "117", "96", "17.9%", "8"),
        "interleaved (num_chunks=2)": ("106.5", "106.5", "106.5", "96", "9.9%", "11.5"),
        "interleaved (num_chunks=4)": ("101.25", "101.25", "101.25", "96", "5.2%", "9.75"),
    }
    assert all(float(row[6]) <= float(row[5]) for row in found.values())
    said = ask_json(capsys, line)
    assert [one["label"] for one in said][2:] == [
        "interleaved (num_chunks=2)",
        "interleaved (num_chunks=4)",
    ]


def test_compare_passes_a_setting_to_the_families_that_have_it(capsys):
    said = ask_json(capsys, "compare 1f1b interleaved looped_bfs mesh=1x2 schedule.num_chunks=3")
    assert [one["num_chunks"] for one in said] == [1, 3, 3]


def test_compare_has_all_charts_in_one_page(capsys, empty_directory):
    ask(capsys, "compare gpipe 1f1b mesh=1x2 --out both.html")
    text = (empty_directory / "both.html").read_text()
    assert '"label": "gpipe"' in text
    assert '"label": "1f1b"' in text


def test_a_narrow_terminal_cuts_no_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert "peak activations" in ask(capsys, "compare gpipe 1f1b mesh=1x2")


def test_list_has_every_family_and_the_reason_for_a_missing_one(capsys):
    out = ask(capsys, "list mesh=1x4 schedule.num_microbatches=8")
    for family in FAMILIES:
        assert re.search(rf"^{family} .*\d%", out, re.MULTILINE), family  # its row
        assert re.search(rf"^{family} +\S.*(F|p|m)", out, re.MULTILINE), family  # its formulas
    said = ask_json(capsys, "list mesh=1x4 schedule.num_microbatches=10")
    assert "num_microbatches=10 is not a multiple of num_ranks=4" in said["refused"]["interleaved"]
    assert {one["schedule"] for one in said["schedules"]} | set(said["refused"]) == set(FAMILIES)


# --- help, imports ------------------------------------------------------------------


@pytest.mark.parametrize("line", ["schedule", "schedule --help", "schedule show -h"])
def test_help_has_every_example_within_120_columns(line, capsys):
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    for text in (*SUBCOMMANDS, "schedule costs", *examples_of("schedule")):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_chart_of_1024_ranks_is_instant_and_loads_neither_jax_nor_matplotlib():
    code = (
        "import sys; from ppctl.cli import main; "
        "c = main('schedule show schedule=1f1b mesh=1x1024 --out x.html'.split()); "
        "print(c, [name for name in ('jax', 'numpy', 'flax', 'matplotlib') if name in sys.modules])"
    )
    before = os.times().children_user
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "0 []\n"
    assert os.times().children_user - before < 8  # CPU seconds: a busy machine does not count


def test_a_reader_that_goes_away_is_no_bug():
    command = (
        f"{sys.executable} -m ppctl.cli schedule show schedule=gpipe mesh=1x64 --json | head -c 10"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, env=environment
    )
    assert (done.stdout, done.stderr) == ('{"schedule', "")


def test_auto_prints_its_candidates_and_its_distance_from_the_bound(capsys):
    said = ask_json(capsys, f"show schedule=auto mesh=1x8 schedule.num_microbatches=32 {UNIT}")
    assert said["makespan_s"] == said["auto"]["lower_bound_s"] == 97.75
    assert said["auto"]["gap_fraction"] == 0
    assert said["auto"]["max_activations"] == max(said["peak_activations"]) == 8
    assert said["label"] == "auto: interleaved_zb (num_chunks=4)"
    assert said["auto"]["candidates"][0] == {
        "label": "interleaved_zb (num_chunks=4)",
        "length_s": 97.75,
        "is_published": True,
    }
    text = ask(
        capsys, "show schedule=auto schedule.max_activations=3 schedule.max_chunks=2 mesh=1x4"
    )
    assert ", at most 3 activations a rank: " in text
    assert re.search(r"and \d+ of \d+ V-shaped building blocks", text)


def test_a_cap_in_gib_is_searched_and_printed(capsys):
    costs = "costs.activation_gib=0.5 costs.fixed_gib=4"
    line = f"mesh=1x4 schedule.num_microbatches=6 {costs}"
    said = ask_json(
        capsys, f"show schedule=auto schedule.max_memory_gib=8 schedule.max_chunks=2 {line}"
    )
    auto, published = said["auto"], ask_json(capsys, f"show schedule=zb_h1 {line}")
    assert max(said["peak_bytes"]) < auto["held_bytes"] <= auto["max_bytes"] == 8 * 2**30
    assert auto["max_activations"] is None
    assert 0 <= auto["gap_fraction"] < 0.3
    assert said["makespan_s"] < published["makespan_s"]
    text = ask(capsys, f"show schedule=auto schedule.max_memory_gib=8 schedule.max_chunks=2 {line}")
    assert re.search(r", at most 8 GiB \([\d.]+ GiB held\) a rank: ", text)
    assert re.search(r"peak \d+(\.\d+)? activations of [\d.]+ GiB", text)


def test_auto_keeps_to_its_settings(capsys):
    said = ask_json(capsys, "show schedule=auto schedule.max_chunks=2 mesh=1x4")
    assert said["num_chunks"] <= 2
    assert max(said["peak_activations"]) <= 4


def test_a_schedule_of_the_user_is_an_option(capsys):
    ask(capsys, "show schedule=zb_v mesh=1x2 schedule.num_microbatches=5 --out mine.csv")
    said = ask_json(capsys, "show schedule=csv schedule.path=mine.csv mesh=1x2")
    own = ask_json(capsys, "show schedule=zb_v mesh=1x2 schedule.num_microbatches=5")
    assert said["label"] == "mine.csv"
    for key in ("ranks", "makespan_s", "num_microbatches", "rank_of"):
        assert said[key] == own[key]
    assert "mine.csv" in ask(
        capsys, "compare csv:path=mine.csv zb_v mesh=1x2 schedule.num_microbatches=5"
    )


def test_a_schedule_in_a_file_sets_its_sizes(capsys):
    ask(capsys, "show schedule=zb_v mesh=1x3 schedule.num_microbatches=6 --out mine.csv")
    words = ["schedule=csv", "schedule.path=mine.csv"]
    shown = ask_json(capsys, f"show {' '.join(words)}")
    assert (len(shown["ranks"]), shown["num_microbatches"]) == (3, 6)
    assert shown == ask_json(capsys, "show mine.csv")
    config = compose([*words, "data.batch_size=12"])
    assert (config.mesh.text, config.schedule.num_microbatches) == ("2x3", 6)
    assert compose([*words, "mesh.dp=1", "data.batch_size=6"]).mesh.text == "1x3"


@pytest.mark.parametrize("mesh", ["mesh=2x4", "mesh.pp=4"])
def test_a_file_does_not_change_stated_ranks(mesh, capsys):
    ask(capsys, "show schedule=zb_v mesh=1x3 schedule.num_microbatches=6 --out mine.csv")
    assert (
        compose(["schedule=csv", "schedule.path=mine.csv", mesh, "data.batch_size=12"]).mesh.pp == 4
    )
    assert cli.main(["schedule", "show", "schedule=csv", "schedule.path=mine.csv", mesh]) == 2
    assert "mesh.pp=4, but mine.csv has 3 ranks" in capsys.readouterr().err
