"""Pieces of html pages: texts, numbers, links, sections, tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote


def printable(text: str) -> str:
    """Return a text without what no page can hold: file names may have any bytes."""
    return text.encode(errors="replace").decode()


def exact(value: float, shown: str) -> str:
    """Return a number as people read it, with its exact value for programs and in a title."""
    return f'<data value="{value!r}" title="{value!r}">{escape(shown)}</data>'


def section(title: str, content: str) -> str:
    """Return a part of a page below its title."""
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"


def table(about: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of html; the first column names the rows."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>' for cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{about}"><table>'
        f"{f'<thead><tr>{head}</tr></thead>' if columns else ''}<tbody>{body}</tbody></table></div>"
    )


def command_html(text: str) -> str:
    """Return a command to copy."""
    return f'<code class="command">{escape(printable(text))}</code>'


def link(place: Path, file: Path) -> str:
    """Return a link from a page to a file or directory, which holds as long as both move together."""
    target = os.path.relpath(os.path.abspath(place), os.path.dirname(os.path.abspath(file)))
    return f'<a href="{escape(quote(os.fsencode(target)))}">{escape(printable(str(place)))}</a>'
