"""Python files as syntax trees, parsed once in a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, as `ast.walk` gives them."""
    return tuple(ast.walk(tree(file)))
