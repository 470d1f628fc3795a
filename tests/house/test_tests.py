"""Rules of tests: names in plain English, and no verdict that depends on a duration."""

import ast
import re
from pathlib import Path

from support.source_trees import nodes, tree

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("test_*.py"))
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")

# riddles in names: write a head noun, its verb, and the parameter's name
HARD_NAMES = {
    "a noun instead of what ...": r"_what(ever)?_",
    "custom or separate instead of its own": r"_own(_|$)|ones_own",
    "only before the verb instead of alone": r"_alone(_|$)",
    "no process, no user instead of nobody": r"nobody",
    "a number instead of so many": r"_so_(many|much)",
    "a plain clause instead of of which": r"_(of|in|to|at|by|from|for|on|with)_(which|whose)_",
    "after or next to instead of behind or beside": r"_(behind|beside)(_|$)",
    "printed or requested instead of said or asked": r"_(tells?|told|says?|said|asked)(_|$)",
    "equal or a genitive instead of those of": r"_(that|those)_of_",
    "the subject instead of it": r"^test_(it|its|they|their|them)_",
    "resumes or continues instead of goes on": r"_go(es)?_on(_|$)",
    "refused in one line instead of is one line": r"_(is|are)_one_line",
    "invalid or unsupported instead of is none": r"_(is|are)_none(_|$)",
}


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
        reads, bounds = clock_reads(tree(file))
        found += [f"{file.relative_to(TESTS)}:{node.lineno}" for node in reads - bounds]
    assert not found, "\n".join(sorted(found))


def test_a_duration_is_found():
    reads, bounds = clock_reads(ast.parse("a = time.monotonic()\nassert time.monotonic() - a < 3"))
    assert (len(reads), len(bounds)) == (2, 0)


def names():
    """Yield (place, name) of every test."""
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{file.relative_to(TESTS)}:{node.lineno}", node.name


def test_names_of_tests_are_plain():
    found = [
        f"{place} {name}: {rule}"
        for place, name in names()
        for rule, pattern in HARD_NAMES.items()
        if re.search(pattern, name)
    ]
    assert not found, "\n".join(found)
