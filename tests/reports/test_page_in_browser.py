"""The html pages in a real browser without a window: they draw, answer keys, and ask the network
for nothing.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import BROWSER, FLAGS, MISSING
from support.pages import recorded
from support.selection import full

from ppctl.cli.subcommands.schedule_show import draw
from ppctl.config import (
    MLP,
    Config,
    Costs,
    Mesh,
    Mpmd,
    Regression,
    Schedule as Plain,
    ScheduleConfig,
)
from ppctl.config.schedule_from_config import pipeline_of
from ppctl.launch.sweep import sweep_page
from ppctl.launch.sweep.sweep_jobs import NUMBERS, Job, Result
from ppctl.planner.make_plan import predicted
from ppctl.planner.show import plan_page
from ppctl.reports import measured_timeline_file as timeline_io
from ppctl.reports.charts.draw_schedule import schedules_page
from ppctl.reports.run_page.one_run_page import run_page
from ppctl.reports.run_page.read_run import LOAD, LayerValues
from ppctl.reports.write_report import compare_page
from ppctl.schedule.simulator import simulate
from ppctl.training.pipeline.engines.step_programs import PARTS
from ppctl.training.pipeline.job import assemble

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=MISSING)]

# Appended to the page: presses keys on the first chart, and records the status text of the page.
SCRIPT = """
<script>
const boxes = (selector) =>
  [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
setTimeout(() => {
  const canvas = document.querySelector("canvas.gantt");
  if (!canvas) {
    const marks = boxes(".figures .data use").map((box) => box.toJSON());
    const texts = boxes(".lines text").map((box) => box.height);
    const hidden = document.documentElement.scrollWidth - innerWidth;
    const said = { marks, texts, hidden, loads: performance.getEntriesByType("resource").length };
    const box = document.createElement("pre");
    box.id = "said";
    box.textContent = JSON.stringify(said);
    document.body.append(box);
    return;
  }
  canvas.focus();
  for (const key of KEYS) {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  }
  draw(charts[0]);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) colours.add(pixels.slice(i, i + 3).join(","));
  const loads = performance.getEntriesByType("resource").length;
  const said = { tip: $("tip").innerText, view, loads, colours: [...colours] };
  said.boxes = boxes(".bars i").map((box) => box.width);
  said.hidden = document.documentElement.scrollWidth - innerWidth;
  document.body.append(element("pre", { id: "said" }, JSON.stringify(said)));
}, 1000);
</script></body>"""


def browse(tmp_path, family, keys, p=4, m=8, **costs):
    """Return (the status text of a schedule's page after these keys, the page's DOM)."""
    drawing = draw(ScheduleConfig(mesh=Mesh(1, p), schedule=Plain(family, m), costs=Costs(**costs)))
    return browse_page(tmp_path, schedules_page([drawing]), keys)


def browse_page(tmp_path, text, keys, width=1200):
    """The same of any page, in a window so wide."""
    file = tmp_path / "page.html"
    file.write_text(
        text.replace("</body>", SCRIPT.replace("KEYS", json.dumps(keys))), encoding="utf-8"
    )
    assert BROWSER is not None
    command = [
        BROWSER,
        *FLAGS,
        "--virtual-time-budget=6000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [f"--window-size={width},800", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{file}"], capture_output=True, text=True, timeout=60, check=True
    )
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout)
    assert said is not None, done.stdout[-2000:]
    return json.loads(html.unescape(said[1])), done.stdout


def test_the_page_draws_every_kind_and_loads_no_other_file(tmp_path):
    said, dom = browse(tmp_path, "zb_h1", [])
    assert 'data-ready="yes"' in dom
    for colour in ("86,180,233", "34,168,132", "204,121,167"):  # F, I, W
        assert colour in said["colours"]
    assert said["loads"] == 0
    assert said["tip"] == ""


def test_keys_move_between_tasks_and_to_their_dependencies(tmp_path):
    said, _ = browse(
        tmp_path, "1f1b", ["ArrowRight", "ArrowDown", "ArrowRight", "ArrowRight"], transfer_s=0.5
    )
    assert said["tip"].splitlines()[0] == "1F2"
    said, _ = browse(
        tmp_path, "1f1b", ["ArrowRight", "ArrowDown", "ArrowDown", "w"], transfer_s=0.5
    )
    assert said["tip"].splitlines()[0] == "1F0"
    assert "waits for 0F0 on rank 0, until 1 s and 0.5 s of transfer" in said["tip"]


def test_zooming_halves_the_view_and_zero_shows_all(tmp_path):
    said, _ = browse(tmp_path, "gpipe", ["+", "+"])
    assert said["view"][1] - said["view"][0] == pytest.approx(33 / 4)
    said, _ = browse(tmp_path, "gpipe", ["+", "ArrowRight", "0", "Escape"])
    assert said["view"] == [0, 33]


def test_more_tasks_than_pixels_keep_the_colours_of_their_kinds(tmp_path):
    said, _ = browse(tmp_path, "1f1b", [], p=16, m=1024)
    assert {"86,180,233", "230,159,0"} <= set(said["colours"])


@pytest.mark.parametrize("width", [500, full(1200)])
def test_the_page_of_a_plan_draws_memory_to_scale_and_the_step(tmp_path, width):
    asked = Config(
        model=MLP(num_layers=4, d_model=32),
        mesh=Mesh(1, 4),
        schedule=Plain("zb_h1", 8),
        executor=Mpmd(),
        data=Regression(batch_size=16),
    )
    job = assemble(asked)
    found = predicted(job)
    text = plan_page.plan_page(found, plan_page.picture_of(job, found.unknown), [])
    said, _ = browse_page(tmp_path, text, ["ArrowRight"], width)
    assert said["loads"] == 0
    assert said["hidden"] <= 0  # nothing stands to the right of the window
    assert {"86,180,233", "34,168,132", "204,121,167"} <= set(said["colours"])
    assert said["tip"].splitlines()[0] == "0F0"
    sizes = [held[part] for held in found.memory_bytes for part in PARTS if held.get(part)]
    assert len(said["boxes"]) == len(sizes)
    scale = sum(said["boxes"]) / sum(sizes)
    for wide, size in zip(said["boxes"], sizes, strict=True):
        assert wide == pytest.approx(size * scale, abs=0.2)


@pytest.mark.parametrize("width", [500, full(1200)])
def test_the_page_of_a_sweep_draws_its_marks_to_scale_and_fits(tmp_path, width):
    results, speeds = [], (100.0, 300.0, 150.0, 200.0)
    for index, speed in enumerate(speeds):
        name, size = ("gpipe", "zb_h1")[index // 2], (8, 16)[index % 2]
        values = {"schedule": name, "schedule.num_microbatches": size}
        job = Job(index, values, f"schedule={name} {'x' * 60}", Path("runs/s"))
        known = {"tokens_per_s": speed, "step_time_s": 1.0, "predicted_bubble_fraction": 0.2}
        error = "y" * 200 if index else None
        results.append(Result(job, "finished", 0, 3.0, error, dict.fromkeys(NUMBERS) | known))
    text = sweep_page.sweep_page(Path("runs/s"), results)
    said, _ = browse_page(tmp_path, text, [], width)
    assert said["loads"] == 0
    assert said["hidden"] <= 0
    assert min(said["texts"]) >= 11  # pixels: letters that can be read
    at = [mark["y"] + mark["height"] / 2 for mark in said["marks"][:4]]
    per_token = (at[1] - at[0]) / 200  # the last point's mark is drawn first
    assert per_token > 0.2
    assert at[3] - at[2] == pytest.approx(50 * per_token, abs=2)


@pytest.mark.parametrize("width", [500, full(1200)])
def test_the_page_of_a_run_fits(tmp_path, width):
    run = recorded(tmp_path / "run", 5000, spike=2500)
    text = run_page(run, tmp_path / "report.html")
    said, _ = browse_page(tmp_path, text, [], width)
    assert said["loads"] == 0
    assert said["hidden"] <= 0
    assert min(said["texts"]) >= 11  # pixels: letters that can be read


@pytest.mark.parametrize("width", [500, full(1200)])
def test_the_page_of_a_run_draws_its_measured_step_above_the_predicted_one(tmp_path, width):
    pipeline = pipeline_of(Plain("zb_h1", 8), Mpmd(), 4, 8)
    run = recorded(tmp_path / "run", 50, 3, pipeline)
    timeline_io.write_timeline(
        run.summary.path / "timeline", simulate(pipeline.step.schedule, pipeline.step.costs)
    )
    said, dom = browse_page(
        tmp_path, run_page(run, tmp_path / "report.html"), ["ArrowRight", "ArrowRight"], width
    )
    assert said["loads"] == 0
    assert said["hidden"] <= 0
    assert {"86,180,233", "34,168,132", "204,121,167"} <= set(said["colours"])
    assert said["tip"].splitlines()[0] == "0F1"
    titles = re.findall(r"<h2>(zb_h1, [^:]+):", dom)
    assert titles == ["zb_h1, measured", "zb_h1, simulated from its means"]


@pytest.mark.parametrize("width", [500, full(1200)])
def test_the_page_of_several_runs_fits(tmp_path, width):
    runs = [
        recorded(tmp_path / f"{'r' * 40}{number}", 50 * number, spike=3) for number in range(1, 9)
    ]
    said, dom = browse_page(tmp_path, compare_page(runs, {}, tmp_path / "report.html"), [], width)
    assert said["loads"] == 0
    assert said["hidden"] <= 0
    assert min(said["texts"]) >= 11
    assert len(said["texts"]) >= 3 * 5  # ticks of losses, gradient norms and speeds
    assert dom.count('<li><span class="key"') == 3 * 8


def test_heat_maps_show_their_colours(tmp_path):
    from matplotlib.image import imread

    file = tmp_path / "page.html"
    loads = LayerValues(1, [1, 2], [[1.0, 1.0], [1.0, 9.0]])
    one = replace(recorded(tmp_path / "run", 3, 1), layers={LOAD: loads})
    file.write_text(run_page(one, file), encoding="utf-8")
    assert BROWSER is not None
    picture, profile = tmp_path / "page.png", f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *FLAGS, profile, "--window-size=800,3000", f"--screenshot={picture}"]
    subprocess.run([*command, f"file://{file}"], capture_output=True, timeout=60, check=True)
    pixels = (imread(picture)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    least, most = (0, 34, 78), (254, 232, 56)  # the extremes of cividis
    number = [(abs(pixels - colour).max(1) <= 1).sum() for colour in (least, most)]
    assert number[0] / number[1] == pytest.approx(3, rel=0.2)  # cells, and equal parts of the scale
