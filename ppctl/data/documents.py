"""Documents in files as people have them: text, JSON lines, Parquet, ArrayRecord; plain or compressed.

The name of a file says what it is:

.jsonl .ndjson                an object a line, of which fields are read
.parquet                      rows, of which columns are read
.arrayrecord .array_record    a text a record, or an array of token ids
anything else                 text

Any but the last two may end in .gz or .zst too.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from ppctl.data.progress import progress
from ppctl.errors import DataError

JSON_LINES, PARQUET, ARRAY_RECORD = (".jsonl", ".ndjson"), (".parquet",), (".arrayrecord", ".array_record")
COMPRESSED = (".gz", ".zst")
NOT_TEXT = b"\0"  # a byte that no text holds
CHUNK_BYTES = 1 << 20
RECORDS_AT_ONCE = 256

Content = str | Sequence[Any] | np.ndarray  # a text, the messages of a chat, or token ids


class Document(NamedTuple):
    """A document, or a piece of one that is long."""

    content: Content
    place: str  # for people: "FILE line 3"
    prompt: str = ""  # comes before the content, and is not learned
    goes_on: bool = False  # the next piece is of the same document
    position: int = 0  # bytes of the file that are read by now


class Broken(NamedTuple):
    """A line, row or file that should have been a document."""

    place: str
    reason: str


@dataclass(frozen=True)
class Fields:
    """What of a file is a document.

    text: the field of an object, or the column of a row, that holds the text or messages; prompt: the one that holds
    what comes before. document: file | paragraph | line, of text. records: text, or the type of ids in a record.
    """

    text: str = "text"
    prompt: str | None = None
    document: str = "file"
    records: str = "text"


class Source(NamedTuple):
    """Files, and how they are read."""

    files: Sequence[Path]
    unnamed: frozenset[Path]  # those of `files` that need not hold text, because nobody named them
    fields: Fields
    skips_broken: bool


def kind_of(file: Path) -> str:
    """Return text | json_lines | parquet | array_record.

    >>> kind_of(Path("a.jsonl.zst")), kind_of(Path("b.py"))
    ('json_lines', 'text')
    """
    suffix = file.with_suffix("").suffix if file.suffix in COMPRESSED else file.suffix
    kinds = {JSON_LINES: "json_lines", PARQUET: "parquet", ARRAY_RECORD: "array_record"}
    return next((kind for suffixes, kind in kinds.items() if suffix in suffixes), "text")


def documents_of(source: Source, doing: str) -> Iterator[Document | Broken]:
    """Yield the documents of all files, and what is broken where it is skipped, while a bar shows how far that is.

    Raises DataError for what is broken where it is not skipped. doing: for the bar.
    """
    with progress(doing, sum(file.stat().st_size for file in source.files)) as advance:
        done = 0
        for file in source.files:
            for document in read_documents(file, source.fields):
                if isinstance(document, Document):
                    advance(done + document.position)
                elif file in source.unnamed:
                    continue
                else:
                    check_skipped(document, source)
                yield document
            done += file.stat().st_size
            advance(done)


def check_skipped(broken: Broken, source: Source) -> None:
    """Raise DataError for what is broken, unless such is skipped."""
    if not source.skips_broken:
        raise DataError(f"{broken.place} {broken.reason}. Use data.on_error=skip to leave such out, or correct it.")


def read_documents(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    """Yield the documents of a file, and what is broken in it, in order. DataError where it cannot be read at all."""
    readers = {"text": _text, "json_lines": _json_lines, "parquet": _parquet, "array_record": _array_record}
    try:
        yield from readers[kind_of(file)](file, fields)
    except OSError as error:
        if not error.strerror:  # what compressed files that are none raise
            yield Broken(str(file), str(error))
            return
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file} cannot be read ({error.strerror}). Make it readable, or use another data.path.")


# --- text ------------------------------------------------------------------------------------------------------------


def why_no_text(file: Path) -> str | None:
    """Return why a file holds no UTF-8 text: it is empty, or is something else. None where it does."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with _opened(file) as (source, _):
            while chunk := source.read(CHUNK_BYTES):
                if NOT_TEXT in chunk:
                    return f"is no text: byte {position + chunk.index(NOT_TEXT)} is 0"
                decoder.decode(chunk)
                position += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return f"is no UTF-8 text ({error.reason} at about byte {position + error.start})"
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        return f"is cut short or damaged ({error})"
    return None if position else "is empty"


