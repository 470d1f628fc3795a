"""Byte-level text, vocabulary 256: the Python standard library's sources, or the user's own files."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from ppctl.data.byte_cache import cached_bytes
from ppctl.data.dataset import DataSet
from ppctl.data.windows import from_tokens
from ppctl.errors import DataError

VOCAB_SIZE = 256
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
NOT_SOURCE = ("config-", "_sysconfigdata")  # written when Python was built: other on every machine


def stdlib(*, seq_len: int, batch_size: int, seed: int, eval_fraction: float, cache_dir: str) -> DataSet:
    """Return the data set of this Python's own library, without tests and packages; the same for the same release.

    Raises DataError when the library has no sources on disk (zipped, or compiled only) or is too small for a batch.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = files_below(root, _is_library)
    if not files:
        raise DataError(
            f"data=stdlib: {root} holds no Python sources (Python {version} has its library zipped or compiled). "
            "Use data=text data.path=<a file or directory of text>."
        )
    text, content = cached_bytes("stdlib", files, sys.version, cache_dir)
    return from_tokens(
        text,
        name="stdlib",
        source=f"data=stdlib (Python {version})",
        content=content,
        vocab_size=VOCAB_SIZE,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        eval_fraction=eval_fraction,
    )


def text(*, path: str, seq_len: int, batch_size: int, seed: int, eval_fraction: float, cache_dir: str) -> DataSet:
    """Return the data set of one file, or of every UTF-8 file below a directory in the order of their paths.

    Hidden files and directories, symbolic links to directories, binary files and `cache_dir` are passed over.
    Raises DataError when nothing is left, when a file cannot be read, or when there is too little for a batch.
    """
    root = Path(path).expanduser()
    source = f"data=text data.path={path}"
    if not root.exists():
        raise DataError(f"{source}: no such file or directory. Use the path of a text file, or of a directory of them.")
    cache = Path(cache_dir).expanduser().resolve()
    files = [root] if root.is_file() else files_below(root, _is_visible)
    bytes_, content = cached_bytes(
        "text", [f for f in map(Path.resolve, files) if cache not in f.parents], "", cache_dir
    )
    if not len(bytes_):
        raise DataError(
            f"{source}: no UTF-8 text there (hidden and binary files are passed over). "
            "Use another path, or data=tokens for files of token ids."
        )
    return from_tokens(
        bytes_,
        name="text",
        source=source,
        content=content,
        vocab_size=VOCAB_SIZE,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        eval_fraction=eval_fraction,
    )


def files_below(root: Path, keep: Callable[[Path], bool]) -> list[Path]:
    """The regular files below `root` that, with every directory on the way, pass `keep`; by relative path."""
    found = []
    for directory, subdirectories, names in os.walk(root):
        here = Path(directory)
        subdirectories[:] = [name for name in subdirectories if keep(here / name)]
        found += [here / name for name in names if keep(here / name) and (here / name).is_file()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".")


def _is_library(path: Path) -> bool:
    if path.name in NOT_LIBRARY or path.name.startswith(NOT_SOURCE):
        return False
    return path.suffix == ".py" or path.is_dir()
