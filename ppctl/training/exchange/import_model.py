"""A language model of others as a run directory: a checkpoint of step 0, a recipe, and the files of its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ppctl.config import Config, Run, Transformer
from ppctl.data import DataSet
from ppctl.data.description import description
from ppctl.errors import ConfigError
from ppctl.model.stack import init
from ppctl.training import models
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.environment import versions
from ppctl.training.exchange.families import model_settings
from ppctl.training.exchange.names import Named, named_parameters
from ppctl.training.exchange.tensors import Tensors, open_safetensors

Tree = Any
SOURCE = "source"  # folder of a run directory with the files that an export gives back
GENERATION = "generation_config.json"
KEPT = (
    *("config.json", GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"),
)
LONGEST = 2048  # tokens of a sequence in the recipe, where the model takes more
RECIPE = "recipes/imported.yaml"


@dataclass(frozen=True)
class Imported:
    """An imported model: its settings and size, and the files kept for an export."""

    model: Transformer
    num_parameters: int
    files: tuple[str, ...]  # kept for an export
    notes: tuple[str, ...] = ()


def import_model(source: Path, out: Path) -> Imported:
    """Write the model of a directory of `transformers`, or of a GGUF file, as a run directory.

    Tensors are read from memory maps one by one and put on their devices, where the checkpoint is written from: the
    host holds one of them at a time.

    Raises:
        ConfigError: There is no such model, it is none that ppctl has, or `out` is there already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and nothing is overwritten. Name another directory with --out.")
    if source.suffix == ".gguf" and source.is_file():
        from ppctl.training.exchange.gguf_file import open_gguf

        config, tensors, texts, notes = open_gguf(source)
    else:
        config, tensors, texts, notes = _config(source), open_safetensors(source), {}, ()
    settings = model_settings(config)
    length = min(int(config.get("max_position_embeddings") or LONGEST), LONGEST)
    model = replace(Transformer(**settings), seq_len=length)
    stack = models.transformer(**settings)
    shapes = jax.eval_shape(lambda: init(stack, 0))
    wanted = named_parameters(shapes)
    tensors.check(wanted)
    params = _placed(shapes, wanted, tensors)
    settings_of_run = Config(model=model, run=Run(name=out.name, dir=str(out)))
    try:
        with Checkpoints(out / "checkpoints", keep=1) as checkpoints:
            if not checkpoints.save(0, {"params": params}, _metadata(settings_of_run, source)):
                raise ConfigError(f"A number of {source} is not finite. It cannot be imported.")
        (out / "config.yaml").write_text(yaml.safe_dump(asdict(settings_of_run), sort_keys=False))
        files = _keep(source, out / SOURCE, config, texts)
        _write_recipe(out, settings | {"seq_len": length})
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Name another directory with --out.") from error
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Imported(model, count, files, tuple(notes))


def _config(source: Path) -> Mapping[str, Any]:
    if not source.is_dir():
        what = "is no directory" if source.exists() else "is not there"
        raise ConfigError(f"{source} {what}. Name a model directory of transformers, or a .gguf file.")
    try:
        found = json.loads((source / "config.json").read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{source} has no config.json. Name a model directory of transformers.") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{source / 'config.json'} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{source / 'config.json'} is no object of JSON.")
    return found


# tensor by tensor to the devices


def _placed(shapes: Tree, wanted: list[Named], tensors: Tensors) -> Tree:
    """Return the parameters on the devices, each leaf divided over them along a dim that can be."""
    leaves = {_path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    places = {path: _place(leaf.shape, path[0] == "layers") for path, leaf in leaves.items()}
    found = {
        path: jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=places[path])()
        for path, leaf in leaves.items()
    }
    for each in wanted:
        tensor = jax.device_put(tensors.read(each.name), _transposed(places[each.path], each))
        found[each.path] = _filled(places[each.path], each.is_transposed, each.layer is None)(
            found[each.path], tensor, each.layer or 0
        )
        found[each.path].block_until_ready()  # so that one tensor at a time is on the host
    paths = [_path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), [found[path] for path in paths])


