"""Every format of a schedule shows its timeline."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.report_of_a import charts_of

import ppctl
from ppctl.cli.subcommands.schedule_show import draw
from ppctl.config import Costs, Mesh, Schedule as Plain, ScheduleConfig
from ppctl.errors import ConfigError
from ppctl.reports.charts.draw_schedule import schedules_page
from ppctl.reports.charts.image_charts import (
    DPI,
    MARGIN_IN,
    MAX_RANKS,
    ROW_IN,
    WIDTH_IN,
    _gantt,
    image,
)
from ppctl.reports.charts.schedule_drawing import drawing_document, show_gantt
from ppctl.reports.palette import COLOURS, shade
from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.ir import Task
from ppctl.schedule.schedule_text import from_csv, to_csv


def drawing(family="1f1b", p=4, m=8, **costs):
    return draw(ScheduleConfig(mesh=Mesh(1, p), schedule=Plain(family, m), costs=Costs(**costs)))


@pytest.fixture(params=FAMILIES)
def any_drawing(request):
    return drawing(request.param, transfer_s=0.25)


def printed(one, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        show_gantt(console, one)
    return capture.get()


def test_the_chart_of_a_tiny_schedule_on_the_terminal():
    assert printed(drawing("1f1b", p=2, m=3)) == (
        "1f1b: 2 ranks, 3 microbatches\n"
        "makespan 12 s (at least 12 s), period 12 s, bubble 25.0%, peak 2 activations\n"
        "\n"
        "                                  bubble    peak\n"
        "rank 0  F0F1....B0--F2B1--..B2--   25.0%       2\n"
        "rank 1  ..F0B0--F1B1--F2B2--....   25.0%       1\n"
        "\n"
        " F  forward   B  backward  1 column: 0.5 s\n"
    )


def test_a_text_chart_drawn_in_a_notebook_is_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    file = ppctl.draw(
        ppctl.build_schedule("1f1b", num_ranks=2, num_microbatches=3), tmp_path / "a.txt"
    )
    assert "rank 0  F0F1....B0--F2B1--..B2--" in file.read_text()


def test_a_chart_too_wide_for_numbers_has_letters():
    rows = [
        line.split()[2]
        for line in printed(drawing("1f1b", p=2, m=3, input_grad_s=0), width=36).splitlines()[4:6]
    ]
    assert rows == ["FF.BFB.B", ".FBFBFB."]


@pytest.mark.parametrize("width", [80, 200])
def test_tasks_have_numbers_for_every_kind_or_for_no_kind(width):
    chart = [
        line.split()[2] for line in printed(drawing("1f1b", p=4, m=32), width).splitlines()[4:8]
    ]
    cells = re.findall(r"([FB])(\d*)", "".join(chart))
    assert {kind for kind, number in cells if number} in (set(), {"F", "B"})
    assert {kind for kind, _ in cells} == {"F", "B"}


def test_cells_of_a_figure_have_equal_labels_for_every_kind():
    for m, said in ((8, 2), (40, 1), (200, 0)):
        words = re.findall(r">([FB]\d*)</text>", image([drawing("1f1b", p=2, m=m)], "svg").decode())
        assert {kind for kind, *_ in words} == ({"F", "B"} if said else set())
        assert all((len(word) > 1) == (said == 2) for word in words)


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_chart_is_no_wider_than_the_terminal(any_drawing, width):
    chart = [
        line
        for line in printed(any_drawing, width).splitlines()
        if line.startswith(("rank", " rank"))
    ]
    assert len(chart) == 4
    assert max(map(len, chart)) <= width


def test_kinds_have_colours_and_chunks_have_shades():
    assert len(set(COLOURS.values())) == len(COLOURS)
    shades = [shade(kind, chunk, 4) for kind in COLOURS for chunk in range(4)]
    assert len(set(shades)) == 4 * len(COLOURS)
    console = Console(width=80, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        show_gantt(console, drawing("zb_v"))
    for kind in "FIW":
        red, green, blue = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
        assert f"48;2;{red};{green};{blue}m" in capture.get()


def test_the_document_is_the_timeline(any_drawing):
    said, timeline = json.loads(json.dumps(drawing_document(any_drawing))), any_drawing.timeline
    assert said["makespan_s"] == timeline.makespan_s
    assert said["period_s"] == timeline.period_s
    near = 1 + 1e-12
    assert said["lower_bound_s"] <= said["makespan_s"] * near
    assert said["period_lower_bound_s"] <= said["period_s"] * near
    bounds = zip(said["peak_activations_lower_bound"], said["peak_activations"], strict=True)
    assert all(bound <= peak * near for bound, peak in bounds)
    assert said["bubble_fraction"] == list(timeline.bubble_fractions)
    assert said["peak_activations"] == list(timeline.peak_activations)
    ranks = tuple(tuple(Task.parse(cell) for cell in cells) for cells in said["ranks"])
    assert ranks == any_drawing.schedule.ranks
    assert said["end_s"] == [[timeline.end_s[task] for task in tasks] for tasks in ranks]


def test_the_csv_is_the_schedule(any_drawing):
    schedule = any_drawing.schedule
    assert from_csv(to_csv(schedule.ranks), schedule.name) == schedule


# --- html ---------------------------------------------------------------------------------------


def test_the_page_loads_no_other_file():
    text = schedules_page([drawing("gpipe"), drawing("zb_v")])
    assert "default-src 'none'" in text  # a browser refuses whatever this leaves out
    assert not re.search(
        r"https?:|//[\w-]+\.\w|@import|url\(|<link|<img|<iframe|\bsrc=|\bfetch\(|XMLHttp|@@", text
    )


def test_the_data_of_the_page_is_the_timeline(any_drawing):
    [chart] = charts_of(schedules_page([any_drawing]))
    timeline, schedule = any_drawing.timeline, any_drawing.schedule
    tasks = [task for program in schedule.ranks for task in program]
    assert chart["ranks"] == [list(map(str, program)) for program in schedule.ranks]
    for name, times in (("start_s", timeline.start_s), ("end_s", timeline.end_s)):
        assert chart[name] == [[times[task] for task in program] for program in schedule.ranks]
    waited = [None if place is None else tasks[place] for place in chart["waits_for"]]
    assert waited == [timeline.waits_for(task) for task in tasks]
    curves = [[tuple(point) for point in curve] for curve in chart["memory"]]
    assert curves == [[*timeline.memory_curve(rank)] for rank in range(4)]


def test_a_name_in_the_page_is_text_and_not_markup():
    one = drawing()
    text = schedules_page([replace(one, label="</script><b>x")])
    assert "</script><b>" not in text
    assert charts_of(text)[0]["label"] == "</script><b>x"


def test_the_page_of_a_large_schedule_is_small():
    assert len(schedules_page([drawing("1f1b", p=32, m=128)])) < 300_000  # 8,192 tasks


# --- figures ------------------------------------------------------------------------------------


def test_a_png_has_the_size_of_its_ranks():
    data = image([drawing("zb_h1")], "png")
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (WIDTH_IN * DPI, round((MARGIN_IN + 4 * ROW_IN) * DPI))


def test_an_svg_has_its_letters_as_text_and_is_the_same_each_time():
    one = drawing("1f1b", p=2, m=2)
    data = image([one], "svg")
    assert f'width="{WIDTH_IN * 72:g}pt"'.encode() in data
    assert all(f">{cell}<".encode() in data for cell in ("F0", "B1"))
    assert image([one], "svg") == data


def test_a_pdf_is_the_same_each_time():
    data = image([drawing("1f1b", p=2, m=2)], "pdf")
    assert data.startswith(b"%PDF")
    assert image([drawing("1f1b", p=2, m=2)], "pdf") == data


def test_drawings_of_one_figure_have_one_time_axis_and_one_legend():
    drawings = [drawing(name, p=2, m=4) for name in ("gpipe", "1f1b", "zb_h1")]
    longest_s = max(each.timeline.makespan_s for each in drawings)
    figure = _gantt(drawings)
    assert [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes] == [
        each.label for each in drawings
    ]
    assert all(axes.get_xlim() == (0, longest_s) for axes in figure.axes)
    assert len({axes.get_position().x0 for axes in figure.axes}) == 1
    (legend,) = figure.legends
    assert [text.get_text()[0] for text in legend.get_texts()] == ["F", "B", "I", "W"]


def test_a_figure_of_too_many_ranks_is_refused():
    with pytest.raises(ConfigError, match=f"{MAX_RANKS} rows at most. Use --format html"):
        image([drawing("gpipe", p=MAX_RANKS + 1, m=1)], "png")
