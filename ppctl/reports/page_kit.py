"""Building blocks of html pages: frame, text, tables and figures of all reports.

A page is a single file that loads no other. Every function returns html. Arguments called words,
lines or names are plain text and get escaped; all others are html already.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ppctl.reports.foreign_files import printable
from ppctl.reports.palette import MARKS, SIGNS, line_style
from ppctl.reports.terminal_output import SPEEDS, loss_column, seconds_column, size_text

YES, NO, UNKNOWN = ("yes", "&#10003;"), ("no", "&#10007;"), ("maybe", "?")  # colour, mark
GOES_ON = ("maybe", "&#9654;")
Texts = Callable[[Sequence[float | None]], list[str]]  # from a column's numbers to its texts


def _each(form: Callable[[Any], str]) -> Texts:
    return lambda values: ["" if value is None else form(value) for value in values]


NUMBERS: dict[str, tuple[str, Texts]] = {  # column heading and format, by name in records
    "steps": ("steps", _each("{:,}".format)),
    "loss": ("loss", loss_column),
    "final_loss": ("loss", loss_column),
    "eval_loss": ("eval loss", loss_column),
    "grad_norm": ("gradient norm", _each("{:.4g}".format)),
    "lr": ("learning rate", _each("{:.3e}".format)),
    "step_time_s": ("step time", seconds_column),
    "predicted_step_time_s": ("step time, predicted", seconds_column),
    **{name: (unit, _each("{:,.0f}".format)) for name, unit in SPEEDS.items()},
    "mfu_fraction": ("MFU", _each("{:.1%}".format)),
    "ideal_bubble_fraction": ("bubble, ideal", _each("{:.1%}".format)),
    "predicted_bubble_fraction": ("bubble, predicted", _each("{:.1%}".format)),
    "measured_bubble_fraction": ("bubble, measured", _each("{:.1%}".format)),
    "memory_bytes": ("memory", _each(lambda size: size_text(int(size)))),
    "predicted_memory_bytes": ("memory, predicted", _each(lambda size: size_text(int(size)))),
    "seconds": ("s in all", _each("{:,.1f}".format)),
}


def page(title: str, *parts: str, main: str = "<main>") -> str:
    """Return the text of a page. title: plain text."""
    content = f"{main}\n{''.join(parts)}</main>\n"
    return filled("page.html", TITLE=text(title), CSS=asset("page.css"), CONTENT=content)


def section(title: str, *content: str) -> str:
    """Return a section below its title; "" without content."""
    inside = "".join(content)
    return f"<section>\n<h2>{title}</h2>\n{inside}\n</section>\n" if inside else ""


def filled(name: str, **texts: str) -> str:
    """Return a file of the charts' folder, with each @@NAME@@ replaced by texts["NAME"]."""
    return re.sub(r"@@(\w+)@@", lambda found: texts[found[1]], asset(name))


def asset(name: str) -> str:
    """Return the text of a file of the charts' folder: frames, style sheet and scripts."""
    return (files("ppctl.reports.charts") / name).read_text(encoding="utf-8")


def text(words: str) -> str:
    """Return plain text, such as file names of any bytes, as html."""
    return escape(printable(words))


def breakable(name: str) -> str:
    """Return the name of a setting, with optional line breaks after dots and underscores."""
    return text(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def exact(value: float, words: str) -> str:
    """Return a number as `words`, with its exact value as tooltip and for programs."""
    return f'<data value="{value!r}" title="{value!r}">{escape(words)}</data>'


def number(name: str, value: float | None, missing: str = "") -> str:
    """Return a number of a record in the format of NUMBERS; missing: html for None."""
    return column(name, [value], missing)[0]


def column(name: str, values: Sequence[float | None], missing: str = "") -> list[str]:
    """Return the cells of a column of `number`s: durations in one unit, losses told apart."""
    pairs = zip(values, NUMBERS[name][1](values), strict=True)
    return [missing if value is None else exact(value, words) for value, words in pairs]


def soft(content: str) -> str:
    """Return an explaining paragraph in a pale colour; "" without content."""
    return f'<p class="soft">{content}</p>' if content else ""


def bullets(lines: Sequence[str]) -> str:
    """Return lines as a list; "" without lines."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="warnings">{items}</ul>' if lines else ""


def command(words: str) -> str:
    """Return a command for the reader to copy."""
    return f'<code class="command">{text(words)}</code>'


def link(place: Path, file: Path, words: str | None = None) -> str:
    """Return a link from the page in `file` to `place`; words: its text, None: the path."""
    target = os.path.relpath(os.path.abspath(place), os.path.dirname(os.path.abspath(file)))
    shown = text(str(place) if words is None else words)
    return f'<a href="{escape(quote(os.fsencode(target)))}">{shown}</a>'


def verdict(look: tuple[str, str], words: str) -> str:
    """Return the first line of a page, in the colour of YES, NO, UNKNOWN or GOES_ON."""
    colour, mark = look
    return f'<p class="fit {colour}"><b aria-hidden="true">{mark}</b> {text(words)}</p>'


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Return the most important numbers, each (name, value, note), as cards."""
    form = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>".format
    return f'<dl class="numbers">{"".join(form(*each) for each in items)}</dl>'


def table(about: str, columns: Sequence[str], rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Return a table whose first column names the rows.

    about: label for screen readers. look: further classes of page.css.
    """
    body = ""
    for name, *cells in rows:
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        body += f'<tr><th scope="row">{name}</th>{rest}</tr>'
    names = "".join(f'<th scope="col">{column}</th>' for column in columns)
    head = f"<thead><tr>{names}</tr></thead>" if columns else ""
    frame = f'class="{f"scroll {look}".strip()}" tabindex="0" role="region" aria-label="{about}"'
    return f"<div {frame}><table>{head}<tbody>{body}</tbody></table></div>"


def figure(title: str, svg: str, note: str = "") -> str:
    """Return a drawing below its title; note: plain text."""
    return f"<figure><figcaption>{text(title)}</figcaption>{svg}{soft(text(note))}</figure>"


def figures(drawn: Iterable[str]) -> str:
    """Return figures next to each other; "" without figures."""
    inside = "".join(drawn)
    return f'<div class="figures">{inside}</div>' if inside else ""


def line_sample(index: int) -> str:
    """Return the mark of a line, for a legend."""
    colour, mark = line_style(index)
    sign = SIGNS[MARKS.index(mark)]
    return f'<span class="key" style="color:{colour}" aria-hidden="true">{sign}</span>'


def line_legend(names: Iterable[str]) -> str:
    """Return the legend of lines, in the order of drawing."""
    items = (f"<li>{line_sample(i)}{text(name)}</li>" for i, name in enumerate(names))
    return f'<ul class="keys">{"".join(items)}</ul>'
