"""Imports point down, and only where they may."""

import ast
import sys
from pathlib import Path

import pytest

import ppctl

ROOT = Path(ppctl.__file__).parent

# design: a file imports from its own level and from those below. A new file needs a place here.
LEVELS = {
    7: ("cli",),
    6: (
        "run",
        "loop",
        "members",
        "compose",
        "assemble",
        "verify",
        "bench",
        "inspection",
        "programs",
        "doctor",
        "planner",
        "calibrate",
        "step",
        "foresee",
        "recipe",
        "tune_report",
        "tune",
        "plan_report",
        "prediction",
        "weigh",
        "price",
        "measure",
        "plan_page",
        "advise",
        "look",
        "scaling",
        "launch",
        "request",
        "runs",
        "run_report",
        "sweep",
    ),
    5: (
        "checkpoint",
        "seal",
        "metrics",
        "board",
        "profile",
        "placement",
        "timeline",
        "spans",
        "environment",
        "report",
        "draw",
        "certify",
        "watch",
        "supervise",
        "status",
        "records",
    ),
    4: ("custom", "pieces", "checksum", "engine", "train", "optim", "data"),
    3: ("runtime",),
    2: ("mesh", "topology", "model", "plan", "hardware", "distributed", "native"),
    1: ("schedule", "costs", "partition"),
    0: ("errors", "config"),
}
LEVEL_OF = {part: level for level, parts in LEVELS.items() for part in parts}
STANDARD_LIBRARY_ONLY = ("schedule", "costs", "partition", "errors", "config")
HYDRA = ("hydra", "omegaconf", "hydra_plugins")
HYDRA_SIDE = {("cli", name) for name in ("compose", "plugins", "faults")}
PRIVATE = ("jax._src", "jax.interpreters", "jax.lib", "jax.core", "jaxlib")

FILES = {file.relative_to(ROOT).with_suffix("").parts: file for file in sorted(ROOT.rglob("*.py"))}
FILES = {(parts[:-1] if parts[-1] == "__init__" else parts): file for parts, file in FILES.items()}
files = pytest.mark.parametrize("module", [parts for parts in FILES if parts], ids=".".join)


def imports(module):
    """Every module that a file imports, inside functions too, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(module):
    """The files of ppctl that a file imports."""
    found = set()
    for name in imports(module):
        parts = tuple(name.split("."))
        if parts[0] == "ppctl":
            known = [parts[1:end] for end in range(len(parts), 1, -1) if parts[1:end] in FILES]
            if known:  # else a name of ppctl/__init__.py
                found.add(known[0])
    return found


@files
def test_every_file_has_a_level_and_imports_point_down(module):
    assert module[0] in LEVEL_OF, f"{FILES[module].name} has no level: add it where it belongs"
    for other in own_imports(module):
        assert LEVEL_OF[other[0]] <= LEVEL_OF[module[0]], f"{'.'.join(module)} imports {'.'.join(other)}"


def test_no_two_files_import_each_other():
    graph = {module: own_imports(module) - {module} for module in FILES if module}
    # `from ppctl.schedule import x` in a file of ppctl/schedule would be one too
    while graph:
        leaves = {module for module, others in graph.items() if not others & graph.keys()}
        assert leaves, f"a cycle among {sorted('.'.join(module) for module in graph)}"
        graph = {module: others for module, others in graph.items() if module not in leaves}


@files
def test_files_of_the_lower_levels_import_the_standard_library_and_each_other_only(module):
    roots = {name.split(".")[0] for name in imports(module)}
    is_choices = module == ("cli", "choices")
    if module[0] in STANDARD_LIBRARY_ONLY or is_choices:
        assert roots - {"ppctl"} <= sys.stdlib_module_names
        others = {other[0] for other in own_imports(module)}
        assert others <= ({"errors", "config"} if is_choices else set(STANDARD_LIBRARY_ONLY))


@files
def test_the_planner_imports_no_jax(module):
    if module[0] == "plan":
        assert {name.split(".")[0] for name in imports(module)} <= {"ppctl", *sys.stdlib_module_names}
        assert all(LEVEL_OF[other[0]] < LEVEL_OF["plan"] or other[0] == "plan" for other in own_imports(module))


@files
def test_hydra_is_imported_by_its_side_of_the_command_line_only(module):
    found = {name for name in imports(module) if name.split(".")[0] in HYDRA}
    assert not found or module in HYDRA_SIDE


@files
def test_matplotlib_is_imported_for_figures_only(module):
    assert module == ("draw", "image") or not any(name.startswith("matplotlib") for name in imports(module))


@files
def test_no_file_uses_what_jax_keeps_private(module):
    for name in imports(module):
        assert not any(f"{name}.".startswith(f"{private}.") for private in PRIVATE), name
    tree = ast.parse(FILES[module].read_text())
    for node in ast.walk(tree):  # jax._src.x without an import of its own
        if isinstance(node, ast.Attribute):
            assert not any(f"{ast.unparse(node)}.".startswith(f"{private}.") for private in PRIVATE), ast.unparse(node)


@files
def test_config_objects_stop_at_the_composition_root(module):
    if LEVEL_OF.get(module[0], 0) < 6 and module != ("config",):
        assert ("config",) not in own_imports(module)


def test_the_test_sees_the_imports():
    assert ("errors",) in own_imports(("config",))
    assert ("schedule", "ir") in own_imports(("schedule", "ticks"))
    assert any(name.startswith("hydra.") for name in imports(("cli", "compose")))
    assert len(FILES) > 30
