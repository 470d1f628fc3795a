"""Import of a language model or of PEFT adapters as a run: checkpoint, recipe and tokenizer."""

import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import NamedSharding

from ppctl.config import AdamW, Config, Interleaved, Mesh, Run, Tokens, Transformer
from ppctl.config.field_checks import settings_from
from ppctl.config.groups.schedule_settings import Eager1F1B
from ppctl.config.groups.transformer_sizes import TARGETS
from ppctl.data import DataSet
from ppctl.data.chat_templates import chat_template, special_token
from ppctl.data.dataset import description
from ppctl.data.tokenizer import FILE, SETTINGS, json_object
from ppctl.errors import IN_BRACKETS, ConfigError, os_errors
from ppctl.executors.device_mesh import all_devices
from ppctl.language.language_model import open_language_model
from ppctl.language.model_files import Tensors, all_or_nothing, check_new, open_safetensors
from ppctl.language.tensor_names import PEFT, Named, by_expert, named_parameters
from ppctl.language.transformers_config import BALANCE, DROPOUT, model_config, model_settings
from ppctl.model.lora import Lora, are_adapters, with_base
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline import built_in_models as models
from ppctl.training.run import kept_tokenizer as kept
from ppctl.training.run.run_environment import checkpoint_metadata
from ppctl.user_files import read_file

Tree = Any
KEPT = (kept.MODEL_CONFIG, kept.GENERATION, *kept.TOKENIZER_FILES)  # files that an export copies
LONGEST = 2048  # maximum tokens per sequence in the recipe
RECIPE = "recipes/imported.yaml"


@dataclass(frozen=True)
class Imported:
    model: Transformer
    num_parameters: int
    files: tuple[str, ...]  # files kept for an export
    commands: tuple[str, ...]  # commands that train the model
    notes: tuple[str, ...] = ()


def import_model(source: Path, out: Path) -> Imported:
    """Import a model directory of `transformers`, or a GGUF file, as a run directory.

    The host holds one parameter leaf (a matrix of all layers) at a time: each leaf is read from
    memory-mapped files, then put on the devices.

    Raises:
        ConfigError: The model is missing or unsupported, or `out` exists.
    """
    check_new(out)
    # 1. read config.json, tensors and tokenizer
    if source.suffix == ".gguf" and source.is_file():
        from ppctl.language.gguf_file import open_gguf

        stated, tensors, texts, notes = open_gguf(source)
        texts = {kept.MODEL_CONFIG: json.dumps(stated, indent=2) + "\n", **texts}
        files = {name: text.encode() for name, text in texts.items()}
    else:
        stated, notes = json_object(source / kept.MODEL_CONFIG), ()
        if not stated:
            remedy = "Name a model directory of transformers, or a .gguf file."
            raise ConfigError(f"{source} has no config.json. {remedy}")
        tensors, files = open_safetensors(source), _contents(source, KEPT)
    if stated.get(DROPOUT):
        notes = (*notes, f"{DROPOUT}={stated[DROPOUT]} is not applied: unsupported")
    # 2. read the model and its parameters
    settings, length = model_settings(stated), stated.get(kept.POSITIONS)
    length = LONGEST if length is None else min(length, LONGEST)
    if length < 1:
        what = f"{kept.POSITIONS}={length} in config.json leaves no token"
        raise ConfigError(f"{what}. Use 1 or more, or remove it.")
    model = replace(settings_from(Transformer, settings, "model"), seq_len=length)
    if (weight := stated.get(BALANCE)) and any(model.has_experts):
        # the loss of `transformers` is top_k for even loads, ppctl's is 1 in each layer
        equal = weight * model.moe.top_k / sum(model.has_experts)
        what = f"model.moe.balance_loss={equal:.3g} weighs even loads alike"
        notes = (*notes, f"{BALANCE}={weight} is not applied: {what}")
    stack = models.transformer(**settings)
    shapes = stack.param_shapes
    params = _params(shapes, named_parameters(shapes, stated), by_expert(tensors, stated))
    # 3. write the run directory
    run = Run(name=out.absolute().name, dir=str(out))
    config = Config(model=model, data=Tokens(path=str(source.absolute())), run=run)
    commands = _write_run(out, source, config, model, settings, params, files)
    count = sum(jax.tree.leaves(stack.counts(shapes)))
    return Imported(model, count, tuple(files), commands, tuple(notes))


