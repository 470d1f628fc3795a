"""The names of parameters in `transformers` and in ppctl: one table, read in both directions."""

from typing import Any, NamedTuple

import jax

from ppctl.model.lora import A, B, adapted_modules

Tree = Any
EMBED_HEAD = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER = {  # after model.layers.L.
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
}
LAYER_OF_POST_NORMS = LAYER | {  # where norms follow attention and MLP
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
}
PEFT = {A: "lora_A", B: "lora_B"}
PEFT_MODEL = "base_model.model."  # begins PEFT's names
TRANSPOSED = ("kernel", "head")  # last names of matrices [in, out], which torch has [out, in]


class Named(NamedTuple):
    """A parameter of a model as `transformers` has it: a tensor by itself for each layer."""

    name: str
    path: tuple[str, ...]  # in the model's parameters
    layer: int | None  # index into a leaf [num_layers, ...]; None: the leaf itself
    shape: tuple[int, ...]  # of the tensor
    is_transposed: bool


def adapter_parameters(params: Tree) -> list[Named]:
    """Return the tensors of a model's adapters by PEFT's names, layer by layer."""
    layers: dict[int, list[Named]] = {}
    for path, module in adapted_modules(params["layers"]):
        of_linear = LAYER["/".join((*path, "kernel"))].removesuffix(".weight")
        for key, name in PEFT.items():
            for l in range(module[key].shape[0]):
                full = f"{PEFT_MODEL}model.layers.{l}.{of_linear}.{name}.weight"
                place, shape = ("layers", *path, key), module[key].shape[:0:-1]
                layers.setdefault(l, []).append(Named(full, place, l, shape, is_transposed=True))
    return [each for l in sorted(layers) for each in layers[l]]


def target_modules(params: Tree) -> list[str]:
    """Return the linear maps with adapters as PEFT's `target_modules` has them."""
    paths = ("/".join((*path, "kernel")) for path, _ in adapted_modules(params["layers"]))
    return [LAYER[path].split(".")[-2] for path in paths]


def named_parameters(params: Tree) -> list[Named]:
    """Return the tensors of a model, layer by layer; params: its parameters, or their shapes."""
    found: list[Named] = []
    layers: dict[int, list[Named]] = {}
    table = LAYER_OF_POST_NORMS if "mlp_post_norm" in params["layers"] else LAYER
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        is_transposed, of_table = path[-1] in TRANSPOSED, "/".join(path[1:])
        shape = leaf.shape[::-1] if is_transposed else leaf.shape
        if path[0] == "embed_head":
            found.append(Named(EMBED_HEAD[of_table], path, None, shape, is_transposed))
            continue
        shape = leaf.shape[:0:-1] if is_transposed else leaf.shape[1:]
        for l in range(leaf.shape[0]):
            name = f"model.layers.{l}.{table[of_table]}"
            layers.setdefault(l, []).append(Named(name, path, l, shape, is_transposed))
    return [*found, *(each for l in sorted(layers) for each in layers[l])]
