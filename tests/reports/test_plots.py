"""Static figures: every value is drawn where it belongs, letters and colours are the page's,
nothing is loaded.
"""

from __future__ import annotations

import html
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ppctl.reports.charts.page_figures import HEIGHT, MOST_LINES, WIDTH, curves_svg, memory_bars
from ppctl.reports.page_kit import line_legend
from ppctl.reports.palette import PARTS


def groups(drawn, name):
    """The elements of an svg that have a class."""
    return [group for group in ET.fromstring(drawn).iter("g") if group.get("class") == name]


def places(group):
    """The points of all paths in a group, or the places of its marks."""
    marks = [(float(use.get("x")), float(use.get("y"))) for use in group.iter("use")]
    paths = " ".join(path.get("d") or "" for path in group.findall("path"))
    return marks or [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", paths)]


def values_at(drawn, axis, at):
    """The values at places of a linear axis, by its first and last tick."""
    ticks = groups(drawn, f"{axis}tick")
    known = [(float(t.get(axis)), number(t.text)) for group in ticks for t in group.iter("text")]
    (p0, v0), (p1, v1) = known[0], known[-1]
    if axis == "y":  # letters stand below their line
        lines = [places(group)[0][1] for each in ticks for group in each if places(group)]
        p0, p1 = lines[0], lines[-1]
    return [v0 + (v1 - v0) * (p - p0) / (p1 - p0) for p in at]


def number(text):
    return float(text.replace(",", "").replace("\u2212", "-").rstrip("%"))


def heights(drawn, group):
    return values_at(drawn, "y", [y for _, y in places(group)])


# --- curves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spike", [0, 777, 49_999, 99_999])
def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn(spike):
    noise = np.random.default_rng(0).random(100_000)
    points = [
        (float(x), 9.0 if x == spike else -7.0 if x == 55_555 else noise[x]) for x in range(100_000)
    ]
    drawn = curves_svg({"loss": points}, title="loss", x_name="step")
    [pale], [trend] = groups(drawn, "pale"), groups(drawn, "trend")
    assert (max(heights(drawn, pale)), min(heights(drawn, pale))) == pytest.approx((9, -7), abs=0.1)
    high = min(places(pale), key=lambda place: place[1])
    assert values_at(drawn, "x", [high[0]]) == pytest.approx([spike], abs=300)
    assert heights(drawn, trend) == pytest.approx([0.5] * 80, abs=0.1)  # the medians
    assert len(drawn) < 100_000


@pytest.mark.parametrize(
    ("places", "over_sizes"),
    [
        ([10 ** (i / 10 - 6) for i in range(60)], True),  # learning rates
        ([10.0**-i for i in range(14)], True),
        ([1e-4, 3e-4, 1e-3, 3e-3], True),
        ([2**i for i in range(21)], True),  # batch sizes
        ([10**9 + i for i in range(40)], False),  # steps
        ([*range(40)], False),
    ],
)
def test_numbers_below_an_axis_keep_apart(places, over_sizes):
    points = [(float(x), 1.0) for x in places]
    drawn = curves_svg({"loss": points}, title="loss", x_name="x", over_sizes=over_sizes)
    texts = [text for tick in groups(drawn, "xtick") for text in tick.iter("text")]
    ends = [(float(t.get("x")), 8 * len(t.text) / 2) for t in texts]  # 8 units a letter, about
    assert len(ends) >= 2
    for (x0, half0), (x1, half1) in itertools.pairwise(ends):
        assert x0 + half0 < x1 - half1, [text.text for text in texts]


def test_a_gap_among_many_points_stays():
    points = [(float(x), None if 5_000 <= x < 5_100 else 1.0) for x in range(10_000)]
    [pale] = groups(curves_svg({"a": points}, title="t", x_name="step"), "pale")
    assert (pale[0].get("d") or "").count("M") == 2


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0], [-3.0, 5.0], [1e-9, 1e9], [4.0, 4.0 + 1e-13], [1e99, -1e99], [1e-320, 1.0]],
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_an_axis_holds_its_values_between_a_few_ticks(values, from_zero):
    points = list(enumerate(values, 1))
    drawn = curves_svg({"a": points}, title="t", x_name="x", from_zero=from_zero)
    texts = [text.text for tick in groups(drawn, "ytick") for text in tick.iter("text")]
    assert 2 <= len(texts) <= 12
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) <= 10
    assert all(0 <= y <= HEIGHT - 40 for group in groups(drawn, "data") for _, y in places(group))


