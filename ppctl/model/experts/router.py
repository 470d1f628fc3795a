"""The router of a mixture of experts: each token's experts, their weights, and the router's losses.

One formula serves Mixtral, Qwen2- and Qwen3-MoE, OLMoE, GLM-4.5, DeepSeek-V2 and -V3. Scores are
the softmax or sigmoid of the logits of all experts. A token takes the experts with the highest
score plus bias, within its best groups. Their weights are the scores without bias, normalized or
not.

The balance loss is computed for each sequence (DeepSeek-V3, equations 17 to 20), or each document
of packed sequences. So, unlike a loss over a microbatch, it does not depend on the division of the
batch. Losses and counts are sums over real tokens: padding is not routed. Executors divide the
losses by the number of real tokens (`StackOptions.divisors`).

Shape suffixes: M rows of this device, E experts, K experts of a token, G groups, S sequences.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ppctl.config.groups.moe_settings import Experts
from ppctl.model.layer_inputs import attach_loss
from ppctl.model.layer_reports import report
from ppctl.model.packed_sequences import Documents
from ppctl.model.parallel import StageAxes, own_part

EPSILON = 1e-20  # added to sums of sigmoid scores, as DeepSeek-V3 does


class Tokens(NamedTuple):
    """The sequences, or the documents of packed sequences, of a device's tokens."""

    sequence_M: jax.Array  # index of each token's sequence or document
    num_sequences: int  # bound on these indices
    is_real_M: jax.Array | None  # whether each token is not padding; None: all


def tokens_of(
    num_rows: int, num_sequences: int, documents: Documents | None, axes: StageAxes
) -> Tokens:
    """Return the tokens of a device's rows, which it may divide with other devices along tp."""
    # 1. all devices' rows, the tokens of one sequence after another
    number = num_rows * axes.row_parts
    sequence, is_real = jnp.arange(number) // (number // num_sequences), None
    if documents is not None:
        most = number // num_sequences + 1  # documents of a sequence
        sequence = most * sequence + documents.index_BT.reshape(-1)
        num_sequences, is_real = most * num_sequences, documents.is_real_BT.reshape(-1)
    # 2. this device's
    if axes.divides_rows:
        sequence = own_part(sequence, axes)
        is_real = None if is_real is None else own_part(is_real, axes)
    return Tokens(sequence, num_sequences, is_real)


class Routed(NamedTuple):
    """The experts of a device's tokens."""

    x_MD: jax.Array  # input with the router's losses attached
    chosen_MK: jax.Array  # indices of each token's experts, int32; E for padding
    weights_MK: jax.Array  # weights of these experts, in at least float32


def route(
    params: dict[str, jax.Array],
    x_MD: jax.Array,
    sizes: Experts,
    tokens: Tokens,
    axes: StageAxes,
    *,
    is_counted: bool,
) -> Routed:
    """Return the experts of tokens; attach the router's losses and report its counts.

    params: kernel [D, E], bias [E]. is_counted: whether to report each expert's number of tokens.
    """
    # 1. scores
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    logits_ME = jnp.matmul(x_MD, params["kernel"], preferred_element_type=wide)
    if sizes.score == "sigmoid":
        scores_ME = jax.nn.sigmoid(logits_ME)
        shares_ME = scores_ME / scores_ME.sum(-1, keepdims=True)
    else:
        scores_ME = shares_ME = jax.nn.softmax(logits_ME)
    # 2. the experts of each token, and their weights
    bias_E = params["bias"].astype(wide) if sizes.choice_bias else 0
    chosen_MK = _chosen(jax.lax.stop_gradient(scores_ME + bias_E), sizes)
    is_chosen_MKE = chosen_MK[..., None] == jnp.arange(sizes.number)
    of_chosen = logits_ME if sizes.score == "softmax_chosen" else scores_ME
    weights_MK = jnp.where(is_chosen_MKE, of_chosen[:, None], 0).sum(-1)
    if sizes.score == "softmax_chosen":
        weights_MK = jax.nn.softmax(weights_MK)
    if sizes.normalize:
        epsilon = EPSILON if sizes.score == "sigmoid" else 0
        weights_MK = weights_MK / (weights_MK.sum(-1, keepdims=True) + epsilon)
    weights_MK = weights_MK * sizes.scale
    # 3. losses and counts of real tokens
    real = lambda a, other: a if is_real_M is None else jnp.where(is_real_M[:, None], a, other)  # noqa: E731
    is_real_M = tokens.is_real_M
    is_chosen_ME = real(is_chosen_MKE.any(1), False).astype(wide)
    if sizes.balance_loss:
        loss = balance_loss(is_chosen_ME, shares_ME, tokens, axes)
        x_MD = attach_loss(x_MD, sizes.balance_loss * loss, name="balance_loss")
    if sizes.z_loss:
        squares_M1 = jnp.square(jax.nn.logsumexp(logits_ME, -1, keepdims=True))
        x_MD = attach_loss(x_MD, sizes.z_loss * real(squares_M1, 0).sum(), name="z_loss")
    if is_counted:
        # the report must reach the output, or its counts are lost
        reported_E = report(params["bias"], is_chosen_ME.sum(0))
        weights_MK = weights_MK + 0 * reported_E.sum().astype(wide)
    return Routed(x_MD, real(chosen_MK, sizes.number), weights_MK)


def _chosen(scores_ME: jax.Array, sizes: Experts) -> jax.Array:
    """Return the experts of each token, best first, within its best groups."""
    if sizes.num_groups > 1:
        scores_MGE = scores_ME.reshape(len(scores_ME), sizes.num_groups, -1)
        best = jax.lax.top_k(scores_MGE, 2 if sizes.group_score == "top2" else 1)[0]
        groups_MG = jax.lax.top_k(best.sum(-1), sizes.top_groups)[1]
        is_kept_MG = (groups_MG[..., None] == jnp.arange(sizes.num_groups)).any(1)
        scores_ME = jnp.where(is_kept_MG[..., None], scores_MGE, -jnp.inf).reshape(scores_ME.shape)
    return jax.lax.top_k(scores_ME, sizes.top_k)[1]


def balance_loss(
    is_chosen_ME: jax.Array, shares_ME: jax.Array, tokens: Tokens, axes: StageAxes
) -> jax.Array:
    """Return this device's summand of the balance loss, a sum over sequences.

    A sequence of T tokens adds T * sum_e f_e P_e; the sum over e is 1 for even loads. f_e is
    E / (K T) times the number of the sequence's tokens that chose e, and P_e is the mean of these
    T tokens' shares of e. Thus each token adds sum_e f_e times its share of e.
    """
    # counts over all devices that hold a sequence; sums of 0 and 1 are exact in any order
    chosen_ME = jax.lax.stop_gradient(is_chosen_ME)
    counts_SE = jax.ops.segment_sum(chosen_ME, tokens.sequence_M, tokens.num_sequences)
    names = tuple(name for name in ("tp", "cp") if getattr(axes, name) > 1)
    counts_SE = jax.lax.psum(counts_SE, names) if names else counts_SE
    even_S1 = jnp.maximum(counts_SE.mean(-1, keepdims=True), 1 / counts_SE.shape[1])  # K T / E
    return ((counts_SE / even_S1)[tokens.sequence_M] * shares_ME).sum()
