"""The page of `ppctl plan` has the lines and tables of the terminal and loads nothing; a file that
cannot be is refused at once.
"""

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
from support.selection import full_except

from ppctl import config
from ppctl.cli.commands.plan import plan as run_plan
from ppctl.errors import ConfigError
from ppctl.planner import make_plan as plan
from ppctl.planner.show.plan_page import picture_of, plan_page
from ppctl.planner.show.plan_terminal import memory_table, plan_lines, stage_table
from ppctl.reports.charts.cluster_figure import cluster_svg
from ppctl.reports.palette import PARTS as COLOURS
from ppctl.training.pipeline.engines.step_programs import PARTS
from ppctl.training.pipeline.job import assemble

SMALL = config.Config(
    model=config.MLP(num_layers=4, d_model=32),
    mesh=config.Mesh(1, 2, 1),
    schedule=config.Schedule("1f1b", 4),
    executor=config.Spmd(remat="layer"),
    data=config.Regression(batch_size=8),
    run=config.Run(dtype="float32"),
)
ASKED = {
    "mpmd": replace(
        SMALL,
        executor=config.Mpmd(),
        schedule=config.Schedule("zb_h1", 4),
        mesh=config.Mesh(2, 2, 1),
    ),
    "does not fit": replace(SMALL, plan=config.Plan(memory_gib=1e-5)),
    "spmd": SMALL,
    "full": replace(SMALL, executor=config.Spmd(remat="full")),
    "reference": replace(SMALL, executor=config.Reference(), mesh=config.Mesh()),
}
VOID = {"meta", "wbr", "link", "img", "br", "hr", "input", "rect", "line"}


