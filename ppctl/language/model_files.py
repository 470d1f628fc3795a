"""Files of a model directory: safetensors, read tensor by tensor from memory maps."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.errors import ConfigError, one_line, os_errors
from ppctl.reports.run_files import UNFINISHED
from ppctl.reports.terminal_output import replace_file
from ppctl.user_files import open_file, read_text

Tree = Any
INDEX = "model.safetensors.index.json"
PART = re.compile(r"model-\d+-of-\d+\.safetensors")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BUFFERS = ".rotary_emb.inv_freq"  # ending of angle tables' names in older files
MOVED = "moved"  # file in UNFINISHED that lists files which may have moved to `out`
CONFIGS = ("config.yaml", "config.json", "adapter_config.json")  # configs of a run, a model, PEFT
FETCH = "Fetch it again, or use another."  # remedy for a damaged file
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def check_new(out: Path) -> None:
    """Raise ConfigError if `out` exists, unless it holds only files left by a killed writer."""
    with writing_to(out):
        is_new = not os.path.lexists(out)
        is_new = is_new or (out.is_dir() and {*os.listdir(out)} <= {*_left_by_a_kill(out)})
    if not is_new:
        raise ConfigError(f"{out} exists already, and nothing is overwritten. Name another --out.")


def writing_to(out: Path) -> AbstractContextManager[None]:
    """Raise ConfigError if the body cannot write to `out`."""
    return os_errors(f"{out} cannot be written", "Name another directory with --out.")


def _left_by_a_kill(out: Path) -> list[str]:
    """Return the names that a killed writer may have left in `out`."""
    moved = out / UNFINISHED / MOVED
    return [*(moved.read_text().splitlines() if moved.is_file() else ()), UNFINISHED]


@contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a directory inside `out`. Its files move into `out` at the end; errors remove them.

    After a kill, the same command starts over. ConfigError if `out` cannot be written.
    """
    part, is_made = out / UNFINISHED, not out.exists()
    with writing_to(out):
        for left in (out / name for name in _left_by_a_kill(out)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        part.mkdir(parents=True)
    try:
        with writing_to(out):
            yield part
            # move the config last: readers recognize the directory by it, and expect all files
            files = sorted(part.iterdir(), key=lambda file: file.name in CONFIGS)
            replace_file(part / MOVED, "\n".join(file.name for file in files[:-1]))
            for file in files:
                file.rename(out / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if is_made:
            with suppress(OSError):  # `out` is not empty if the files are written
                out.rmdir()


@dataclass(frozen=True)
class Tensors:
    """Tensors by their `transformers` names: shapes, and a function that reads one tensor.

    fused: the tensor in the file for each tensor that is a part of another, as messages name it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    fused: Mapping[str, str] = field(default_factory=dict)

    def check(self, names: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless these are the model's tensors; names: their shapes by name."""
        missing = [name for name in names if name not in self.shapes]
        if missing:
            more = f" (the first of {len(missing)})" if len(missing) > 1 else ""
            name = missing[0]
            what = f"{name} {list(names[name])} of the model is missing{more}"
            raise ConfigError(f"{what}. Fetch all files of one model.")
        for name, shape in names.items():
            if self.shapes[name] != shape:
                part = f" (of {self.fused[name]})" if name in self.fused else ""
                what = f"{name}{part} is {list(self.shapes[name])}, but config.json requires"
                raise ConfigError(f"{what} {list(shape)}. Fetch all files of one model.")
        for name in self.shapes:
            if name not in names and not self._is_known(name, names):
                what = f"{name} {list(self.shapes[name])} is not a tensor of the model that"
                raise ConfigError(f"{what} config.json describes. It cannot be imported.")

    def _is_known(self, name: str, names: Iterable[str]) -> bool:
        """Return whether a tensor is redundant: angles, or a copy of a tied embedding."""
        if name != HEAD or EMBEDDING not in names:
            return name.endswith(BUFFERS)
        if not np.array_equal(self.read(HEAD), self.read(EMBEDDING)):
            what = f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings=true has no separate"
            raise ConfigError(f"{what} head. Set it to false in config.json to import both.")
        return True


def open_safetensors(directory: Path) -> Tensors:
    """Return a model directory's tensors. ConfigError if incomplete, damaged or not of DTYPES."""
    from safetensors import SafetensorError, safe_open  # imported when needed

    places, shapes = dict[str, Path](), dict[str, tuple[int, ...]]()
    for file in _files(directory):
        try:
            open_file(file).close()  # raises for a pipe, which would block
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 not a mapping
                    part = opened.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        why = f"float32, which holds only {', '.join(DTYPES)} exactly"
                        what = f"{name} in {file} is {part.get_dtype()}"
                        raise ConfigError(f"{what}, but parameters are stored in {why}.")
                    if name in places:
                        two = f"{name} is in {places[name].name} and {file.name} of {directory}"
                        raise ConfigError(f"{two}. Fetch all files of one model.")
                    places[name], shapes[name] = file, tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            why = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{file} cannot be read: {why}. {FETCH}") from error

    def read(name: str) -> np.ndarray:
        with safe_open(places[name], "numpy") as opened:
            return opened.get_tensor(name)

    return Tensors(shapes, read)


def _files(directory: Path) -> list[Path]:
    """Return the index's files; else model.safetensors, its numbered parts, or the only file."""
    # 1. without an index
    index = directory / INDEX
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        parts = [file for file in found if PART.fullmatch(file.name)]
        files = [file for file in found if file.name == "model.safetensors"] or parts or found
        if not files:
            remedy = "Name a model directory, or a .gguf file."
            raise ConfigError(f"{directory} has no *.safetensors. {remedy}")
        if not parts and len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ConfigError(f"{directory} has {names}. Keep one, or name it model.safetensors.")
        return files
    # 2. by the index
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{index} is not an index of safetensors"
        raise ConfigError(f"{what}. Restore it, or remove it.") from error
    missing = [name for name in names if not os.path.exists(directory / name)]
    if missing:
        count = f"{len(missing)} of {len(names)}"
        raise ConfigError(f"{directory / missing[0]} is missing, but {INDEX} names it ({count}).")
    return [directory / name for name in names]