@pytest.mark.parametrize(
    ("last", "texts"),
    [(3, "1 2 3"), (7, "2 4 6"), (100_000, "20,000 40,000 60,000 80,000 100,000"), (1, "0 1 2")],
)
def test_ticks_of_steps_are_whole_steps(last, texts):
    drawn = curves_svg({"a": [(1, 5.0), (last, 5.0)]}, title="t", x_name="step")
    below = [
        text.text
        for text in ET.fromstring(drawn).iter("text")
        if float(text.get("y") or 0) > HEIGHT - 30
    ]
    assert below == [*texts.split(), "step"]


def test_values_that_are_not_finite_are_gaps_and_crosses():
    points = [(1.0, 2.0), (2.0, 3.0), (3.0, None), (4.0, 1.0), (5.0, None), (6.0, 5.0), (7.0, 4.0)]
    drawn = curves_svg({"run": points}, title="t", x_name="step")
    (line, alone), [lost] = groups(drawn, "data"), groups(drawn, "lost")
    assert heights(drawn, line) == pytest.approx([2, 3, 1, 5, 4], abs=0.02)
    assert (line[0].get("d") or "").count("M") == 3
    assert heights(drawn, alone) == pytest.approx([1], abs=0.02)  # a dot, without a line
    assert values_at(drawn, "x", [x for x, _ in places(lost)]) == pytest.approx([3, 5], abs=0.02)
    assert min(heights(drawn, lost)) >= 5
    many = curves_svg(
        {"a": [(x, None) for x in range(10_000)], "b": [(0, 1.0)]}, title="t", x_name="x"
    )
    assert len(places(groups(many, "lost")[0])) <= WIDTH + 1


def test_several_curves_have_marks_and_a_single_one_has_no_mark():
    few, many = [(x, 1.0) for x in range(5)], [(x, 2.0) for x in range(1000)]
    drawn = curves_svg({"few": few, "many": many}, title="t", x_name="x")
    marks = [
        places(group)
        for group in groups(drawn, "data")
        if next(group.iter("use"), None) is not None
    ]
    assert [len(each) for each in marks] == [5, 5]
    assert "<use" not in curves_svg({"few": few}, title="t", x_name="x")


def test_odd_labels_are_text_and_the_same_run_gives_the_same_bytes():
    curves = {"$x_1$ <b>&\x1b 漢字": [(1, 1.0)], "b": [(1, 2.0)]}
    drawn = curves_svg(curves, title="<t>", x_name="$1 step$")
    assert ET.fromstring(drawn).get("aria-label") == (
        "<t>, by $1 step$; $x_1$ <b>&? 漢字: 1: 1; b: 1: 2"
    )
    assert "$1 step$" in [text.text for text in ET.fromstring(drawn).iter("text")]
    assert drawn == curves_svg(curves, title="<t>", x_name="$1 step$")
    assert not re.search(r'url\(|https?:|href="[^#]|<style|<!|\b(nan|inf)\b', drawn)
    assert "var(--line)" in drawn
    assert "$x_1$ &lt;b&gt;&amp;" in line_legend(curves)
    ids = [re.findall(r' id="(\w+)"', curves_svg(curves, title=t, x_name="x")) for t in "ab"]
    assert not {*ids[0]} & {*ids[1]}  # ids of two figures in a page


# --- lines, bars --------------------------------------------------------------------------------


