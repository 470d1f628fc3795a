"""Rules of tests: no verdict depends on how long something took."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("test_*.py"))
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


def clock_reads(tree):
    """Return the nodes that read a clock, and those among them that only bound a wait."""
    reads, bounds = set(), set()
    is_clock = lambda node: (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "time"
        and node.func.attr in CLOCKS
    )
    for node in ast.walk(tree):
        if is_clock(node):
            reads.add(node)
        # until_s = time.monotonic() + 60, then: time.monotonic() < until_s
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_clock(node.left):
            bounds.add(node.left)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and is_clock(node.left):
            bounds |= {node.left} if isinstance(node.comparators[0], ast.Name) else set()
    return reads, bounds


def test_clocks_only_bound_waits():
    found = []
    for file in FILES:
        reads, bounds = clock_reads(ast.parse(file.read_text()))
        found += [f"{file.relative_to(TESTS)}:{node.lineno}" for node in reads - bounds]
    assert not found, "\n".join(sorted(found))


def test_a_duration_is_found():
    reads, bounds = clock_reads(ast.parse("a = time.monotonic()\nassert time.monotonic() - a < 3"))
    assert (len(reads), len(bounds)) == (2, 0)
