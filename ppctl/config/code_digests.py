"""Digests of the code of custom models and data sets, by which a resumed run notices changes.

Loads no JAX.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

Sources = Mapping[str, "Digests"]  # by the name of the module


class Digests(NamedTuple):
    """Digests of a module's text, and of its code without comments, docstrings, line breaks."""

    text: str
    code: str


def sources(target: str) -> dict[str, Digests]:
    """Return the digests of the imported module of a dotted path and of the user's modules in it.

    A module is used if it, or something that it defines, is bound to a name in a used module; one
    that is imported only inside a function is not found. Installed packages and Python's own
    modules are left out.
    """
    first = target.rpartition(".")[0]
    names = [first]
    found: dict[str, Digests] = {}
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or name in found:
            continue
        if name == first or not is_installed(file):
            found[name] = _digests(Path(file))
            names += _used(module)
    return dict(sorted(found.items()))


def sources_here(names: Iterable[str]) -> dict[str, Digests]:
    """Return the digests of those modules that lie in the current directory; imports none."""
    found: dict[str, Digests] = {}
    for name in names:
        stem = Path(*name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                found[name] = _digests(file)
                break
    return found


def changed_modules(before: Mapping[str, Sequence[str]], now: Sources) -> list[str]:
    """Return the modules whose code differs from `before`, the digests in a checkpoint's metadata.

    Two versions of Python may unparse the same code differently, so the same text is the same code.
    """
    same = {name for name, digests in now.items() if set(before.get(name, ())) & set(digests)}
    return sorted({*before, *now} - same)


def _used(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        is_module = isinstance(value, ModuleType)
        name = value.__name__ if is_module else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def is_installed(file: str) -> bool:
    """Return whether a source file is of a library, of Python or of ppctl, not the user's."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    tops = {*map(Path, libraries), Path(__file__).parents[1]}
    return "site-packages" in file or not tops.isdisjoint(Path(file).parents)


def _digests(file: Path) -> Digests:
    text = file.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a compiled module
        return Digests(_digest(text), _digest(text))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False):
            node.body = [*node.body[1:], ast.Pass()]
    return Digests(_digest(text), _digest(ast.unparse(tree).encode()))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
