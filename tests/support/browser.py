"""A browser without a window: where it is, its flags, and what stands where on pages at several
widths.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MISSING = "needs chromium or google-chrome on PATH (apt-get install chromium)"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")

# In a page before all else: notes every text that a canvas draws, in pixels of the canvas.
NOTES = """<script>
const drawn = new Map();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, room) {
  fillText.apply(this, arguments);
  const size = this.measureText(text), wide = Math.min(size.width, room ?? Infinity);
  const left = x - { left: 0, center: wide / 2, right: wide }[this.textAlign];
  const [top, bottom] = [y - size.actualBoundingBoxAscent, y + size.actualBoundingBoxDescent];
  if (!drawn.has(this.canvas)) drawn.set(this.canvas, []);
  drawn.get(this.canvas).push({ text: String(text), left, top, right: left + wide, bottom });
};
</script>"""

# In a page after all else: draws its charts once more, and tells the page around it what stands
# where.
PROBE = """<script>
const wide = () => document.documentElement.clientWidth;
const boxed = (text, box) => ({ text, left: box.left, top: box.top, right: box.right, bottom: box.bottom });
function canvases() {
  drawn.clear();
  for (const chart of charts) draw(chart);
  return [...drawn].map(([canvas, texts]) => ({
    name: canvas.getAttribute("aria-label"), texts, width: canvas.clientWidth, height: canvas.clientHeight,
  }));
}
function figures() {
  return [...document.querySelectorAll("svg.lines, .bars")].map((svg) => ({
    name: svg.getAttribute("aria-label"), width: wide(), height: document.documentElement.scrollHeight,
    texts: [...svg.querySelectorAll("text, small, span")].filter((each) => each.textContent)
      .map((each) => inked(each)),
    lines: [...svg.querySelectorAll(".limit")].map((each) => boxed("", each.getBoundingClientRect())),
  }));
}
function inked(text) { // without the room above and below its letters
  const { left, right, top, bottom, height } = text.getBoundingClientRect();
  return boxed(text.textContent, { left, right, top: top + 0.2 * height, bottom: bottom - 0.2 * height });
}
function room(node) { // how far right an element is seen: in a box that scrolls, any distance
  for (let each = node; each !== document.body; each = each.parentElement) {
    const overflow = getComputedStyle(each).overflowX;
    if (["auto", "scroll"].includes(overflow)) return Infinity;
    if (overflow !== "visible") return each.getBoundingClientRect().right;
  }
  return wide();
}
function cut() { // texts that reach out of the window, or out of a box that hides the rest
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode()); ) {
    const parent = text.parentElement;
    if (!text.data.trim() || parent.closest("script, svg, #tip") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    if (box.left < -1 || box.right > room(parent) + 1) found.push(text.data);
  }
  return found;
}
function boxes() { // tables in a box of their own
  return [...document.querySelectorAll(".scroll")].filter((each) => each.checkVisibility()).map((each) => ({
    name: each.getAttribute("aria-label"), hidden: each.scrollWidth - each.clientWidth,
    isMarked: getComputedStyle(each).backgroundImage !== "none",
  }));
}
function report() {
  const has = document.querySelector("canvas.gantt") !== null;
  parent.postMessage({
    charts: [...(has ? canvases() : []), ...figures()], cut: cut(), boxes: boxes(),
    sideways: document.documentElement.scrollWidth - wide(),
    hints: [...document.querySelectorAll(".hint")].map((each) => each.textContent),
  }, "*");
}
(function wait() {
  const waits = document.getElementById("data") && document.documentElement.dataset.ready !== "yes";
  if (waits) setTimeout(wait, 20); else report();
})();
</script>"""

# The outer page: shows one after the other in a frame of that width, and keeps their messages.
AROUND = """<!doctype html><meta charset="utf-8"><body><script>
const pages = JSON.parse(PAGES), said = {};
async function look() {
  for (const [name, width, text] of pages) {
    const frame = document.createElement("iframe");
    Object.assign(frame.style, { width: width + "px", height: "900px", border: "0" });
    const told = new Promise((tell) => addEventListener("message", (event) => tell(event.data), { once: true }));
    frame.srcdoc = text;
    document.body.append(frame);
    said[name + " " + width] = await told;
    frame.remove();
  }
  const out = document.createElement("pre");
  out.id = "said";
  out.textContent = JSON.stringify(said);
  document.body.append(out);
}
look();
</script></body>"""


def look_at(
    pages: Mapping[str, str], widths: Sequence[int], directory: Path
) -> dict[tuple[str, int], Any]:
    """Return what stands where on each page at each width, all from one start of the browser."""
    assert BROWSER is not None
    shown = []
    for name, text in pages.items():
        assert text.count("<head>") == text.count("</body>") == 1
        noted = text.replace("<head>", f"<head>{NOTES}").replace("</body>", f"{PROBE}</body>")
        shown += [(name, width, noted) for width in widths]
    quoted = json.dumps(json.dumps(shown)).replace("<", "\\u003c")
    file = directory / "around.html"
    file.write_text(AROUND.replace("PAGES", quoted), encoding="utf-8")
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={directory / 'profile'}",
        "--window-size=1400,1000",
    ]
    command += ["--virtual-time-budget=60000", "--dump-dom", f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None, f"{done.stderr[-2000:]} {done.stdout[-500:]}"
    found = json.loads(html.unescape(said[1]))
    return {(name, width): found[f"{name} {width}"] for name in pages for width in widths}


def overlaps(chart: Mapping[str, Any], allowed: float = 1.0) -> list[tuple[str, str]]:
    """Return the pairs of texts in a chart that run into each other by more than these pixels in
    both directions.
    """
    texts = sorted(chart["texts"], key=lambda each: each["left"])
    found = []
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            if other["left"] > one["right"] - allowed:
                break
            if min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > allowed:
                found.append((one["text"], other["text"]))
    return found


def cut_off(chart: Mapping[str, Any], allowed: float = 1.0) -> list[str]:
    """Return the texts of a chart that reach out of its box, or of the window."""
    return [
        each["text"]
        for each in chart["texts"]
        if min(each["left"], each["top"]) < -allowed
        or each["right"] > chart["width"] + allowed
        or each["bottom"] > chart["height"] + allowed
    ]


def crossed(chart: Mapping[str, Any]) -> list[str]:
    """Return the texts of a chart that a line of a limit runs through."""
    return [
        each["text"]
        for each in chart["texts"]
        for line in chart.get("lines", ())
        if each["left"] < line["left"] < each["right"]
        and line["top"] < each["bottom"]
        and line["bottom"] > each["top"]
    ]
