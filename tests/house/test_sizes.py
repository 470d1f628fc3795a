"""Sizes and names of ppctl/: a stranger finds a file by its name, and a function fits on a screen."""

import ast
import re
from collections import Counter
from pathlib import Path

import ppctl

ROOT = Path(ppctl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_FILES, MOST_LINES = 20, 60  # of a folder; of a function
PAGE = ROOT.parent / "docs/architecture.md"


def test_no_two_files_share_a_name():
    counts = Counter(file.name for file in FILES if file.name not in ("__init__.py", "__main__.py"))
    repeated = [str(file.relative_to(ROOT)) for file in FILES if counts[file.name] > 1]
    assert not repeated, "\n".join(
        sorted(repeated, key=lambda name: (name.rpartition("/")[2], name))
    )


def test_no_folder_has_more_than_20_files():
    """Of Python, `__init__.py` aside."""
    counts = Counter(file.parent.relative_to(ROOT) for file in FILES if file.name != "__init__.py")
    large = [
        f"{folder}: {number}" for folder, number in sorted(counts.items()) if number > MOST_FILES
    ]
    assert not large, "\n".join(large)


def test_no_function_is_longer_than_60_lines():
    """Of its `def` to its end, docstring and nested functions included."""
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MOST_LINES
    ]
    assert not long, "\n".join(long)


def test_every_path_of_the_architecture_page_is_exact():
    """A path in backticks stands from the root of the repository or of ppctl/ and leads to a file or folder."""
    paths = re.findall(
        r"`([\w.*<>/-]+)`",
        re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE),
    )
    paths = [
        path
        for path in paths
        if path.endswith((".py", ".yaml", ".md", ".csv", "/")) and "<" not in path
    ]
    dead = [
        path
        for path in paths
        if not any(base.glob(path) and [*base.glob(path)] for base in (ROOT.parent, ROOT))
    ]
    assert paths
    assert not dead, "\n".join(dead)


def test_the_architecture_page_opens_each_file_that_it_names():
    """A name of a file without a folder is exact too: names are unique, so it leads to one file."""
    names = {file.name for file in FILES}
    text = PAGE.read_text()
    absent = {name for name in re.findall(r"`(\w+\.py)`", text) if name not in names}
    assert not absent, "\n".join(sorted(absent))
