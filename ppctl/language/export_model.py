"""A run's parameters as a directory that `transformers` loads, or its adapters for PEFT."""

import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ppctl.config import Transformer
from ppctl.config.changed_settings import model_and_data
from ppctl.errors import ConfigError
from ppctl.language.import_model import KEPT
from ppctl.language.model_files import INDEX, check_new, writing_to
from ppctl.language.tensor_names import Named, adapter_parameters, named_parameters, target_modules
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.training.run.kept_tokenizer import GENERATION, MODEL_CONFIG, SOURCE
from ppctl.training.run.saved_run import SavedRun, load_run

Tree = Any
SHARD_BYTES = 5 * 10**9  # of a file, without its last tensor, at most
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
BFLOAT16 = ml_dtypes.bfloat16
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": BFLOAT16, "float16": np.float16}


class Exported(NamedTuple):
    files: tuple[str, ...]
    dtype: str
    step: int


def export_model(
    run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None
) -> Exported:
    """Write a checkpoint as safetensors with config.json, and the files kept by an import.

    Adapters are merged in. step: None: the newest. dtype: of the tensors; None: that of the
    imported model, else float32.

    Raises:
        ConfigError: `transformers` lacks the run's model, or `out` exists.
        CheckpointError: There is no such checkpoint.
    """
    check_new(out)
    run, model = _opened(run_dir)
    # 1. parameters and config.json: the imported one where it describes the same model
    number = run.steps[-1] if step is None and run.steps else step
    params, source = run.params(number), _source(run_dir, run.settings)
    config = model_config(model, params["embed_head"]["embedding"].shape[0])
    kept = None if source is None else json.loads((source / MODEL_CONFIG).read_text())
    if kept is not None and model_settings(kept) == model_settings(config):
        config = kept
    config.setdefault("max_position_embeddings", model.seq_len)
    dtype = str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
    _check_dtype(dtype)
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype}
    # 2. the files
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        files = list(_write_tensors(out, params, named_parameters(params), DTYPES[dtype]))
        for name, file in _kept_files(source, run_dir / SOURCE).items():
            shutil.copyfile(file, out / name)
            files.append(name)
        if GENERATION not in files:
            tokens = {key: config[key] for key in TOKEN_IDS if key in config}
            text = json.dumps({"_from_model_config": True, **tokens}, indent=2)
            (out / GENERATION).write_text(text + "\n")
            files.append(GENERATION)
    return Exported((*files, MODEL_CONFIG), dtype, number or 0)


def export_adapter(
    run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None
) -> Exported:
    """Write the adapters of a checkpoint of optim.train=lora by PEFT's names.

    step: None: the newest. dtype: of the tensors; None: float32.

    Raises:
        ConfigError: The run has no adapters, `transformers` lacks its model, or `out` exists.
        CheckpointError: There is no such checkpoint.
    """
    from safetensors.numpy import save_file

    # 1. the adapters
    check_new(out)
    run, model = _opened(run_dir)
    dtype = dtype or "float32"
    _check_dtype(dtype)
    adapters = run.adapters(step)
    if adapters is None:
        raise ConfigError(
            f"--adapter: {run_dir} was not trained with optim.train=lora and has no adapters."
        )
    lora, params = adapters
    model_config(model, params["embed_head"]["embedding"].shape[0])  # raises for other models
    # 2. the files
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    config |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": target_modules(params)}
    config |= {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False}
    config |= {"inference_mode": True}
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        names = adapter_parameters(params)
        tensors = {each.name: _tensor_of(params, each, DTYPES[dtype]) for each in names}
        save_file(tensors, out / ADAPTER_TENSORS, {"format": "pt"})
        (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return Exported(
        (ADAPTER_TENSORS, ADAPTER_CONFIG), dtype, run.steps[-1] if step is None else step
    )


def _opened(run_dir: Path) -> tuple[SavedRun, Transformer]:
    """Return a run and its model. ConfigError unless that is a transformer."""
    run = load_run(run_dir)
    model = model_and_data(run.settings).model
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"model={model.name} of {run_dir} is no language model that transformers has."
        )
    return run, model


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name} is not one of {', '.join(DTYPES)}.")


def _source(run_dir: Path, settings: Mapping[str, Any]) -> Path | None:
    """Return the folder of files kept by an import: this run's, or that of run.start_from."""
    start = settings["run"].get("start_from")
    for folder in (run_dir, *(() if start is None else (Path(start),))):
        if (folder / SOURCE / MODEL_CONFIG).is_file():
            return folder / SOURCE
    return None


def _kept_files(source: Path | None, run_source: Path) -> dict[str, Path]:
    """Return the kept files to export, config.json aside; a tokenizer of the run comes first."""

    def files_of(folder: Path) -> dict[str, Path]:
        return {name: folder / name for name in KEPT[1:] if (folder / name).is_file()}

    imported = {} if source is None else files_of(source)
    if run_source == source or not (run_source / "tokenizer.json").is_file():
        return imported
    return {name: imported[name] for name in imported if name == GENERATION} | files_of(run_source)


def _write_tensors(out: Path, params: Tree, names: list[Named], dtype: Any) -> Iterator[str]:
    """Write tensors in shards, with an index of several; yield the names of the files."""
    from safetensors.numpy import save_file

    # 1. the tensors of each shard
    sizes = [int(np.prod(each.shape)) * np.dtype(dtype).itemsize for each in names]
    numbers = [start // SHARD_BYTES for start in accumulate([0, *sizes[:-1]])]
    numbered = groupby(zip(numbers, names, strict=True), key=itemgetter(0))
    shards = [[each for _, each in shard] for _, shard in numbered]
    # 2. the files
    places = dict[str, str]()
    for i, shard in enumerate(shards):
        part = "" if len(shards) == 1 else f"-{i + 1:05}-of-{len(shards):05}"
        name = f"model{part}.safetensors"
        tensors = {each.name: _tensor_of(params, each, dtype) for each in shard}
        save_file(tensors, out / name, {"format": "pt"})
        shutil.copymode(out / MODEL_CONFIG, out / name)  # safetensors ignores the umask
        places |= {each.name: name for each in shard}
        yield name
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2)
        (out / INDEX).write_text(text + "\n")
        yield INDEX


def _tensor_of(params: Tree, each: Named, dtype: Any) -> np.ndarray:
    leaf = params
    for key in each.path:
        leaf = leaf[key]
    tensor = np.asarray(leaf if each.layer is None else leaf[each.layer]).astype(dtype)
    return np.ascontiguousarray(tensor.T if each.is_transposed else tensor)
