"""Compiled programs are kept between starts, and change only the time."""

import json
import os
import subprocess
import sys

import jax
import pytest
from support.environment import BY_USER

from ppctl import cli
from ppctl.config.config_dirs import user_cache_dir
from ppctl.training.pipeline import jax_start
from ppctl.training.pipeline.jax_start import keep_compiled

WORDS = (
    "train model=mlp model.num_layers=2 model.d_model=8 data=regression data.batch_size=8 "
    "data.num_rows=64 data.eval_fraction=0 run.eval_every=null run.num_steps=3 run.trackers=[] "
    "run.checkpoint.enabled=false run.platform=cpu mesh=1x2 schedule=gpipe "
    "schedule.num_microbatches=2"
)


# A package for trackers or files, imported before the end of the first step, would delay it.
CHECKS_IMPORTS = """
import sys
from ppctl import cli
from ppctl.training.run.loop import Loop

late, step = {"tensorboardX", "matplotlib", "flax", "pyarrow", "tokenizers", "optuna"}, Loop._train_step

def checked(self, *args):
    result = step(self, *args)
    assert not late & sys.modules.keys()
    print("checked", file=sys.stderr)
    return result

Loop._train_step = checked
cli.console_script()
"""


def train(directory, name, program=("-m", "ppctl.cli"), **more):
    """Train in a separate process; return JAX's log, and the loss and norm of each step."""
    run_dir = directory / name
    command = [sys.executable, *program, *WORDS.split(), f"run.dir={run_dir}"]
    env = {
        key: value
        for key, value in BY_USER.items()
        if "CACHE" not in key and key != "PYTHONWARNINGS"
    }
    env |= {"XDG_CACHE_HOME": str(directory), **more}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return done.stderr, [(record["loss"], record["grad_norm"]) for record in records]


def entries(directory):
    return sorted((directory / "ppctl" / "compiled").rglob("*-cache"))


@pytest.mark.full
@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_trains_the_same(tmp_path):
    logged, losses = train(tmp_path, "first")
    assert logged == ""
    # programs that compile in about WORTH_S may be kept or not
    steps = [path for path in entries(tmp_path) if "jit_step" in path.name]
    assert steps
    more = {"JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
    logged, same = train(tmp_path, "second", ("-c", CHECKS_IMPORTS), **more)
    assert "checked\n" in logged
    assert "cache hit for 'jit_step'" in logged
    assert same == losses
    assert [path for path in entries(tmp_path) if "jit_step" in path.name] == steps


@pytest.mark.full
def test_programs_that_a_kill_left_half_written_are_compiled_again(tmp_path):
    _, losses = train(tmp_path, "first")
    for path in entries(tmp_path):  # left by a process killed while writing
        os.truncate(path, path.stat().st_size // 2)
    assert train(tmp_path, "third") == ("", losses)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Run without a directory of the user; restore settings of JAX."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield names
    for name, value in before.items():
        jax.config.update(name, value)


def kept(where="auto"):
    return keep_compiled(where)


def test_the_directory_is_named_or_of_the_environment_or_in_the_users_cache(
    settings, tmp_path, monkeypatch
):
    enabled, where, _ = settings
    assert kept() is None
    (made,) = (tmp_path / "ppctl" / "compiled").iterdir()
    assert getattr(jax.config, where) == str(made)
    assert made.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    jax.config.update(where, "elsewhere")
    assert kept() is None
    assert getattr(jax.config, where) == "elsewhere"
    assert kept(str(tmp_path / "mine")) is None
    assert getattr(jax.config, where) == str(tmp_path / "mine" / made.name)
    assert kept(None) is None
    assert not getattr(jax.config, enabled)


def test_an_unwritable_directory_is_refused_if_named_and_noted_otherwise(
    settings, tmp_path, capsys
):
    (tmp_path / "ppctl").write_text("a file")
    note = kept()
    assert note is not None
    assert "Not a directory. Use run.compilation_cache=DIR, or null" in note
    words = [
        *WORDS.split(),
        f"run.dir={tmp_path / 'run'}",
        f"run.compilation_cache={tmp_path}/ppctl",
    ]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(
        f"ppctl: run.compilation_cache={tmp_path}/ppctl: compiled programs"
    )
    assert not (tmp_path / "run").exists()


def test_the_oldest_entries_are_removed_above_the_limit(settings, tmp_path, monkeypatch):
    assert kept() is None
    (made,) = (tmp_path / "ppctl" / "compiled").iterdir()
    now_s = 1e9
    for age in range(5):
        path = made / f"{age}-cache"
        path.write_bytes(b"z" * 100)
        os.utime(path, (now_s - age, now_s - age))
    monkeypatch.setattr(jax_start, "MOST_BYTES", 250)
    assert kept() is None
    assert sorted(path.name for path in made.iterdir()) == ["0-cache", "1-cache"]


def test_the_cache_is_in_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "ppctl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / ".cache/ppctl"
