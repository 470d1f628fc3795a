"""The run runs/a of two steps, and its page."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import unescape
from pathlib import Path

from ppctl import cli


def run_of_two_steps():
    """Return the directory of a run with two steps, runs/a below the current directory."""
    made = Path("runs/a")
    made.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 1.0, "step_time_s": 0.5, "tokens_per_s": 10.0} for step in (1, 2)
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def report(capsys):
    """(charts of the page, its text without tags)."""
    assert cli.main(["report", "a"]) == 0
    capsys.readouterr()
    text = Path("runs/a/report.html").read_text(encoding="utf-8")
    return charts_of(text), unescape(re.sub(r"<[^>]+>", " ", text))


def charts_of(page):
    """The data of the charts in a page, its numbers among the rest."""
    data = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    charts = json.loads(data[0]) if data else []
    numbers = (zlib.decompress(base64.b64decode(chart.pop("numbers"))) for chart in charts)
    return [chart | json.loads(each) for chart, each in zip(charts, numbers, strict=True)]
