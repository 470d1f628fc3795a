"""The tokenizer that a run was trained with, kept in its directory for when the original has moved or changed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from ppctl.config import Config
from ppctl.data.chat import FILE as TEMPLATE
from ppctl.data.tokenizer import BYTES, FILE, SETTINGS
from ppctl.training.exchange.import_model import KEPT, SOURCE

OF_A_FILE = (SETTINGS, TEMPLATE, "special_tokens_map.json")  # that belong to a tokenizer.json beside them
NOT_OF_TOKENIZERS = ("config.json", "generation_config.json")


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


def keep_tokenizer(config: Config) -> None:
    """Write the files of data.tokenizer into the run directory, if it has any."""
    folder = Path(config.run.dir) / SOURCE
    for name, file in _files(config).items():
        if _content(folder / name) != file.read_bytes():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)


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
