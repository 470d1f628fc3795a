"""Sizes and names of ppctl/: a stranger finds a file by its name, and a function fits on a screen."""

import ast
import re
from collections import Counter
from pathlib import Path

from support.source_trees import nodes

import ppctl

ROOT = Path(ppctl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_FILES, MOST_LINES = 20, 60  # files of a folder; lines of a function
MOST_LINES_OF_CLASS = 200
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
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MOST_LINES
    ]
    assert not long, "\n".join(long)


# classes above MOST_LINES_OF_CLASS that are still to be divided
LARGE = ("Pipeline",)


def test_no_class_is_longer_than_200_lines():
    """A longer class has two subjects."""
    sizes = {
        node.name: node.end_lineno - node.lineno + 1
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    long = {name: size for name, size in sizes.items() if size > MOST_LINES_OF_CLASS}
    assert not long.keys() - {*LARGE}, "\n".join(f"{name}: {long[name]} lines" for name in long)


# arguments that neither reader nor type checker sees: counts that may only fall
MOST_HIDDEN = {"lambdas with a name": 99, "functions with **": 41, "calls with **": 160}


def test_hidden_arguments_become_fewer():
    counts = Counter()
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                counts["lambdas with a name"] += 1
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                counts["functions with **"] += 1
            if isinstance(node, ast.Call):
                counts["calls with **"] += any(each.arg is None for each in node.keywords)
    more = {name: number for name, number in counts.items() if number > MOST_HIDDEN[name]}
    assert not more, more


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


def definitions(file):
    """Return the names that a file defines: functions, classes, CLASS.MEMBER, fields, constants."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
        if isinstance(node, ast.ClassDef):
            members = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            found |= {f"{node.name}.{name}" for name in (*members, *(f.id for f in fields))}
    return found


def architecture_names():
    """Yield (name, file) for "`name` of `file`" on the page, and for its rows of file and function."""
    text = PAGE.read_text()
    named = r"((?:`[\w.]+`(?:, | and )(?:[a-z' ]* )?)*`[\w.]+`) (?:of|in) `([\w/]+\.py)`"
    for names, file in re.findall(named, text):
        yield from ((name, file) for name in re.findall(r"`([\w.]+)`", names))
    for file, name in re.findall(r"^\|[ \d]*\| `([\w/]+\.py)` \| `(\w+)` \|", text, re.MULTILINE):
        yield name, file


def test_every_name_of_the_architecture_page_is_defined_in_its_file():
    pairs = [*architecture_names()]
    assert len(pairs) > 20
    missing = []
    for name, place in pairs:
        base = ROOT.parent if place.startswith("tests/") else ROOT
        # a setting: PART.FIELD
        if not {name, name.rpartition(".")[2]} & definitions(base / place):
            missing.append(f"{name} of {place}")
    assert not missing, "\n".join(missing)


def test_every_name_of_the_architecture_page_is_defined():
    """A name without a file is unique or speaks for itself, but it is a name of ppctl/."""
    known = {name for file in FILES for name in definitions(file)}
    known |= {path.name for path in ROOT.rglob("*") if path.is_dir()} | {"schedule", "errors"}
    foreign = {"transformers", "hydra_plugins"}
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"`(?:ppctl\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", text))
    names = {name for name in names if not name.endswith((".py", ".jsonl", ".yaml"))}
    names -= foreign | {name for name, _ in architecture_names()}  # tested above
    absent = {name for name in names if not {name, name.rpartition(".")[2]} & known}
    assert not absent, "\n".join(sorted(absent))


def test_the_architecture_page_opens_each_file_that_it_names():
    """A name of a file without a folder is exact too: names are unique, so it leads to one file."""
    names = {file.name for file in FILES}
    text = PAGE.read_text()
    absent = {name for name in re.findall(r"`(\w+\.py)`", text) if name not in names}
    assert not absent, "\n".join(sorted(absent))
