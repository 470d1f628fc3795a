"""Import of a language model as a run: a checkpoint at step 0, a recipe and the tokenizer."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import NamedSharding

from ppctl.config import Config, Interleaved, Mesh, Run, Tokens, Transformer
from ppctl.config.field_checks import settings_from
from ppctl.config.groups.schedule_settings import Eager1F1B
from ppctl.data import DataSet
from ppctl.data.chat_templates import chat_template, special_token
from ppctl.data.dataset import description
from ppctl.data.tokenizer import FILE, SETTINGS, json_object
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.language.model_files import Tensors, all_or_nothing, check_new, open_safetensors
from ppctl.language.tensor_names import Named, by_expert, named_parameters
from ppctl.language.transformers_config import BALANCE, DROPOUT, model_settings
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline import built_in_models as models
from ppctl.training.run.kept_tokenizer import (
    GENERATION,
    MODEL_CONFIG,
    POSITIONS,
    SOURCE,
    TOKENIZER_FILES,
)
from ppctl.training.run.run_environment import checkpoint_metadata
from ppctl.user_files import read_file

Tree = Any
KEPT = (MODEL_CONFIG, GENERATION, *TOKENIZER_FILES)  # files that an export copies
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

        model_config, tensors, texts, notes = open_gguf(source)
    else:
        model_config, texts, notes = json_object(source / MODEL_CONFIG), {}, ()
        if not model_config:
            raise ConfigError(
                f"{source} has no config.json. Name a model directory of transformers, or a .gguf "
                "file."
            )
        tensors = open_safetensors(source)
    if model_config.get(DROPOUT):
        notes = (*notes, f"{DROPOUT}={model_config[DROPOUT]} is not applied: unsupported")
    kept = _kept(source, model_config, texts)
    # 2. read the model and its parameters
    settings = model_settings(model_config)
    stated = model_config.get(POSITIONS)
    length = LONGEST if stated is None else min(stated, LONGEST)
    if length < 1:
        what = f"{POSITIONS}={length} in config.json leaves no token"
        raise ConfigError(f"{what}. Use 1 or more, or remove it.")
    model = replace(settings_from(Transformer, settings, "model"), seq_len=length)
    if (weight := model_config.get(BALANCE)) and any(model.has_experts):
        # the loss of `transformers` is top_k for even loads, ppctl's is 1 in each layer
        equal = weight * model.moe.top_k / sum(model.has_experts)
        what = f"model.moe.balance_loss={equal:.3g} weighs even loads alike"
        notes = (*notes, f"{BALANCE}={weight} is not applied: {what}")
    stack = models.transformer(**settings)
    shapes = stack.param_shapes
    wanted, tensors = named_parameters(shapes, model_config), by_expert(tensors, model_config)
    tensors.check({each.name: each.shape for each in wanted})
    params = _params(shapes, wanted, tensors)
    # 3. write the run directory
    run = Run(name=out.absolute().name, dir=str(out))
    recorded = asdict(Config(model=model, data=Tokens(path=str(source.absolute())), run=run))
    with all_or_nothing(out) as part:
        with Checkpoints(part / "checkpoints", keep=1) as checkpoints:
            if not checkpoints.save(0, {"params": params}, metadata(recorded, model, source)):
                raise ConfigError(f"A number in {source} is not finite. It cannot be imported.")
        (part / "config.yaml").write_text(yaml.safe_dump(recorded, sort_keys=False))
        (part / SOURCE).mkdir()
        for name, content in kept.items():
            (part / SOURCE / name).write_bytes(content)
        lines = commands(out, part / SOURCE)
        write_recipe(part, out, settings | {"seq_len": length}, lines)
    count = sum(jax.tree.leaves(stack.counts(shapes)))
    return Imported(model, count, tuple(kept), lines, tuple(notes))


def _params(shapes: Tree, wanted: list[Named], tensors: Tensors) -> Tree:
    """Return the parameters, each leaf divided over all devices along its first divisible dim."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(all_devices()),), ("all",), axis_types=auto)

    read_last = lru_cache(1)(tensors.read)  # consecutive reads are of the same tensor

    def leaf(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        of_leaf = [each for each in wanted if each.path == tuple(key.key for key in keys)]

        def read(each: Named, index: Any) -> np.ndarray:
            tensor = read_last(each.name)
            return np.asarray((tensor.T if each.is_transposed else tensor)[index], shape.dtype)

        def part(index: Any) -> np.ndarray:
            if of_leaf and not of_leaf[0].place:  # the leaf is one tensor: slice it, no copy
                return read(of_leaf[0], index)
            ranges = [range(size)[each] for size, each in zip(shape.shape, index, strict=True)]
            block = np.zeros([*map(len, ranges)], shape.dtype)  # zeros where no layer uses the leaf
            for each in of_leaf:
                if all(map(range.__contains__, ranges, each.place)):
                    in_block = tuple(map(range.index, ranges, each.place))
                    block[in_block] = read(each, index[len(in_block) :])
            return block

        dims = [dim for dim, size in enumerate(shape.shape) if size % mesh.size == 0]
        place = NamedSharding(mesh, jax.P(*([None] * dims[0] + ["all"] if dims else [])))
        return jax.make_array_from_callback(shape.shape, place, part)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def metadata(recorded: Mapping[str, Any], model: Transformer, source: Path) -> dict[str, Any]:
    """Return a checkpoint's metadata, in the form that training writes."""
    about, sizes = ("imported", str(source), ""), (1, 0, 1, 0)
    data = DataSet(*about, *sizes, lambda _: {}, vocab_size=model.vocab_size)
    tokens = jax.ShapeDtypeStruct((1, model.seq_len), np.int32)
    shapes = {"inputs": tokens, "targets": tokens}
    return checkpoint_metadata(recorded, 0, {}, description(data, shapes))


def _kept(
    source: Path, model_config: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the contents of the files to keep for an export, by name.

    texts: tokenizer files of a GGUF file. ConfigError if a file cannot be read.
    """
    if source.is_file():
        made = {MODEL_CONFIG: json.dumps(model_config, indent=2) + "\n", **texts}
        return {name: text.encode() for name, text in made.items()}
    kept = dict[str, bytes]()
    for file in (source / name for name in KEPT if os.path.lexists(source / name)):
        try:
            kept[file.name] = read_file(file)
        except OSError as error:
            why = f"{file} cannot be read ({error.strerror})"
            raise ConfigError(f"{why}. Restore it, or remove it.") from error
    return kept


def commands(out: Path, kept: Path) -> tuple[str, ...]:
    """Return the commands that train a model on texts, and on chats if there is a template.

    out: the imported run's directory. kept: the folder of the model's files; if it has no
    tokenizer, the only command trains on token ids.
    """
    command = f"ppctl train --config-dir {shlex.quote(str(out))} recipes=imported"
    if not (kept / FILE).is_file():
        return (f"{command} data=tokens data.path=IDS.npy",)
    settings = json_object(kept / SETTINGS)
    end = "" if special_token(settings, "eos_token") else """ 'data.end_token="TOKEN"'"""
    text = f"{command} data=text data.path=TEXT.txt{end}"
    if chat_template(kept, settings) is None:
        return (text,)
    chats = f"data.path=CHATS.jsonl data.field=messages data.packing=true{end}"
    return (text, f"{command} data=text {chats}")


def write_recipe(
    part: Path,
    out: Path,
    settings: dict[str, Any],
    lines: Sequence[str],
    optim: Mapping[str, Any] | None = None,
) -> None:
    """Write the recipe to train the imported parameters.

    part: directory of the unfinished files of `out`; settings: those of model; lines: commands for
    the recipe's header; optim: settings of optim, None: the defaults.
    """
    run = {"name": f"{out.name}-trained", "start_from": str(out.absolute())}
    defaults = [{"override /model": "transformer"}, *_layout(settings["num_layers"])]
    document = {"defaults": defaults, "model": settings, "run": run}
    document |= {} if optim is None else {"optim": dict(optim)}
    has_tokenizer = (part / SOURCE / FILE).is_file()
    tokenizer = out.absolute() / SOURCE if has_tokenizer else "none came with the model"
    head = ["# @package _global_", "# Written by `ppctl import`."]
    head += [f"# Tokenizer: {tokenizer} (default of data.tokenizer)"]
    head += [f"# Command: {command}" for command in lines]
    path = part / RECIPE
    path.parent.mkdir()
    path.write_text("\n".join([*head, yaml.safe_dump(document, sort_keys=False)]))


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