def import_adapter(source: Path, base: Path, out: Path) -> Imported:
    """Import PEFT adapters as a run directory `out` with optim.train=lora.

    source: directory of the adapters; base: directory of the run whose model they adapt.
    Raises ConfigError if the adapters are missing, of an unsupported kind or of another model, or
    if `out` exists.
    """
    check_new(out)
    # 1. read the adapters and their model
    peft, tensors = json_object(source / ADAPTER_CONFIG), open_safetensors(source)
    base_model = open_language_model(base)
    model = base_model.transformer
    of_base = model_config(model, base_model.vocab_size)
    lora = _lora(peft, tensors, model, source / ADAPTER_CONFIG)
    settings = model_settings(of_base)
    shapes = models.transformer(**settings, lora=lora).param_shapes
    wanted = named_parameters(shapes, of_base, adapters=True)
    # 2. join the parameters of base and adapters, and write the run directory
    only_new = jax.tree.map(
        lambda is_new, leaf: leaf if is_new else None, are_adapters(shapes), shapes
    )
    params = with_base(jax.device_get(_params(only_new, wanted, tensors)), base_model.params)
    optim: dict[str, Any] = {"train": "lora", "lora_rank": lora.rank, "lora_alpha": lora.alpha}
    optim |= {} if lora.targets is None else {"lora_targets": [*lora.targets]}
    optim |= {"lora_dropout": lora.dropout} if lora.dropout else {}
    run = replace(
        base_model.config.run, name=out.absolute().name, dir=str(out), start_from=str(base)
    )
    config = replace(base_model.config, optim=AdamW(**optim), run=run)
    folder = base / kept.SOURCE
    files = _contents(folder, sorted(os.listdir(folder)) if folder.is_dir() else ())
    commands = _write_run(out, source, config, model, settings, params, files, optim)
    count = sum(math.prod(each.shape) for each in wanted)
    return Imported(model, count, tuple(files), commands)


