"""Files that anybody may have written: opened without waiting for a writer, their texts made fit to be shown.

Nothing that they hold is executed, none makes a reader take more memory than a real one would, and none is written
through a link that leads out of its directory. docs/security.md says what follows from that.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.composer import ComposerError

from ppctl.errors import ConfigError

MOST_BYTES = 2**28  # of a file that is read whole: a timeline of a million tasks has a quarter of that
MOST_SETTINGS_BYTES = 2**20  # of a config.yaml, which has 6 KB: parsing so many takes seconds
MOST_LINE_BYTES = 2**20  # of a record, which has 400
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


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a plain file. OSError for all else, and for one that is larger."""
    with open_file(path) as file:
        content = file.read(most_bytes + 1) if os.fstat(file.fileno()).st_size <= most_bytes else None
    if content is None or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"More than {most_bytes >> 20} MiB")
    return content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long for a record an empty line stands for it.

    >>> import io
    >>> [len(line) for line in lines_of(io.BytesIO(b"a\\n" + b"b" * 3 * MOST_LINE_BYTES + b"\\nc"))]
    [2, 1, 1]
    """
    while line := file.readline(MOST_LINE_BYTES):
        if len(line) < MOST_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MOST_LINE_BYTES)
        yield b"\n"


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, by which a few lines may stand for billions; ppctl writes none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias, which ppctl never writes", mark)
        return super().compose_node(parent, index)


# libyaml reads the settings of a run in 2 ms, PyYAML alone in 20: `ppctl runs` may list a thousand. It recurses in C,
# and would end the process where 64 KiB open a list in a list.
MOST_FAST_BYTES = 2**13
FAST_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else _PlainLoader


def read_settings(path: str | Path) -> Any:
    """Return what a run's config.yaml holds. OSError, or ValueError in a line, for what cannot be read."""
    try:
        content = read_file(path, MOST_SETTINGS_BYTES)
        is_plain = len(content) <= MOST_FAST_BYTES and b"*" not in content  # an alias begins with it
        found = yaml.load(content, FAST_LOADER) if is_plain else yaml.load(content, _PlainLoader)
        cleaned(found)  # raises where libyaml read lists in lists deeper than anything here follows
        return found
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise ValueError(printable(" ".join(str(error).split()))) from error


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


def check_inside(directory: Path, names: Iterable[str], option: str) -> None:
    """Raise ConfigError where what is to be written by these names, or below, would not be written in the directory.

    A link may lead out of it, and a pipe to anybody. The directory itself may be a link.
    """
    top = directory.resolve()
    for name in names:
        for path in _below(directory / name):
            mode = path.lstat().st_mode
            is_out = stat.S_ISLNK(mode) and not path.resolve().is_relative_to(top)
            if is_out or not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = f"is a link to {path.resolve()}, outside of it" if is_out else "is neither file nor directory"
                shown = printable(f"{path.relative_to(directory)} {what}")
                raise ConfigError(
                    f"{option}={directory} cannot be written: {shown}. Move it away, or use another {option}."
                )


def _below(path: Path) -> Iterator[Path]:
    """Yield a path and all that is below it, links not followed; of checkpoints only the directories of their steps."""
    if not os.path.lexists(path):
        return
    yield path
    if not path.is_dir() or path.is_symlink():
        return
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))
        if path.name == "checkpoints":
            folders.clear()
