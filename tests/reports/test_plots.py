"""Static figures: every value is drawn where it belongs, letters and colours are the page's,
nothing is loaded.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from ppctl.reports.charts.palette import PARTS
from ppctl.reports.charts.svg_plots import (
    MOST_LINES,
    Curve,
    Line,
    curves_svg,
    histogram_svg,
    lines_svg,
    stacked_bars,
)
from ppctl.reports.charts.svg_surface import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    decades,
    is_logarithmic,
    nice_ticks,
    tick_texts,
)
from ppctl.reports.charts.thinning import medians, thin


def groups(drawn, name):
    """The elements of an svg that have a class."""
    root = ET.fromstring(drawn)
    return [group for group in root.iter("g") if name in (group.get("class") or "").split()]


def places(group):
    """The points of all paths in a group, or the places of its marks."""
    found = []
    for path in group.findall("path"):
        at = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", path.get("transform") or "")
        points = (
            [at.groups()]
            if at
            else re.findall(r"[ML ]([-\d.]+) ([-\d.]+)", " " + (path.get("d") or ""))
        )
        found += [(float(x), float(y)) for x, y in points]
    return found


def height_of(value, low, high):
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


# --- few points for many ------------------------------------------------------------------------


@pytest.mark.parametrize("spike", [0, 777, 49_999, 99_999])
def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn(spike):
    points = [
        (float(x), 9.0 if x == spike else -7.0 if x == 55_555 else 0.0) for x in range(100_000)
    ]
    kept = thin(points, 600)
    assert {(spike, 9.0), (55_555, -7.0)} <= set(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)
    assert len(kept) <= 4 * 600
    drawn = curves_svg([Curve("loss", points)], title="loss", x_name="step")
    [pale] = groups(drawn, "pale")
    heights = [y for _, y in places(pale)]
    assert (min(heights), max(heights)) == pytest.approx(
        (height_of(9, -10, 10), height_of(-7, -10, 10)), abs=0.2
    )
    assert len(groups(drawn, "trend")) == 1
    assert len(drawn) < 100_000


def test_few_points_and_gaps_stay():
    points = [(1.0, 2.0), (2.0, None), (3.0, 4.0)]
    assert thin(points, 600) == points
    many = [(float(x), None if x == 5_000 else 1.0) for x in range(10_000)]
    assert (5_000.0, None) in thin(many, 100)
    assert medians(points, 80) == []
    trend = medians([(float(x), 100.0 if x % 10 == 0 else 1.0) for x in range(10_000)], 80)
    assert {y for _, y in trend} == {1.0}
    assert len(trend) == 80


def test_steps_far_apart_are_no_empty_columns():
    points = [(float(x), 1.0) for x in (*range(3000), 10**9)]
    assert thin(points, 600)[-1] == (1e9, 1.0)
    assert [y for _, y in medians(points, 80)] == [1.0, 1.0]


# --- curves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0], [-3.0, 5.0], [1e-9, 1e9], [4.0, 4.0 + 1e-13], [1e99, -1e99], [1e-320, 1.0]],
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_an_axis_holds_its_values_between_a_few_ticks(values, from_zero):
    low, high = (min(*values, 0), max(*values, 0)) if from_zero else (min(values), max(values))
    ticks = decades(low, high) if is_logarithmic(low, high) else nice_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1] * (1 + 1e-9)
    assert 2 <= len(ticks) <= 12
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) <= 9
    [path] = groups(
        curves_svg([Curve("a", [(1, low), (2, high)])], title="t", x_name="x", from_zero=from_zero),
        "all",
    )
    assert all(TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for _, y in places(path))


@pytest.mark.parametrize(
    ("last", "texts"), [(3, "1 2 3"), (7, "2 4 6"), (100_000, "20k 40k 60k 80k 100k"), (1, "1")]
)
def test_ticks_of_steps_are_whole_steps(last, texts):
    drawn = curves_svg([Curve("a", [(1, 5.0), (last, 5.0)])], title="t", x_name="step")
    below = [
        text.text
        for text in ET.fromstring(drawn).iter("text")
        if float(text.get("y") or 0) > HEIGHT - BOTTOM + 10
    ]
    assert below == [*texts.split(), "step"]


def test_values_that_are_not_finite_are_gaps_and_crosses():
    points = [(1.0, 2.0), (2.0, 3.0), (3.0, None), (4.0, 1.0), (5.0, None), (6.0, 5.0), (7.0, 4.0)]
    drawn = curves_svg([Curve("run", points, lost=[3.0, 5.0])], title="t", x_name="step")
    line, [lost] = groups(drawn, "all")[0].findall("path")[0].get("d"), groups(drawn, "lost")
    assert (line or "").count("M") == 2 + 1  # a point alone has no line, but a dot
    assert len(places(groups(drawn, "data")[1])) >= 1
    assert [y for _, y in places(lost)] == [TOP, TOP]
    assert lost.findtext("title") == "run: not finite"


def test_labels_of_eight_curves_do_not_run_into_each_other():
    drawn = curves_svg(
        [Curve(f"{n} run", [(1, 1.0), (2, 1.0)]) for n in range(8)], title="x", x_name="step"
    )
    labels = [group.find("text") for group in groups(drawn, "label")]
    at = sorted(float(text.get("y") or 0) for text in labels if text is not None)
    assert len(at) == 8
    assert all(after - before >= 17.9 for before, after in pairwise(at))
    assert at[0] >= TOP
    assert at[-1] <= HEIGHT - BOTTOM + 6
    assert len(groups(drawn, "leader")) == 8


def test_odd_labels_are_text_and_the_same_run_gives_the_same_bytes():
    curves = [Curve("$x_1$ <b>&\x1b 漢字", [(1, 1.0)]), Curve("b", [(1, 2.0)])]
    drawn = curves_svg(curves, title="<t>", x_name="step")
    assert [group.findtext("title") for group in groups(drawn, "label")] == [
        "b",
        "$x_1$ <b>&? 漢字",
    ]
    assert drawn == curves_svg(curves, title="<t>", x_name="step")
    assert not re.search(r"url\(|https?:|href|\bid=|<style|<!|\b(nan|inf)\b", drawn)
    assert "var(--line)" in drawn


# --- lines, histogram, bars ---------------------------------------------------------------------


def test_marks_stand_to_scale_and_differ_by_colour_and_shape():
    lines = [
        Line(str(i), [(2, i + 1), (8, 2 * i + 2)], measured=[(4, 1)]) for i in range(MOST_LINES)
    ]
    marks = groups(lines_svg(lines, title="t", x_name="x", y_text="{:g}".format), "mark")
    first = [
        group for group in marks if re.fullmatch(r"\d+, 2: \d+", group.findtext("title") or "")
    ]
    assert len({(group[1].get("d"), group[1].get("style")) for group in first}) == MOST_LINES
    assert (
        sum((group.findtext("title") or "").endswith("4: 1 measured") for group in marks)
        == MOST_LINES
    )
    drawn = lines_svg(
        [Line("a", [(2, 5), (4, 10), (8, 10)])], title="t", x_name="x", y_text="{:g}".format
    )
    points = [place for group in groups(drawn, "mark") for place in places(group)]
    (x0, y0), (x1, y1), (x2, _) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # doublings
    assert (y0, y1) == pytest.approx((height_of(5, 0, 10), height_of(10, 0, 10)), abs=0.2)


def test_a_histogram_counts_every_value():
    values = [0.5 + 0.001 * (n % 50) for n in range(1000)] + [30.0, 40.0]
    drawn = histogram_svg(values, [("median", 0.524), ("predicted", 0.4)], title="x", x_name="s")
    titles = [group.findtext("title") or "" for group in groups(drawn, "mark")]
    assert sum(int(title.rpartition(": ")[2].replace(",", "")) for title in titles) == len(values)
    assert titles[-1] == "more than 1.572: 2"
    low, high = (end(y for _, y in places(groups(drawn, "mark")[-1])) for end in (min, max))
    assert high - low >= 1
    assert [group.findtext("text") for group in groups(drawn, "said")] == [
        "median 0.524",
        "predicted 0.4",
    ]
    assert len(groups(drawn, "named")) == 2
    far = histogram_svg(values, [("median", 0.524), ("predicted", 0.004)], title="x", x_name="s")
    assert len(groups(far, "named")) == 1


LETTERS = ("said", "total", "letters")


def span(text):
    """Where a text begins and ends, at the width of a letter in the figure's own size."""
    x, wide = float(text.get("x")), 7.5 * len(text.text)
    begin = x - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor", "start")]
    return begin, begin + wide


