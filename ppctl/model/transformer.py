"""Decoder-only transformer on the stack protocol.

Models: Llama 2 and 3, Qwen 2, 2.5 and 3, Mistral, SmolLM 2, Gemma 2 and 3; mixtures of experts:
Mixtral, OLMoE, Qwen 2 and 3, GLM 4.5.

A sequence may hold several packed documents, and padding (`packed_sequences`).

Shape suffixes: B batch, T tokens, M = B*T, D d_model, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.errors import ConfigError, setting
from ppctl.model.attention.attention_kernels import Mix, attention
from ppctl.model.attention.attention_scores import Scoring
from ppctl.model.attention.grouped_query import GroupedQuery
from ppctl.model.attention.rotary_positions import Rotate, rotate
from ppctl.model.cross_entropy import (
    NO_TOKEN,
    HeadForm,
    cross_entropy,
    first_id,
    logits,
    own_logits,
    part_log_sums,
)
from ppctl.model.experts.expert_layer import (
    CHOICE_BIAS,
    counted_updates,
    expert_specs,
    used_layers,
    without_unused,
)
from ppctl.model.layer_parts import BlockDropout, new_norm, normed, specs_over_tp
from ppctl.model.layer_reports import Updates
from ppctl.model.lora import Lora, are_adapters, with_adapters
from ppctl.model.packed_sequences import PADDING, Documents, num_rows, split_starts, with_starts
from ppctl.model.parallel import (
    WHOLE,
    StageAxes,
    gather,
    on_first,
    own_tokens,
    scatter,
    whole_sequences,
)
from ppctl.model.random_keys import drawing
from ppctl.model.stack import DividedStack, Layers, Stack, StackOptions, Tree, VocabularyParts
from ppctl.model.transformer_blocks import Block, new_block

EMBED_STD = 0.02


def transformer(
    sizes: Architecture,
    *,
    dtype: jnp.dtype,
    mix: Mix = partial(attention, "auto", None),  # noqa: B008 no arrays
    rotate: Rotate = rotate,
    packed: bool = False,
    device: Any = None,
    lora: Lora | None = None,
    imbalance: float | None = None,
) -> Stack:
    """Return the stack of a language model: num_layers pre-norm blocks between embedding and head.

    inputs and targets are int32 [B, T], ids below vocab_size, for any T; x is [B, T, d_model]. The
    loss is the cross-entropy of each token in nats, in at least float32. Tokens with target
    NO_TOKEN are left out of the sum of losses and of their number. The layers are one function, or
    a tuple of functions if their windows differ or only some have experts.

    Args:
        sizes: Sizes and variants, with vocab_size.
        dtype: Dtype of the parameters.
        mix: Function from a stage's axes and a scoring to attention.
        rotate: Function that turns queries and keys by their positions.
        packed: Whether a sequence may hold several documents; x then has rows of their marks.
        device: Target device, which selects kernels of experts; None: the first attached one.
        lora: Adapters of the blocks' linear maps. Only they are trained.
        imbalance: For predictions: see `StackOptions.counted`. None: experts run.

    Raises:
        ConfigError: Heads, MLP widths or experts do not fit the mesh axes. Other misfits fail in
            tracing, with the error of the operation.
    """
    if lora is not None:
        sizes.moe.check_frozen()
    return _Transformer(sizes, dtype, mix, rotate, packed, device, lora, imbalance).stack


@dataclass(frozen=True, eq=False)
class _Transformer:
    """The functions of a transformer on one device of a divided stage."""

    sizes: Architecture
    dtype: jnp.dtype
    mix: Mix
    rotate: Rotate
    packed: bool
    device: Any
    lora: Lora | None
    imbalance: float | None
    axes: StageAxes = WHOLE

    @property
    def stack(self) -> Stack:
        parameters = self.sizes.num_layers, self.init_embed_head, self.init_layer
        options = StackOptions(
            outputs=self.outputs,
            mixes_examples=False,
            rounded_weights=self._rounded_weights,
            check_batch=lambda *batch: _check_tokens(self.vocab_size, self.packed, *batch),
            divided=self.divided,
            updates=self._updates,
            keep_dtype=(CHOICE_BIAS,) if any(self.sizes.has_experts) else (),
            divisors=num_tokens,
            used_layers=used_layers(self.sizes),
        )
        stack = Stack(*parameters, self.embed, self.layers(), self.head, options)
        if self.lora is None:
            return stack
        params = stack.param_shapes
        trainable = {"embed_head": False, "layers": are_adapters(params["layers"])}
        return stack.with_options(trainable=trainable)

    @property
    def vocab_size(self) -> int:
        assert self.sizes.vocab_size is not None, "the model or its data give the number of tokens"
        return self.sizes.vocab_size

    @property
    def _updates(self) -> Updates:
        if self.lora is not None or not any(self.sizes.has_experts):
            return {}  # with adapters, all other parameters are frozen
        return counted_updates(self.sizes.moe)

    @property
    def _rounded_weights(self) -> dict[str, int]:
        maps = () if self.sizes.linear_dtype is None else self.sizes.linear_maps
        return {f"{each.path}/kernel": -1 if each.divided == "inputs" else -2 for each in maps}

    def init_layer(self, key: jax.Array, l: jax.Array) -> Tree:
        layer = new_block(self.sizes, drawing(key, self.dtype))
        if any(self.sizes.has_experts) and not all(self.sizes.has_experts):
            layer = without_unused(layer, jnp.asarray(self.sizes.has_experts)[l])
        if self.lora is None:
            return layer
        return with_adapters(layer, self.lora, self.sizes.linear_maps, key)

    def init_embed_head(self, key: jax.Array) -> Tree:
        sizes, draw = self.sizes, drawing(key, self.dtype)
        normal, D, V = jax.nn.initializers.normal(EMBED_STD), sizes.d_model, self.vocab_size
        params = {"embedding": draw(normal, V, D), "norm": new_norm(D, sizes, draw)}
        return params if sizes.tied else params | {"head": draw(normal, D, V)}

    # embedding

    def embed(self, embed_head: Tree, inputs_BT: jax.Array, part: jax.Array | int = 0) -> jax.Array:
        axes = self.axes
        if any(self.sizes.has_experts):
            _check_no_padding(inputs_BT.shape[1], axes)
        if not self.packed:
            return self._embed_ids(embed_head, own_tokens(inputs_BT, axes), part)
        ids_BT, marks_BT = split_starts(inputs_BT)
        marks_BT = own_tokens(marks_BT, axes)
        if axes.vocab_parts:  # marks only in part 0, as ranks' results are summed
            marks_BT = jnp.where(part == 0, marks_BT, 0)
        return with_starts(self._embed_ids(embed_head, own_tokens(ids_BT, axes), part), marks_BT)

    def _embed_ids(self, embed_head: Tree, ids_BT: jax.Array, part: jax.Array | int) -> jax.Array:
        """Return the embeddings of this device's tokens; with vocabulary parts, its summands."""
        axes, table_VD = self.axes, embed_head["embedding"]
        if axes.parts(("pp", "tp")) == 1:
            x_BTD = table_VD[ids_BT]
        else:
            num_ids, d_model = table_VD.shape
            ids_BT = ids_BT - first_id(num_ids, axes.tp, part)
            is_here = (ids_BT >= 0) & (ids_BT < num_ids)
            x_BTD = jnp.where(is_here[..., None], table_VD[jnp.clip(ids_BT, 0, num_ids - 1)], 0)
            rows = scatter(x_BTD.reshape(-1, d_model), axes)
            x_BTD = rows.reshape(ids_BT.shape[0], -1, d_model)
        if not self.sizes.traits.scale_embedding:
            return x_BTD
        return x_BTD * jnp.asarray(self.sizes.d_model**0.5, x_BTD.dtype)

    def divided(self, axes: StageAxes) -> DividedStack:
        """Return the functions on one device of a stage that is divided over axes."""
        if self.packed and axes.cp > 1:
            raise ConfigError(
                f"{setting('mesh.cp', axes.cp)} divides a sequence over devices, and no attention "
                "kernel keeps packed documents apart across devices. Use "
                f"{setting('mesh.cp', 1)}, or {setting('data.packing', 'false', 'packed=False')}."
            )
        sizes, divides_rows = self.sizes, axes.divides_rows
        sizes.check_divides(axes.tp, axes.cp, axes.ep, divides_rows=divides_rows)
        part, sharding, parts = replace(self, axes=axes), None, None
        if axes.parts(("pp", "ep", "tp")) > 1:
            params = self.stack.param_shapes
            sharding = _sharding(params, axes, self.sizes)
        if axes.vocab_parts:
            parts = VocabularyParts(part.embed, part.part_sums, part.head)
        functions = part.embed, part.layers(), part.head
        return DividedStack(*functions, sharding, parts, part.whole_outputs)

    # layers

    def layers(self) -> Layers:
        """Return the function of all layers, or a tuple if their windows or experts differ."""
        kinds = [*zip(self.sizes.windows, self.sizes.has_experts, strict=True)]
        function_of = {kind: self.layer(*kind) for kind in dict.fromkeys(kinds)}
        layers = tuple(function_of[kind] for kind in kinds)
        return layers[0] if len(function_of) == 1 else layers

    def layer(
        self, window: int | None, has_experts: bool
    ) -> Callable[[Tree, jax.Array], jax.Array]:
        """Return the function of the layers with this window, and with or without experts."""
        sizes, axes, lora = self.sizes, self.axes, self.lora
        rope = sizes.rope if window is None else sizes.rope.of_windows
        turn = partial(self.rotate, rope=rope, axes=axes)
        attend = GroupedQuery(sizes, self.mix(axes, Scoring.of(sizes, window)), turn, axes)
        maps = {each.path: each for each in sizes.linear_maps}
        block = Block(sizes, maps, attend, axes, lora, has_experts, self.device, self.imbalance)

        def with_key(params: Tree, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
            rows = num_rows(x_BTD.shape, axes.row_parts) if self.packed else x_BTD.shape[1]
            drop = BlockDropout(sizes.dropout, lora, axes, key, rows)
            if not self.packed:
                return block(params, x_BTD, None, drop)
            x_BTD, marks = x_BTD[:, :rows], x_BTD[:, rows:]
            x_BTD = block(params, x_BTD, Documents.of(marks, rows * axes.row_parts), drop)
            return jnp.concatenate([x_BTD, marks], axis=1)

        def layer(params: Tree, x_BTD: jax.Array) -> jax.Array:
            return with_key(params, x_BTD)

        drops = sizes.dropout or (lora is not None and lora.dropout)
        return with_key if drops else layer

    # head

    @property
    def _head(self) -> HeadForm:
        sizes, axes = self.sizes, self.axes
        divided = self.vocab_size, axes.tp, max(1, axes.vocab_parts)
        return HeadForm(sizes.tied, sizes.logit_softcap, *divided)

    def _normed(self, embed_head: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (normed rows [M, D], the head's matrix)."""
        x_BTD = x_BTD[:, : num_rows(x_BTD.shape, self.axes.row_parts)] if self.packed else x_BTD
        x_MD = normed(embed_head["norm"], x_BTD.reshape(-1, self.sizes.d_model), self.sizes)
        return x_MD, embed_head["embedding" if self.sizes.tied else "head"]

    def outputs(self, embed_head: Tree, x_BTD: jax.Array) -> jax.Array:
        logits_MV = logits(*self._normed(embed_head, x_BTD), self._head)
        return logits_MV.reshape(x_BTD.shape[0], -1, self.vocab_size)

    def whole_outputs(self, embed_head: Tree, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Return the logits [B, T, V], gathered from the devices of the stage."""
        (x_MD, w), axes = self._normed(embed_head, x_BTD), self.axes
        logits_MV, _ = own_logits(gather(x_MD, axes), w, self._head)
        if axes.tp > 1:
            logits_MV = jax.lax.all_gather(logits_MV, "tp", axis=1, tiled=True)
        logits_BTV = logits_MV[:, : self.vocab_size].reshape(len(x_BTD), -1, self.vocab_size)
        return whole_sequences(logits_BTV, axes, targets_BT.shape[1])

    def head(
        self, embed_head: Tree, x_BTD: jax.Array, targets_BT: jax.Array, *known: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, number of losses). known: (log sums [M], kept logits, part).

        known is given if pipeline ranks divide the vocabulary, see `VocabularyParts.head`.
        """
        (x_MD, w), axes = self._normed(embed_head, x_BTD), self.axes
        targets_M = own_tokens(targets_BT, axes, fill=NO_TOKEN).reshape(-1)
        loss = cross_entropy(gather(x_MD, axes), w, targets_M, self._head, *known)
        number = on_first((targets_M != NO_TOKEN).sum().astype(loss.dtype), axes)
        # ranks' numbers are summed, so only part 0 counts
        return loss, jnp.where(known[2] == 0, number, 0) if known else number

    def part_sums(
        self, embed_head: Tree, x_BTD: jax.Array, part: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return (log sums [M] of a part's logits, the logits [M, V] or None)."""
        x_MD, w = self._normed(embed_head, x_BTD)
        return part_log_sums(gather(x_MD, self.axes), w, part, self._head)


def _sharding(params: Tree, axes: StageAxes, sizes: Architecture) -> Tree:
    """Return the PartitionSpecs of parameters: experts over ep and tp, all others over tp.

    tp divides the columns of the first matrices of attention and MLP, the rows of the last, and the
    vocabulary of embedding and head.
    """
    specs = {"embed_head/embedding": P("tp"), "embed_head/head": P(None, "tp")}
    for part in (*sizes.linear_maps, *sizes.attention_form.norms):
        specs |= {f"layers/{path}": each for path, each in specs_over_tp(part, axes.tp).items()}

    def spec(path: tuple, _: Any) -> P:
        name = "/".join(key.key for key in path)
        is_expert = name.startswith("layers/experts/")
        return expert_specs(axes) if is_expert else specs.get(name, P())

    return jax.tree_util.tree_map_with_path(spec, params)


def num_tokens(inputs_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (number of targets, number of real tokens): see `StackOptions.divisors`."""
    is_real_BT = Documents(split_starts(inputs_BT)[1]).is_real_BT
    return (targets_BT != NO_TOKEN).sum(), is_real_BT.sum()


def _check_tokens(size: int, packed: bool, inputs_BT: Any, targets_BT: Any) -> None:
    """Raise ConfigError for dtypes, or values of NumPy arrays, that are not ids below `size`."""
    lowest = {"inputs": -size if packed else 0, "targets": NO_TOKEN}
    for name, ids_BT in (("inputs", inputs_BT), ("targets", targets_BT)):
        if ids_BT is None:
            continue
        if not jnp.issubdtype(ids_BT.dtype, jnp.integer):
            raise ConfigError(f"{name} are {ids_BT.dtype}, not token ids. Use int32.")
        if not isinstance(ids_BT, np.ndarray) or not ids_BT.size:
            continue
        if packed and name == "inputs":
            ids_BT = np.where(ids_BT == PADDING, 0, ids_BT)
        least, most = int(ids_BT.min()), int(ids_BT.max())
        if least < lowest[name] or most >= size:
            raise ConfigError(
                f"{name} hold {least if least < lowest[name] else most}, but token ids are "
                f"0..{size - 1} (vocab_size={size}). Use {lowest[name]}..{size - 1}"
                f"{', where -1 is no target' if name == 'targets' else ''}."
            )


def _check_no_padding(num_tokens: int, axes: StageAxes) -> None:
    """Raise ConfigError for sequences that need padding, which experts would count as tokens."""
    padded = axes.padded(num_tokens)
    if padded != num_tokens:
        raise ConfigError(
            f"sequences of {num_tokens} tokens are padded to {padded} for {axes.text}, and padding "
            f"would be sent to experts and counted. Use {setting('model.seq_len', padded)}."
        )