def _path_of(keys: Any) -> tuple[str, ...]:
    return tuple(key.key for key in keys)


def _place(shape: tuple[int, ...], is_of_layers: bool) -> Sharding:
    devices = jax.devices()
    dims = [dim for dim in range(int(is_of_layers), len(shape)) if shape[dim] % len(devices) == 0]
    if len(devices) == 1 or not dims:
        return SingleDeviceSharding(devices[0]) if len(devices) == 1 else _over(devices, PartitionSpec())
    return _over(devices, PartitionSpec(*(None,) * dims[0], "all"))


def _over(devices: list[Any], spec: PartitionSpec) -> Sharding:
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, spec)


def _transposed(place: Sharding, each: Named) -> Sharding:
    """Return where a tensor goes, so that each device has what it needs of it."""
    if not isinstance(place, NamedSharding):
        return place
    spec = [*place.spec, *(None,) * (len(each.shape) + (each.layer is not None) - len(place.spec))]
    own = spec[1:] if each.layer is not None else spec
    return NamedSharding(place.mesh, PartitionSpec(*(own[::-1] if each.is_transposed else own)))


@cache
def _filled(place: Sharding, is_transposed: bool, is_whole: bool) -> Any:
    """Return (leaf, tensor, layer) -> the leaf with the tensor in it, in its place."""

    def fill(leaf: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
        own = (tensor.T if is_transposed else tensor).astype(leaf.dtype)
        return own if is_whole else jax.lax.dynamic_update_index_in_dim(leaf, own, layer, 0)

    return jax.jit(fill, donate_argnums=() if is_whole else (0,), out_shardings=place)


# the run directory


def _metadata(config: Config, source: Path) -> dict[str, Any]:
    """Return what the checkpoint says of itself, as one of training does."""
    model = config.model
    assert isinstance(model, Transformer), "imported as one"
    data = DataSet("imported", str(source), "", 1, 0, 1, 0, lambda _: {}, vocab_size=model.vocab_size)
    tokens = jax.ShapeDtypeStruct((1, model.seq_len), np.int32)
    return {
        "step": 0,
        "config": asdict(config),
        "sources": {},
        "data": {**description(data, {"inputs": tokens, "targets": tokens}), "next_step": 0},
        "rng": {"seed": config.run.seed, "data_order": "a function of seed and step"},
        "versions": versions(),
    }


def ends_of(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the token ids that end a text by a config; () for none, None for what are no ids.

    >>> ends_of({"eos_token_id": [1, 106]}), ends_of({"eos_token_id": 2}), ends_of({}), ends_of({"eos_token_id": "a"})
    ((1, 106), (2,), (), None)
    """
    given = config.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    return tuple(ids) if all(type(each) is int for each in ids) else None


def _keep(source: Path, folder: Path, config: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[str, ...]:
    """Write the files that an export gives back, and return their names. texts: those made of a GGUF file."""
    folder.mkdir(parents=True)
    if source.is_file():
        made = {"config.json": json.dumps(config, indent=2) + "\n", **texts}
        for name, text in made.items():
            (folder / name).write_text(text)
        return tuple(made)
    kept = [name for name in KEPT if (source / name).is_file()]
    for name in kept:
        shutil.copyfile(source / name, folder / name)
    return tuple(kept)


def _write_recipe(out: Path, settings: dict[str, Any]) -> None:
    """Write the recipe that trains on from the imported parameters."""
    run = {"name": f"{out.name}-trained", "start_from": str(out.absolute())}
    document = {"defaults": [{"override /model": "transformer"}], "model": settings, "run": run}
    head = [
        "# @package _global_",
        "# Written by `ppctl import`.",
        f"# Command: ppctl train --config-dir {out} recipes=imported data=tokens data.path=...",
    ]
    path = out / RECIPE
    path.parent.mkdir()
    path.write_text("\n".join([*head, yaml.safe_dump(document, sort_keys=False)]))
