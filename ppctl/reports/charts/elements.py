"""Pieces of html pages: numbers, sections, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def exact(value: float, shown: str) -> str:
    """A number as people read it, with its exact value for programs and in a title."""
    return f'<data value="{value!r}" title="{value!r}">{escape(shown)}</data>'


def section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n"


def table(about: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of html; the first column names the rows."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>' for cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{about}"><table>'
        f"{f'<thead><tr>{head}</tr></thead>' if columns else ''}<tbody>{body}</tbody></table></div>"
    )