def _text(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    reason = why_no_text(file)
    if reason is not None:
        yield Broken(str(file), reason)
        return
    with _opened(file) as (source, raw):
        if fields.document == "file":
            yield from _pieces(file, source, raw)
            return
        lines = io.TextIOWrapper(cast("Any", source), encoding="utf-8", newline="\n")
        paragraph, first = "", 0
        for number, line in enumerate(lines, 1):
            if line.strip():
                first = first if paragraph else number
                paragraph += line
            if paragraph and (fields.document == "line" or not line.strip()):
                yield Document(paragraph.rstrip(), f"{file} line {first}", position=raw.tell())
                paragraph = ""
        if paragraph:
            yield Document(paragraph.rstrip(), f"{file} line {first}", position=raw.tell())


def _pieces(file: Path, source: IO[bytes], raw: IO[bytes]) -> Iterator[Document]:
    """Yield the text of a file in pieces that are cut at ends of lines, each about CHUNK_BYTES."""
    decoder, held = codecs.getincrementaldecoder("utf-8")(), ""
    while chunk := source.read(CHUNK_BYTES):
        cut = _cut(held)
        if cut:
            yield Document(held[:cut], str(file), goes_on=True, position=raw.tell())
        held = held[cut:] + decoder.decode(chunk)
    yield Document(held, str(file), position=raw.tell())


def _cut(text: str) -> int:
    """Return the last place where a text may be cut, 0 for none: a letter's, and a line's, end.

    Byte-level tokenizers join a line's end with punctuation before it or space after it, but with no letter before it.

    >>> _cut("one\\ntwo;\\n\\nthree")
    3
    """
    place = text.rfind("\n")
    while place > 0 and not text[place - 1].isalpha():
        place = text.rfind("\n", 0, place)
    return max(place, 0)


# --- records ---------------------------------------------------------------------------------------------------------


def _json_lines(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    number, is_empty = 0, True
    try:
        with _opened(file) as (source, raw):
            for number, line in enumerate(source, 1):
                if line.strip():
                    is_empty = False
                    yield _of_line(line, f"{file} line {number}", fields, raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Broken(f"{file} line {number + 1}", f"is in a compressed file that is cut short or damaged ({error})")
        return
    if is_empty:
        yield Broken(str(file), "is empty")


def _of_line(line: bytes, place: str, fields: Fields, position: int) -> Document | Broken:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # which a UnicodeDecodeError is too
        return Broken(place, f"is no JSON ({error})")
    if not isinstance(found, dict):
        return Broken(place, f"holds {type(found).__name__}, not an object with fields")
    return _of_row(cast("dict[str, Any]", found), place, fields, position)


def _of_row(row: Mapping[str, Any], place: str, fields: Fields, position: int) -> Document | Broken:
    text, prompt = row.get(fields.text), "" if fields.prompt is None else row.get(fields.prompt)
    missing = next((name for name in (fields.text, fields.prompt) if name is not None and name not in row), None)
    if missing is not None:
        return Broken(place, f"has no field {missing} (it has {', '.join(map(str, row)) or 'none'})")
    if not isinstance(text, str | list) or not isinstance(prompt, str):
        name, value = (fields.prompt, prompt) if isinstance(text, str | list) else (fields.text, text)
        return Broken(place, f"field {name} is {type(value).__name__}, not a text")
    if not text or (isinstance(text, str) and not text.strip()):
        return Broken(place, f"field {fields.text} is empty")
    return Document(text, place, prompt, position=position)


def _parquet(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"{file}: Parquet needs pyarrow, which is not installed. Install it: pip install 'ppctl[parquet]'."
        ) from error
    size, columns = file.stat().st_size, [name for name in (fields.text, fields.prompt) if name is not None]
    row = 0
    try:
        table = parquet.ParquetFile(file)
        there = table.schema_arrow.names
        if not {*columns} <= {*there}:
            missing = next(name for name in columns if name not in there)
            yield Broken(str(file), f"has no column {missing} (it has {', '.join(there) or 'none'})")
            return
        total = table.metadata.num_rows
        for batch in table.iter_batches(RECORDS_AT_ONCE, columns=columns):
            for values in batch.to_pylist():
                row += 1
                yield _of_row(values, f"{file} row {row}", fields, size * row // total)
    except ArrowException as error:
        yield Broken(f"{file} row {row + 1}" if row else str(file), f"is no Parquet ({error})")
        return
    if not row:
        yield Broken(str(file), "is empty")


def _array_record(file: Path, fields: Fields) -> Iterator[Document | Broken]:
    from array_record.python.array_record_module import ArrayRecordReader

    size = file.stat().st_size
    number = 0
    try:
        reader = ArrayRecordReader(str(file))
        total = reader.num_records()
        for start in range(0, total, RECORDS_AT_ONCE):
            for record in reader.read([*range(start, min(start + RECORDS_AT_ONCE, total))]):
                number += 1
                yield _of_record(record, f"{file} record {number}", fields, size * number // total)
        reader.close()
    except (RuntimeError, ValueError) as error:  # by which its C++ says what is wrong
        yield Broken(f"{file} record {number + 1}" if number else str(file), f"is no ArrayRecord ({error})")
        return
    if not number:
        yield Broken(str(file), "is empty")


def _of_record(record: bytes, place: str, fields: Fields, position: int) -> Document | Broken:
    if not record:
        return Broken(place, "is empty")
    if fields.records == "text":
        try:
            return Document(record.decode(), place, position=position)
        except UnicodeDecodeError as error:
            return Broken(place, f"is no UTF-8 text ({error.reason} at byte {error.start})")
    dtype = np.dtype(fields.records)
    if len(record) % dtype.itemsize:
        return Broken(place, f"has {len(record)} bytes, not a multiple of the {dtype.itemsize} of {dtype}")
    return Document(np.frombuffer(record, dtype), place, position=position)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield a file's bytes as they are without compression, and the file itself, which knows how far it is read."""
    with file.open("rb") as raw:
        if file.suffix == ".gz":
            with gzip.open(raw) as source:
                yield cast("IO[bytes]", source), raw
        elif file.suffix == ".zst":
            yield cast("IO[bytes]", io.BufferedReader(_Zstandard(file, raw), CHUNK_BYTES)), raw
        else:
            yield raw, raw


class _Zstandard(io.RawIOBase):
    """The content of a file of Zstandard frames; unlike the library's own reader it tells a file that is cut short."""

    def __init__(self, file: Path, raw: IO[bytes]):
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{file}: .zst needs zstandard, which is not installed. Install it: pip install 'ppctl[text]'."
            ) from error
        self._library, self._raw, self._held, self._rest = zstandard, raw, b"", b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            chunk = self._rest or self._raw.read(CHUNK_BYTES // 8)
            self._rest = b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._held = self._frame.decompress(chunk)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._held))
        buffer[:size], self._held = self._held[:size], self._held[size:]
        return size
