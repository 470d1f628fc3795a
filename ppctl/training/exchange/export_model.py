"""A run's parameters as a model directory that `transformers` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ppctl.config import Transformer
from ppctl.config.stored import model_and_data
from ppctl.errors import ConfigError
from ppctl.training.exchange.families import model_config, model_settings
from ppctl.training.exchange.import_model import GENERATION, KEPT, SOURCE
from ppctl.training.exchange.names import Named, named_parameters
from ppctl.training.exchange.tensors import INDEX
from ppctl.training.saved_run import SavedRun, load_run

Tree = Any
CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9  # at most of a file, but for a tensor that is larger
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Exported(NamedTuple):
    files: tuple[str, ...]
    dtype: str
    step: int


def export_model(run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> Exported:
    """Write the parameters of a checkpoint as safetensors with config.json, and the files kept by an import.

    Adapters are merged in. step: None: the newest. dtype: of the tensors; None: that of the model that was imported,
    else float32.

    Raises:
        ConfigError: The run's model is none that `transformers` has, or `out` is there already.
        CheckpointError: There is no such checkpoint.
    """
    run, model = opened(run_dir, out)
    source = _source(run_dir, run.settings)
    number = run.steps[-1] if step is None and run.steps else step
    params = run.params(number)
    vocab_size = params["ends"]["embedding"].shape[0]
    kept = None if source is None else json.loads((source / CONFIG).read_text())
    config = model_config(model, vocab_size)
    if kept is not None and model_settings(kept) == model_settings(config):
        config = kept
    config.setdefault("max_position_embeddings", model.seq_len)
    chosen = dtype or _dtype_of(config)
    check_dtype(chosen)
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | {"dtype": chosen}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        files = list(_write_tensors(out, params, named_parameters(params), DTYPES[chosen]))
        for name, file in _kept_files(source, run_dir / SOURCE).items():
            shutil.copyfile(file, out / name)
            files.append(name)
        if GENERATION not in files:
            of_tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
            text = json.dumps({"_from_model_config": True, **of_tokens}, indent=2)
            (out / GENERATION).write_text(text + "\n")
            files.append(GENERATION)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Name another directory with --out.") from error
    return Exported((*files, CONFIG), chosen, number or 0)


def opened(run_dir: Path, out: Path) -> tuple[SavedRun, Transformer]:
    """Return a run that is to be written as `out`, and its model. ConfigError where that cannot be."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and nothing is overwritten. Name another directory with --out.")
    run = load_run(run_dir)
    model = model_and_data(run.settings).model
    if not isinstance(model, Transformer):
        raise ConfigError(f"model={model.name} of {run_dir} is no language model that transformers has.")
    return run, model


def check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name} is not one of {', '.join(DTYPES)}.")


def _source(run_dir: Path, settings: Mapping[str, Any]) -> Path | None:
    """Return the folder of files that an import kept: of this run, or of the one that it started from."""
    start = settings["run"].get("start_from")
    for folder in (run_dir, *(() if start is None else (Path(start),))):
        if (folder / SOURCE / CONFIG).is_file():
            return folder / SOURCE
    return None


def _kept_files(source: Path | None, own: Path) -> dict[str, Path]:
    """Return the files that an export gives back, but config.json: the tokenizer that the run itself has, if any."""
    found = {} if source is None else {name: source / name for name in KEPT[1:] if (source / name).is_file()}
    if own == source or not (own / "tokenizer.json").is_file():
        return found
    kept = {name: file for name, file in found.items() if name == GENERATION}
    return kept | {name: own / name for name in KEPT[1:] if (own / name).is_file()}


def _dtype_of(config: Mapping[str, Any]) -> str:
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _write_tensors(out: Path, params: Tree, names: list[Named], dtype: Any) -> Iterator[str]:
    """Write shards of tensors, and their index where there are several; yield the names of the files."""
    from safetensors.numpy import save_file

    shards, sizes = [[]], [0]
    for each in names:
        size = int(np.prod(each.shape)) * np.dtype(dtype).itemsize
        if shards[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(each)
        sizes[-1] += size
    places = dict[str, str]()
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file({each.name: tensor_of(params, each, dtype) for each in shard}, out / name, {"format": "pt"})
        shutil.copymode(out / CONFIG, out / name)  # as the umask has it: safetensors lets the owner alone read
        places |= {each.name: name for each in shard}
        yield name
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2)
        (out / INDEX).write_text(text + "\n")
        yield INDEX


def tensor_of(params: Tree, each: Named, dtype: Any) -> np.ndarray:
    leaf = params
    for key in each.path:
        leaf = leaf[key]
    found = np.asarray(leaf if each.layer is None else leaf[each.layer]).astype(dtype)
    return np.ascontiguousarray(found.T if each.is_transposed else found)
