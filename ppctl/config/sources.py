"""The code of models and data sets of the user's own, as digests: a run must not go on with another's unknowingly.

Loads no JAX.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

Sources = Mapping[str, "Digests"]  # by the name of the module


class Digests(NamedTuple):
    """Of a module: of its text, and of its code, which comments, docstrings and line breaks leave as it is."""

    text: str
    code: str


def sources(target: str) -> dict[str, Digests]:
    """Return the digests of the module of a dotted path, imported before, and of all those of the user's that it uses.

    A module is used if it, or something that it defines, is bound to a name in one that is; one that is imported only
    inside a function is not found. Modules of packages that are installed, and Python's own, are left out.
    """
    first = target.rpartition(".")[0]
    names = [first]
    found: dict[str, Digests] = {}
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or name in found or (name != first and _is_installed(file)):
            continue
        found[name] = _digests(Path(file))
        names += _used(module)
    return dict(sorted(found.items()))


def sources_here(names: Iterable[str]) -> dict[str, Digests]:
    """Return the digests of those modules that lie in the current directory, where they are looked for first; none of
    them is imported.
    """
    found: dict[str, Digests] = {}
    for name in names:
        stem = Path(*name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                found[name] = _digests(file)
                break
    return found


def recorded_sources(meta: object) -> dict[str, dict[str, list[str]]]:
    """Return the digests that a checkpoint's metadata hold, by part and module; what is not such is left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for part, modules in _settings(_settings(meta).get("sources")).items():
        found[part] = {name: digests for name, digests in _settings(modules).items() if _are_digests(digests)}
    return found


def _settings(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _are_digests(value: object) -> bool:
    found = cast("list[Any]", value) if isinstance(value, list) else []
    return list(map(type, found)) == [str] * len(Digests._fields)


def changed_modules(before: Mapping[str, list[str]], now: Sources) -> list[str]:
    """Return the modules whose code is another than `before`, which holds digests as JSON keeps them.

    Of two versions of Python one may write the same code otherwise, so that the same text is the same code.
    """
    same = {name for name, digests in now.items() if set(before.get(name, ())) & set(digests)}
    return sorted({*before, *now} - same)


def _used(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name


def _is_installed(file: str) -> bool:
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1]))
    return "site-packages" in file or any(Path(library) in Path(file).parents for library in libraries)


def _digests(file: Path) -> Digests:
    text = file.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a module that is compiled
        return Digests(_digest(text), _digest(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = [*node.body[1:], ast.Pass()]
    return Digests(_digest(text), _digest(ast.unparse(tree).encode()))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
