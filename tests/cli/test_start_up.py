"""Packages that a start does not import: each would delay the first result."""

import os
import subprocess
import sys

import pytest
from support.environment import BY_USER

PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
LATE = ("tensorboardX", "matplotlib", "flax", "pyarrow", "tokenizers", "optuna")
NO_JAX = "jax", "numpy", "optax", "hydra", "omegaconf"


def imported(code, names, directory):
    """Return those of `names` that a process has imported after `code`, or in the middle of it."""
    code = f"import sys\ndef show(): print([n for n in {names} if n in sys.modules])\n{code}"
    how = {"capture_output": True, "text": True, "cwd": directory, "env": BY_USER | PATH}
    done = subprocess.run([sys.executable, "-c", code], check=False, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_imports_neither_jax_nor_hydra(words, tmp_path):
    code = f"from ppctl.cli import main; main({words}); show()"
    assert imported(code, (*NO_JAX, *LATE), tmp_path)[-1] == "[]"


def test_commands_import_their_large_packages_late(tmp_path):
    modules = ("train", "plan", "tune", "verify", "bench", "inspect", "rehearse")
    code = f"from importlib import import_module\nfor name in {modules}:\n"
    code += "    import_module(f'ppctl.cli.commands.{name}')\nshow()"
    assert imported(code, LATE, tmp_path)[-1] == "[]"
