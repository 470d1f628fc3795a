"""A run's copy of its tokenizer and its model's configs: the original files may change or move."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.config import Run, Stdlib, Tokens
from ppctl.config.groups.data_settings import AnyData
from ppctl.data.chat_templates import FILE as TEMPLATE
from ppctl.data.tokenizer import BYTES, FILE, SETTINGS, json_object
from ppctl.errors import ConfigError, DataError
from ppctl.training.run.saved_run import load_run

SOURCE = "source"  # folder of a run directory; an export copies its files
POSITIONS = "max_position_embeddings"  # key of config.json: largest number of tokens
MODEL_CONFIG, GENERATION = "config.json", "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of both configs
OF_A_FILE = (SETTINGS, TEMPLATE, "special_tokens_map.json")  # files next to a tokenizer.json
OLDER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
TOKENIZER_FILES = (FILE, *OF_A_FILE, *OLDER_FILES)


def kept_tokenizer(run_dir: Path) -> Path | None:
    """Return the folder of the tokenizer in a run directory, or None."""
    folders = run_dir, run_dir / SOURCE
    return next((folder for folder in folders if (folder / FILE).is_file()), None)


def tokenizer_name(run_dir: Path, data: AnyData) -> str | None:
    """Return the folder of a run's copy, else the tokenizer of its data; None if unknown."""
    kept, name = kept_tokenizer(run_dir), getattr(data, "tokenizer", None)
    if kept is not None:
        return str(kept)
    return BYTES if name is None and isinstance(data, Stdlib) else name


def with_start_tokenizer(start_from: str, data: AnyData) -> AnyData:
    """Return data with the tokenizer of run.start_from, unless data.tokenizer is set.

    ConfigError if data are text and the tokenizer of run.start_from is unknown.
    """
    start = Path(start_from)
    is_open = isinstance(data, Stdlib | Tokens) and data.tokenizer is None
    # without config.yaml it is not a run: `state_from` raises later if it has no checkpoint
    if not is_open or not (start / "config.yaml").is_file():
        return data
    name = tokenizer_name(start, load_run(start).config.data)
    if name is None and isinstance(data, Stdlib):
        raise ConfigError(
            f"run.start_from={start_from} neither keeps nor names a tokenizer, so the ids of its "
            f"tokens are unknown. Use data.tokenizer=DIR of the tokenizer, or data.tokenizer=bytes."
        )
    return replace(data, tokenizer=name)


def changed_tokenizer(run_dir: Path, data: AnyData) -> str | None:
    """Describe how data.tokenizer differs from a run's copy; None if equal or either is unknown."""
    folder, files = run_dir / SOURCE, _files(data)
    if not (folder / FILE).is_file() or not (files or isinstance(data, Stdlib)):
        return None
    content = lambda file: file.read_bytes() if file.is_file() else None  # noqa: E731
    changed = [name for name in files if content(folder / name) != content(files[name])]
    if files and not changed:
        return None
    request = f"data.tokenizer={getattr(data, 'tokenizer', None) or BYTES}"
    return f"{request} differs from the copy in {folder}: {', '.join(changed or [FILE])}"


def configured_ends(run_dir: Path) -> tuple[int, ...]:
    """Return the token ids that end a text: eos_token_id in the files of a run's model.

    generation_config.json precedes config.json, as in `transformers`. DataError if a file cannot be
    read.
    """
    for file in (run_dir / SOURCE / GENERATION, run_dir / SOURCE / MODEL_CONFIG):
        ends = ends_of(json_object(file))
        if ends is None:
            what = f"{file}: eos_token_id is neither a token id nor a list of token ids"
            raise DataError(f"{what}. Correct it, or remove it.")
        if ends:
            return ends
    return ()


def ends_of(model_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the eos_token_id of a config.json as token ids; None if the value is invalid.

    >>> ends_of({"eos_token_id": [1, 106]}), ends_of({"eos_token_id": 2}), ends_of({})
    ((1, 106), (2,), ())
    """
    given = model_config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    return tuple(ids) if all(type(each) is int for each in ids) else None


def keep_source(run: Run, data: AnyData) -> None:
    """Copy tokenizer and configs into the run directory: an export and `generate` read them.

    The tokenizer is that of data.tokenizer, else of run.start_from; the configs are those of the
    imported model in run.start_from, without token ids if the tokenizer is another.
    """
    files = _contents(_files(data))
    if run.start_from is not None:
        start, is_text = Path(run.start_from), isinstance(data, Stdlib)
        folder = kept_tokenizer(start)
        of_start = {} if folder is None else _contents(_tokenizer_files(folder))
        files = files or ({} if is_text else of_start)
        has_same_ids = files.get(FILE) == of_start.get(FILE) and (FILE in files or not is_text)
        files |= _configs(start / SOURCE, has_same_ids=has_same_ids)
    for name, content in files.items():
        file = Path(run.dir) / SOURCE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _configs(source: Path, *, has_same_ids: bool) -> dict[str, bytes]:
    """Return the configs of an imported model by name. DataError if one is damaged."""
    if has_same_ids:
        files = {name: source / name for name in (MODEL_CONFIG, GENERATION)}
        return _contents({name: file for name, file in files.items() if file.is_file()})
    config = json_object(source / MODEL_CONFIG)
    kept = {key: value for key, value in config.items() if key not in TOKEN_IDS}
    return {MODEL_CONFIG: json.dumps(kept, indent=2).encode()} if kept else {}


def _contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


def _files(data: AnyData) -> Mapping[str, Path]:
    """Return the files of data.tokenizer by name; {} for bytes or no tokenizer."""
    name = getattr(data, "tokenizer", None)
    if name in (None, BYTES):
        return {}
    path = Path(name).expanduser()
    if path.is_dir():
        return _tokenizer_files(path)
    near = {each: path.parent / each for each in OF_A_FILE}
    return {FILE: path} | {each: file for each, file in near.items() if file.is_file()}


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
