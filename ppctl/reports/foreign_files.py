"""Untrusted files: read them without waiting or executing, and make their texts printable.

Reading one takes no more memory than reading a file of ppctl. No file is written through a link
that leads out of its directory. See docs/security.md.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.composer import ComposerError

from ppctl.errors import ConfigError
from ppctl.user_files import read_file

MOST_SETTINGS_BYTES = 2**20  # bytes of a config.yaml; usually 6 KB
MOST_LINE_BYTES = 2**20  # bytes of a record; usually 400
# control characters (they may move the cursor), except line breaks and tabs, and lone surrogates
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# records that need no cleaning: flat, ASCII, without escapes
_PLAIN_RECORD = re.compile(rb"\{[ -Z\]-z|~]*\}\n?")


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, with an empty line in place of one that is too long for a record.

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
    """A YAML loader that rejects aliases: with them, a few lines could expand to billions."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "an alias, which ppctl never writes", mark)
        return super().compose_node(parent, index)


# libyaml reads the settings of a run in 0.7 ms, PyYAML in 7 ms: `ppctl runs` may list thousands.
# But libyaml recurses in C: 64 KiB of nested lists would crash the process.
MOST_FAST_BYTES = 2**13
FAST_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else _PlainLoader
_NEW_GROUP = re.compile(rb"^(?=[a-z])", re.MULTILINE)


def read_settings(path: str | Path) -> Any:
    """Return the content of a run's config.yaml. OSError; ValueError with a reason if not YAML."""
    content = read_file(path, MOST_SETTINGS_BYTES)
    is_plain = len(content) <= MOST_FAST_BYTES and b"*" not in content  # * begins an alias
    if is_plain:
        with suppress(ValueError):
            groups = [_group(each) for each in _NEW_GROUP.split(content) if each]
            if groups and all(isinstance(each, dict) and len(each) == 1 for each in groups):
                return {name: value for each in groups for name, value in each.items()}
    return _from_yaml(content, is_plain)


@lru_cache(maxsize=256)
def _group(content: bytes) -> Any:
    """Return one top-level group of settings, {name: group}; cached, as most runs share groups."""
    return _from_yaml(content, is_plain=True)


def _from_yaml(content: bytes, is_plain: bool) -> Any:
    """Return a YAML value; is_plain: libyaml may read it, because it is short and has no alias."""
    try:
        value = yaml.load(content, FAST_LOADER) if is_plain else yaml.load(content, _PlainLoader)
        cleaned(value)  # raises RecursionError for deeply nested lists, which libyaml accepts
        return value
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        raise ValueError(printable(" ".join(str(error).split()))) from error


def from_json(text: bytes) -> Any:
    """Return the value of a JSON text, with printable strings. ValueError or RecursionError."""
    value = json.loads(text)
    return value if _PLAIN_RECORD.fullmatch(text) else cleaned(value)


def cleaned(value: Any) -> Any:
    """Return a value with all texts in its lists and dicts made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def printable(text: str) -> str:
    r"""Return a text with control characters and lone surrogates as Python's escapes.

    >>> printable("\x1b[31mred\ud800, ä\t")
    '\\x1b[31mred\\ud800, ä\t'
    """
    return UNPRINTABLE.sub(lambda each: each[0].encode("unicode_escape").decode("ascii"), text)


# characters of a path that Orbax reads as a pattern while it saves
_PATTERN = re.compile(r"[\[*?]")
# paths that etils, Orbax's files, reads as addresses of stores
_ADDRESS = re.compile(r"/(gs|s3|az|hf)(?=/|$)|.*/(gs|s3|az|hf):(?=/|$)")


def check_place(directory: Path, option: str, *, saves: bool = True) -> None:
    """Raise ConfigError if checkpoints below a directory could not be read again.

    Other libraries read some names as patterns, separators or addresses. saves: False if the
    checkpoints are only read, which no pattern prevents.
    """
    path = str(directory.absolute())
    if saves and (letter := _PATTERN.search(path)):
        reason = f"Orbax reads {letter[0]} as a pattern"
    elif "\\" in path:
        reason = "tensorstore reads \\ as /"
    elif address := _ADDRESS.match(path):
        reason = f"Orbax reads {address[1] or address[2]} as an address"
    elif path.encode(errors="replace").decode() != path:
        reason = "tensorstore reads only names in UTF-8"
    else:
        return
    where = "" if str(directory) == path else f", in {path}"
    what = printable(f"{option}={directory} cannot hold checkpoints: {reason}{where}")
    raise ConfigError(f"{what}. Use another directory, or a symlink with another name.")


def check_inside(directory: Path, names: Iterable[str], option: str) -> None:
    """Raise ConfigError if writing to these names, or below them, would leave the directory.

    A link may lead out of it, and a pipe to another process. The directory itself may be a link.
    """
    top = directory.resolve()
    for name in names:
        for path in _below(directory / name):
            is_link = path.is_symlink()
            is_out = is_link and not path.resolve().is_relative_to(top)
            if is_out or not (is_link or path.is_file() or path.is_dir()):
                link = f"is a link to {path.resolve()}, outside of it"
                what = link if is_out else "is neither file nor directory"
                shown = printable(f"{path.relative_to(directory)} {what}")
                remedy = f"Move it away, or use another {option}."
                raise ConfigError(f"{option}={directory} cannot be written: {shown}. {remedy}")


def _below(path: Path) -> Iterator[Path]:
    """Yield a path and all paths below it, but only one level below checkpoints; follow no link."""
    if os.path.lexists(path):
        yield path
    for folder, folders, files in os.walk(path) if not path.is_symlink() else ():
        yield from (Path(folder, name) for name in (*folders, *files))
        if path.name == "checkpoints":
            folders.clear()