def test_marks_stand_to_scale_and_differ_by_colour_and_shape():
    curves = {str(i): [(2, i + 1), (8, 2 * i + 2)] for i in range(MOST_LINES)}
    drawn = curves_svg(curves, title="t", x_name="x", over_sizes=True)
    looks = set()
    for group in groups(drawn, "data"):
        if next(group.iter("use"), None) is not None:
            shape, mark = next(group.iter("defs"))[0], next(group.iter("use"))
            looks.add((shape.get("d"), mark.get("style")))
    assert len(looks) == MOST_LINES
    drawn = curves_svg(
        {"a": [(2, 5), (4, 10), (8, 10)]}, title="t", x_name="x", from_zero=True, over_sizes=True
    )
    (line, marks) = groups(drawn, "data")
    (x0, _), (x1, _), (x2, _) = places(marks)
    assert abs(x1 - x0) == pytest.approx(abs(x2 - x1), abs=0.2)  # doublings
    assert heights(drawn, line) == pytest.approx([5, 10, 10], abs=0.1)


def bars(sizes, limit):
    """The html of one bar, and the (width in %, title, number) of its parts."""
    drawn = memory_bars([("rank 0", sizes)], ["a", "b"], limit, {"a": "<words>"})
    boxes = re.findall(r'<i style="width:([\d.]+)%[^>]*title="([^"]*)">(?:<b>(\d)</b>)?</i>', drawn)
    return drawn, [(float(width), title, letters) for width, title, letters in boxes]


def test_parts_of_bars_have_widths_in_proportion_titles_colours_and_numbers():
    drawn, boxes = bars({"a": 30, "b": 10}, None)
    assert boxes == [(75, "a 30 B", "1"), (25, "b 10 B", "2")]
    assert 'aria-label="rank 0: 40 B, of which a 30 B, b 10 B"' in drawn
    assert "</div><span>40 B</span>" in drawn
    assert all(colour in drawn for colour in PARTS[:2])
    assert "</span>a: &lt;words&gt;</li>" in drawn
    assert "limit" not in drawn
    assert bars({"a": 999, "b": 1}, None)[1][1][2] == ""  # no room for its number


@pytest.mark.parametrize(("limit", "share"), [(20, 0.5), (40, 1.0), (60, 1.5)])
def test_the_limit_is_a_line_where_the_bar_would_end(limit, share):
    drawn, boxes = bars({"a": 30, "b": 10}, limit)
    [at] = re.findall(r'class="limit" style="left:([\d.]+)%"', drawn)
    assert float(at) == pytest.approx(share * sum(width for width, *_ in boxes), abs=0.01)
    [(side, place)] = re.findall(r'<small style="(\w+):([\d.]+)%">limit', drawn)
    assert float(at) == pytest.approx(float(place) if side == "left" else 100 - float(place))


def test_a_limit_far_beyond_the_axis_is_named():
    drawn, boxes = bars({"a": 30, "b": 10}, 4000)
    assert "limit 3.9 KiB, 100 × the longest →" in html.unescape(drawn)
    assert "<u " not in drawn
    assert sum(width for width, *_ in boxes) == 100
    assert "limit 87.9 KiB, over 1,000 × the longest →" in bars({"a": 30, "b": 10}, 90_000)[0]


def test_matplotlib_is_loaded_by_figures_only():
    code = (
        "import sys; from ppctl.reports import runs_table; from ppctl.reports.charts import "
        "image_charts, page_figures; from ppctl.reports import write_report; "
        "print('matplotlib' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_rounding_is_no_trend_and_the_axis_has_whole_numbers():
    """Losses that differ in the last digit of float32 are a flat line at 3.46385."""
    points = [(float(x), 3.463847 + 2.4e-7 * (x % 2)) for x in range(1, 9)]
    drawn = curves_svg({"loss": points}, title="Loss", x_name="step")
    ticks = [t.text for group in groups(drawn, "ytick") for t in group.iter("text")]
    assert all(text.startswith("3.46") for text in ticks)
    assert len({*ticks}) == len(ticks)
    y = [y for _, y in places(groups(drawn, "data")[0])]
    assert max(y) - min(y) < 0.02 * HEIGHT
    assert "1e" not in "".join(ET.fromstring(drawn).itertext())
