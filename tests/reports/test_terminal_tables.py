"""Tables on a terminal: which columns fit, and the columns in a file."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from ppctl.reports.terminal_output import seconds_column, seconds_text, show_table

COLUMNS = "run", "status", "step", "eval loss", "mesh", "empty"
ROWS = [
    ("a run", "finished", "10 of 10", "3.5696", "1x2", ""),
    ("another run of a long name", "failed", "9 of 10", "4.1", "2x4", ""),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(width, columns=COLUMNS, rows=ROWS, least=(), out=None):
    """Return the lines of a table, printed by `show_table`."""
    out = Terminal() if out is None else out
    show_table(Console(file=out, width=width, color_system=None), "runs", columns, rows, least)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 46, 60, 80, 200])
def test_no_table_is_wider_than_the_terminal_or_padded(width):
    lines = printed(width)
    table = [line for line in lines if not line.startswith("not shown")]
    assert max(map(cell_len, table)) <= width
    assert lines == [line.rstrip() for line in lines]


def test_the_least_important_columns_go_first_and_are_named():
    lines = printed(52, least=("status", "step"))
    assert "another run of a long name" in "".join(lines)
    assert lines[-2] == "not shown: status (use a wider terminal, | cat, or --json)"
    left_out = [
        next((line for line in printed(width, least=("status", "step")) if "not shown" in line), "")
        for width in range(80, 20, -1)
    ]
    assert [*dict.fromkeys(line.partition(" (")[0].partition(": ")[2] for line in left_out)] == [
        *("", "status", "status, step", "status, step, mesh")
    ]


def test_files_and_pipes_get_every_column_in_a_line_each():
    lines = printed(20, out=io.StringIO())
    assert lines[1].split() == ["run", "status", "step", "eval", "loss", "mesh"]
    assert lines[3].split() == ["a", "run", "finished", "10", "of", "10", "3.5696", "1x2"]
    assert len(lines) == 6


def test_a_long_name_wraps_and_loses_no_letter():
    name = "runs/2026-11-28/" + "x" * 60
    lines = printed(40, ("run", "loss"), [(name, "1.0"), ("b", "2.0")])
    table = "".join(line.split()[0] for line in lines[3:-2])
    assert table == name
    assert lines[3].endswith("  1.0")


def test_cells_are_printed_as_they_are():
    lines = printed(80, ("run", "loss"), [("[red]a[/red] :x:", "1.0"), ("ラン", "2.0")])
    assert lines[3] == "[red]a[/red] :x:   1.0"
    assert cell_len(lines[4]) == cell_len(lines[3])


def test_a_column_of_durations_has_one_unit():
    assert seconds_column([0.98, None, 1.02], "unknown") == ["0.98 s", "unknown", "1.02 s"]
    assert seconds_column([2.32e-5, 2.5e-5]) == ["23.2 us", "25 us"]
    assert [seconds_text(10.0**n) for n in range(-6, 6)] == [
        *("1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms"),
        *("1 s", "10 s", "100 s", "1,000 s", "10,000 s", "100,000 s"),
    ]
