"""docs/security.md: files that never execute code, directories that no write leaves, and code that
is executed.
"""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from support.source_trees import nodes

import ppctl
from ppctl import cli
from ppctl.reports.foreign_files import FAST_LOADER
from ppctl.reports.run_files import WRITTEN

PACKAGE = Path(ppctl.__file__).parent
PAGE = (PACKAGE.parent / "docs/security.md").read_text()
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}
# by what files of others could execute code, and the only files of ppctl that have it
EXECUTE = {
    "eval": (),
    "exec": (),
    "compile": (),
    "__import__": (),
    "exec_module": ("training/pipeline/user_code.py",),
    "import_module": (
        *(
            "__init__.py",
            "schedule/__init__.py",
            "schedule/families/registry.py",
        ),  # names of ppctl's own
        "cli/entry.py",  # files of its commands
        "training/pipeline/user_code.py",
    ),
}
MODULES = (
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "zipfile",
    "tarfile",
    "hydra.utils",
)
TINY = (
    "model=mlp model.num_layers=2 model.d_model=8 data=regression data.batch_size=8 "
    "data.num_rows=256 mesh=1x1 schedule=gpipe schedule.num_microbatches=2 run.platform=cpu "
    "run.eval_every=null run.num_steps=1"
)


def calls(path):
    """(name, call) of each call in a file, without what stands before its last dot."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", None)), node


def imported(path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_no_reader_executes_its_input():
    found = []
    for file, path in FILES.items():
        found += [f"{file} imports {name}" for name in imported(path) if name in MODULES]
        for name, call in calls(path):
            is_method = isinstance(call.func, ast.Attribute)
            plain = (
                name in ("eval", "exec", "compile", "__import__") and is_method
            )  # re.compile, engine.compile
            if name in EXECUTE and not plain and file not in EXECUTE[name]:
                found.append(f"{file}:{call.lineno} {name}")
            if is_method and ast.unparse(call.func) in ("yaml.load", "np.load", "numpy.load"):
                loader = [ast.unparse(each) for each in call.args[1:]]
                if loader not in (["_PlainLoader"], ["FAST_LOADER"]):
                    found.append(f"{file}:{call.lineno} {ast.unparse(call)}")
            found += [
                f"{file}:{call.lineno} allow_pickle"
                for each in call.keywords
                if each.arg == "allow_pickle"
            ]
    assert not found, "\n".join(found)
    assert issubclass(FAST_LOADER, yaml.constructor.SafeConstructor)


def test_the_page_names_all_that_executes_code():
    for name in (
        "model.target",
        "data.target",
        "optim.target",
        "run.on_event",
        "submitit",
        "PYTHONPATH",
        "plugins",
        "--config-dir",
        "_target_",
    ):
        assert name in PAGE, name
    for name in WRITTEN:
        assert name.split(".")[0] in PAGE, name


def snapshot(directory):
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


@pytest.mark.parametrize(
    "name", ["config.yaml", "status.jsonl", "metrics.jsonl", "memory.json", "checkpoints/1"]
)
def test_training_writes_only_to_its_run_directory(tmp_path, capsys, name):
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "there").mkdir(parents=True)
    (outside / "there/precious").write_text("precious\n")
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside / ("there" if "/" in name else "there/precious"))
    before = snapshot(tmp_path)
    assert cli.main(["train", *TINY.split(), f"run.dir={run}"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"ppctl: run.dir=\S+ cannot be written: {name} is a link to \S+, outside of it\. .*\n",
        said,
    )
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["sweep.json", "optim.lr=0.1/output.log"])
def test_a_sweep_writes_only_to_its_directory(tmp_path, capsys, name):
    (tmp_path / "precious").write_text("precious\n")
    sweep = tmp_path / "sweep"
    (sweep / name).parent.mkdir(parents=True)
    (sweep / name).symlink_to(tmp_path / "precious")
    words = ["--multirun", *TINY.split(), "optim.lr=0.1,0.2", f"run.dir={sweep}"]
    assert cli.main(["train", *words]) == 2
    assert (
        f"{name.rpartition('/')[2]} is a link to {tmp_path / 'precious'}, outside of it"
        in capsys.readouterr().err
    )
    assert (tmp_path / "precious").read_text() == "precious\n"
    assert os.listdir(sweep) == [name.partition("/")[0]]


def test_reading_a_run_directory_or_a_schedule_imports_no_module(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('made').touch()\n")
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    settings = (
        "model:\n  name: custom\n  target: evil.model\n  num_layers: 4\nrun:\n  num_steps: 1\n"
    )
    (run / "config.yaml").write_text(settings)
    (run / "status.jsonl").write_text(
        '{"status": "started", "overrides": ["model=custom", "model.target=evil.model"]}'
    )
    (tmp_path / "evil.csv").write_text("evil.model\n")
    for words in (
        ["runs"],
        ["runs", "show", "a"],
        ["report", "a"],
        ["schedule", "check", "evil.csv"],
    ):
        assert cli.main(words) in (0, 1)
    assert "evil" not in sys.modules
    assert not (tmp_path / "made").exists()
    capsys.readouterr()


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["mesh=1x3"]], ids=" ".join)
def test_a_config_instantiates_no_class(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text(
        "import pathlib\npathlib.Path('made').touch()\nclass Evil: ...\n"
    )
    (tmp_path / "hydra/callbacks").mkdir(parents=True)
    (tmp_path / "hydra/callbacks/evil.yaml").write_text("evil:\n  _target_: evil.Evil\n")
    words = ["--config-dir", str(tmp_path), "hydra/callbacks=evil", *flags]
    assert cli.main(["plan", *words]) in (0, 2)
    assert not (tmp_path / "made").exists()
    capsys.readouterr()
