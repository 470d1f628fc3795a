"""Rooms: each imports from those below it only. One test a rule, which lists all that break it."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
from support.source_trees import nodes

import ppctl

ROOT = Path(ppctl.__file__).parent
ROOMS = (  # from the top down: a room may import from itself and from those after it
    "cli",
    "planner",
    "language",
    "training",
    "executors",
    "launch",
    "reports",
    "model",
    "data",
    "config",
    "schedule",
    "user_files",
    "errors",
)
NO_JAX = (
    "cli.subcommands.schedule_show",
    "reports",
    "config",
    "schedule",
    "user_files",
    "errors",
)  # and all that they import
STANDARD_LIBRARY_ONLY = ("schedule", "config", "user_files", "errors")
HYDRA = ("hydra", "omegaconf")
HYDRA_SIDE = (
    *("cli.compose", "cli.fault_messages", "cli.multirun", "cli.optuna_sweeper"),
    "cli.text_settings",
)
MATPLOTLIB_SIDE = ("reports.charts.image_charts", "reports.charts.page_figures")
PRIVATE = ("jax._src", "jax.interpreters", "jax.lib", "jax.core", "jaxlib")
CONFIG_STOPS_AT = (
    "executors",
    "model",
    "data",
    "schedule",
    "errors",
)  # these take ints, tuples, arrays, callables
SIZES = (  # records of a transformer's sizes, which its settings are and its model reads
    "config.groups.transformer_sizes",
    "config.groups.moe_settings",
    "config.groups.rope_settings",
)

FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for file in sorted(ROOT.rglob("*.py"))
}
FILES = {
    module.removesuffix(".__init__"): file for module, file in FILES.items() if module != "__init__"
}


def imported(module):
    """Every name that a file imports, inside functions too, dotted."""
    for node in nodes(FILES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def own_imports(module):
    """The files of ppctl that a file imports."""
    found = set()
    for name in imported(module):
        parts = name.split(".")[1:]
        ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        if name.startswith("ppctl."):
            found.update(next(([end] for end in ends if end in FILES), []))
    return found - {module}


def is_in(module, places):
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def room(module):
    return module.partition(".")[0]


def test_the_rooms_are_these():
    entries = {path.name for path in ROOT.iterdir()} - {
        "__pycache__",
        "conf",
        "recipes",
    }  # the last two in a wheel
    assert entries == {*ROOMS[:-2], "__init__.py", "errors.py", "user_files.py", "py.typed"}


def test_imports_point_down():
    order = {name: level for level, name in enumerate(ROOMS)}
    up = [f"{a} -> {b}" for a in FILES for b in own_imports(a) if order[room(b)] < order[room(a)]]
    assert not up, "\n".join(sorted(up))


PAGE = (ROOT.parent / "docs/architecture.md").read_text()
SUB_ROOMS = [row.replace("/", ".") for row in re.findall(r"^\| `ppctl/(\w+/[\w/]+)/`", PAGE, re.M)]


def paths_to(sub_room):
    """The files that a sub-room needs, through files of its room too: {file: the imports to it}."""
    room_of, paths = sub_room.rpartition(".")[0], {}
    to_visit = [(module, ()) for module in FILES if is_in(module, [sub_room])]
    while to_visit:
        module, path = to_visit.pop()
        for other in own_imports(module) - paths.keys():
            if is_in(other, [room_of]) and not (is_in(other, [sub_room]) and not path):
                paths[other] = (*path, f"{module} -> {other}")
                to_visit.append((other, paths[other]))
    return paths


@pytest.mark.parametrize("sub_room", SUB_ROOMS)
def test_sub_rooms_stand_on_those_below_them_in_the_table(sub_room):
    """And never on themselves through a file of their room: the table is one order of all."""
    above = SUB_ROOMS[: SUB_ROOMS.index(sub_room) + 1]
    above = [each for each in above if each.rpartition(".")[0] == sub_room.rpartition(".")[0]]
    up = [", ".join(path) for file, path in paths_to(sub_room).items() if is_in(file, above)]
    assert not up, "\n".join(sorted(up))


def test_jobs_and_checkpoints_know_nothing_of_each_other():
    sides = ["training.pipeline"], ["training.checkpoint"]
    for one, other in (sides, sides[::-1]):
        assert not [
            f for f in FILES if is_in(f, one) and any(is_in(g, other) for g in own_imports(f))
        ]


def test_no_two_files_import_each_other():
    graph = {module: set(own_imports(module)) for module in FILES}
    while graph:
        leaves = {module for module, others in graph.items() if not others & graph.keys()}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {module: others for module, others in graph.items() if module not in leaves}


def test_imports_are_absolute():
    assert not [
        f"{module}: {name}" for module in FILES for name in imported(module) if name.startswith(".")
    ]


def test_schedules_and_settings_need_the_standard_library_only():
    allowed = sys.stdlib_module_names | {"ppctl"}
    found = [
        f"{module}: {name}"
        for module in FILES
        if is_in(module, STANDARD_LIBRARY_ONLY)
        for name in imported(module)
        if name.split(".")[0] not in allowed
    ]
    assert not found, "\n".join(found)


def test_modules_without_jax_do_not_import_it():
    found = [
        f"{module}: {name}"
        for module in FILES
        if is_in(module, NO_JAX)
        for name in imported(module)
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax")
    ]
    assert not found, "\n".join(found)


def test_hydra_is_imported_by_its_side_of_the_command_line_only():
    found = [
        f"{module}: {name}"
        for module in FILES
        if module not in HYDRA_SIDE
        for name in imported(module)
        if name.split(".")[0] in HYDRA
    ]
    assert not found, "\n".join(found)


def test_matplotlib_is_imported_for_figures_only():
    found = [
        module
        for module in FILES
        if module not in MATPLOTLIB_SIDE
        and any(name.startswith("matplotlib") for name in imported(module))
    ]
    assert not found


def test_no_file_uses_private_names_of_jax():
    found = [
        f"{module}: {name}" for module in FILES for name in imported(module) if is_in(name, PRIVATE)
    ]
    for module, file in FILES.items():  # jax._src.x without a separate import
        attributes = (ast.unparse(node) for node in nodes(file) if isinstance(node, ast.Attribute))
        found += [f"{module}: {name}" for name in attributes if is_in(name, PRIVATE)]
    assert not found, "\n".join(found)


def test_config_objects_stop_above_the_executors():
    found = [
        f"{module} -> {other}"
        for module in FILES
        if is_in(module, CONFIG_STOPS_AT)
        for other in own_imports(module)
        if room(other) == "config" and (room(module) != "model" or other not in SIZES)
    ]
    assert not found, "\n".join(found)


def test_no_test_file_imports_another():
    tests = Path(__file__).parents[1]
    names = {file.stem for file in tests.rglob("test_*.py")}
    found = [
        f"{file.relative_to(tests)}: {node.module}"
        for file in tests.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in names
    ]
    assert not found, "\n".join(found)


def test_the_test_sees_the_imports():
    assert "errors" in own_imports("config")
    assert "schedule.ir" in own_imports("schedule.tick_lowering")
    assert any(name.startswith("hydra.") for name in imported("cli.compose"))
    assert len(FILES) > 200


@pytest.mark.parametrize("setting", ["norm_eps", "attention_softcap", "logit_softcap"])
def test_the_page_of_the_architecture_names_the_files_of_a_models_setting(setting):
    (row,) = re.findall(r"^\| add a setting of the transformer \| (.*)", PAGE, re.MULTILINE)
    named = re.findall(r"`([\w/]+(?:\.py|/))`", row)
    assert all((ROOT / name).exists() for name in named)
    using = [f for f in FILES.values() if re.search(rf"\b{setting}\b", f.read_text())]
    places = {str(file.relative_to(ROOT)) for file in using}
    assert {place for place in places if not place.startswith(tuple(named))} == set()
