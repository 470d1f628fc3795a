"""Hydra's own settings of directories: they mean what Hydra's users expect, or are refused."""

import pytest

from ppctl.cli.compose import compose
from ppctl.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.run.dir=x", "ppctl does not read this setting .* a run writes to run.dir"),
        ("hydra.sweep.dir=x", "a run writes to run.dir"),
        ("hydra.job.chdir=true", "does not change the current directory"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(word, message):
    with pytest.raises(ConfigError, match=rf"^{word}.*{message}"):
        compose(["recipes=tiny", word])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("# @package _global_\nrun: {name: a}\n".encode("utf-16"), "It is UTF-16"),
        (b"# @package _global_\nrun: {name: \xff}\n", "It is not UTF-8 text"),
        (b"# @package _global_\n" + b"#" * 2**20, "More than 1 MiB"),
    ],
)
def test_files_of_a_config_dir_are_opened_as_all_files_of_users(tmp_path, content, reason):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"^{tmp_path}/recipes/mine.yaml cannot be read: {reason}"
    ):
        compose(["recipes=mine"], str(tmp_path))


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    (tmp_path / "recipes").mkdir()
    recipe = "\ufeff# @package _global_\nrun: {name: marked}\n"
    (tmp_path / "recipes/mine.yaml").write_text(recipe, encoding="utf-8")
    assert compose(["recipes=mine"], str(tmp_path)).run.name == "marked"
