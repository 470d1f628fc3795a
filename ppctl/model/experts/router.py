"""The router of a mixture of experts: each token's experts, their weights, and the router's losses.

One formula serves Mixtral, Qwen2- and Qwen3-MoE, OLMoE, GLM-4.5, DeepSeek-V2 and -V3. Scores are
the softmax or sigmoid of the logits of all experts. A token takes the experts with the highest
score plus bias, within its best groups. Their weights are the scores without bias, normalized or
not.

The balance loss is computed for each sequence (DeepSeek-V3, equations 17 to 20). So, unlike a loss
over a microbatch, it does not depend on the division of the batch. Shape suffixes: M rows of this
device, E experts, K experts of a token, G groups, B sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.layer_inputs import attach_loss
from ppctl.model.layer_reports import report
from ppctl.model.parallel import StageAxes, own_part

EPSILON = 1e-20  # added to sums of sigmoid scores, as DeepSeek-V3 does


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes and variants of a mixture of experts; `moe_settings.Experts` explains the fields."""

    num_experts: int
    top_k: int
    width: int  # hidden width of an expert
    has_experts: tuple[bool, ...]  # flag of each layer
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    shared_width: int | None = None
    shared_gate: bool = False
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_update: float = 0.0
    dispatch: str = "gather"
    capacity: float | None = None
    kernel: str = "auto"
    # load of the fullest device relative to the mean, for predictions, which count products but
    # do not run them; None: products run
    counted: float | None = None


class Routed(NamedTuple):
    """The experts of a device's tokens."""

    x_MD: jax.Array  # input with the router's losses attached
    chosen_MK: jax.Array  # indices of each token's experts, int32
    weights_MK: jax.Array  # weights of these experts, in at least float32


def route(
    params: dict[str, jax.Array],
    x_MD: jax.Array,
    sizes: ExpertSizes,
    num_sequences: int,
    axes: StageAxes,
    *,
    is_counted: bool,
) -> Routed:
    """Return the experts of tokens; attach the router's losses and report its counts.

    params: kernel [D, E], bias [E]. num_sequences: number of sequences in the rows of all devices
    along tp and cp. is_counted: whether to report each expert's number of tokens.
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
    is_chosen_MKE = chosen_MK[..., None] == jnp.arange(sizes.num_experts)
    of_chosen = logits_ME if sizes.score == "softmax_chosen" else scores_ME
    weights_MK = jnp.where(is_chosen_MKE, of_chosen[:, None], 0).sum(-1)
    if sizes.score == "softmax_chosen":
        weights_MK = jax.nn.softmax(weights_MK)
    if sizes.normalize:
        epsilon = EPSILON if sizes.score == "sigmoid" else 0
        weights_MK = weights_MK / (weights_MK.sum(-1, keepdims=True) + epsilon)
    weights_MK = weights_MK * sizes.scale
    # 3. losses and counts
    is_chosen_ME = is_chosen_MKE.any(1).astype(wide)
    if sizes.balance_loss:
        loss = balance_loss(is_chosen_ME, shares_ME, sizes.top_k, num_sequences, axes)
        x_MD = attach_loss(x_MD, sizes.balance_loss * loss, name="balance_loss")
    if sizes.z_loss:
        loss = jnp.square(jax.nn.logsumexp(logits_ME, -1)).sum()
        x_MD = attach_loss(x_MD, sizes.z_loss * loss, name="z_loss")
    if is_counted:
        # the report must reach the output, or its counts are lost
        reported_E = report(params["bias"], is_chosen_ME.sum(0))
        weights_MK = weights_MK + 0 * reported_E.sum().astype(wide)
    return Routed(x_MD, chosen_MK, weights_MK)


def _chosen(scores_ME: jax.Array, sizes: ExpertSizes) -> jax.Array:
    """Return the experts of each token, best first, within its best groups."""
    if sizes.num_groups > 1:
        scores_MGE = scores_ME.reshape(len(scores_ME), sizes.num_groups, -1)
        best = jax.lax.top_k(scores_MGE, 2 if sizes.group_score == "top2" else 1)[0]
        groups_MG = jax.lax.top_k(best.sum(-1), sizes.top_groups)[1]
        is_kept_MG = (groups_MG[..., None] == jnp.arange(sizes.num_groups)).any(1)
        scores_ME = jnp.where(is_kept_MG[..., None], scores_MGE, -jnp.inf).reshape(scores_ME.shape)
    return jax.lax.top_k(scores_ME, sizes.top_k)[1]


def balance_loss(
    is_chosen_ME: jax.Array, shares_ME: jax.Array, top_k: int, num_sequences: int, axes: StageAxes
) -> jax.Array:
    """Return this device's summand of the balance loss, a sum over sequences.

    A sequence of T tokens adds T * sum_e f_e P_e; the sum over e is 1 for even loads. f_e is
    E / (K T) times the number of the sequence's tokens that chose e, and P_e is the mean of these
    T tokens' shares of e.
    """
    # 1. the sequence of each row
    num_rows, num_experts = shares_ME.shape
    # tokens of a sequence on all devices along tp
    num_tokens = num_rows * axes.row_parts // num_sequences
    rows = own_part(jnp.arange(num_rows * axes.row_parts), axes) if axes.divides_rows else None
    rows = jnp.arange(num_rows) if rows is None else rows
    is_in_BM = (rows // num_tokens == jnp.arange(num_sequences)[:, None]).astype(shares_ME.dtype)
    # 2. counts over all devices that hold the sequence, and this device's shares
    names = tuple(name for name in ("tp", "cp") if getattr(axes, name) > 1)
    counts_BE = jax.lax.stop_gradient(is_in_BM @ is_chosen_ME)
    counts_BE = jax.lax.psum(counts_BE, names) if names else counts_BE
    even = top_k * num_tokens * axes.cp / num_experts
    return (counts_BE / even * (is_in_BM @ shares_ME)).sum()
