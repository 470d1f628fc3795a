"""Hydra's own settings of directories: they mean what Hydra's users expect, or are refused."""

import pytest

from ppctl.cli.compose import compose
from ppctl.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.run.dir=x", "ppctl reads no such setting .* A run's files are in run.dir"),
        ("hydra.sweep.dir=x", "A run's files are in run.dir"),
        ("hydra.job.chdir=true", "it stays in the directory of its start"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(word, message):
    with pytest.raises(ConfigError, match=rf"^{word}.*{message}"):
        compose(["recipes=tiny", word])