def _contents(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files of these names, by name. ConfigError if unreadable."""
    contents = dict[str, bytes]()
    for file in (folder / name for name in names if os.path.lexists(folder / name)):
        with os_errors(f"{file} cannot be read", "Restore it, or remove it.", form=IN_BRACKETS):
            contents[file.name] = read_file(file)
    return contents


def _params(shapes: Tree, wanted: list[Named], tensors: Tensors) -> Tree:
    """Return the parameters, each leaf divided over all devices along its first divisible dim."""
    tensors.check({each.name: each.shape for each in wanted})
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(all_devices()),), ("all",), axis_types=auto)
    read_last = lru_cache(1)(tensors.read)  # consecutive reads are of the same tensor

    def leaf(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        of_leaf = [each for each in wanted if each.path == tuple(key.key for key in keys)]

        def read(each: Named) -> np.ndarray:
            tensor = read_last(each.name)
            return tensor.T if each.is_transposed else tensor

        def part(index: Any) -> np.ndarray:
            if of_leaf and not of_leaf[0].place:  # the leaf is one tensor: slice it, no copy
                return np.asarray(read(of_leaf[0])[index], shape.dtype)
            ranges = [range(size)[each] for size, each in zip(shape.shape, index, strict=True)]
            block = np.zeros([*map(len, ranges)], shape.dtype)  # zeros where no layer uses the leaf
            for each in of_leaf:
                if all(map(range.__contains__, ranges, each.place)):
                    in_block = map(range.index, ranges, each.place)
                    block[*in_block] = read(each)[index[len(each.place) :]]
            return block

        dims = [dim for dim, size in enumerate(shape.shape) if size % mesh.size == 0]
        place = NamedSharding(mesh, jax.P(*([None] * dims[0] + ["all"] if dims else [])))
        return jax.make_array_from_callback(shape.shape, place, part)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def _write_run(
    out: Path,
    source: Path,
    config: Config,
    model: Transformer,
    settings: dict[str, Any],
    params: Tree,
    files: Mapping[str, bytes],
    optim: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Write a run directory: checkpoint, settings, recipe and kept files; return the commands.

    settings, optim: those of model and optim in the recipe; optim None: the defaults. ConfigError
    if a parameter is not finite.
    """
    # 1. checkpoint, settings and kept files
    recorded, part_of = asdict(config), ("imported", str(source), "")
    data = DataSet(*part_of, 1, 0, 1, 0, lambda _: {}, vocab_size=model.vocab_size)
    tokens = jax.ShapeDtypeStruct((1, model.seq_len), np.int32)
    about = description(data, {"inputs": tokens, "targets": tokens})
    with all_or_nothing(out) as part:
        with Checkpoints(part / "checkpoints", keep=1) as checkpoints:
            meta = checkpoint_metadata(recorded, 0, {}, about)
            if not checkpoints.save(0, {"params": params}, meta):
                raise ConfigError(f"A number in {source} is not finite. It cannot be imported.")
        (part / "config.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False))
        (part / kept.SOURCE).mkdir()
        for name, content in files.items():
            (part / kept.SOURCE / name).write_bytes(content)
        # 2. the recipe to train the parameters
        commands = _commands(out, part / kept.SOURCE)
        folder = out.absolute() / kept.SOURCE if FILE in files else "none came with the model"
        head = ["# @package _global_", "# Written by `ppctl import`."]
        head += [f"# Tokenizer: {folder} (default of data.tokenizer)"]
        head += [f"# Command: {command}" for command in commands]
        defaults = [{"override /model": "transformer"}, *_layout(settings["num_layers"])]
        run = {"name": f"{out.name}-trained", "start_from": str(out.absolute())}
        recipe = {"defaults": defaults, "model": settings | {"seq_len": model.seq_len}, "run": run}
        recipe |= {} if optim is None else {"optim": dict(optim)}
        (part / RECIPE).parent.mkdir()
        (part / RECIPE).write_text("\n".join([*head, yaml.safe_dump(recipe, sort_keys=False)]))
    return commands


def _commands(out: Path, folder: Path) -> tuple[str, ...]:
    """Return the commands that train a model on texts, and on chats if there is a template.

    out: the imported run's directory. folder: the folder of the model's files; if it has no
    tokenizer, the only command trains on token ids.
    """
    command = f"ppctl train --config-dir {shlex.quote(str(out))} recipes=imported"
    if not (folder / FILE).is_file():
        return (f"{command} data=tokens data.path=IDS.npy",)
    settings = json_object(folder / SETTINGS)
    end = "" if special_token(settings, "eos_token") else """ 'data.end_token="TOKEN"'"""
    text = f"{command} data=text data.path=TEXT.txt{end}"
    if chat_template(folder, settings) is None:
        return (text,)
    chats = f"data.path=CHATS.jsonl data.field=messages data.packing=true{end}"
    return (text, f"{command} data=text {chats}")


def _layout(num_layers: int) -> list[dict[str, str]]:
    """Return the choices of mesh and schedule for models with fewer layers than default stages.

    >>> _layout(3), _layout(8)
    ([{'override /mesh': '2x2'}, {'override /schedule': 'eager_1f1b'}], [])
    """
    default = Mesh(2, 4)  # and schedule=interleaved, as in conf/config.yaml
    if num_layers >= Interleaved().num_chunks * default.pp:
        return []
    pp = min(default.pp, 1 << (num_layers.bit_length() - 1))
    return [{"override /mesh": f"{default.dp}x{pp}"}, {"override /schedule": Eager1F1B().name}]


# --- adapters -----------------------------------------------------------------------------------

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
