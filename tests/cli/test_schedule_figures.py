"""`ppctl schedule` in figures and tables for papers, and files of schedules next to families."""

from __future__ import annotations

import json

import pytest

from ppctl import cli

STARTS = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG", "csv": b"schedule,label,makespan_s,"}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def ask(capsys, line, code=0):
    """Return the output of a command: stdout, or stderr where it is refused."""
    assert cli.main(["schedule", *line.split()]) == code
    out, err = capsys.readouterr()
    return err if code else out


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "form"), [*(("compare 1f1b zb_h1", form) for form in STARTS), ("list", "csv")]
)
def test_tables_and_panels_are_written_by_the_ending(what, form, capsys, empty_directory):
    ask(capsys, f"{what} mesh=1x2 schedule.num_microbatches=2 --out all.{form}")
    assert (empty_directory / f"all.{form}").read_bytes().startswith(STARTS[form])


@pytest.mark.parametrize(
    "line", ["show schedule=zb_v", "curves schedule=gpipe --ranks 2,4 --microbatches 1-4"]
)
def test_figures_are_pdf_too(line, capsys, empty_directory):
    ask(capsys, f"{line} --out one.pdf")
    assert (empty_directory / "one.pdf").read_bytes().startswith(b"%PDF")
    assert "--format pdf is not text. Add --out FILE.pdf." in ask(capsys, f"{line} --format pdf", 2)


def test_a_file_is_compared_with_families_at_its_size(capsys):
    ask(capsys, "show schedule=zb_h1 mesh=1x3 schedule.num_microbatches=5 --out mine.csv")
    rows = json.loads(ask(capsys, "compare mine.csv zb_h1 1f1b --json"))
    assert [row["label"] for row in rows] == ["mine.csv", "zb_h1", "1f1b"]
    seconds = [row["makespan_s"] for row in rows]
    assert seconds[0] == seconds[1] != seconds[2]
    assert "3 ranks, 5 microbatches" in ask(
        capsys, "compare mine.csv looped_bfs schedule.num_chunks=2"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare mine.csv 1f1b mesh=1x8", "mesh.pp=8, but mine.csv has 2 ranks"),
        (
            "compare mine.csv 1f1b schedule.num_microbatches=9",
            "schedule.num_microbatches=9, but mine.csv has 4",
        ),
        (
            "compare mine.csv 1f1b schedule.num_chunks=2",
            "schedule.num_chunks=2: none of mine.csv, 1f1b has such",
        ),
        (
            "compare mine.csv other.csv",
            "mine.csv has 2 ranks and 4 microbatches, other.csv has 2 ranks and 6 microbatches: "
            "only schedules",
        ),
        ("compare none.csv 1f1b", "none.csv cannot be read: No such file or directory"),
        ("compare zero_bubble", "Did you mean schedule=zb_h1 or schedule=zb_v?"),
        ("show zero-bubble", "Did you mean schedule=zb_h1 or schedule=zb_v?"),
        (
            "show schedule=gpipe mesh=1x1024 schedule.num_microbatches=4096 --format csv",
            "2*1024*1*4096 = 8,388,608 tasks are more than the 500,000 that ppctl lays out (gpipe). Use fewer ranks",
        ),
        (
            "compare gpipe mesh=1x1024 schedule.num_microbatches=4096 --out all.pdf",
            "2*1024*1*4096 = 8,388,608 tasks are more than the 500,000 that ppctl lays out (gpipe). Use fewer ranks",
        ),
        (
            "list mesh=1x1024 schedule.num_microbatches=4096",
            "2*1024*1*4096 = 8,388,608 tasks are more than the 500,000 that ppctl lays out (gpipe). Use fewer ranks",
        ),
    ],
)
def test_impossible_comparisons_and_figures_are_refused_in_one_line(line, message, capsys):
    for name, number in (("mine", 4), ("other", 6)):
        ask(
            capsys,
            f"show schedule=gpipe mesh=1x2 schedule.num_microbatches={number} --out {name}.csv",
        )
    said = ask(capsys, line, 2)
    assert message in said
    assert said.count("\n") == 1


def test_the_legend_has_the_number_of_tasks_in_a_column(capsys):
    said = ask(
        capsys, "show schedule=gpipe mesh=1x2 schedule.num_microbatches=99"
    )  # 300 s in 96 columns
    assert said.endswith(
        "1 column: 3.125 s, up to 4 tasks of a rank; --out FILE.html or FILE.svg shows each\n"
    )
    assert "tasks of a rank" not in ask(capsys, "show schedule=gpipe mesh=1x2")
