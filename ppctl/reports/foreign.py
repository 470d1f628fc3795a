"""Files that anybody may have written: opened without waiting for a writer, their texts made fit to be shown."""

from __future__ import annotations

import errno
import json
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

UNPRINTABLE = ("Cc", "Cs")  # control characters, among them those that move the cursor; halves of surrogate pairs
KEPT = "\n\t"


def open_file(path: str | Path) -> BinaryIO:
    """Return a plain file, open for reading. OSError for all else, such as a pipe, which might never give a byte."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        is_directory = stat.S_ISDIR(mode)
        raise OSError(
            errno.EISDIR if is_directory else errno.EINVAL, "Is a directory" if is_directory else "No plain file"
        )
    return os.fdopen(number, "rb")


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a plain file. OSError for all else."""
    with open_file(path) as file:
        return file.read()


def from_json(text: bytes) -> Any:
    """Return what JSON says, its texts printable. ValueError or RecursionError where it says nothing."""
    return cleaned(json.loads(text))


def cleaned(value: Any) -> Any:
    """Return lists and dicts with every text in them printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def printable(text: str) -> str:
    r"""Return a text with what no terminal or page should get written as Python writes it.

    >>> printable("\x1b[31mred\ud800, ä\t")
    '\\x1b[31mred\\ud800, ä\t'
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter in KEPT or unicodedata.category(letter) not in UNPRINTABLE:
        return letter
    return letter.encode("unicode_escape").decode("ascii")
