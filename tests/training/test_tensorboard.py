"""What TensorBoard reads of a run beside scalars: text and figures, of each step once, however often it was done."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ppctl.reports.charts.drawing import drawing_of_timeline
from ppctl.reports.charts.palette import COLOURS
from ppctl.schedule import build
from ppctl.schedule.costs import Costs
from ppctl.schedule.simulate import simulate
from ppctl.training.tensorboard import MOST_TASKS, TensorBoardLog

WHERE = {"platform": "cpu", "num_devices": 2, "versions": {"jax": "0.99"}}


def read(directory):
    """All events, none sampled away."""
    return EventAccumulator(str(directory), {"images": 0, "tensors": 0, "histograms": 0, "scalars": 0}).Reload()


def pixels(event):
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)).convert("RGB"))


def text_of(events, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{tag}/text_summary")]


def wide(image, kind):
    """The columns of a figure in which a kind's colour is, as the share of its width that they span."""
    colour = [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)]
    columns = np.flatnonzero((image == colour).all(axis=2).any(axis=0))
    return (columns[-1] - columns[0]) / image.shape[1]


def test_the_request_and_the_place_are_text_that_markdown_leaves_alone(tmp_path):
    log = TensorBoardLog(tmp_path, 1)
    log.request(["mesh=1x2", "run.name=a|b"], "run:\n  name: '*a*'\n", WHERE | {"system": "a|b"})
    log.close()
    events = read(tmp_path)
    assert text_of(events, "run/asked") == [(1, "    mesh=1x2\n    run.name=a|b")]
    assert text_of(events, "run/config") == [(1, "    run:\n      name: '*a*'")]
    [(_, table)] = text_of(events, "run/environment")
    assert "| platform | cpu |\n| num_devices | 2 |\n| system | a\\|b |\n| version of jax | 0.99 |" in table


def test_drawings_of_a_figure_share_their_time_axis_and_memory_has_a_bar_a_rank(tmp_path):
    schedule = build("gpipe", 2, 4)
    slow, fast = (
        drawing_of_timeline(f"{seconds}", simulate(schedule, Costs(*[seconds] * 3))) for seconds in (2.0, 1.0)
    )
    log = TensorBoardLog(tmp_path, 7)
    log.gantt("schedule/measured", schedule, lambda: [slow, fast], 9)
    log.memory([3 << 20, 0, 1 << 20], 4 << 20)
    log.step_times([0.5, 0.25, 0.5], 9)
    log.close()
    events = read(tmp_path)
    [drawn] = events.Images("schedule/measured")
    assert drawn.step == 9
    image = pixels(drawn)
    middle = len(image) // 2
    assert wide(image[:middle], "F") > 0.3
    # the legend below is of the same colours, so that only the upper part of the lower half is looked at
    assert np.isclose(wide(image[middle:-60], "F"), wide(image[:middle], "F") / 2, atol=0.02)
    [memory] = events.Images("memory/ranks")
    assert memory.step == 7
    bars = (pixels(memory) == [0x77, 0xAA, 0xDD]).all(axis=2)
    lengths = sorted({int(n) for n in bars.sum(axis=1) if n > 20})
    assert np.isclose(lengths[0] / lengths[-1], 1 / 3, atol=0.05)  # that of another process is left out
    [histogram] = events.Histograms("speed/step_times_s")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (9, 3, 1.25)


def test_what_is_done_again_after_a_resume_is_there_once(tmp_path):
    schedule = build("gpipe", 1, 1)
    drawing = drawing_of_timeline("x", simulate(schedule, Costs()))
    for first, last in ((1, 6), (5, 8), (5, 9)):  # killed at 6 and at 8, with a checkpoint of step 4
        log = TensorBoardLog(tmp_path, first)
        log.request([f"from={first}"], "", {})
        for step in range(first, last + 1):
            log.scalars({"step": step, "loss": 1.0, "unknown": None}, step, lambda key: key)
        log.gantt("schedule/measured", schedule, lambda: [drawing], first + 1)
        log.step_times([1.0], last)
        log.close()
        time.sleep(1.1)  # files are named by the second
    events = read(tmp_path)
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 10))
    shown = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()  # what the pages of TensorBoard show
    assert [event.step for event in shown.Tensors("run/asked/text_summary")] == [1, 5]
    assert [event.step for event in events.Images("schedule/measured")] == [2, 6]
    assert [event.step for event in events.Histograms("speed/step_times_s")] == [9]
    assert events.Tags()["scalars"] == ["loss"]


def test_a_schedule_of_many_tasks_is_not_drawn(tmp_path):
    schedule = build("gpipe", 1, MOST_TASKS)
    log = TensorBoardLog(tmp_path, 1)
    log.gantt("schedule/ideal", schedule, lambda: [][0], 1)
    log.close()
    events = read(tmp_path)
    assert events.Tags()["images"] == []
    assert text_of(events, "schedule/ideal_text") == [
        (1, f"{2 * MOST_TASKS:,} tasks are too many for a figure: see `ppctl report`.")
    ]


def test_figures_leave_no_state_of_pyplot_and_metrics_alone_load_no_matplotlib():
    code = (
        "import sys, ppctl.training.metrics; first = 'matplotlib' in sys.modules\n"
        "from ppctl.reports.charts.image import bar_pixels\n"
        "bar_pixels('x', [('a', 1.0)], 'MiB', [('b', 2.0)])\n"
        "print(first, 'matplotlib.figure' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True False\n"
