"""The tensors of a directory of safetensors."""

from __future__ import annotations

from safetensors import safe_open


def tensors_of(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 it is no mapping
    return found