def bars(sizes, limit):
    drawn = stacked_bars([("rank 0", sizes)], ["a", "b"], limit, lambda n: f"{n} B")
    boxes = [sorted({x for x, _ in places(group)}) for group in groups(drawn, "mark")]
    return drawn, boxes


def test_parts_of_bars_have_widths_in_proportion_titles_and_colours():
    drawn, [(left, middle), (start, right)] = bars({"a": 30, "b": 10}, None)
    assert start == middle
    assert middle - left == pytest.approx(3 * (right - middle), rel=1e-2)
    assert right < WIDTH - RIGHT
    assert left > LEFT / 2
    assert [group.findtext("title") for group in groups(drawn, "mark")] == ["a 30 B", "b 10 B"]
    assert [group.findtext("text") for group in groups(drawn, "total")] == ["40 B"]
    assert all(colour in drawn for colour in PARTS[:2])


@pytest.mark.parametrize(("limit", "share"), [(20, 0.5), (40, 1.0), (60, 1.5)])
def test_the_limit_is_a_line_where_the_bar_would_end(limit, share):
    drawn, boxes = bars({"a": 30, "b": 10}, limit)
    left, right = boxes[0][0], boxes[-1][1]
    at = [x for group in groups(drawn, "limit") for x, _ in places(group)]
    assert at == pytest.approx([left + share * (right - left)] * 4, abs=0.2)  # a halo and a line


def test_a_limit_far_beyond_is_said():
    drawn, _ = bars({"a": 30, "b": 10}, 4000)
    assert "limit 4000 B, 100 × the longest →" in drawn
    assert groups(drawn, "limit") == []
    assert "limit 90000 B, over 1,000 × the longest →" in bars({"a": 30, "b": 10}, 90_000)[0]


@pytest.mark.parametrize("limit", [1, 10, 25, 38, 40, 60, 150])
def test_the_label_of_the_limit_stands_at_its_line_and_the_line_crosses_no_letters(
    limit,
):
    drawn, _ = bars({"a": 30, "b": 10}, limit)
    line = places(groups(drawn, "limit")[0])[0][0]
    spans = {
        name: [span(text) for group in groups(drawn, name) for text in group.iter("text")]
        for name in LETTERS
    }
    [(left, right)] = spans["said"]
    assert min(abs(left - line), abs(right - line)) <= 6
    assert left >= 0
    assert right <= WIDTH
    assert all(not left < line < right for each in spans.values() for left, right in each)


def test_matplotlib_is_loaded_by_figures_only():
    code = (
        "import sys; from ppctl.reports import runs_table; from ppctl.reports.charts import "
        "image_charts, svg_plots; from ppctl.reports.run_page import write_report; "
        "print('matplotlib' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
