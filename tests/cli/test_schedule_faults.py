"""What `ppctl schedule` refuses, each in a line, and where the fault of a schedule is."""

from __future__ import annotations

import re

import pytest
from support.remedies import suggestions, with_suggestion

from ppctl import cli


@pytest.mark.parametrize(
    ("text", "fault", "arrow"),
    [
        ("0B0,0F0\n", "rank 0, step 0: 0B0 waits for stash(0,0)", "->0B0"),
        ("0F0,0B0\n1F0\n", "the program ends without 1B0", "->"),
        ("0F0,0B0,0B0\n", "0B0 writes", "->0B0"),
        ("0F0,0X0\n", "line 1, column 2: cell '0X0' is not", ""),
        ("", "the text has no tasks", ""),
    ],
)
def test_check_points_at_the_fault_of_a_bad_file(text, fault, arrow, capsys, in_empty_directory):
    (in_empty_directory / "bad.csv").write_text(text)
    assert cli.main(["schedule", "check", "bad.csv"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith("ppctl: bad.csv: ")) == ("", True)
    assert fault in err
    assert arrow in err
    assert cli.main(["schedule", "show", "bad.csv"]) == 2
    assert (
        capsys.readouterr().err
        == err.splitlines()[0] + " `ppctl schedule check bad.csv` shows where.\n"
    )


FAULTS = [
    (
        "shw",
        r"shw is not a subcommand .* Did you mean show\? \(show, list, compare, curves, check\)",
    ),
    ("mesh=1x4", "mesh=1x4 is not a subcommand"),
    ("--json", "needs a subcommand"),
    (
        "show --format pgn",
        "--format pgn is not one of text, html, svg, pdf, png, json, csv. Did you mean png",
    ),
    ("show --format png", "--format png is not text. Add --out FILE.png"),
    ("show --json --format csv", "--json and --format csv exclude each other"),
    ("show --out x.foo", "--out x.foo is not one of html, svg"),
    (
        "show --out no/such/x.html",
        "--out no/such/x.html cannot be written: No such file or directory",
    ),
    ("show --multirun", "--multirun is not an option"),
    ("show --config-dir nowhere", "--config-dir nowhere: there is no such directory"),
    ("show gpipe", "gpipe is neither KEY=VALUE nor a FILE.csv. Did you mean schedule=gpipe"),
    ("show a.csv b.csv", "takes one file, not 2"),
    ("show a.csv", "a.csv cannot be read: No such file"),
    ("show a.csv mesh=1x2", "a.csv cannot be read: No such file"),
    ("check", "takes one file, not 0"),
    ("check a.csv", "a.csv cannot be read: No such file"),
    ("check a.csv mesh=1x2", "`ppctl schedule check` takes a file and nothing else"),
    ("list gpipe", "gpipe is not KEY=VALUE"),
    ("list --format html", "--format html is not one of text, svg, pdf, png, json, csv"),
    ("compare", "Name the schedules to compare"),
    ("compare gpipe foo", "schedule=foo is not an option of schedule"),
    ("compare gpipe schedule=1f1b", "takes only the name: 1f1b"),
    ("compare gpipe:num_chunks=2", "schedule.num_chunks is not a setting of schedule=gpipe"),
    (
        "compare gpipe 1f1b schedule.num_chunks=3",
        "schedule.num_chunks=3: none of gpipe, 1f1b has such a setting",
    ),
    ("show model.num_layers=3", "model.num_layers=3: no schedule depends on model. Leave it out"),
    (
        "show partition=balanced",
        "partition=balanced: no schedule depends on partition. Leave it out",
    ),
    ("show run.name=x", "run.name=x: no schedule depends on run"),
    ("show hardware=h100", "hardware=h100: no schedule depends on hardware. Leave it out"),
    ("show mseh=1x2", "mseh is not a part of a drawing. Did you mean mesh"),
    ("show costs.forward_s=-1", "costs.forward_s=-1.0 is not a time in seconds. Use 0, or"),
    ("show costs.forward_s=nan", "costs.forward_s=nan is not a time"),
    ("show costs.forward_s=fast", "costs.forward_s=fast: Value 'fast' of type 'str' could not"),
    (
        "show costs.forwrad_s=1",
        "costs.forwrad_s is not a setting of costs. Did you mean costs.forward_s",
    ),
    ("show costs=slow", "costs=slow: "),
    ("show costs={forward_s:0,input_grad_s:0,weight_grad_s:0}", "give one of them a time"),
    ("show costs.forward_s=1,2", "gives several values. `ppctl schedule compare`"),
    (
        "show schedule=interleaved mesh=1x3",
        "num_microbatches=8 is not a multiple of num_ranks=3 .interleaved.",
    ),
    ("show mesh=4", "mesh=4 is not a mesh"),
    ("show schedule.num_microbatches=0", "schedule.num_microbatches=0 must be"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS, ids=[line for line, _ in FAULTS])
def test_a_wrong_request_is_refused_in_one_line_with_exit_code_2(
    line, message, capsys, in_empty_directory
):
    assert cli.main(["schedule", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ppctl: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert (bool(out), list(in_empty_directory.iterdir())) == ("--json" in line.split(), [])


def test_a_binary_file_is_refused_in_one_line(capsys, in_empty_directory):
    (in_empty_directory / "bytes.csv").write_bytes(b"\xff\xff")
    assert cli.main(["schedule", "check", "bytes.csv"]) == 2
    assert (
        capsys.readouterr().err
        == "ppctl: bytes.csv cannot be read: It is not UTF-8 text: invalid start byte.\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "train costs.forward_s=2",
        "plan costs={forward_s:2}",
        "verify recipes=ours",
        "bench +costs.forward_s=2",
    ],
)
def test_other_commands_refuse_assumed_costs(line, capsys, in_empty_directory):
    (in_empty_directory / "recipes").mkdir()
    text = "# @package _global_\ncosts: {forward_s: 2}\n"
    (in_empty_directory / "recipes/ours.yaml").write_text(text)
    assert cli.main([*line.split(), "--config-dir", "."]) == 2
    assert "only `ppctl schedule` reads these costs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("show schedule=csv mesh=1x2", "schedule.path has no value"),
        ("show schedule=csv schedule.path=none.csv mesh=1x2", "none.csv cannot be read"),
        (
            "show schedule=csv schedule.path=mine.csv mesh=1x3",
            "mesh.pp=3, but mine.csv has 2 ranks .* Use mesh.pp=2",
        ),
        (
            "show schedule=csv schedule.path=mine.csv mesh=1x2 schedule.num_microbatches=3",
            "num_microbatches=3, but mine.csv has 1. Use schedule.num_microbatches=1",
        ),
        (
            "show schedule=csv schedule.path=bad.csv mesh=1x2",
            r"bad.csv: rank 0, step 0: 0B0 waits for stash.*`ppctl schedule check bad.csv` shows "
            r"where",
        ),
        (
            "show schedule=auto schedule.max_activations=0.1 mesh=1x2",
            "max_activations=0.1: no schedule .* or more",
        ),
        (
            "show schedule=auto schedule.max_activations=-1 mesh=1x2",
            "max_activations=-1.0 must be a finite number above 0",
        ),
        (
            "show schedule=auto schedule.max_activations=2 schedule.max_memory_gib=3 mesh=1x2",
            "max_activations=2 and schedule.max_memory_gib=3 are two caps .* Leave one of them out",
        ),
        (
            "show schedule=auto schedule.max_memory_gib=0 mesh=1x2",
            "max_memory_gib=0.0 must be a finite number above 0",
        ),
        (
            "show schedule=auto schedule.max_memory_gib=3 mesh=1x2",
            "max_memory_gib=3 .* Set costs.activation_gib",
        ),
        (
            "show schedule=auto schedule.max_memory_gib=3 costs.activation_gib=1 "
            "costs.fixed_gib=4 mesh=1x2",
            r"max_memory_gib=3: no schedule of 2 ranks .* holds least, [\d.]+ GiB\). Use "
            r"schedule.max_memory_gib=",
        ),
        ("show schedule=auto schedule.max_chunks=0 mesh=1x2", "schedule.max_chunks=0"),
        (
            "show schedule=auto mesh=1x512 schedule.num_microbatches=512",
            "786,432 tasks are more than",
        ),
    ],
)
def test_impossible_requests_of_auto_and_csv_are_refused_in_one_line(
    line, what, in_empty_directory, capsys
):
    (in_empty_directory / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (in_empty_directory / "bad.csv").write_text("0B0,0F0\n1F0,1B0\n")
    assert cli.main(["schedule", *line.split()]) == 2
    said = capsys.readouterr().err
    assert re.search(what, said)
    assert said.count("\n") == 1
    for suggestion in suggestions(said):
        assert cli.main(["schedule", *with_suggestion(line.split(), suggestion)]) == 0, suggestion
