"""The names of a model's tensors in `transformers` and in ppctl: one table, read both ways."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from ppctl.config import Transformer
from ppctl.config.field_checks import settings_from
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
LAYER = {  # after model.layers.L.; {} is the number of an expert
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/query/bias": "self_attn.q_proj.bias",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/key/bias": "self_attn.k_proj.bias",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/value/bias": "self_attn.v_proj.bias",
    "attention/out/kernel": "self_attn.o_proj.weight",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
    "router/kernel": "mlp.gate.weight",
    "experts/gate": "mlp.experts.{}.gate_proj.weight",
    "experts/up": "mlp.experts.{}.up_proj.weight",
    "experts/down": "mlp.experts.{}.down_proj.weight",
    "shared/gate/kernel": "mlp.shared_expert.gate_proj.weight",
    "shared/up/kernel": "mlp.shared_expert.up_proj.weight",
    "shared/down/kernel": "mlp.shared_expert.down_proj.weight",
    "shared_gate/kernel": "mlp.shared_expert_gate.weight",
}
POST_NORMS = {  # norms follow attention and MLP
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
OTHERS = {  # model_type: other names in its layers
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
FUSED = {  # tensors [E, out, in] of all experts, in fused files and in GGUF
    "gate_up_proj": ("gate", "up"),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
}
PEFT = {A: "lora_A", B: "lora_B"}
PEFT_MODEL = "base_model.model."  # begins PEFT's names
TRANSPOSED = ("kernel", "head")  # last names of matrices [in, out], which torch has [out, in]


class Named(NamedTuple):
    """A tensor as `transformers` has it: by itself for each layer and expert."""

    name: str
    path: tuple[str, ...]  # in the model's parameters
    place: tuple[int, ...]  # in a leaf [num_layers, experts, ...]; (): the leaf itself
    shape: tuple[int, ...]  # of the tensor
    is_transposed: bool


def layer_names(model_type: str) -> dict[str, str]:
    """Return the names of a layer's tensors by those of its parameters."""
    return LAYER | OTHERS.get(model_type, {})


def named_parameters(
    params: Tree, model_config: Mapping[str, Any], *, adapters: bool = False
) -> list[Named]:
    """Return the tensors of a model, layer by layer; params: its parameters, or their shapes.

    model_config: its config.json. adapters: only those of LoRA, by PEFT's names.
    """
    # 1. names, and the kinds of layers
    table = layer_names(model_config["model_type"])
    model = settings_from(Transformer, model_settings(model_config), "model")
    uses = {True: {"mlp"}, False: {*PARTS}}  # parts that layers with and without experts lack
    counters = {"/".join(names) for names in (COUNTED, DROPPED)}
    whole: list[Named] = []
    layers: dict[int, list[Named]] = {}
    # 2. the tensors of each parameter
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        is_adapter = path[-1] in PEFT
        if is_adapter != adapters:
            continue
        is_transposed = is_adapter or path[-1] in TRANSPOSED or path[1] == "experts"
        if path[0] == "embed_head":
            shape = leaf.shape[::-1] if is_transposed else leaf.shape
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
                shape = leaf.shape[1 + len(number) :]
                shape = shape[::-1] if is_transposed else shape
                named = f"{prefix}.{l}.{name.format(*number)}"
                layers.setdefault(l, []).append(
                    Named(named, path, (l, *number), shape, is_transposed)
                )
    return [*whole, *(each for l in sorted(layers) for each in layers[l])]


def by_expert(tensors: Tensors, model_config: Mapping[str, Any]) -> Tensors:
    """Return a model's tensors with one for each expert, where a file has all of a layer in one.

    Without those of layers after the last: GLM's, for multi-token prediction.
    """
    # 1. the place of each tensor in a fused one
    table, num_layers = layer_names(model_config["model_type"]), model_config["num_hidden_layers"]
    places, shapes = dict[str, tuple[str, Any]](), dict[str, tuple[int, ...]]()
    for name, shape in tensors.shapes.items():
        layer, _, rest = name.partition(".mlp.")
        parts = FUSED.get(rest.removeprefix("experts."), ())
        if (
            name.startswith(f"model.layers.{num_layers}.")
            and model_config["model_type"] == "glm4_moe"
        ):
            continue
        if rest == "gate.weight":  # as fused files of Mixtral name it, too
            shapes[f"{layer}.{table['router/kernel']}"] = shape
            places[f"{layer}.{table['router/kernel']}"] = name, ...
        elif len(shape) != 3 or not parts:
            shapes[name] = shape
        else:
            size = shape[1] // len(parts)
            for number, part in enumerate(parts):
                rows = slice(number * size, (number + 1) * size)
                for e in range(shape[0]):
                    one = f"{layer}.{table[f'experts/{part}'].format(e)}"
                    shapes[one], places[one] = (size, shape[2]), (name, (e, rows))
    read_last = lru_cache(1)(tensors.read)  # the experts of a layer follow each other

    # 2. its numbers
    def read(name: str) -> np.ndarray:
        if name not in places:
            return tensors.read(name)
        fused, place = places[name]
        return read_last(fused)[place]

    return Tensors(shapes, read)
