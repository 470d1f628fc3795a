"""Documents in the usual files: text, JSON lines or Parquet, plain or compressed.

The file name determines the format:

.jsonl .ndjson   one object per line, with the text in a field
.parquet         rows, with the text in a column
anything else    text

All except Parquet may also end in .gz or .zst.
"""

import codecs
import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ppctl.errors import IN_BRACKETS, DataError, missing_package, os_errors, setting
from ppctl.user_files import UTF_16, check_text, open_file

KINDS = {".jsonl": "json_lines", ".ndjson": "json_lines", ".parquet": "parquet"}  # others: text
COMPRESSED = (".gz", ".zst")
NOT_TEXT = b"\0"  # byte that never occurs in text
UTF_8 = "utf-8-sig"  # with or without a byte order mark
IS_UTF_16 = "is UTF-16: write it as UTF-8"
CHUNK_BYTES = 1 << 20
ROWS_AT_ONCE = 256
PROGRESS_S = 15.0  # seconds between progress lines

DAMAGED = (EOFError, zlib.error)  # errors of damaged compressed files

Content = str | Sequence[Any]  # a text, or the messages of a chat


class Document(NamedTuple):
    """A document, or a piece of a long document."""

    content: Content
    place: str  # shown to users: "FILE line 3"
    prompt: str = ""  # text before the content, not learned
    goes_on: bool = False  # the document continues in the next piece


class Broken(NamedTuple):
    """A line, row or file that is not a valid document."""

    place: str
    reason: str


@dataclass(frozen=True)
class Fields:
    """The fields (JSON lines) or columns (Parquet) of a document, and the unit of plain text."""

    text: str = "text"  # field with a text, or the messages of a chat
    prompt: str | None = None  # field with a prompt, not learned
    document: str = "file"  # unit of plain text: file | paragraph | line

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.prompt) if name is not None]


class Source(NamedTuple):
    """Files, and how to read them."""

    files: Sequence[Path]
    # text files found in a directory, not named by the user: skipped silently if not UTF-8
    unnamed: frozenset[Path]
    fields: Fields
    skips_broken: bool


def kind_of(file: Path) -> str:
    """Return text | json_lines | parquet.

    >>> kind_of(Path("a.jsonl.zst")), kind_of(Path("b.py"))
    ('json_lines', 'text')
    """
    inner = file.with_suffix("") if file.suffix in COMPRESSED else file
    return KINDS.get(inner.suffix, "text")


def documents_of(source: Source, doing: str) -> Iterator[Document | Broken]:
    """Yield the documents of all files, and the skipped broken ones; print progress lines.

    doing: verb of the progress lines, such as "tokenizing". Raises DataError for a broken document
    that may not be skipped.
    """
    began = told = time.monotonic()
    num_read = 0
    for number, file in enumerate(source.files, 1):
        for document in read_documents(file, source.fields):
            num_read += 1
            if (now := time.monotonic()) - told >= PROGRESS_S:
                so_far = f"file {number} of {len(source.files)}, {num_read:,} texts"
                print(f"{doing} ... {so_far}, {now - began:.0f} s", file=sys.stderr)
                told = now
            if isinstance(document, Broken):
                if file in source.unnamed:
                    continue
                check_skipped(document, source)
            yield document


def check_skipped(broken: Broken, source: Source) -> None:
    """Raise DataError for a broken document, unless the source skips broken ones."""
    if not source.skips_broken:
        remedy = f"Use {setting('data.on_error', 'skip')} to leave it out, or correct it."
        raise DataError(f"{broken.place} {broken.reason}. {remedy}")


