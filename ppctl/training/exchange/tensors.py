"""The tensors of a model directory, read one by one from memory maps: safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.errors import ConfigError
from ppctl.training.exchange.names import Named

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BUFFERS = ".rotary_emb.inv_freq"  # what older files hold besides parameters
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Tensors:
    """Tensors by the names of `transformers`: their shapes, and a function that reads one."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]

    def check(self, wanted: Sequence[Named]) -> None:
        """Raise ConfigError where a tensor of a model is missing, has another shape, or is none of it."""
        names = {each.name: each.shape for each in wanted}
        for name, shape in names.items():
            if name not in self.shapes:
                raise ConfigError(f"{name} {list(shape)} of the model is missing{_more(names, self.shapes)}.")
            if self.shapes[name] != shape:
                raise ConfigError(f"{name} is {list(self.shapes[name])}, and config.json makes it {list(shape)}.")
        for name in self.shapes:
            if name not in names and not self._is_known(name, names):
                raise ConfigError(
                    f"{name} {list(self.shapes[name])} is no tensor of the model that config.json describes."
                )

    def _is_known(self, name: str, names: Iterable[str]) -> bool:
        """Return whether a tensor adds nothing: a table of angles, or the embedding once more where it is tied."""
        is_tied = name == HEAD and EMBEDDING in names and self.shapes[HEAD] == self.shapes[EMBEDDING]
        return name.endswith(BUFFERS) or (is_tied and np.array_equal(self.read(HEAD), self.read(EMBEDDING)))


def _more(names: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    count = len([name for name in names if name not in there])
    return f" (the first of {count})" if count > 1 else ""


def open_safetensors(directory: Path) -> Tensors:
    """Return the tensors of a model directory. ConfigError where there are none, or not all, or of other types."""
    from safetensors import SafetensorError, safe_open  # here: what imports no model needs no time for it

    places, shapes = dict[str, Path](), dict[str, tuple[int, ...]]()
    for file in _files(directory):
        try:
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 it is no mapping
                    part = opened.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        raise ConfigError(
                            f"{name} in {file} is {part.get_dtype()}, and parameters are kept in float32: only "
                            f"{', '.join(DTYPES)} fit exactly."
                        )
                    places[name], shapes[name] = file, tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}.") from error

    def read(name: str) -> np.ndarray:
        with safe_open(places[name], "numpy") as opened:
            return opened.get_tensor(name)

    return Tensors(shapes, read)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{directory} has no *.safetensors. Name a model directory of transformers, or a .gguf.")
        return found
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of safetensors.") from error
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ConfigError(f"{directory / missing[0]} is missing, which {INDEX} names ({len(missing)} of {len(names)}).")
    return [directory / name for name in names]
