"""Hydra's own settings of directories: they mean what Hydra's users expect, or are refused."""

from pathlib import Path

import pytest

from ppctl.cli.compose import compose
from ppctl.errors import ConfigError
from ppctl.launch.sweep.sweep_jobs import Sweep


def test_the_directory_of_a_sweep_is_that_of_its_summary_and_of_its_jobs():
    sweep = compose(
        ["recipes=tiny", "optim.lr=1e-3,2e-3", "hydra.sweep.dir=here/x"], ["--multirun"], ["train"]
    )
    assert isinstance(sweep, Sweep)
    assert sweep.directory == Path("here/x")
    assert len(sweep.jobs) == 2
    assert all(job.run_dir.is_relative_to("here/x") for job in sweep.jobs)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.run.dir=x", "ppctl reads no such setting .* A run's files are in run.dir"),
        ("hydra.sweep.dir=x", "is for the jobs of a sweep"),
        ("hydra.job.chdir=true", "it stays in the directory of its start"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(word, message):
    with pytest.raises(ConfigError, match=rf"^{word}.*{message}"):
        compose(["recipes=tiny", word], [], ["train"])
