"""Curves of long runs: thinned to the points of a figure, their numbers those of all steps."""

import itertools
import json
import math
import statistics

import pytest

from ppctl.reports.run_page.read_run import COLUMNS, MOST_POINTS, read_curves, read_layers


def written(tmp_path, values, steps=None):
    file = tmp_path / "metrics.jsonl"
    steps = range(1, len(values) + 1) if steps is None else steps
    lines = [
        {"step": step, "loss": value, "lr": step} for step, value in zip(steps, values, strict=True)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def values_of(count):
    return [2 + math.sin(i) + 8 / (1 + i) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 30_000])
def test_a_curve_has_few_points_and_the_numbers_of_all(tmp_path, count):
    values, problems = values_of(count), []
    curves, newest = read_curves(written(tmp_path, values), ("loss", "mfu"), ("lr",), problems)
    loss = curves["loss"]
    assert (problems, newest, [*curves]) == ([], {"lr": count}, ["loss"])
    # the second of two steps: the first one is slow
    assert loss.median == statistics.median(values[1:] if count == 2 else values)
    assert len(loss.points) <= MOST_POINTS
    assert loss.points == sorted(loss.points)
    assert {(1, values[0]), (count, values[-1])} <= {*loss.points}
    if count <= MOST_POINTS:
        assert loss.points == [*enumerate(values, 1)]


def test_every_spike_and_gap_of_a_long_curve_is_kept(tmp_path):
    values = values_of(50_000)
    values[20_000], values[20_001], values[20_002] = 50.0, 0.01, 60.0
    for lost in (777, 778, 40_000):
        values[lost] = None
    values[40_500] = 1e200  # cannot be drawn
    loss = read_curves(written(tmp_path, values), ("loss",), (), [])[0]["loss"]
    points = dict(loss.points)
    assert (points[20_002], points[20_003], points[778], points[40_001]) == (0.01, 60.0, None, None)
    assert (loss.num_lost, loss.first_lost) == (4, 778)
    assert max(value for value in points.values() if value is not None) == 60.0
    # the middle of a part of the thinned curve is that of all its points
    part = [value for step, value in loss.points if 30_000 < step <= 40_000]
    every = statistics.median(value for value in values[30_000:40_000] if value is not None)
    assert statistics.median(value for value in part if value is not None) == pytest.approx(
        every, abs=0.05
    )


def test_a_curve_without_a_finite_value_has_no_median(tmp_path):
    loss = read_curves(written(tmp_path, [None] * 9000), ("loss",), (), [])[0]["loss"]
    assert (loss.median, loss.num_lost, loss.first_lost) == (None, 9000, 1)
    assert {value for _, value in loss.points} == {None}


@pytest.mark.parametrize("count", [8, 20_000])
def test_the_last_line_of_a_repeated_step_counts(tmp_path, count):
    values, problems = values_of(count), []
    steps = [*range(1, count // 2 + 1)] * 2
    loss = read_curves(written(tmp_path, values, steps), ("loss",), (), problems)[0]["loss"]
    assert loss.median == statistics.median(values[count // 2 :])
    assert loss.points[0] == (1, values[count // 2])
    assert len(problems) == 1
    assert "repeated" in problems[0]


# --- numbers of layers --------------------------------------------------------------------------


def of_layers(tmp_path, rows, first=1):
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "load": row} for step, row in enumerate(rows, first)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_layers(file, "load")


def test_numbers_of_layers_are_read_for_each_step(tmp_path):
    rows = [[None, 1.5 + step, 2.0] for step in range(COLUMNS)]
    found = of_layers(tmp_path, rows, first=7)
    assert (found.first, [*found.last]) == (7, [*range(7, 7 + COLUMNS)])
    assert [row[1:] for row in found.values] == [row[1:] for row in rows]
    assert all(math.isnan(row[0]) for row in found.values)


@pytest.mark.parametrize("count", [2 * COLUMNS, 2 * COLUMNS + 1, 5000])
def test_of_many_steps_each_block_has_the_greatest_number_of_a_layer(tmp_path, count):
    rows = [[1 + math.sin(i), None if i % 3 else float(i)] for i in range(count)]
    found = of_layers(tmp_path, rows)
    assert COLUMNS <= len(found.values) <= 2 * COLUMNS
    assert found.last[-1] == count
    assert len({b - a for a, b in itertools.pairwise([0, *found.last[:-1]])}) == 1
    begin = 0
    for last, values in zip(found.last, found.values, strict=True):
        block = rows[begin:last]
        known = [b for _, b in block if b is not None]
        assert values[0] == max(a for a, _ in block)
        assert values[1] == max(known) if known else math.isnan(values[1])
        begin = last


def test_foreign_numbers_of_layers_are_no_numbers_and_other_records_are_left_out(tmp_path):
    rows = [[1.0, "x"], [2.0, True], "no list", [1.0], [10**400, 1e200], [1.0, [2.0]]]
    found = of_layers(tmp_path, rows)
    assert [*found.last] == [1, 2, 5, 6]
    assert [row[0] for row in found.values if row[0] == row[0]] == [1.0, 2.0, 1.0]
    assert all(math.isnan(row[1]) for row in found.values)
    assert of_layers(tmp_path, [5, None]) is None
