"""Fixtures of several tests of imports."""

import json
import shutil

import pytest
from safetensors.numpy import save_file
from support.model_copies import tensors_of
from support.oracle import FOLDER


@pytest.fixture
def copy(tmp_path):
    """A golden model to change: (directory, its config.json, its tensors, what writes them)."""
    directory = tmp_path / "model"
    shutil.copytree(FOLDER / "llama2", directory)

    def write(config=None, tensors=None):
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, directory / "model.safetensors")

    return (
        directory,
        json.loads((directory / "config.json").read_text()),
        tensors_of(directory),
        write,
    )
