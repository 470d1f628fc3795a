"""A run's tokenizer, and what ends its texts, kept in its directory: the original may move or change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ppctl.config import Config
from ppctl.data.chat import FILE as TEMPLATE
from ppctl.data.tokenizer import BYTES, FILE, SETTINGS
from ppctl.errors import DataError
from ppctl.training.exchange.import_model import GENERATION, KEPT, SOURCE, ends_of

OF_A_FILE = (SETTINGS, TEMPLATE, "special_tokens_map.json")  # that belong to a tokenizer.json beside them
NOT_OF_TOKENIZERS = ("config.json", GENERATION)


def kept_tokenizer(run_dir: Path) -> Path | None:
    """Return the folder of a run's own tokenizer, None where it has none."""
    return next((folder for folder in (run_dir, run_dir / SOURCE) if (folder / FILE).is_file()), None)


def changed_tokenizer(config: Config) -> str | None:
    """Return how data.tokenizer differs from what the run keeps, None where it does not, or nothing is kept."""
    files, folder = _files(config), Path(config.run.dir) / SOURCE
    if not (folder / FILE).is_file():
        return None
    changed = [name for name, file in files.items() if _content(folder / name) != file.read_bytes()]
    if not changed:
        return None
    return f"data.tokenizer={_name(config)} is not what {folder} keeps of the start of this run: {', '.join(changed)}"


def configured_ends(run_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end a text by the files of a run's model: its eos_token_id, of which there may be several.

    generation_config.json is asked first, as in `transformers`. DataError where a file cannot be read.
    """
    for file in (run_dir / SOURCE / GENERATION, run_dir / SOURCE / "config.json"):
        if not file.is_file():
            continue
        try:
            found = ends_of(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{file} cannot be read ({error}). Restore it, or remove it.") from error
        if found is None:
            raise DataError(f"{file}: eos_token_id is no token id and no list of them. Correct it, or remove it.")
        if found:
            return found
    return ()


def keep_tokenizer(config: Config) -> None:
    """Write the files of data.tokenizer into the run directory, if it has any.

    Data that names no tokenizer has that of run.start_from; what ends texts comes from there where the tokenizer does,
    or is the same.
    """
    folder = Path(config.run.dir) / SOURCE
    files = {name: file.read_bytes() for name, file in _files(config).items()}
    start = None if config.run.start_from is None else Path(config.run.start_from)
    of_start = None if start is None else kept_tokenizer(start)
    if start is not None and of_start is not None:
        if not hasattr(config.data, "tokenizer"):
            kept = {name: of_start / name for name in KEPT if name not in NOT_OF_TOKENIZERS}
            files = {name: file.read_bytes() for name, file in kept.items() if file.is_file()}
        if files.get(FILE) == (of_start / FILE).read_bytes():
            files |= _generation_config(start)
    for name, content in files.items():
        if _content(folder / name) != content:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def _generation_config(run_dir: Path) -> dict[str, bytes]:
    """Return the generation config of a run's model by its name, made of config.json where it has none."""
    own = _content(run_dir / SOURCE / GENERATION)
    ends = configured_ends(run_dir)
    if own is not None:
        return {GENERATION: own}
    return {GENERATION: json.dumps({"eos_token_id": [*ends]}).encode()} if ends else {}


def _name(config: Config) -> str:
    return getattr(config.data, "tokenizer", BYTES)


def _files(config: Config) -> Mapping[str, Path]:
    """Return the files of data.tokenizer by their names in a directory of one; none of bytes."""
    name = _name(config)
    if name == BYTES:
        return {}
    path = Path(name).expanduser()
    if not path.is_dir():
        beside = {each: path.parent / each for each in OF_A_FILE}
        return {FILE: path} | {each: file for each, file in beside.items() if file.is_file()}
    return {each: path / each for each in KEPT if each not in NOT_OF_TOKENIZERS and (path / each).is_file()}


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
