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

from ppctl.config import AdamW, Transformer
from ppctl.config.groups.attention_forms import TARGETS
from ppctl.data.tokenizer import json_object
from ppctl.errors import ConfigError
from ppctl.language.import_model import SOURCE, Imported, commands, metadata, write_recipe
from ppctl.language.language_model import open_language_model
from ppctl.language.model_files import Tensors, all_or_nothing, check_new, open_safetensors
from ppctl.language.tensor_names import PEFT, Named, named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.model.lora import Lora, with_base
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline import built_in_models as models

Tree = Any
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's config
READ: dict[str, Any] = {  # key: its type; bool is an int, but no number of a config
    "peft_type": str,
    "r": int,
    "lora_alpha": (int, float),
    "lora_dropout": (int, float, type(None)),
    "use_rslora": (bool, type(None)),
}
NO_FUNCTION = """
task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
exclude_modules layers_pattern megatron_config megatron_core loftq_config eva_config corda_config
lora_ga_config velora_config qalora_group_size runtime_config ensure_weight_tying
"""  # keys without effect on a trained adapter's outputs; the tensors' names state the modules
# kinds of initialization that leave the base as it is; others (pissa, olora, ...) change it
UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


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
    lora = _lora(config, tensors, model.transformer, source / ADAPTER_CONFIG)
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


def _lora(config: Mapping[str, Any], tensors: Tensors, model: Transformer, file: Path) -> Lora:
    """Return rank, alpha, targets and dropout of adapters. ConfigError for an unsupported kind."""
    # 1. refuse settings that make it something other than x W + alpha/r (x A) B
    for key, value in config.items():
        is_right = isinstance(value, READ.get(key, object))
        if not is_right or (isinstance(value, bool) and key in READ and key != "use_rslora"):
            raise ConfigError(f"{file} has {key}={value}, of a wrong type. Correct it.")
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type", "nothing")
        raise ConfigError(f"{file} states peft_type={kind}. Only LORA can be imported.")
    for key, value in config.items():
        is_off = value in (UNCHANGED_BASE if key == "init_lora_weights" else (None, [], {}, "none"))
        if not (is_off or value is False or key in READ or key in NO_FUNCTION.split()):
            what = f"{file} has {key}={value}, which ppctl's adapters lack"
            raise ConfigError(f"{what}. Merge it with its base in PEFT, and import that model.")
    # 2. read its sizes
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout")
    if not rank or rank < 1 or not alpha or not 0 < alpha < math.inf:
        raise ConfigError(f"{file} has r={rank} and lora_alpha={alpha}: both must be positive.")
    if config.get("use_rslora"):  # PEFT scales by alpha/sqrt(r), ppctl by alpha/r
        alpha *= math.sqrt(rank)
    found = set[str | None]()
    for each in model.linear_maps:
        endings = tuple(f".{each.tensor}.{ending}.weight" for ending in PEFT.values())
        found |= {each.target for name in tensors.shapes if name.endswith(endings)}
    targets = tuple(target for target in TARGETS if target in found)
    return Lora(rank, float(alpha), targets, dropout or 0.0)


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