def read_documents(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    """Yield a file's documents and broken ones, in order. DataError if it cannot be read."""
    readers = {"text": _text, "json_lines": _json_lines, "parquet": _parquet}
    with readable(file):
        try:
            yield from readers[kind_of(file)](file, fields)
        except OSError as error:
            if error.strerror:
                raise
            yield Broken(str(file), str(error))  # pyarrow's error for a damaged file


def readable(file: Path) -> AbstractContextManager[None]:
    """Raise DataError if the body cannot read a file."""
    remedy = "Make it readable, or use another data.path."
    return os_errors(f"{file} cannot be read", remedy, DataError, IN_BRACKETS)


# --- text ---------------------------------------------------------------------------------------


def why_no_text(file: Path) -> str | None:
    """Return the reason why a file is not UTF-8 text; None if it is."""
    decoder, position = codecs.getincrementaldecoder(UTF_8)(), 0
    try:
        with _opened(file) as source:
            while chunk := source.read(CHUNK_BYTES):
                if not position and chunk.startswith(UTF_16):
                    return IS_UTF_16
                if NOT_TEXT in chunk:
                    return f"is not text: byte {position + chunk.index(NOT_TEXT)} is 0"
                decoder.decode(chunk)
                position += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text ({error.reason} at about byte {position + error.start})"
    except DAMAGED as error:
        return f"is cut short or damaged ({error})"
    return None if position else "is empty"


def _text(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    reason = why_no_text(file)
    if reason is not None:
        yield Broken(str(file), reason)
        return
    with _opened(file) as source:
        if fields.document == "file":
            yield from _pieces(file, source)
            return
        lines = io.TextIOWrapper(cast("Any", source), encoding=UTF_8, newline="\n")
        paragraph, first = "", 0
        for number, line in enumerate(chain(lines, [""]), 1):  # "" ends the last paragraph
            if line.strip():
                first = first if paragraph else number
                paragraph += line
            if paragraph and (fields.document == "line" or not line.strip()):
                yield Document(paragraph.rstrip(), f"{file} line {first}")
                paragraph = ""


def _pieces(file: Path, source: IO[bytes]) -> Iterator[Document]:
    """Yield a file's text in pieces of about CHUNK_BYTES, cut at line breaks as in `_cut`."""
    decoder, held = codecs.getincrementaldecoder(UTF_8)(), ""
    while chunk := source.read(CHUNK_BYTES):
        cut = _cut(held)
        if cut:
            yield Document(held[:cut], str(file), goes_on=True)
        held = held[cut:] + decoder.decode(chunk)
    yield Document(held, str(file))


def _cut(text: str) -> int:
    """Return the index of the last line break after a letter, a place to cut; 0 without one.

    Byte-level tokenizers join a line break with punctuation before it or space after it, but never
    with a letter, so such a cut changes no token.

    >>> _cut("one\\ntwo;\\n\\nthree")
    3
    """
    place = text.rfind("\n")
    while place > 0 and not text[place - 1].isalpha():
        place = text.rfind("\n", 0, place)
    return max(place, 0)


# --- records ------------------------------------------------------------------------------------


def _json_lines(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    number, is_empty = 0, True
    try:
        with _opened(file) as source:
            for number, line in enumerate(source, 1):
                if number == 1 and line.startswith(UTF_16):
                    yield Broken(str(file), IS_UTF_16)
                    return
                if line.strip():
                    is_empty = False
                    yield _of_row(line, f"{file} line {number}", fields)
    except DAMAGED as error:
        reason = f"is in a compressed file that is cut short or damaged ({error})"
        yield Broken(f"{file} line {number + 1}", reason)
        return
    if is_empty:
        yield Broken(str(file), "is empty")


def _of_row(row: Any, place: str, fields: Fields) -> Document | Broken:
    """Return the document of a row: a dict of fields, or a line of JSON with them."""
    try:
        row = json.loads(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        return Broken(place, f"is not JSON ({error})")
    if not isinstance(row, dict):
        return Broken(place, f"holds {type(row).__name__}, not an object with fields")
    row = cast("dict[str, Any]", row)
    missing = next((name for name in fields.names if name not in row), None)
    if missing is not None:
        have = ", ".join(map(str, row)) or "none"
        return Broken(place, f"has no field {missing} (it has {have})")
    try:
        text = json_value(row[fields.text])
        prompt = json_value(row[fields.prompt]) if fields.prompt is not None else ""
    except ValueError as error:
        return Broken(place, str(error))
    for name, value, types in ((fields.text, text, str | list), (fields.prompt, prompt, str)):
        if not isinstance(value, types):
            return Broken(place, f"field {name} is {type(value).__name__}, not a text")
    if not text or (isinstance(text, str) and not text.strip()):
        return Broken(place, f"field {fields.text} is empty")
    return Document(text, place, prompt)


def json_value(value: Any) -> Any:
    """Return a value in JSON's types, others as text. ValueError for bytes and unencodable text."""
    if isinstance(value, str):
        check_text(value)
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {json_value(str(key)): json_value(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, bytes):
        raise ValueError("holds bytes, which are not text")
    return value if value is None or isinstance(value, int | float) else str(value)


def _parquet(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise missing_package(f"{file}: Parquet", "pyarrow", "parquet") from error
    row = 0
    try:
        # 1. check the columns
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        missing = next((name for name in fields.names if name not in names), None)
        if missing is not None:
            have = ", ".join(names) or "none"
            yield Broken(str(file), f"has no column {missing} (it has {have})")
            return
        # 2. read the rows
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=fields.names):
            for values in batch.to_pylist():
                row += 1
                yield _of_row(values, f"{file} row {row}", fields)
    except ArrowException as error:
        yield Broken(f"{file} row {row + 1}" if row else str(file), f"is not Parquet ({error})")
        return
    if not row:
        yield Broken(str(file), "is empty")


# --- compressed files ---------------------------------------------------------------------------


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Yield the open file, decompressed. Reading a damaged file raises one of DAMAGED."""
    with open_file(file) as raw:
        source: Any = raw
        if file.suffix == ".gz":
            source = gzip.GzipFile(fileobj=raw)
        elif file.suffix == ".zst":
            try:
                from pyarrow import CompressedInputStream, PythonFile
            except ImportError as error:
                raise missing_package(f"{file}: .zst", "pyarrow", "parquet") from error
            stream: Any = CompressedInputStream(PythonFile(raw, "r"), "zstd")
            source = io.BufferedReader(stream, CHUNK_BYTES)
        try:
            yield source
        except OSError as error:
            if error.errno is None:  # error of gzip or pyarrow
                raise EOFError(str(error)) from error
            raise
