"""The names of parameters in `transformers` and in ppctl: one table, read in both directions."""

from typing import Any, NamedTuple

import jax

from ppctl.model.lora import A, B

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


def named_parameters(params: Tree, *, adapters: bool = False) -> list[Named]:
    """Return the tensors of a model, layer by layer; params: its parameters, or their shapes.

    adapters: only those of LoRA, by PEFT's names.
    """
    whole: list[Named] = []
    layers: dict[int, list[Named]] = {}
    table = LAYER_OF_POST_NORMS if "mlp_post_norm" in params["layers"] else LAYER
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        is_adapter = path[-1] in PEFT
        if is_adapter != adapters:
            continue
        is_transposed = is_adapter or path[-1] in TRANSPOSED
        is_whole = path[0] == "embed_head"
        shape = leaf.shape if is_whole else leaf.shape[1:]
        shape = shape[::-1] if is_transposed else shape
        if is_whole:
            whole.append(Named(EMBED_HEAD["/".join(path[1:])], path, None, shape, is_transposed))
            continue
        of_table = "/".join((*path[1:-1], "kernel" if is_adapter else path[-1]))
        prefix, name = "model.layers", table[of_table]
        if is_adapter:
            prefix = f"{PEFT_MODEL}{prefix}"
            name = f"{name.removesuffix('weight')}{PEFT[path[-1]]}.weight"
        for l in range(leaf.shape[0]):
            named = Named(f"{prefix}.{l}.{name}", path, l, shape, is_transposed)
            layers.setdefault(l, []).append(named)
    return [*whole, *(each for l in sorted(layers) for each in layers[l])]
