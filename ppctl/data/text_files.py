"""Language data from files of text, JSON lines, Parquet or ArrayRecord: the Python library's sources, or the user's."""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppctl.data.dataset import DataSet
from ppctl.data.documents import Fields, Source, kind_of
from ppctl.data.packing import packed
from ppctl.data.token_cache import Tokens, cached_tokens
from ppctl.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from ppctl.data.windows import from_tokens
from ppctl.errors import DataError

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
NOT_SOURCE = ("config-", "_sysconfigdata")  # written when Python was built: other on every machine
GLOB = frozenset("*?[")


def stdlib(
    *,
    tokenizer: str,
    end_token: str | None,
    packing: bool,
    cache_dir: str,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
) -> DataSet:
    """Return the data set of this Python's own library, without tests and packages; the same for the same release.

    Raises DataError when the library has no sources on disk (zipped, or compiled only) or is too small for a batch.
    """
    how = {"seq_len": seq_len, "batch_size": batch_size, "seed": seed, "eval_fraction": eval_fraction}
    version = ".".join(map(str, sys.version_info[:3]))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = files_below(root, _is_library)
    if not files:
        raise DataError(
            f"data=stdlib: {root} holds no Python sources (Python {version} has its library zipped or compiled). "
            "Use data=text data.path=<a file or directory of text>."
        )
    by = load_tokenizer(tokenizer, end_token)
    tokens = cached_tokens("stdlib", Source(files, frozenset(files), Fields(), False), by, sys.version, cache_dir)
    return _data_set(tokens, by, packing, name="stdlib", source=f"data=stdlib (Python {version})", **how)


def text(
    *,
    path: str,
    tokenizer: str,
    end_token: str | None,
    field: str,
    prompt_field: str | None,
    document: str,
    records: str,
    on_error: str,
    packing: bool,
    cache_dir: str,
    seq_len: int,
    batch_size: int,
    seed: int,
    eval_fraction: float,
) -> DataSet:
    """Return the data set of one file, of those that match a pattern, or of every one below a directory, by their
    paths.

    Below a directory hidden files and directories, symbolic links to directories, files that hold no text and
    `cache_dir` are passed over. Raises DataError when nothing is left, when a file cannot be read, for what is broken
    in one unless on_error=skip, or when there is too little for a batch.
    """
    fields = Fields(field, prompt_field, document, records)
    how = {"seq_len": seq_len, "batch_size": batch_size, "seed": seed, "eval_fraction": eval_fraction}
    by, source = load_tokenizer(tokenizer, end_token), f"data=text data.path={path}"
    return of_files(path, by, fields, source=source, on_error=on_error, packing=packing, cache_dir=cache_dir, **how)


def of_files(
    path: str, by: Tokenizer, fields: Fields, *, source: str, on_error: str, packing: bool, cache_dir: str, **how: Any
) -> DataSet:
    """Return the data set of files as `text` does. source: opens messages; how: seq_len, batch_size, seed and
    eval_fraction.
    """
    given = Source(*files_of(path, source, cache_dir), fields, on_error == "skip")
    tokens = cached_tokens("text", given, by, "", cache_dir)
    if not len(tokens.ids):
        left_out = f"; {tokens.num_skipped} skipped, first: {tokens.first_skipped}" if tokens.num_skipped else ""
        raise DataError(
            f"{source}: no UTF-8 text there (hidden and binary files are passed over{left_out}). "
            "Use another path, or data=tokens for files of token ids."
        )
    return _data_set(tokens, by, packing, name="text", source=source, **how)


def _data_set(tokens: Tokens, by: Tokenizer, packing: bool, *, source: str, **how: Any) -> DataSet:
    """Return the data set of documents as ids: packed, or in windows over all of them."""
    about = "" if by.name == BYTES else f", {len(tokens.ids):,} tokens of {by.name}"
    if tokens.num_skipped:
        about += f", {tokens.num_skipped} broken skipped (first: {tokens.first_skipped})"
    if packing:
        return packed(
            tokens.ids,
            tokens.ends,
            is_learned=tokens.is_learned,
            content=tokens.content,
            end=by.end,
            vocab_size=by.vocab_size,
            source=source,
            about=about,
            **how,
        )
    return from_tokens(
        tokens.ids,
        is_learned=tokens.is_learned,
        content=tokens.content,
        vocab_size=by.vocab_size,
        source=source,
        about=about,
        **how,
    )


def files_of(path: str, source: str, cache_dir: str | None = None) -> tuple[list[Path], frozenset[Path]]:
    """Return the files of a path (a file, a pattern, or a directory), and those of a directory that may be no text.

    Raises DataError, which `source` opens, where there is none.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        cache = None if cache_dir is None else Path(cache_dir).expanduser().resolve()
        files = [f for f in map(Path.resolve, files_below(root, _is_visible)) if cache not in f.parents]
        return files, frozenset(file for file in files if kind_of(file) == "text")
    is_pattern = bool(GLOB & {*path}) and not root.is_file()
    names = sorted(glob.glob(str(root), recursive=True)) if is_pattern else [root]
    files = [Path(name).resolve() for name in names if Path(name).is_file()]
    if not files:
        what = "no file matches" if is_pattern else "no such file or directory"
        raise DataError(f"{source}: {what}. Use the path of a text file, or of a directory of them.")
    return files, frozenset()


def named_source(paths: Sequence[str], fields: Fields, *, skips_broken: bool) -> Source:
    """Return the files of several paths, each once. Raises DataError for a path without any."""
    found = [files_of(path, path) for path in paths]
    files = dict.fromkeys(file for files, _ in found for file in files)
    return Source([*files], frozenset().union(*(unnamed for _, unnamed in found)), fields, skips_broken)


def files_below(root: Path, keep: Callable[[Path], bool]) -> list[Path]:
    """The regular files below `root` that, with every directory on the way, pass `keep`; by relative path."""
    found: list[Path] = []
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
