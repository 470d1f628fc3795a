"""Help, and the composed config."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from ppctl import cli
from ppctl.cli.choices import all_settings, settings_of
from ppctl.cli.command_options import COMMANDS, COMPOSED, MOST_USED

pytestmark = pytest.mark.usefixtures("in_empty_directory")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_ppctl_without_a_command_lists_the_commands(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", out, re.MULTILINE)


@pytest.mark.parametrize("command", COMPOSED)
def test_help_shows_groups_settings_examples_and_exit_codes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    for text in (
        "usage: ",
        "interleaved | ",
        "model.num_layers=8",
        "optimizer steps",
        "Examples:",
        "130, 143",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


def test_help_of_a_part_without_settings_describes_it(capsys):
    assert cli.main(["train", "--help", "partition"]) == 0
    out = capsys.readouterr().out
    for text in (
        "partition=uniform: Equally many layers",
        "partition=balanced: ",
        "partition.layers=...  list: layers of each stage",
    ):
        assert text in out


def test_help_of_parts_shows_all_their_settings(capsys):
    assert cli.main(["train", "--help", "schedule", "model=mlp", "run", "mesh"]) == 0
    out = capsys.readouterr().out
    for text in (
        "schedule=interleaved: ",
        "schedule.num_chunks=2",
        "model.d_model=64",
        "run.profile=null",
        "mesh.pp",
    ):
        assert text in out
    assert "swiglu" not in out


def test_descriptions_of_models_chips_and_costs_are_shown_on_request(capsys):
    words = ["train", "--help", "model=transformer", "hardware=h100", "costs"]
    assert cli.main(words) == 0
    few = capsys.readouterr().out
    assert cli.main([*words, "--all"]) == 0
    every = capsys.readouterr().out
    for key in ("model.rope.theta", "model.window", "hardware.peak_flops", "costs.forward_s"):
        assert key not in few
        assert key in every
    for part in words[2:]:
        more = f"more settings describe models, chips or assumed costs: ppctl train --help {part} --all"
        number = int(re.search(rf"(\d+) {re.escape(more)}", few)[1])
        key = part.partition("=")[0]
        numbers = [len(re.findall(rf"^  {key}\.", out, re.MULTILINE)) for out in (few, every)]
        assert numbers[1] - numbers[0] == number > 0
    assert "model.d_model" in few
    assert "model.moe.capacity" in few


def test_the_settings_of_the_help_are_explained():
    plain = ("run.name",)
    assert [key for key in MOST_USED if not all_settings()[key].about] == list(plain)


def test_only_train_and_doctor_serve_and_show_the_launcher(served, capsys):
    assert cli.main(["train", "recipes=tiny", "launch.processes=2"]) == 0
    [(command, settings, _)] = served
    assert (command, settings.launch.processes) == ("launch", 2)
    for command in COMPOSED:
        assert cli.main([command, "--help"]) == 0
        assert ("launch.max_restarts=0" in capsys.readouterr().out) == (
            command in ("train", "doctor")
        )


def test_a_command_shows_the_groups_that_apply_to_it(capsys):
    for command in COMPOSED:
        assert cli.main([command, "--help"]) == 0
        out = capsys.readouterr().out
        with_hardware = ("train", "plan", "rehearse", "tune", "doctor")
        assert ("  hardware  auto |" in out) == (command in with_hardware), command


def test_cfg_prints_the_composed_config(capsys, served):
    assert cli.main(["train", "--cfg", "job", "recipes=tiny"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mesh:\n  dp: 1\n  pp: 2\n  fsdp: 1$", out, re.MULTILINE)
    assert "  dir: runs/tiny\n" in out
    assert served == []


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"ppctl \d+\.\d+\.\d+\n", capsys.readouterr().out)


@dataclass
class _Commented:
    """Two forms of comments."""

    # steps between
    # two saves
    every: int = 3
    keep: int = 2  # checkpoints
    bare: int = 1

    # no comment of a field

    wide: str = "x"  # columns


def test_help_of_a_setting_is_its_comment_on_or_above_its_line():
    about = {key: setting.about for key, setting in settings_of("x", _Commented).items()}
    assert about == {
        "x.every": "steps between two saves",
        "x.keep": "checkpoints",
        "x.bare": "",
        "x.wide": "columns",
    }
