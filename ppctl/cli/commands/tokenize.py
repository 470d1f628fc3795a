"""`ppctl tokenize`: train a byte-level BPE tokenizer on text files, offline."""

import hashlib
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.errors import ConfigError, as_option, os_errors, written_as
from ppctl.reports.terminal_output import show_result

MOST_VOCAB = 2**20


def parser() -> Parser:
    """Return the parser for the options of `ppctl tokenize`."""
    usage = "FILE... --vocab-size N --out DIR [OPTIONS]"
    notes = "FILE is a text, .jsonl or .parquet file, a pattern, or a directory; .gz and .zst too."
    options = Parser("tokenize", usage, notes=notes, words="files", nargs="+")
    about = "number of tokens, including the 256 bytes and the special tokens"
    options.add_argument("--vocab-size", type=int, metavar="N", required=True, help=about)
    about = "directory for tokenizer.json and tokenizer_config.json, for data.tokenizer=DIR"
    options.add_argument("--out", metavar="DIR", required=True, help=about)
    about = "a special token; may be repeated. The first ends documents"
    options.add_argument("--special", action="append", metavar="TOKEN", help=about)
    about = "the field of text or messages in .jsonl and .parquet (default: text)"
    options.add_argument("--field", default="text", metavar="NAME", help=about)
    about = "action at a broken line, row or file (default: stop)"
    options.add_argument("--on-error", choices=("stop", "skip"), default="stop", help=about)
    return options


def serve(options: Namespace) -> int:
    """Train and write a tokenizer; return 0."""
    from ppctl.data.document_files import Fields
    from ppctl.data.text_dataset import source_of
    from ppctl.data.tokenizer import SPECIAL, train_bpe, write_tokenizer

    # 1. the request
    special = options.special or [*SPECIAL]
    out, vocab_size = Path(options.out), options.vocab_size
    _check(vocab_size, special, out)
    # 2. the tokenizer
    began, skips_broken = time.perf_counter(), options.on_error == "skip"
    with written_as(as_option):
        source = source_of(options.files, Fields(text=options.field), skips_broken=skips_broken)
        trained = train_bpe(source, vocab_size, special)
    with os_errors(f"--out {out} cannot be written", "Use another directory."):
        write_tokenizer(out, trained.tokenizer, special)
    # 3. the output
    size = trained.tokenizer.get_vocab_size()
    sha256 = hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()
    document = {"out": str(out), "vocab_size": size, "documents": trained.num_documents}
    document |= {"bytes": trained.num_bytes, "skipped": len(trained.skipped), "sha256": sha256}
    text = f"{trained.num_documents:,} documents, {trained.num_bytes / 1e6:.1f} MB"
    number, lines = len(trained.skipped), list[str]()
    for first in trained.skipped[:1]:
        lines += [f"skipped  {number} broken (first: {first.place} {first.reason})"]
    lines += [f"trained  {size} tokens on {text}, in {time.perf_counter() - began:.0f} s"]
    if size < vocab_size:
        few = f"no more than {size} tokens to learn"
        lines += [f"note     the text has {few}, fewer than --vocab-size {vocab_size}"]
    lines += [
        f"wrote    {out}/tokenizer.json (sha256 {sha256[:16]}), {out}/tokenizer_config.json",
        f"train    ppctl train data=text data.path={options.files[0]} data.tokenizer={out}",
    ]
    return show_result(document, lines, as_json=options.json)


def _check(vocab_size: int, special: Sequence[str], out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is not a directory. Use another.")
    if len({*special}) < len(special):
        raise ConfigError("--special names a token twice. Name each once.")
    least = 256 + len(special)
    if not least <= vocab_size <= MOST_VOCAB:
        tokens = f"256 bytes and {len(special)} special tokens are {least} already"
        what = f"--vocab-size {vocab_size} is not in {least}..{MOST_VOCAB}: {tokens}"
        raise ConfigError(f"{what}. Use 4096 to 128000, which are usual.")
