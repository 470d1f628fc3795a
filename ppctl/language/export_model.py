"""Export of a run's parameters as a `transformers` directory, or of its adapters for PEFT."""

import json
import shutil
from collections.abc import Iterator
from functools import reduce
from itertools import accumulate, groupby
from operator import getitem, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ppctl.config import Transformer
from ppctl.data.tokenizer import json_object
from ppctl.errors import ConfigError, one_line
from ppctl.language.import_model import ADAPTER_CONFIG, KEPT
from ppctl.language.language_model import LanguageModel, open_language_model
from ppctl.language.model_files import INDEX, all_or_nothing, check_new
from ppctl.language.tensor_names import PEFT_MODEL, Named, named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.model.experts.expert_layer import COUNTED
from ppctl.training.run.kept_tokenizer import GENERATION, MODEL_CONFIG, POSITIONS, SOURCE, TOKEN_IDS
from ppctl.training.run.saved_run import load_run

Tree = Any
SHARD_BYTES = 5 * 10**9  # bytes per file; the last tensor of a file may go beyond
BFLOAT16 = ml_dtypes.bfloat16
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": BFLOAT16, "float16": np.float16}


class Exported(NamedTuple):
    files: tuple[str, ...]
    dtype: str
    step: int
    linear_dtype: str | None  # setting of the run that the format lacks


def export_model(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> Exported:
    """Write a run's checkpoint to `out`: safetensors, config.json, and files kept by an import.

    step: the checkpoint's step; None: the newest. dtype: the tensors' dtype; None: the imported
    model's, else float32. adapter: write only the adapters of optim.train=lora, under PEFT's names;
    if False, merge the adapters into the model.

    Raises:
        ConfigError: `transformers` lacks the run's model, the run has no adapters, or `out` exists.
        CheckpointError: The checkpoint does not exist.
    """
    check_new(out)
    model = open_language_model(run_dir, step=step)
    # 1. collect parameters, config.json, and the files to copy
    if adapter:
        step, params, config, of_base = _adapter(model)
        copied, stem = dict[str, Path](), "adapter_model"
    else:
        step, params, config = model.step, model.params, _config(model)
        of_base, folder, stem = config, model.directory / SOURCE, "model"
        copied = {name: folder / name for name in KEPT[1:] if (folder / name).is_file()}
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if (dtype or stated) not in DTYPES:
        named = f"--dtype {dtype}" if dtype else f"dtype={stated} in config.json"
        raise ConfigError(f"{named} is not one of {', '.join(DTYPES)}. Use --dtype float32.")
    dtype = dtype or stated
    config_file = ADAPTER_CONFIG if adapter else MODEL_CONFIG
    if not adapter:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    # 2. write the files
    with all_or_nothing(out) as part:
        (part / config_file).write_text(json.dumps(config, indent=2) + "\n")
        names = named_parameters(params, of_base, adapters=adapter)
        files = [*_write_tensors(part, params, names, DTYPES[dtype], stem)]
        for name, file in copied.items():
            shutil.copyfile(file, part / name)
            files.append(name)
        if GENERATION not in files and not adapter:
            tokens = {key: config[key] for key in TOKEN_IDS if key in config}
            text = json.dumps({"_from_model_config": True, **tokens}, indent=2)
            (part / GENERATION).write_text(text + "\n")
            files.append(GENERATION)
    linear_dtype = model.transformer.linear_dtype
    return Exported((*files, config_file), dtype, step, linear_dtype)


def _config(model: LanguageModel) -> dict[str, Any]:
    """Return a model's config.json: the imported one if it describes the same model."""
    config = model_config(model.transformer, model.vocab_size)
    kept = json_object(model.directory / SOURCE / MODEL_CONFIG)
    if kept and model_settings(kept) == model_settings(config):
        config = kept
    config.setdefault(POSITIONS, model.transformer.seq_len)
    return config


def _adapter(model: LanguageModel) -> tuple[int, Tree, dict[str, Any], dict[str, Any]]:
    """Return (step, parameters with adapters, PEFT's config, config.json of the base)."""
    adapters = model.adapters
    if adapters is None:
        what = f"{model.directory} was not trained with optim.train=lora and has no adapters"
        raise ConfigError(f"--adapter: {what}.")
    step, lora, params = adapters
    of_base = model_config(model.transformer, params["embed_head"]["embedding"].shape[0])
    names = named_parameters(params, of_base, adapters=True)
    linear = [_module(each, model.transformer) for each in names]
    base = _base(model.config.run.start_from)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": [*dict.fromkeys(linear)]}
    config |= {"lora_dropout": lora.dropout, "bias": "none", "fan_in_fan_out": False}
    return step, params, config | {"inference_mode": True}, of_base


def _module(each: Named, model: Transformer) -> str:
    """Return the end of a module's name, long enough to match only modules with adapters."""
    parts = each.name.removeprefix(PEFT_MODEL).split(".")[:-2]
    has_namesakes = each.path[1] == "mlp" and any(model.has_experts)
    return ".".join(parts) if has_namesakes else parts[-1]


def _base(start_from: str | None) -> str | None:
    """Return the base model of adapters: the directory of the imported model, else of the run."""
    while start_from is not None and (Path(start_from) / "config.yaml").is_file():
        run = load_run(start_from)
        if (run.settings.get("optim") or {}).get("train") != "lora":
            is_imported = (run.directory / SOURCE / MODEL_CONFIG).is_file()
            imported = getattr(run.config.data, "path", None) if is_imported else None
            return imported or str(run.directory.absolute())
        start_from = run.config.run.start_from
    return start_from


def _write_tensors(
    out: Path, params: Tree, names: list[Named], dtype: Any, stem: str = "model"
) -> Iterator[str]:
    """Write tensors in shards, with an index if there are several; yield the file names."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # 1. divide the tensors into shards
    sizes = [int(np.prod(each.shape)) * np.dtype(dtype).itemsize for each in names]
    numbers = [start // SHARD_BYTES for start in accumulate([0, *sizes[:-1]])]
    numbered = groupby(zip(numbers, names, strict=True), key=itemgetter(0))
    shards = [[each for _, each in shard] for _, shard in numbered]
    # 2. write the shards
    places = dict[str, str]()
    for i, shard in enumerate(shards):
        part = "" if len(shards) == 1 else f"-{i + 1:05}-of-{len(shards):05}"
        name = f"{stem}{part}.safetensors"
        tensors = {each.name: _tensor_of(params, each, dtype) for each in shard}
        try:
            save_file(tensors, out / name, {"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(one_line(error)) from error
        # safetensors ignores the umask: copy the mode of another file
        (out / name).chmod(next(out.glob("*config.json")).stat().st_mode)
        places |= {each.name: name for each in shard}
        yield name
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2)
        (out / INDEX).write_text(text + "\n")
        yield INDEX


def _tensor_of(params: Tree, each: Named, dtype: Any) -> np.ndarray:
    # router biases stay float32, as in published files
    dtype = np.float32 if each.path[1:] == COUNTED else dtype
    tensor = np.asarray(reduce(getitem, each.path, params)[each.place]).astype(dtype)
    return np.ascontiguousarray(tensor.T if each.is_transposed else tensor)
