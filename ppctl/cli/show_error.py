"""Errors that end a command: a line on stderr and, with `--json`, the document on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppctl.errors import error_document
from ppctl.launch.local_processes import ERROR_FILE


def show_error(kind: str, message: str, words: Sequence[str], *, in_handler: bool = False) -> None:
    """Print an error, as JSON too if `words`, the command line, request that.

    One of several processes leaves the document to the process that started it. in_handler: of a
    signal, which may have interrupted a write to Python's streams.
    """
    _print(2, f"ppctl: {message}\n", in_handler=in_handler)
    if "--json" not in words:
        return
    document = json.dumps(error_document(kind, message)) + "\n"
    with suppress(OSError):  # the reader has gone, or the disk is full
        if ERROR_FILE in os.environ:
            Path(os.environ[ERROR_FILE]).write_text(document)
        else:
            _print(1, document, in_handler=in_handler)


def _print(number: int, text: str, *, in_handler: bool) -> None:
    if in_handler:
        os.write(number, text.encode(errors="backslashreplace"))
    else:
        print(text, end="", file=sys.stdout if number == 1 else sys.stderr, flush=True)
