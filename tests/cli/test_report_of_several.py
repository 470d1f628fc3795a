"""`ppctl report` of several runs: differences, labelled curves, common notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.run_pages import make, record, words_of, write

pytestmark = pytest.mark.usefixtures("in_empty_directory")


def test_several_runs_are_a_table_of_differences_and_labelled_curves(capsys):
    make("first", schedule="gpipe")
    make(
        "second",
        [record(step, tokens_per_s=2e4) for step in range(1, 6)],
        schedule="1f1b",
        layers=8,
    )
    text, said = write(capsys, "first", "second")
    assert said["file"] == "report.html"
    assert [run["differs"] for run in said["runs"]] == [
        {"model.num_layers": "4", "schedule": "gpipe"},
        {"model.num_layers": "8", "schedule": "1f1b"},
    ]
    seen = words_of(text)
    assert "1 first 4 gpipe" in seen
    assert "no end recorded 9 of 9 0.4444 500 ms 10,000 1.5 MiB 12.5% 20.0%" in seen
    assert "2 second 8 1f1b" in seen
    assert "5 of 9 0.8000 500 ms 20,000" in seen
    labels = re.findall(r"<li><span[^>]*>.</span>([^<]*)</li>", text)
    assert sorted(labels) == sorted(["1 first", "2 second"] * 4)
    assert '<a href="runs/first">' in text


def test_runs_without_common_metrics_are_compared(capsys):
    make("a", [{"step": step, "loss": 1.0, "rows_per_s": 5.0} for step in range(1, 4)])
    make("b", [])
    Path("runs/b/config.yaml").unlink()
    make("c")
    text, _ = write(capsys, "a", "b", "c", "--out", "abc.html")
    assert "rows/s" in text
    assert "tok/s" in text
    assert "b: config.yaml is missing" in words_of(text)


def test_any_number_of_runs_is_compared_and_the_first_sixteen_are_drawn(capsys):
    names = [f"run{number:02}" for number in range(1, 19)]
    for number, name in enumerate(names, 1):
        make(name, [record(step, loss=number / step) for step in range(1, 6)], layers=number)
    text, said = write(capsys, *names)
    assert len(said["runs"]) == 18
    assert [run["differs"]["model.num_layers"] for run in said["runs"]] == list(
        map(str, range(1, 19))
    )
    figure = text[text.index("<figcaption>Loss<") :].split("</figure>")[0]
    labels = re.findall(r"<li><span[^>]*>.</span>([^<]*)</li>", figure)
    assert labels == [f"{i} {n}" for i, n in enumerate(names[:16], 1)]
    assert "The first 16 runs. Name others to see theirs" in text
    assert text.count('<a href="runs/run05">run05</a>') == 1
    rows = [row for row in re.findall(r"<tr>.*?</tr>", text, re.DOTALL) if "<td>5 of 9" in row]
    keys = [re.search(r'<span class="key".*?</span>', row) for row in rows]
    assert len({key[0] for key in keys[:16]}) == 16
    assert keys[16:] == [None, None]


def test_a_note_on_several_runs_is_shown_once(capsys):
    for name in ("a", "b", "c"):
        make(name, [])
    make("d")
    seen = words_of(write(capsys, "a", "b", "c", "d")[0])
    assert seen.count("no step is recorded") == 1
    assert "a, b, c: no step is recorded" in seen