class Page(HTMLParser):
    """The contents of a page; every tag must be closed in its turn."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        said = dict(attrs)
        self.tags.append((tag, said))
        self.links += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def shown(found, picture):
    return plan_page(found, picture, ["mesh=1x2"])


@cache
def made(name):
    """(prediction, its picture, text of its page) of one of ASKED."""
    asked = ASKED[name]
    job = assemble(asked)
    found = plan.predicted(job)
    picture = picture_of(job, found.unknown)
    return found, picture, shown(found, picture)


names = pytest.mark.parametrize("name", full_except([*ASKED], "mpmd", "does not fit"))


@names
def test_the_page_has_the_lines_and_tables_of_the_terminal(name, capsys):
    found, _, text = made(name)
    said = Page(text).text
    for words in (word for line in plan_lines(found) for word in line):
        assert " ".join(words.split()) in said
    tables = [stage_table(found.stages)] if found.stages else []
    for title, columns, rows in (*tables, memory_table(found)):
        cells = [cell for row in (columns, *rows) for cell in row if cell]
        assert " ".join(" ".join(cells).split()) in said, title


@names
def test_the_page_loads_no_other_file(name):
    _, _, text = made(name)
    assert "default-src 'none'" in text
    assert Page(text).links == []
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttp|@@", text)


def test_the_verdict_has_words_in_addition_to_its_colour():
    _, _, text = made("does not fit")
    parsed = Page(text)
    assert ("p", {"class": "fit no"}) in parsed.tags
    assert "✗ does not fit: " in parsed.text
    assert ("p", {"class": "fit yes"}) in Page(made("spmd")[2]).tags
    labels = [
        said["aria-label"]
        for tag, said in parsed.tags
        if tag == "div" and said.get("role") == "img"
    ]
    assert len(labels) == 1  # ranks are alike
    assert re.match(r"every rank: [\d.]+ KiB, of which parameters [\d.]+ KiB, optimizer", labels[0])


def test_stages_name_their_layers_and_rank():
    said = Page(made("mpmd")[2]).text
    assert "0 0-1 0 " in said  # stage, layers, rank
    assert "1 2-3 1 " in said


def test_the_page_gives_the_reason_for_a_missing_chart(monkeypatch):
    job, (found, _, _) = assemble(SMALL), made("spmd")
    assert made("reference")[1] == "executor=reference has no pipeline to draw."
    unknown = picture_of(job, "no <peak> is known.")
    assert unknown == "Not drawn, because the step time is unknown: no <peak> is known."
    assert "no &lt;peak&gt; is known." in shown(found, unknown)
    monkeypatch.setattr("ppctl.reports.charts.draw_schedule.MOST_TASKS", 10)
    large = picture_of(job, None)
    assert large == "Not drawn: 16 tasks are too many for a chart (10 at most)."
    text = shown(found, large)
    assert large in text
    assert "<canvas" not in text
    assert "<script" not in text


def test_the_page_lists_assumptions_and_forwards_that_run_in_their_backward():
    found, _, text = made("full")  # with remat=full
    said = Page(text).text
    assert "What this assumes" in said
    assert all(text in said for text in found.assumes)
    assert "in backward" in said


def test_the_page_gives_the_reason_for_an_unknown_step_time():
    found = replace(
        made("spmd")[0],
        step_time_s=None,
        per_step_overhead_s=None,
        tokens_per_s=None,
        unknown="no <peak>.",
    )
    said = Page(shown(found, "none")).text
    assert "step not known: no <peak>." in said


def test_the_picture_is_the_step_that_is_predicted():
    for name in ("spmd", "full", "mpmd"):
        found, picture, _ = made(name)
        assert found.step_time_s is not None
        assert found.per_step_overhead_s is not None
        assert not isinstance(picture, str)
        assert (
            0
            < picture.timeline.makespan_s
            <= (found.step_time_s - found.per_step_overhead_s) * (1 + 1e-9)
        )
        assert picture.lower_bound_s <= picture.timeline.makespan_s * (1 + 1e-9)


def test_names_are_text_and_not_markup():
    found = replace(made("spmd")[0], schedule="</p><b>x", devices="2 x <i>cpu", hardware='"<u>')
    text = plan_page(found, "<h1>no", ["data.path=<script>alert(1)</script>&"])
    for markup in ("<script>alert", "<b>x", "<i>cpu", "<u>", "<h1>no"):
        assert markup not in text
    said = Page(text).text
    for words in (
        "data.path=<script>alert(1)</script>&",
        "</p><b>x",
        "2 x <i>cpu",
        '"<u>',
        "<h1>no",
    ):
        assert words in said


def test_many_ranks_have_few_bars():
    found = made("mpmd")[0]
    sizes = tuple({"parameters": 1000 + rank, "batch": 0} for rank in range(100))
    totals = tuple(sum(each.values()) for each in sizes)
    many = replace(found, memory_bytes=sizes, total_bytes=totals, predicted_bytes=totals)
    parsed = Page(shown(many, "none"))
    [label] = [
        said["aria-label"]
        for tag, said in parsed.tags
        if tag == "div" and said.get("role") == "img"
    ]
    assert label.count("of which") == 2  # the last is the fullest


def test_every_part_has_a_colour():
    assert len(PARTS) <= len(COLOURS) == len(set(COLOURS))


# --- the file -----------------------------------------------------------------------------------


def test_the_page_is_written_in_addition_to_the_printed_plan(tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert run_plan(replace(SMALL, plan=config.Plan(html=str(file))), as_json=True) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["schedule"] == "1f1b"
    assert said.err == f"ppctl: wrote {file} ({file.stat().st_size:,} bytes)\n"
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("no/such/plan.html", "there is no directory {}/no/such"),
        ("", "it is a directory"),
        ("f/x", "there is no"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    file, reason, tmp_path, monkeypatch
):
    (tmp_path / "f").write_text("")
    monkeypatch.setattr("ppctl.cli.commands.plan.assemble", lambda asked: pytest.fail("too late"))
    with pytest.raises(ConfigError) as error:
        run_plan(replace(SMALL, plan=config.Plan(html=str(tmp_path / file))), as_json=False)
    said = str(error.value)
    assert said.startswith(
        f"plan.html={tmp_path / file} cannot be written: {reason.format(tmp_path)}"
    )
    assert said.count("\n") == 0


def test_a_directory_of_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "os.access", lambda path, mode: False
    )  # tests may run as root, who may write anywhere
    with pytest.raises(ConfigError, match=r"cannot be written: permission denied\. Name a file"):
        run_plan(replace(SMALL, plan=config.Plan(html=str(tmp_path / "x.html"))), as_json=False)


def test_a_full_disk_fails_in_one_line():
    with pytest.raises(
        ConfigError, match=r"plan.html=/dev/full cannot be written: No space left on device\.$"
    ):
        run_plan(replace(SMALL, plan=config.Plan(html="/dev/full")), as_json=True)


def test_devices_are_drawn_by_host_and_rank():
    figure = cluster_svg([("one", 3), ("two", 9)], 8)
    hosts = re.findall(r'class="host" x="(\d+)" y="(\d+)">host (\d)<', figure)
    assert [number for *_, number in hosts] == ["0", "1"]
    assert len({x for x, *_ in hosts}) == 1
    titles = re.findall("<title>(.*?)</title>", figure)
    assert titles == [f"device {n}: {'one' if n < 3 else 'two'}" for n in range(12)]
    colours = re.findall(r'<rect [^>]*fill="(#\w+)"', figure)
    assert colours == [COLOURS[0]] * 3 + [COLOURS[1]] * 9
    assert 'aria-label="one: 3 devices; two: 9 devices"' in figure
    assert cluster_svg([("one", 2**20)], 8) == ""
