"""Import of PEFT adapters as a run on top of a base run, to train further or to evaluate."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from ppctl.config import AdamW
from ppctl.data.tokenizer import json_object
from ppctl.errors import ConfigError
from ppctl.language.import_model import SOURCE, Imported, commands, metadata, write_recipe
from ppctl.language.language_model import open_language_model
from ppctl.language.model_files import Tensors, all_or_nothing, check_new, open_safetensors
from ppctl.language.tensor_names import PEFT, Named, layer_names, named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.model.lora import PROJECTIONS, Lora, with_base
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline import built_in_models as models

Tree = Any
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's config
PLAIN = {  # PEFT's settings: values that make an adapter x W + alpha/r (x A) B
    "use_dora": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
}


def import_adapter(source: Path, base: Path, out: Path) -> Imported:
    """Import PEFT adapters as a run directory `out` with optim.train=lora.

    source: directory of the adapters; base: directory of the run whose model they adapt.
    Raises ConfigError if the adapters are missing, of an unsupported kind or of another model, or
    if `out` exists.
    """
    check_new(out)
    # 1. read the adapters and their model
    config, tensors = json_object(source / ADAPTER_CONFIG) or {}, open_safetensors(source)
    model = open_language_model(base)
    of_base = model_config(model.transformer, model.vocab_size)
    lora = _lora(config, tensors, of_base, source / ADAPTER_CONFIG)
    settings = model_settings(of_base)
    stack = models.transformer(**settings, lora=lora)
    wanted = named_parameters(stack.param_shapes, of_base, adapters=True)
    tensors.check({each.name: each.shape for each in wanted})
    # 2. join the parameters of base and adapters, and write the run directory
    params = with_base(_params(stack.param_shapes, wanted, tensors), model.params)
    optim = {"train": "lora", "lora_rank": lora.rank, "lora_alpha": lora.alpha}
    optim |= {} if lora.targets is None else {"lora_targets": [*lora.targets]}
    optim |= {"lora_dropout": lora.dropout} if lora.dropout else {}
    run = replace(model.config.run, name=out.absolute().name, dir=str(out), start_from=str(base))
    recorded = asdict(replace(model.config, optim=AdamW(**optim), run=run))
    with all_or_nothing(out) as part:
        with Checkpoints(part / "checkpoints", keep=1) as checkpoints:
            kept = metadata(recorded, model.transformer, source)
            if not checkpoints.save(0, {"params": params}, kept):
                raise ConfigError(f"A number in {source} is not finite. It cannot be imported.")
        (part / "config.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False))
        files = base / SOURCE
        shutil.copytree(files, part / SOURCE) if files.is_dir() else (part / SOURCE).mkdir()
        lines = commands(out, part / SOURCE)
        write_recipe(part, out, settings | {"seq_len": model.transformer.seq_len}, lines, optim)
    count = sum(int(np.prod(each.shape)) for each in wanted)
    names = tuple(sorted(file.name for file in files.iterdir())) if files.is_dir() else ()
    return Imported(model.transformer, count, names, lines)


def _lora(
    config: Mapping[str, Any], tensors: Tensors, of_base: Mapping[str, Any], file: Path
) -> Lora:
    """Return rank, alpha, targets and dropout of adapters. ConfigError for an unsupported kind."""
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type", "nothing")
        raise ConfigError(f"{file} states peft_type={kind}. Only LORA can be imported.")
    for name, plain in PLAIN.items():
        if name in config and config[name] not in plain:
            raise ConfigError(f"{file} has {name}={config[name]}, which ppctl's adapters lack.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ConfigError(f"{file} has r={rank} and lora_alpha={alpha}: both must be positive.")
    if config.get("use_rslora"):  # PEFT scales by alpha/sqrt(r), ppctl by alpha/r
        alpha *= math.sqrt(rank)
    table, found = layer_names(of_base["model_type"]), list[str]()
    for target, path in PROJECTIONS.items():
        module = table.get("/".join((*path, "kernel")), "").removesuffix("weight")
        endings = tuple(f".{module}{ending}.weight" for ending in PEFT.values())
        if module and any(name.endswith(endings) for name in tensors.shapes):
            found.append(target)
    return Lora(rank, float(alpha), tuple(found), float(config.get("lora_dropout") or 0))


def _params(shapes: Tree, wanted: list[Named], tensors: Tensors) -> Tree:
    """Return a tree like the model's parameters, with adapters as leaves and None for others."""
    by_path: dict[tuple, list[Named]] = {}
    for each in wanted:
        by_path.setdefault(each.path, []).append(each)

    def leaf(keys: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray | None:
        of_leaf = by_path.get(tuple(key.key for key in keys))
        if of_leaf is None:
            return None
        whole = np.zeros(shape.shape, shape.dtype)
        for each in of_leaf:
            tensor = np.asarray(tensors.read(each.name), shape.dtype)
            whole[each.place] = tensor.T if each.is_transposed else tensor
        return whole

    return jax.tree_util.tree_map_with_path(leaf, shapes)
