"""The names of a model's tensors in `transformers` and in ppctl: one table, read both ways."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from ppctl.config import Transformer
from ppctl.config.field_checks import settings_from
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.language.model_files import Tensors
from ppctl.language.transformers_config import model_settings
from ppctl.model.experts.expert_layer import COUNTED, DROPPED, PARTS
from ppctl.model.lora import A, B

Tree = Any
EMBED_HEAD = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
}
# ppctl's path: name after model.layers.L.; {} is an expert's number. `LinearMap` has other names.
LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "router/kernel": "mlp.gate.weight",
    "experts/gate": "mlp.experts.{}.gate_proj.weight",
    "experts/up": "mlp.experts.{}.up_proj.weight",
    "experts/down": "mlp.experts.{}.down_proj.weight",
}
POST_NORMS = {  # models with norms after attention and MLP
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
OTHERS = {  # model_type: names of its layers that differ from LAYER
    "gemma2": POST_NORMS,
    "gemma3_text": POST_NORMS,
    "mixtral": {
        "router/kernel": "block_sparse_moe.gate.weight",
        "experts/gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts/up": "block_sparse_moe.experts.{}.w3.weight",
        "experts/down": "block_sparse_moe.experts.{}.w2.weight",
    },
    "glm4_moe": {
        "router/bias": "mlp.gate.e_score_correction_bias",
        "shared/gate/kernel": "mlp.shared_experts.gate_proj.weight",
        "shared/up/kernel": "mlp.shared_experts.up_proj.weight",
        "shared/down/kernel": "mlp.shared_experts.down_proj.weight",
    },
}
FUSED = {  # name of a tensor [E, out, in] of all experts: matrices in it
    "gate_up_proj": ("gate", "up"),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
}
PEFT = {A: "lora_A", B: "lora_B"}
PEFT_MODEL = "base_model.model."  # prefix of PEFT's names
TRANSPOSED = ("kernel", "head")  # last names of matrices [in, out]; torch stores [out, in]


class Named(NamedTuple):
    """A tensor of `transformers` (of one layer and expert), and its place in a leaf of ppctl."""

    name: str
    path: tuple[str, ...]  # path in the model's parameters
    place: tuple[int, ...]  # index in a leaf [num_layers, experts, ...]; (): the whole leaf
    shape: tuple[int, ...]  # shape in `transformers`
    is_transposed: bool


def layer_names(model: Architecture) -> dict[str, str]:
    """Return the usual names of a layer's tensors, by the names of its parameters in ppctl."""
    names = {f"{each.path}/scale": f"{each.tensor}.weight" for each in model.attention_form.norms}
    for each in model.linear_maps:
        names |= {f"{each.path}/kernel": f"{each.tensor}.weight"}
        names |= {f"{each.path}/bias": f"{each.tensor}.bias"} if each.has_bias else {}
    return names | LAYER


def named_parameters(
    params: Tree, model_config: Mapping[str, Any], *, adapters: bool = False
) -> list[Named]:
    """Return the tensors of a model, layer by layer.

    params: the model's parameters, or their shapes. model_config: its config.json.
    adapters: return only the adapters of LoRA, under PEFT's names.
    """
    # 1. look up names and the kinds of layers
    model = settings_from(Transformer, model_settings(model_config), "model")
    table = layer_names(model) | OTHERS.get(model_config["model_type"], {})
    uses = {True: {"mlp"}, False: {*PARTS}}  # parts that a layer lacks, by has_experts
    counters = {"/".join(names) for names in (COUNTED, DROPPED)}
    whole, layers = list[Named](), list[Named]()
    # 2. name the tensors of each parameter
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        is_adapter = path[-1] in PEFT
        if is_adapter != adapters:
            continue
        is_transposed = is_adapter or path[-1] in TRANSPOSED or path[1] == "experts"
        if path[0] == "embed_head":
            shape = leaf.shape[:: -1 if is_transposed else 1]
            whole.append(Named(EMBED_HEAD["/".join(path[1:])], path, (), shape, is_transposed))
            continue
        of_table = "/".join((*path[1:-1], "kernel" if is_adapter else path[-1]))
        if of_table in counters - table.keys():
            continue
        prefix, name = "model.layers", table[of_table]
        if is_adapter:
            prefix = f"{PEFT_MODEL}{prefix}"
            name = f"{name.removesuffix('weight')}{PEFT[path[-1]]}.weight"
        numbers = [(e,) for e in range(leaf.shape[1])] if "{}" in name else [()]
        for l, has_experts in enumerate(model.has_experts):
            for number in numbers if path[1] not in uses[has_experts] else ():
                shape = leaf.shape[1 + len(number) :][:: -1 if is_transposed else 1]
                named = f"{prefix}.{l}.{name.format(*number)}"
                layers.append(Named(named, path, (l, *number), shape, is_transposed))
    return [*whole, *sorted(layers, key=lambda each: each.place[0])]


def by_expert(tensors: Tensors, model_config: Mapping[str, Any]) -> Tensors:
    """Return a model's tensors, with those that fuse the experts of a layer split by expert.

    GLM's extra layer after the last one, which predicts further tokens, is left out.
    """
    # 1. list the tensors, and the place of each in a fused one
    table = LAYER | OTHERS.get(model_config["model_type"], {})
    num_layers, is_glm = model_config["num_hidden_layers"], model_config["model_type"] == "glm4_moe"
    places, shapes = dict[str, tuple[str, Any]](), dict[str, tuple[int, ...]]()
    sources = dict[str, str]()  # fused tensors, by the name of a part
    for name, shape in tensors.shapes.items():
        layer, _, rest = name.partition(".mlp.")
        parts = FUSED.get(rest.removeprefix("experts."), ())
        if is_glm and name.startswith(f"model.layers.{num_layers}."):
            continue
        if rest == "gate.weight":  # fused files of Mixtral use this name, too
            router = f"{layer}.{table['router/kernel']}"
            shapes[router], places[router] = shape, (name, ...)
        elif len(shape) != 3 or not parts:
            shapes[name] = shape
        else:
            size = shape[1] // len(parts)
            for number, part in enumerate(parts):
                rows = slice(number * size, (number + 1) * size)
                for e in range(shape[0]):
                    one = f"{layer}.{table[f'experts/{part}'].format(e)}"
                    shapes[one], places[one] = (size, shape[2]), (name, (e, rows))
                    sources[one] = f"{name} {list(shape)}"
    read_last = lru_cache(1)(tensors.read)  # consecutive reads are of one layer's experts

    # 2. read a tensor from its place
    def read(name: str) -> np.ndarray:
        if name not in places:
            return tensors.read(name)
        fused, place = places[name]
        return read_last(fused)[place]

    return Tensors(shapes, read, sources)
