"""Language data from files of text, JSON lines or Parquet: one part, or several by weight."""

import glob
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.data.dataset import Batch, DataSet, fingerprint, held_out_of, read_from
from ppctl.data.document_files import Fields, Source, kind_of
from ppctl.data.token_cache import Tokens, cached_tokens
from ppctl.data.token_examples import from_tokens, packed
from ppctl.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from ppctl.errors import DataError
from ppctl.user_files import why_not_plain

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
# prefixes of files and directories that are generated when Python is built and differ by machine
NOT_SOURCE = ("config-", "_sysconfigdata")
GLOB = frozenset("*?[")


def stdlib(*, tokenizer: str | None, end_token: str | None, cache_dir: str, **how: Any) -> DataSet:
    """Return the data set of this Python's standard library, without tests and packages.

    tokenizer, end_token: as in `load_tokenizer`. how: packing, seq_len, batch_size, seed and
    eval_fraction. Raises DataError if the library has no sources (zipped, or only compiled) or is
    too small for a batch.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    root = Path(sysconfig.get_paths()["stdlib"])
    files = files_below(root, _is_library)
    if not files:
        why = (
            f"{root} holds no Python sources (Python {version} has its library zipped or compiled)"
        )
        remedy = "Use data=text data.path=<a file or directory of text>."
        raise DataError(f"data=stdlib: {why}. {remedy}")
    by = load_tokenizer(tokenizer, end_token)
    source = Source(files, frozenset(files), Fields(), skips_broken=False)
    tokens = cached_tokens("stdlib", source, by, sys.version, cache_dir)
    return _data_set(tokens, by, name="stdlib", source=f"data=stdlib (Python {version})", **how)


def text(
    *,
    path: str,
    tokenizer: str | None,
    end_token: str | None,
    field: str,
    prompt_field: str | None,
    document: str,
    on_error: str,
    cache_dir: str,
    source: str | None = None,
    **how: Any,
) -> DataSet:
    """Return the data set of a file, of files that match a pattern, or of a directory's files.

    Files are in the order of their paths. Hidden files and directories, links to directories, files
    without text and `cache_dir` are left out. field, prompt_field, document: as in `Fields`;
    source: name of the data in messages, None: the path; other arguments as in `stdlib`. Raises
    DataError for a path without files, an unreadable file, a broken document unless on_error=skip,
    and too few examples for a batch.
    """
    # 1. tokenize the files, or read the cache
    source = source or f"data=text data.path={path}"
    by, fields = load_tokenizer(tokenizer, end_token), Fields(field, prompt_field, document)
    skips_broken = on_error == "skip"
    files = source_of([path], fields, skips_broken, opening=source, cache_dir=cache_dir)
    tokens = cached_tokens("text", files, by, "", cache_dir)
    # 2. make the data set
    if not len(tokens.ids):
        skipped = f"; {tokens.num_skipped} skipped, first: {tokens.first_skipped}"
        raise DataError(
            f"{source}: no UTF-8 text found (hidden and binary files are skipped"
            f"{skipped if tokens.num_skipped else ''}). "
            "Use another path, or data=tokens for files of token ids."
        )
    return _data_set(tokens, by, name="text", source=source, **how)


def mixture(
    *,
    parts: Sequence[Mapping[str, Any]],
    batch_size: int,
    seed: int,
    eval_fraction: float,
    **how: Any,
) -> DataSet:
    """Return a data set that interleaves several parts in proportion to their weights.

    Epochs are counted for each part separately. Each part holds out eval_fraction of its examples,
    and its share of a batch at least.
    how: further arguments of `text`. Raises DataError if a part has too few examples to train on or
    to hold out.
    """
    # 1. the data set of each part
    how |= {"batch_size": 1, "seed": seed, "eval_fraction": eval_fraction}
    sets, weights = list[DataSet](), [float(part["weight"]) for part in parts]
    shares = [weight / sum(weights) for weight in weights]
    for number, part in enumerate(parts):
        of_part = {key: value for key, value in part.items() if key != "weight"}
        how["least_held_out"] = math.ceil(batch_size * shares[number])
        sets.append(text(source=f"data.parts[{number}].path={part['path']}", **of_part, **how))

    # 2. number the examples: training ones of all parts, then held-out ones, then short ones
    sizes = [(each.num_examples, each.num_eval_examples, each.num_short) for each in sets]
    trained, held_out, short = zip(*sizes, strict=True)
    bounds = np.cumsum([0, *trained, *held_out, *short])
    # piece: training, held-out or short examples of a part; before: first index in the part
    before = (np.cumsum(sizes, axis=1) - sizes).T.ravel()

    def read(numbers: np.ndarray) -> Batch:
        piece = np.searchsorted(bounds, numbers, side="right") - 1
        return read_from(sets, piece % len(sets), numbers - bounds[piece] + before[piece])

    # 3. names and sizes
    texts = [f"{share:.1%} {each.source}" for share, each in zip(shares, sets, strict=True)]
    mixed = tuple(zip(trained, held_out, weights, strict=True))
    order = {"name": "mixture", "batch_size": batch_size, "seed": seed}
    digests = [each.fingerprint for each in sets]
    return DataSet(
        **order,
        source=f"data=mixture: {'; '.join(texts)}",
        fingerprint=fingerprint(**order, parts=digests, weights=weights),
        num_examples=sum(trained),
        num_eval_examples=len(held_out_of(sum(trained), mixed)) if eval_fraction > 0 else 0,
        read=read,
        vocab_size=sets[0].vocab_size,
        is_packed=sets[0].is_packed,
        mixture=mixed,
        num_short=sum(short),
    )


def _data_set(tokens: Tokens, by: Tokenizer, *, packing: bool, **how: Any) -> DataSet:
    """Return the data set of tokenized documents: packed, or joined and cut into windows."""
    about = "" if by.name == BYTES else f", {len(tokens.ids):,} tokens of {by.name}"
    if tokens.num_skipped:
        about += f", {tokens.num_skipped} broken skipped (first: {tokens.first_skipped})"
    how |= {"is_learned": tokens.is_learned, "content": tokens.content, "about": about}
    how |= {"vocab_size": by.vocab_size}
    if packing:
        return packed(tokens.ids, tokens.ends, end=by.end, **how)
    return from_tokens(tokens.ids, **how)


def source_of(
    paths: Sequence[str],
    fields: Fields,
    skips_broken: bool,
    *,
    opening: str | None = None,
    cache_dir: str | None = None,
) -> Source:
    """Return the files of several paths (file, pattern or directory), each once.

    cache_dir: directory of the token cache, left out of directories; None: no such directory.
    Raises DataError for a path without files; the message begins with `opening`, else the path.
    """
    files, unnamed = dict[Path, None](), set[Path]()
    for path in paths:
        root = Path(path).expanduser()
        if root.is_dir():
            cache = None if cache_dir is None else Path(cache_dir).expanduser().resolve()
            visible = files_below(root, lambda each: not each.name.startswith("."))
            found = [file for file in map(Path.resolve, visible) if cache not in file.parents]
            unnamed.update(file for file in found if kind_of(file) == "text")
        else:
            is_pattern = bool(GLOB & {*path}) and not root.is_file()
            names = sorted(glob.glob(str(root), recursive=True)) if is_pattern else [root]
            found = [Path(name).resolve() for name in names if Path(name).is_file()]
            if not found:
                what = "no file matches" if is_pattern else why_not_plain(root)
                remedy = "Use the path of a text file or a directory of them."
                raise DataError(f"{opening or path}: {what}. {remedy}")
        files |= dict.fromkeys(found)
    return Source([*files], frozenset(unnamed), fields, skips_broken)


def files_below(root: Path, keep: Callable[[Path], bool]) -> list[Path]:
    """Return the files below `root` in path order; `keep` selects files and directories."""
    files: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        here = Path(directory)
        subdirectories[:] = [name for name in subdirectories if keep(here / name)]
        paths = (here / name for name in names)
        files += [path for path in paths if keep(path) and path.is_file()]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _is_library(path: Path) -> bool:
    if path.name in NOT_LIBRARY or path.name.startswith(NOT_SOURCE):
        return False
    return path.suffix == ".py" or path.is_dir()
