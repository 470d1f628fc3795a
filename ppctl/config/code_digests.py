"""Digests of the code of custom models and data sets: a resumed run notices changes."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

Sources = Mapping[str, str]  # digest of each module's code, by module name


def sources(target: str) -> dict[str, str]:
    """Return the code digests, by name, of the module of `target` and of the user modules it uses.

    target: dotted path of a function, MODULE.FUNCTION.

    A module is used if it, or something that it defines, is bound to a name in a used module.
    Imports inside functions are not found. Installed packages and Python's modules are left out.
    """
    first = target.rpartition(".")[0]
    names = [first]
    found: dict[str, str] = {}
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None or name in found or (name != first and is_installed(file)):
            continue
        found[name] = _digest(Path(file))
        for value in vars(module).values():
            is_module = isinstance(value, ModuleType)
            used = value.__name__ if is_module else getattr(value, "__module__", None)
            names += [used] if isinstance(used, str) else []
    return dict(sorted(found.items()))


def sources_here(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of modules found in the current directory, without importing them."""
    stems = {name: Path(*name.split(".")) for name in names}
    places = ((name, (s.with_suffix(".py"), s / "__init__.py")) for name, s in stems.items())
    return {name: _digest(file) for name, files in places for file in files if file.is_file()}


def changed_modules(before: Sources, now: Sources) -> list[str]:
    """Return the names of the modules whose code differs."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def is_installed(file: str) -> bool:
    """Return whether a source file belongs to a library, to Python or to ppctl."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    tops = {*map(Path, libraries), Path(__file__).parents[1]}
    return "site-packages" in file or not tops.isdisjoint(Path(file).parents)


def _digest(file: Path) -> str:
    """Return a digest of a module's code without comments, docstrings and line breaks."""
    text = file.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a compiled module
        return hashlib.sha256(text).hexdigest()[:16]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = 0 if ast.get_docstring(node, clean=False) is None else 1
            node.body = [*node.body[first:], ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
