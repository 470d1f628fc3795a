"""Output of commands: tables and lines on the terminal, numbers as text, JSON, and files."""

import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ppctl.errors import ConfigError, os_errors

LOSS_DIGITS = 7  # digits of a loss; rounding in float32 changes the next ones
MOST_DECIMALS = 9  # decimals of a loss
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GAP = "  "  # between two columns of a table
SPEEDS = {"tokens_per_s": "tok/s", "rows_per_s": "rows/s"}  # units of the speeds in records
EQUAL = "equal stages and fixed costs of F, I and W"
ABOUT_BUBBLES = (
    "Bubble: the idle share of the ranks while tasks run. Ideal: the schedule simulated on its "
    f"executor, with {EQUAL}; predicted: simulated with the planner's seconds, as "
    "the step time; measured: in a step (run.timeline=true)."
)


class OutputConsole(Console):
    """The console of a command. Its reader may close the pipe, as in `ppctl runs | head`.

    rich itself would then exit at once, and lose the steps since the last checkpoint.
    """

    when_reader_gone: Callable[[], None] | None = None  # None: raise BrokenPipeError

    def on_broken_pipe(self) -> None:
        """Stop printing, and call `when_reader_gone`."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)  # otherwise Python's last flush prints an error
        os.dup2(nowhere, self.file.fileno())
        if self.when_reader_gone is None:
            raise BrokenPipeError
        self.when_reader_gone()


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    least: Sequence[str] = (),
) -> None:
    """Print a table, numbers right-aligned, without empty columns and trailing spaces.

    If it is wider than the terminal, headings and a long first column wrap. Then columns are left
    out, and a line names them. Files and pipes get all columns. title: a line above the table; ""
    for none. rows: the cells; the first column names the row and is never left out. least: the
    columns to leave out first, in this order; the others follow from the right.
    """
    # 1. the columns
    table = [tuple(row) for row in rows]
    room = console.width if console.file.isatty() else sys.maxsize
    widths, left_out = _fitted(columns, table, room, least)
    is_number = {i: i > 0 and any(row[i][:1].isdigit() for row in table) for i in widths}

    def aligned(i: int, text: str) -> str:
        blank = " " * (widths[i] - cell_len(text))
        return blank + text if is_number[i] else text + blank

    def wrapped(text: str, width: int) -> list[str]:
        is_short = cell_len(text) <= width
        return [text] if is_short else [l.plain.rstrip() for l in Text(text).wrap(console, width)]

    def lines(cells: Sequence[str], from_top: int) -> Iterator[str]:
        pieces = [wrapped(cells[i], widths[i])[::from_top] for i in widths]
        for texts in [*zip_longest(*pieces, fillvalue="")][::from_top]:
            yield GAP.join(map(aligned, widths, texts)).rstrip()

    # 2. the lines; headings end at the rule
    head = [title, *lines(columns, -1)] if title else lines(columns, -1)
    rule = "\u2500" * (sum(widths.values()) + len(GAP) * (len(widths) - 1))
    body = chain.from_iterable(lines(row, 1) for row in table)
    show_lines(console, *(Text(line, "bold") for line in head), rule, *body)
    if left_out:
        names = ", ".join(columns[i] for i in left_out)
        show_lines(console, f"not shown: {names} (use a wider terminal, | cat, or --json)")
    show_lines(console, "")


def _fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int, least: Sequence[str]
) -> tuple[dict[int, int], list[int]]:
    """Return the width of each shown column, and the columns left out; see `show_table`."""
    # 1. all columns with a value
    shown = [i for i in range(len(columns)) if not (i and rows) or any(row[i] for row in rows)]
    cells = {i: max((cell_len(row[i]) for row in rows), default=0) for i in shown}
    widths = {i: max(cells[i], cell_len(columns[i])) for i in shown}

    def spare() -> int:
        return room - sum(widths.values()) - len(GAP) * (len(widths) - 1)

    # 2. wrap the headings, then the first column
    if spare() < 0:
        words = {i: max(map(cell_len, columns[i].split()), default=0) for i in shown}
        widths = {i: max(cells[i], words[i]) for i in shown}
        widths[0] = min(widths[0], max(room // 2, words[0]))
    # 3. leave out the least important columns
    order = [columns.index(name) for name in least if name in columns]
    order = [i for i in dict.fromkeys([*order, *reversed(shown)]) if i in shown and i]
    left_out = []
    while order and spare() < 0:
        left_out.append(order.pop(0))
        del widths[left_out[-1]]
    widths[0] = min(max(cells[0], widths[0]), widths[0] + max(spare(), 0))
    return widths, sorted(left_out)


def show_lines(console: Console, *lines: str | Text) -> None:
    """Print lines of plain text without wrapping."""
    for line in lines:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


def show_json(document: Any) -> None:
    """Print one JSON document. Non-finite numbers, which JSON lacks, become null."""
    print(json.dumps(json_safe(document), allow_nan=False), flush=True)


def show_result(document: Any, lines: Iterable[str], *, as_json: bool) -> int:
    """Print the document as JSON, or else the lines; return 0, the exit code of success."""
    if as_json:
        show_json(document)
    else:
        print(*lines, sep="\n")
    return 0


def decimal_text(value: float, decimals: int = 4) -> str:
    """Return a loss with four decimals, or with an exponent if it is very small or large.

    >>> [decimal_text(loss) for loss in (3.14159, 0.00012345, 0.0, 1.5e30)]
    ['3.1416', '1.234e-04', '0.0000', '1.500e+30']
    """
    is_usual = 0.01 <= abs(value) < 1e6 or not value
    return f"{value:.{decimals}f}" if is_usual else f"{value:.{decimals - 1}e}"


def loss_column(values: Sequence[float | None]) -> list[str]:
    """Return losses with the fewest decimals, from four, that show them as different; "" for None.

    Losses that differ by less than LOSS_DIGITS digits count as equal.

    >>> loss_column([0.5, 0.25, None]), loss_column([1.00001, 1.00002]), loss_column([4, 4.0000002])
    (['0.5000', '0.2500', ''], ['1.00001', '1.00002'], ['4.0000', '4.0000'])
    """
    rounded = {float(f"{value:.{LOSS_DIGITS}g}") for value in values if value is not None}

    def differ(decimals: int) -> bool:
        return len({decimal_text(value, decimals) for value in rounded}) == len(rounded)

    decimals = next(filter(differ, range(4, MOST_DECIMALS)), MOST_DECIMALS)
    return ["" if value is None else decimal_text(value, decimals) for value in values]


def seconds_text(seconds: float, largest: float | None = None, digits: int = 4) -> str:
    """Return a duration in s, ms or us. largest: the duration that chooses the unit, in seconds.

    >>> seconds_text(3.8e-05), seconds_text(0.0123456), seconds_text(2e-5, 0.5), seconds_text(71943)
    ('38 us', '12.35 ms', '0.02 ms', '71,943 s')
    """
    of = seconds if largest is None else largest
    unit, size = ("s", 1.0) if not of or of >= 1 else ("ms", 1e-3) if of >= 1e-3 else ("us", 1e-6)
    value = seconds / size
    return f"{value:,.0f} {unit}" if value >= 10**digits else f"{value:,.{digits}g} {unit}"


def seconds_column(column: Sequence[float | None], unknown: str = "") -> list[str]:
    """Return durations in the unit of the longest; unknown: the text for None."""
    largest = max((each for each in column if each is not None), default=None)
    return [unknown if each is None else seconds_text(each, largest) for each in column]


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB (powers of 1024).

    >>> size_text(1536), size_text(15_750_000_000)
    ('1.5 KiB', '14.7 GiB')
    """
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    sizes = (f"{num_bytes / size:.1f} {unit}" for unit, size in units if num_bytes >= size)
    return next(sizes, f"{num_bytes:.0f} B")


