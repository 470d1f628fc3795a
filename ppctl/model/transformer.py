"""Decoder-only transformer on the stack protocol: Llama 2 and 3, Qwen 2, 2.5 and 3, Mistral, SmolLM 2, Gemma 2 and 3.

Shape suffixes: B batch, T tokens, M = B*T, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.architecture import Architecture
from ppctl.model.attention import Kernel, attention
from ppctl.model.blocks import Block, BlockSettings, norm
from ppctl.model.cross_entropy import NO_TOKEN, Vocabulary, cross_entropy, first_id, logits
from ppctl.model.lora import A, B, are_adapters, with_adapters
from ppctl.model.packing import documents_of, num_rows, split_starts, with_starts
from ppctl.model.parallel import WHOLE, StageAxes, gather, on_first, own_tokens, scatter
from ppctl.model.rotary import Rotate, rotation
from ppctl.model.scoring import Scoring
from ppctl.model.stack import Stack, Tree, VocabularyParts, init, over_ranks
from ppctl.model.vocabulary_part import part_cross_entropy, part_log_sums

EMBED_STD = 0.02
Mix = Callable[[StageAxes, Scoring], Kernel]  # attention on a stage's axes


class Ends(nnx.Module):
    """Token embedding, final norm, and the head's matrix unless it is tied to the embedding."""

    def __init__(self, sizes: Architecture, dtype: jnp.dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(EMBED_STD)
        d_model, vocab_size = sizes.d_model, sizes.vocab_size
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, d_model), dtype))
        self.norm = norm(d_model, sizes, dtype, rngs)
        self.head = None if sizes.tied else nnx.Param(init(rngs.params(), (d_model, vocab_size), dtype))


def transformer(
    *,
    dtype: jnp.dtype,
    mix: Mix | None = None,
    rotate: Rotate | None = None,
    packed: bool = False,
    axes: StageAxes = WHOLE,
    **sizes: Any,
) -> Stack:
    """Return the stack of a decoder-only language model: num_layers pre-norm blocks between embedding and head.

    sizes: the fields of `Architecture`, each of which `config.Transformer` explains in a line; those without a default
    are needed. dtype: of the parameters. With `lora` blocks have adapters, and these alone are trained.
    inputs and targets: int32 [B, T], tokens below vocab_size; x: [B, T, d_model]. T is any number of tokens. A target
    that is NO_TOKEN counts neither in the sum of losses nor in their number.
    packed: inputs may hold several documents, see `ppctl.model.packing`; x has rows that say where they start.
    Layers are one function where all have the window or none has, else one of two.
    mix: attention on a stage's axes, rotate: rotary positions; None: as the device that is here has them.
    axes: how a stage is divided; the functions of a divided one are those of one device (`Stack.divided`).
    The loss is cross-entropy in nats, one a token, in at least float32. Sizes that do not fit fail in tracing, with the
    error of the operation; those that tp does not divide raise ConfigError.
    """
    return _stack(Architecture(**sizes), dtype, mix or _mix_here, rotate or rotation(), packed, axes)


def _mix_here(axes: StageAxes, scoring: Scoring) -> Kernel:
    return attention("auto", axes=axes, scoring=scoring)


