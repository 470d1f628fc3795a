"""Fixtures of several tests of the planner."""

import pytest
from support.tuning import WORDS

from ppctl import cli


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty directory, and two cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.fixture
def tuned(machine, capsys):
    """Return a function that tunes: (exit code, stdout, stderr)."""

    def run(*words, best=2):
        """best: number of layouts that are built and predicted."""
        code = cli.main(["tune", *WORDS.split(), f"tune.best={best}", *words])
        return code, *capsys.readouterr()

    return run