def age_text(seconds: float) -> str:
    """Return an age in whole s, min, h or d.

    >>> age_text(-3), age_text(5.2), age_text(60), age_text(200), age_text(8000), age_text(200_000)
    ('0 s', '5 s', '1 min', '3 min', '2 h', '2 d')
    """
    units = (("d", 86400), ("h", 3600), ("min", 60))
    ages = (f"{seconds // size:.0f} {unit}" for unit, size in units if seconds >= size)
    return next(ages, f"{max(0.0, seconds):.0f} s")


def iso_text(seconds: float | None) -> str | None:
    """Return seconds since 1970 as an ISO 8601 time in UTC; None outside of the calendar's range.

    >>> iso_text(1.8e9), iso_text(None), iso_text(1e300)
    ('2027-01-15T08:00:00Z', None, None)
    """
    try:
        form = "%Y-%m-%dT%H:%M:%SZ"
        return None if seconds is None else time.strftime(form, time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None


def bubble_text(
    ideal: float | None, predicted: float | None = None, measured: float | None = None
) -> str:
    """Return the known bubbles with their names; "" if all are None.

    >>> bubble_text(0.025, 0.203)
    '2.5% ideal, 20.3% predicted'
    >>> bubble_text(0.273, 0.232).partition(" (")[2]
    'predicted below ideal, which assumes equal stages and fixed costs of F, I and W)'
    """
    named = (("ideal", ideal), ("predicted", predicted), ("measured", measured))
    text = ", ".join(f"{value:.1%} {name}" for name, value in named if value is not None)
    is_below = ideal is not None and predicted is not None and round(ideal - predicted, 3) > 0
    return text + f" (predicted below ideal, which assumes {EQUAL})" * is_below


def shared_cores_text(num_devices: int, num_cores: int | None) -> str | None:
    """Return the reason why no bubble can be measured if devices outnumber cores, else None.

    num_cores: cores that simulated devices share; None: real devices.

    >>> shared_cores_text(4, 2).partition(":")[0]
    '4 simulated devices share 2 cores'
    """
    if num_cores is None or num_devices <= num_cores:
        return None
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    return (
        f"{num_devices} simulated devices share {cores}: ranks also wait for a core, so this "
        "machine cannot show the schedule's bubble"
    )


def check_file(option: str, path: Path) -> None:
    """Raise ConfigError if the file of `option` cannot be written; call it before the work."""
    folder = path.parent
    if path.is_dir():
        reason = "it is a directory"
    elif not folder.is_dir():
        reason = f"there is no directory {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "permission denied"
    else:
        return
    remedy = "Name a file in an existing directory that you may write."
    raise ConfigError(f"{option} cannot be written: {reason}. {remedy}")


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write the file of `option`, and print a line to stderr. ConfigError if that fails."""
    with os_errors(f"{option} cannot be written"):
        replace_file(path, content)
    print(f"ppctl: wrote {path} ({path.stat().st_size:,} bytes)", file=sys.stderr)


def write_remedy(reason: str) -> str:
    """Return the remedy for files in run.dir that could not be written, by the system's reason.

    >>> write_remedy("Permission denied")
    'Use another run.dir, or make this one writable.'
    """
    if any(os.strerror(number) in reason for number in NO_ROOM):
        return "Free or extend the disk, or use another run.dir."
    return "Use another run.dir, or make this one writable."


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, by rename: a kill leaves the old or the new content.

    A link's target is replaced. Special files, such as /dev/stdout, and files in a directory that
    the user cannot write are written in place. Raises OSError.
    """
    data, target = content.encode() if isinstance(content, str) else content, path.resolve()
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name}.part")
    try:
        part.unlink(missing_ok=True)  # a killed process's file, or a link that must not be followed
        with part.open("xb") as file:
            file.write(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    except OSError:
        part.unlink(missing_ok=True)  # a partial file, for example of a full disk
        raise


def json_safe(value: Any) -> Any:
    """Return a value with None in place of non-finite numbers, which JSON lacks."""
    return mapped(value, lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with change(each) in place of each value in its lists and dicts."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(item, change) for item in value]
    return change(value)
