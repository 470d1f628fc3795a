"""Runs of a few records, and the checked page that `ppctl report` writes of them."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from ppctl import cli

CONFIG = """\
model: {{name: transformer, num_layers: {layers}}}
mesh: {{dp: 1, pp: 2, fsdp: 1}}
schedule: {{name: {schedule}, num_microbatches: 4}}
run:
  name: {name}
  dir: runs/{name}
  num_steps: {num_steps}
"""
VOID = {"meta", "br", "wbr", "hr", "input"}


def record(step, **other):
    found = {
        "step": step,
        "loss": 4.0 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "step_time_s": 0.5,
        "tokens_per_s": 1e4,
    }
    found |= {
        "predicted_step_time_s": 0.4,
        "predicted_bubble_fraction": 0.2,
        "predicted_memory_bytes": 1 << 20,
    }
    found |= {"ideal_bubble_fraction": 0.125}
    return found | {"memory_bytes": 3 << 19} | other


def make(name, records=None, layers=4, schedule="gpipe", num_steps=9, last=""):
    """A run below runs/, as training leaves it."""
    run_dir = Path("runs") / name
    run_dir.mkdir(parents=True)
    settings = CONFIG.format(
        name=json.dumps(name), layers=layers, schedule=schedule, num_steps=num_steps
    )
    (run_dir / "config.yaml").write_text(settings)
    lines = [record(step) for step in range(1, 10)] if records is None else records
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + last
    )
    return run_dir


def write(capsys, *words):
    """(html, what --json prints) of a report."""
    assert cli.main(["report", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert err.startswith(f"ppctl: wrote {said['file']} (")
    text = Path(said["file"]).read_text(encoding="utf-8")
    check(text)
    return text, said


def check(text):
    """Every element is closed in order, nothing is loaded, no number is missing."""
    opened = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in VOID:
                opened.append(tag)
            assert not {"src", "srcset"} & {name for name, _ in attrs}
            assert tag != "link"

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Checker().feed(text)
    assert opened == []
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(
        r'="[^"]*\b(nan|inf)\b', "".join(re.findall(r"<(?:path|rect|line|text|circle)[^>]*>", text))
    )


def words_of(text):
    """The visible text."""
    body = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))
