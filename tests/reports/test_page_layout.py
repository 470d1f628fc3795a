"""Every html page at the width of a desk, a tablet and a phone: its words can be read, whatever
there is to say.
"""

from __future__ import annotations

import re

import pytest
from support.browser import BROWSER, MISSING, crossed, cut_off, look_at, overlaps
from support.pages import all_pages

WIDTHS = (1600, 1280, 800, 420)
LABEL = re.compile(r"[FBIW]\d*")  # a task's number in its cell
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=MISSING)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What stands where, by (page, width)."""
    directory = tmp_path_factory.mktemp("pages")
    return look_at(all_pages(directory), WIDTHS, directory)


def texts(page):
    """The texts of the first chart."""
    return [each["text"] for each in page["charts"][0]["texts"]]


@pytest.mark.full
def test_tasks_are_labelled_for_every_kind_or_no_kind_with_a_note(seen):
    found = set()
    for name, kinds in (
        ("schedule, 8 ranks, 32 microbatches", "FIW"),
        ("schedule, whole backwards", "BF"),
    ):
        for width in WIDTHS:
            labels = [text for text in texts(seen[name, width]) if LABEL.fullmatch(text)]
            assert "".join(sorted({label[0] for label in labels})) in ("", kinds)
            assert len({len(label) > 1 for label in labels}) < 2
            [hint] = seen[name, width]["hints"]
            assert hint == f"Zoom in to read each task's {'' if labels else 'kind and '}microbatch."
            found.add(bool(labels))
    assert found == {True, False}
    labels = [text for text in texts(seen["schedule", 1280]) if LABEL.fullmatch(text)]
    assert len(set(labels)) == 16
    assert len(labels) == 64
    assert seen["schedule", 1280]["hints"] == [""]


def test_numbers_that_are_the_same_on_every_rank_have_no_column(seen):
    assert not {"bubble", "peak"} & {*texts(seen["schedule, 8 ranks, 32 microbatches", 1280])}
    assert {"bubble", "peak"} & {*texts(seen["schedule", 1280])} == {"peak"}


def test_no_text_of_a_chart_runs_into_another_or_is_cut(seen):
    wrong = {}
    for place, page in seen.items():
        assert page["charts"]
        assert all(chart["texts"] for chart in page["charts"])
        for chart in page["charts"]:
            found = [overlaps(chart), cut_off(chart), crossed(chart)]
            if any(found):
                wrong[*place, chart["name"]] = found
    assert wrong == {}


def test_no_page_scrolls_sideways_and_no_text_is_cut_by_the_window(seen):
    assert {place: page["sideways"] for place, page in seen.items() if page["sideways"] > 0} == {}
    assert {place: page["cut"] for place, page in seen.items() if page["cut"]} == {}


def test_a_table_that_scrolls_in_its_box_is_marked_and_has_a_name(seen):
    wide = {
        (*place, box["name"]): box["isMarked"]
        for place, page in seen.items()
        for box in page["boxes"]
    }
    assert all(wide.values())
    assert None not in {name for _, _, name in wide}
    assert any(box["hidden"] > 0 for box in seen["plan, limit", 420]["boxes"])
