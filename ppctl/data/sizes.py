"""A data set as far as its sizes go, which says what is too small without reading what is large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppctl.data import BUILDERS
from ppctl.data.dataset import DataSet
from ppctl.data.token_file import open_tokens
from ppctl.data.windows import from_tokens


def sized(name: str, **given: Any) -> DataSet:
    """Return a data set of BUILDERS, made to be asked for its sizes alone. Raises DataError where it is too small."""
    if name != "tokens":
        return BUILDERS[name](**given)
    path, dtype, vocab_size = given.pop("path"), given.pop("dtype"), given.pop("vocab_size")
    source = f"data=tokens data.path={path}"
    ids = open_tokens(Path(path).expanduser(), dtype, source)  # mapped: their values are not read
    return from_tokens(ids, name="tokens", source=source, content="", vocab_size=vocab_size or 1, **given)
