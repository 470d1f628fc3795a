"""Reading of users' files: only plain files, which never block, and only UTF-8."""

import codecs
import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ppctl.errors import ConfigError

MOST_BYTES = 2**28  # bytes of the largest file read whole: 4 timelines of a million tasks
PIECE = 2**20  # bytes per read
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def path_of(name: str, value: Any) -> Path:
    """Return a path given to the Python API. ConfigError for another type; name: the argument."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r} is not a path. Use a text or a pathlib.Path.")
    return Path(os.fsdecode(value))


def open_file(path: str | Path) -> BinaryIO:
    """Open a plain file for reading. OSError for other kinds: a pipe could block forever."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(number).st_mode
    if (kind := _kind(mode)) is not None:
        os.close(number)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, kind)
    return os.fdopen(number, "rb")


def why_not_plain(path: str | Path) -> str | None:
    """Return the reason why a path is not a plain file; None if it is."""
    try:
        return _kind(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "Is a directory"
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device" if is_device else "a socket"
    return f"Not a plain file but {kind}"


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a plain file. OSError for other kinds of file, and above most_bytes."""
    with open_file(path) as file:
        is_small = os.fstat(file.fileno()).st_size <= most_bytes
        content = bytearray()  # in pieces: a read of n bytes allocates n, however short the file
        while is_small and len(content) <= most_bytes and (piece := file.read(PIECE)):
            content += piece
    if not is_small or len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"More than {most_bytes >> 20} MiB")
    return bytes(content)


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a plain UTF-8 file, without its byte order mark if it has one.

    OSError for other kinds of file, other encodings, and above most_bytes.
    """
    content = read_file(path, most_bytes)
    if content.startswith(UTF_16):
        raise OSError(errno.EILSEQ, "It is UTF-16: write it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"It is not UTF-8 text: {error.reason}") from error


def lines_of_text(text: str) -> list[str]:
    r"""Return the lines of a text, split only at \n and \r\n.

    >>> lines_of_text("a\u2028b\r\nc\n")
    ['a\u2028b', 'c']
    """
    lines = text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def check_text(text: str) -> None:
    """Raise ValueError for a text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = "holds half of a surrogate pair, which UTF-8 cannot encode"
        raise ValueError(what) from error
