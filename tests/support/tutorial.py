"""The tutorial: docs/tutorial.md is the source, docs/tutorial.ipynb is generated from it.

`make tutorial` runs the page's code and rewrites the outputs of both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from math import isclose
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = ROOT / "docs/tutorial.md", ROOT / "docs/tutorial.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
LINK = "[tutorial.md](tutorial.md) explains each step and each term."  # notebook, first cell
# runs a list of codes in one namespace; prints a list of (stdout, html of the last expression)
RUN = """
import ast, contextlib, io, json, sys
names, outputs = {"__name__": "__main__"}, []
for code in json.load(sys.stdin):
    tree, shown = ast.parse(code), None
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    html = shown._repr_html_() if hasattr(shown, "_repr_html_") else None
    outputs.append((out.getvalue(), html))
print(json.dumps(outputs))
"""


class Cell(NamedTuple):
    """A code block of the page."""

    text: str  # notebook text above the code
    code: str
    printed: str  # the output that the page shows


class Output(NamedTuple):
    """The output of a cell."""

    printed: str
    html: str | None  # view of the last expression


def cells(page: str) -> list[Cell]:
    """Return the code blocks of a page, in order."""
    found, start = [], 0
    for block in CELL.finditer(page):
        text = _shortened(page[start : block.start()])
        found.append(Cell(text, block[1].rstrip("\n"), block[2] or ""))
        start = block.end()
    return found


def _shortened(text: str) -> str:
    """Return the headings, numbered lists, and first and last paragraph, without pictures.

    >>> _shortened("# Title\\n\\nFirst.\\n\\nLong.\\n\\nLast.\\n\\n![a](a.svg)\\n")
    '# Title\\n\\nFirst.\\n\\nLast.'
    """
    parts = [part for part in text.strip().split("\n\n") if not part.startswith("![")]
    after_title = [last.startswith("# ") for last in ["", *parts]]
    kept = (
        part
        for part, is_first in zip(parts, after_title, strict=False)
        if is_first or part.startswith(("#", "1. ")) or part is parts[-1]
    )
    return "\n\n".join(kept)


def run(page: str) -> list[Output]:
    """Run the code blocks of a page in one process with simulated devices; return the outputs."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0", "PYTHONPATH": paths}
    environment.pop("JAX_NUM_CPU_DEVICES", None)  # ppctl.mesh simulates the devices
    codes = json.dumps([cell.code for cell in cells(page)])
    how = {"input": codes, "env": environment, "capture_output": True, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", RUN], cwd=folder, **how)
    assert done.returncode == 0, done.stderr
    return [Output(*output) for output in json.loads(done.stdout)]


def with_outputs(page: str, outputs: list[Output]) -> str:
    """Return the page with these printed outputs; a block that prints nothing has none."""
    rest = iter(outputs)

    def block(match: re.Match[str]) -> str:
        code, printed = f"```python\n{match[1]}```\n", _plain(next(rest).printed)
        return f"{code}\n```text\n{printed}```\n" if printed else code

    return CELL.sub(block, page)


def notebook(page: str, outputs: list[Output]) -> str:
    """Return the notebook, nbformat 4.5, of the page's code blocks with these outputs."""
    listed = []
    for i, (cell, output) in enumerate(zip(cells(page), outputs, strict=True)):
        text = {"cell_type": "markdown", "id": f"text-{i}", "metadata": {}}
        shown = cell.text if i else cell.text.replace("\n\n## ", f"\n\n{LINK}\n\n## ", 1)
        listed.append(text | {"source": shown.splitlines(keepends=True)})
        code = {"cell_type": "code", "execution_count": i + 1, "id": f"code-{i}", "metadata": {}}
        code["outputs"] = _outputs(output, i + 1)
        listed.append(code | {"source": cell.code.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    document = {"cells": listed, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _outputs(output: Output, count: int) -> list[dict]:
    listed: list[dict] = []
    if printed := _plain(output.printed):
        text = printed.splitlines(keepends=True)
        listed.append({"name": "stdout", "output_type": "stream", "text": text})
    if output.html is not None:
        shown = {"data": {"text/html": [output.html]}, "execution_count": count, "metadata": {}}
        listed.append(shown | {"output_type": "execute_result"})
    return listed


def _plain(printed: str) -> str:
    """Return the output without spaces and empty lines at its ends."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
    return lines + "\n" if lines else ""


def stored(document: str) -> list[Output]:
    """Return the outputs that a notebook holds."""
    found = []
    for cell in json.loads(document)["cells"]:
        if cell["cell_type"] == "code":
            printed = [text for out in cell["outputs"] for text in out.get("text", [])]
            html = [
                text for out in cell["outputs"] for text in out.get("data", {}).get("text/html", [])
            ]
            found.append(Output("".join(printed), "".join(html) or None))
    return found


def same_outputs(expected: str, printed: str) -> bool:
    """Return whether words are equal, and numbers within 1%; numbers below 1e-9 are rounding.

    >>> same_outputs("error 2e-15, loss 0.5", "error 7e-16, loss 0.501")
    True
    >>> same_outputs("8 ranks", "9 ranks")
    False
    """
    words = [NUMBER.sub("#", " ".join(text.split())) for text in (expected, printed)]
    numbers = [[float(each) for each in NUMBER.findall(text)] for text in (expected, printed)]
    close = (isclose(*pair, rel_tol=0.01, abs_tol=1e-9) for pair in zip(*numbers, strict=False))
    return words[0] == words[1] and all(close)


def rewrite() -> None:
    """Run the page; write its outputs and the notebook."""
    page = PAGE.read_text()
    outputs = run(page)
    PAGE.write_text(with_outputs(page, outputs))
    NOTEBOOK.write_text(notebook(PAGE.read_text(), outputs))


if __name__ == "__main__":
    rewrite()