def _stack(sizes: Architecture, dtype: jnp.dtype, mix: Mix, rotate: Rotate, packed: bool, axes: StageAxes) -> Stack:
    if packed and axes.cp > 1:
        raise ConfigError(
            f"mesh.cp={axes.cp} divides a sequence over devices, but with data.packing=true attention stays within "
            "documents, which no kernel does across devices. Use mesh.cp=1, or data.packing=false."
        )
    sizes.check_divides(axes)
    tied, cap, lora = sizes.tied, sizes.logit_softcap, sizes.lora

    def settings(has_window: bool) -> BlockSettings:
        turn = partial(rotate, rope=sizes.rope(has_window), axes=axes)
        return BlockSettings(sizes, mix(axes, sizes.scoring(has_window)), turn, axes)

    ends_graph = nnx.graphdef(nnx.eval_shape(lambda: Ends(sizes, dtype, nnx.Rngs(0))))

    def init_layer(key: jax.Array, _: jax.Array) -> Tree:
        plain = replace(settings(False), sizes=replace(sizes, lora=None))
        layer = nnx.to_pure_dict(nnx.state(Block(plain, dtype, nnx.Rngs(key)), nnx.Param))
        return layer if lora is None else with_adapters(layer, lora, key)

    def init_ends(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Ends(sizes, dtype, nnx.Rngs(key)), nnx.Param))

    def embed(ends: Tree, inputs_BT: jax.Array, part: jax.Array | int = 0) -> jax.Array:
        if not packed:
            return embed_ids(ends, own_tokens(inputs_BT, axes), part)
        ids_BT, is_first_BT = split_starts(inputs_BT)
        marks_BT = own_tokens(is_first_BT, axes)
        if axes.vocab_ranks > 1:  # what ranks return is added up, and these count once
            marks_BT = marks_BT & (part == 0)
        return with_starts(embed_ids(ends, own_tokens(ids_BT, axes), part), marks_BT)

    def embed_ids(ends: Tree, ids_BT: jax.Array, part: jax.Array | int) -> jax.Array:
        x_BTD = _looked_up(ends["embedding"], ids_BT, axes, part)
        return x_BTD * jnp.asarray(sizes.d_model**0.5, x_BTD.dtype) if sizes.scale_embedding else x_BTD

    def layer_function(has_window: bool) -> Callable[[Tree, jax.Array], jax.Array]:
        graph = nnx.graphdef(nnx.eval_shape(lambda: Block(settings(has_window), dtype, nnx.Rngs(0))))

        def layer(params: Tree, x_BTD: jax.Array) -> jax.Array:
            block = nnx.merge(graph, params)
            if not packed:
                return block(x_BTD)
            rows = num_rows(x_BTD.shape, axes.row_parts)
            x_BTD, marks = x_BTD[:, :rows], x_BTD[:, rows:]
            return jnp.concatenate([block(x_BTD, documents_of(marks, rows * axes.row_parts)), marks], axis=1)

        return layer

    def normed(ends: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(ends_graph, ends)
        x_BTD = x_BTD[:, : num_rows(x_BTD.shape, axes.row_parts)] if packed else x_BTD
        return model.norm(x_BTD.reshape(-1, sizes.d_model)), (model.embedding if tied else model.head)[...]

    def outputs(ends: Tree, x_BTD: jax.Array) -> jax.Array:
        return logits(*normed(ends, x_BTD), is_tied=tied, cap=cap).reshape(x_BTD.shape[0], -1, sizes.vocab_size)

    vocabulary = Vocabulary(sizes.vocab_size, axes.tp, axes.vocab_ranks)
    of_ends = {"is_tied": tied, "cap": cap}

    def head(ends: Tree, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_MD, w = normed(ends, x_BTD)
        if axes.num_devices == 1:
            loss = cross_entropy(x_MD, w, targets_BT.reshape(-1), **of_ends)
            return loss, (targets_BT != NO_TOKEN).sum().astype(loss.dtype)
        targets_M = own_targets(targets_BT)
        loss = cross_entropy(gather(x_MD, axes), w, targets_M, vocabulary=vocabulary, **of_ends)
        return loss, on_first((targets_M != NO_TOKEN).sum().astype(loss.dtype), axes)

    def own_targets(targets_BT: jax.Array) -> jax.Array:
        return own_tokens(targets_BT, axes, fill=NO_TOKEN).reshape(-1)

    def part_sums(ends: Tree, x_BTD: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x_MD, w = normed(ends, x_BTD)
        return part_log_sums(gather(x_MD, axes), w, part, vocabulary=vocabulary, **of_ends)

    def part_head(
        ends: Tree,
        x_BTD: jax.Array,
        targets_BT: jax.Array,
        log_sums_M: jax.Array,
        logits_MV: jax.Array | None,
        part: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        (x_MD, w), targets_M = normed(ends, x_BTD), own_targets(targets_BT)
        known = log_sums_M, logits_MV, part
        loss = part_cross_entropy(gather(x_MD, axes), w, targets_M, *known, vocabulary=vocabulary, **of_ends)
        number = on_first((targets_M != NO_TOKEN).sum().astype(loss.dtype), axes)
        return loss, jnp.where(part == 0, number, 0)  # it counts once

    parts = VocabularyParts(embed, part_sums, part_head) if axes.vocab_ranks > 1 else None
    function_of = {has_window: layer_function(has_window) for has_window in sorted(set(sizes.have_windows))}
    layers = tuple(function_of[has_window] for has_window in sizes.have_windows)
    stack = Stack(
        sizes.num_layers,
        init_ends,
        init_layer,
        embed if parts is None else over_ranks(parts)[0],
        layers[0] if len(function_of) == 1 else layers,
        head if parts is None else over_ranks(parts)[1],
        mixes_examples=False,
        outputs=outputs,
        divided=lambda axes: _stack(sizes, dtype, mix, rotate, packed, axes),
        has_vocabulary=True,
        parts=parts,
    )
    if axes.vocabulary_parts == 1 and lora is None:
        return stack
    params = jax.eval_shape(lambda: init(stack, 0))
    if lora is not None:
        stack = replace(stack, trainable={"ends": False, "layers": are_adapters(params["layers"])})
    return stack if axes.vocabulary_parts == 1 else replace(stack, sharding=_sharding(params, axes, sizes.kv_heads))


def _looked_up(table_VD: jax.Array, ids_BT: jax.Array, axes: StageAxes, part: jax.Array | int) -> jax.Array:
    """Return the embeddings of tokens; over tp and ranks a device has part of the table. Ranks return summands."""
    if axes.vocabulary_parts == 1:
        return table_VD[ids_BT]
    num_ids, d_model = table_VD.shape
    ids_BT = ids_BT - first_id(num_ids, axes.tp, part)
    is_here = (ids_BT >= 0) & (ids_BT < num_ids)
    x_BTD = jnp.where(is_here[..., None], table_VD[jnp.clip(ids_BT, 0, num_ids - 1)], 0)
    return scatter(x_BTD.reshape(-1, d_model), axes).reshape(ids_BT.shape[0], -1, d_model)


def _sharding(params: Tree, axes: StageAxes, num_kv_heads: int) -> Tree:
    """Return the PartitionSpecs over tp: columns and their biases, then rows; embedding and head by the vocabulary."""
    columns, rows = P(None, "tp"), P("tp")
    kv = columns if num_kv_heads >= axes.tp else P()
    of_module = {"query": columns, "key": kv, "value": kv, "out": rows, "up": columns, "gate": columns, "down": rows}

    def spec(path: tuple, _: Any) -> P:
        names = [key.key for key in path]
        if names[0] == "ends":
            return {"embedding": rows, "head": columns}.get(names[1], P())
        found = of_module.get(names[-2], P())
        if names[-1] in (A, B):  # of columns B is divided, of rows A
            return found if found == (columns if names[-1] == B else rows) else P()
        return P(*found[1:]) if names[-1] == "bias" else found

    return jax.tree_util.tree_map_with_path(spec, params)
