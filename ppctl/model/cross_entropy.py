"""Cross-entropy of a language model's head without the logits of all tokens at once.

Tokens are processed in chunks, and each chunk's gradient is computed together with its loss. So no
logits are kept between chunks, and no logits are computed twice.

If the ranks of a pipeline divide the vocabulary, loss and gradient need each token's softmax sum
over all parts. A device keeps its logits until these sums arrive if there are at most MOST_LOGITS;
otherwise it computes them again.

Shape suffixes: M tokens, K chunks, C tokens of a chunk, D d_model, V ids of the vocabulary, or of
this device's part.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppctl.model.parallel import shard_of

# maximum logits of a chunk, 512 MiB in float32; large, as each chunk reads w and its gradient
MOST_LOGITS = 2**27
LEAST_TOKENS = 1024  # minimum tokens a chunk, even if their logits exceed MOST_LOGITS
NO_TOKEN = -1  # target of a token without loss
NEVER = -1e30  # logit of a padding id


def perplexity(loss: float) -> float:
    """Return e**loss, or infinity if this is too large for a float.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


class HeadForm(NamedTuple):
    """The form of a head.

    is_tied: whether the head's matrix w is the embedding's [V, D]; else it is [D, V]. cap: soft cap
    of logits; None: no cap. size: number of ids in the vocabulary. num_ranks: number
    of parts of the vocabulary, one for each pipeline rank. tp devices divide each part.
    """

    is_tied: bool
    cap: float | None
    size: int
    tp: int = 1
    num_ranks: int = 1

    @property
    def num_parts(self) -> int:
        """Return the number of devices that divide the vocabulary."""
        return self.tp * self.num_ranks

    def num_ids(self, w: jax.Array) -> int:
        return w.shape[0 if self.is_tied else 1]


def first_id(num_ids: int, tp: int, part: jax.Array | int) -> jax.Array:
    """Return the first id of this device's shard of a vocabulary part.

    num_ids: number of ids in the shard. part: index of the part, which tp devices divide.
    """
    return part * (tp * num_ids) + shard_of(num_ids, "tp", tp)


def cross_entropy(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    head: HeadForm,
    log_sums_M: jax.Array | None = None,
    logits_MV: jax.Array | None = None,
    part: jax.Array | int = 0,
) -> jax.Array:
    """Return the sum over tokens of -log softmax(logits)[target] in nats, in at least float32.

    w: the head's matrix [D, V], or the embedding's [V, D] if tied. logits: x @ w in at least
    float32, or cap * tanh(x @ w / cap). Tokens with target NO_TOKEN add nothing. With a divided
    vocabulary w is this device's part, and the loss and its gradient for x are this device's
    summands. log_sums_M, logits_MV, part: if pipeline ranks divide the vocabulary, the log sums
    over all ids, the logits that `part_log_sums` returned, and the index of this rank's part.
    """
    return _loss(x_MD, w, targets_M, log_sums_M, logits_MV, part, head)


def part_log_sums(
    x_MD: jax.Array, w: jax.Array, part: jax.Array, head: HeadForm
) -> tuple[jax.Array, jax.Array | None]:
    """Return (log sums [M] of a part's logits, the logits or None if more than MOST_LOGITS)."""
    num_tokens, num_ids = x_MD.shape[0], head.num_ids(w)
    if num_tokens * num_ids <= MOST_LOGITS:
        logits_MV, _ = own_logits(x_MD, w, head, part)
        return log_sums(logits_MV, head.tp), logits_MV
    x_KCD, _ = in_chunks(x_MD, jnp.zeros(num_tokens, jnp.int32), num_ids)
    of_chunk = lambda x_CD: log_sums(own_logits(x_CD, w, head, part)[0], head.tp)  # noqa: E731
    return jax.lax.map(of_chunk, x_KCD).reshape(-1)[:num_tokens], None


def in_chunks(x_MD: jax.Array, targets_M: jax.Array, num_ids: int) -> tuple[jax.Array, jax.Array]:
    """Return (x, targets) in chunks, padded with NO_TOKEN. num_ids: number of logits a token."""
    num_tokens = x_MD.shape[0]
    size = max(LEAST_TOKENS, MOST_LOGITS // num_ids)
    num_chunks = -(-num_tokens // size)
    size = -(-num_tokens // num_chunks)
    padding = num_chunks * size - num_tokens
    x_KCD = jnp.pad(x_MD, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    targets_M = jnp.pad(targets_M, (0, padding), constant_values=NO_TOKEN)
    return x_KCD, targets_M.reshape(num_chunks, size)


def own_logits(
    x_MD: jax.Array, w: jax.Array, head: HeadForm, part: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """Return (logits [M, V] of this device's ids, its first id); NEVER for padding ids."""
    logits_MV, held = logits(x_MD, w, head), head.num_ids(w)
    first = first_id(held, head.tp, part)
    if held * head.num_parts == head.size:
        return logits_MV, first
    is_padding_V = first + jnp.arange(held) >= head.size
    return jnp.where(is_padding_V, NEVER, logits_MV), first


def log_sums(logits_MV: jax.Array, tp: int) -> jax.Array:
    """Return the logarithms [M] of the sums of exponentials over the ids of all tp devices."""
    if tp == 1:
        return jax.nn.logsumexp(logits_MV, axis=-1)
    largest_M = jax.lax.pmax(jax.lax.stop_gradient(logits_MV.max(-1)), "tp")
    return jnp.log(jax.lax.psum(jnp.exp(logits_MV - largest_M[:, None]).sum(-1), "tp")) + largest_M


def logits(x_MD: jax.Array, w: jax.Array, head: HeadForm) -> jax.Array:
    """Return the logits x @ w [M, V], soft-capped if head.cap is set, in at least float32."""
    dtype = jnp.promote_types(x_MD.dtype, jnp.float32)
    dims = (((1,), (1 if head.is_tied else 0,)), ((), ()))
    products = jax.lax.dot_general(x_MD, w, dims, preferred_element_type=dtype)
    return products if head.cap is None else head.cap * jnp.tanh(products / head.cap)


def loss_and_slopes(
    logits_CV: jax.Array,
    targets_C: jax.Array,
    log_sums_C: jax.Array,
    first: jax.Array,
    head: HeadForm,
) -> tuple[jax.Array, jax.Array]:
    """Return (this device's summand of the loss, gradient [C, V] of the whole loss).

    The gradient is with respect to x @ w. first: this device's first id.
    """
    is_token_C = targets_C != NO_TOKEN
    ids_CV = first + jax.lax.broadcasted_iota(targets_C.dtype, logits_CV.shape, 1)
    are_targets_CV = targets_C[:, None] == ids_CV
    losses_C = log_sums_C / head.num_parts - jnp.where(are_targets_CV, logits_CV, 0).sum(-1)
    slopes_CV = jnp.exp(logits_CV - log_sums_C[:, None]) - are_targets_CV
    g_CV = jnp.where(is_token_C[:, None], slopes_CV, 0)
    if head.cap is not None:
        # derivative of the cap; clipped, so that padding ids, whose logit is NEVER, get slope 0
        g_CV = g_CV * (1 - jnp.square(jnp.clip(logits_CV / head.cap, -1, 1)))
    return jnp.where(is_token_C, losses_C, 0).sum(), g_CV


def products(
    g_CV: jax.Array, x_CD: jax.Array, w: jax.Array, is_tied: bool, has_grad: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return (gradient of x, gradient of w), given g, the gradient of x @ w.

    The gradient of w is in at least float32; without has_grad it is None.
    """
    gx_CD = jax.lax.dot_general(g_CV, w, (((1,), (0 if is_tied else 1,)), ((), ())))
    if not has_grad:
        return gx_CD, None
    left, right = (g_CV, x_CD) if is_tied else (x_CD, g_CV)
    dtype = jnp.promote_types(x_CD.dtype, jnp.float32)
    dims = (((0,), (0,)), ((), ()))
    return gx_CD, jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _loss(*args: Any) -> jax.Array:
    return _computed(*args)[0]  # pyright: ignore


def _computed(
    x_MD: jax.Array,
    w: jax.Array,
    targets_M: jax.Array,
    log_sums_M: jax.Array | None,
    logits_MV: jax.Array | None,
    part: jax.Array | int,
    head: HeadForm,
    gradients: str = "",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return (loss, gradient of x, gradient of w), with None for gradients not requested.

    gradients: the gradients to compute: "", "x" or "xw".
    """
    num_tokens, num_ids = x_MD.shape[0], head.num_ids(w)

    # 1. one chunk of tokens
    def of_chunk(
        x_CD: jax.Array, targets_C: jax.Array, sums_C: Any, logits_CV: jax.Array | None
    ) -> tuple:
        if logits_CV is None:
            logits_CV, first = own_logits(x_CD, w, head, part)
        else:
            first = first_id(num_ids, head.tp, part)
        sums_C = log_sums(logits_CV, head.tp) if sums_C is None else sums_C
        loss, g_CV = loss_and_slopes(logits_CV, targets_C, sums_C, first, head)
        if not gradients:
            return loss, None, None
        return loss, *products(g_CV.astype(x_CD.dtype), x_CD, w, head.is_tied, "w" in gradients)

    if logits_MV is not None:
        return of_chunk(x_MD, targets_M, log_sums_M, logits_MV)
    # 2. all tokens, chunk by chunk
    x_KCD, targets_KC = in_chunks(x_MD, targets_M, num_ids)
    pad = lambda a: jnp.pad(a, (0, targets_KC.size - num_tokens)).reshape(targets_KC.shape)  # noqa: E731

    def add(sums: tuple, chunk: tuple) -> tuple[tuple, jax.Array | None]:
        x_CD, targets_C, sums_C = chunk
        loss, gx_CD, gw = of_chunk(x_CD, targets_C, sums_C, None)
        return jax.tree.map(jnp.add, sums, (loss, gw)), gx_CD

    dtype = jnp.promote_types(x_MD.dtype, jnp.float32)
    zeros = jnp.zeros((), dtype), jnp.zeros(w.shape, dtype) if "w" in gradients else None
    chunks = x_KCD, targets_KC, None if log_sums_M is None else pad(log_sums_M)
    (loss, gw), gx_KCD = jax.lax.scan(add, zeros, chunks)
    return loss, None if gx_KCD is None else gx_KCD.reshape(-1, x_MD.shape[1])[:num_tokens], gw


def _there(*args: Any) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    """Return (loss, residuals): the residuals are the gradients of x and w (None: w is frozen)."""
    value = lambda a: a.value  # noqa: E731
    is_leaf = lambda a: hasattr(a, "perturbed")  # noqa: E731
    values = [jax.tree.map(value, each, is_leaf=is_leaf) for each in args[:6]]
    loss, gx, gw = _computed(*values, *args[6:], gradients="xw" if args[1].perturbed else "x")  # pyright: ignore
    return loss, (gx, None if gw is None else gw.astype(values[1].dtype))


def _back(
    _: HeadForm, grads: tuple[jax.Array, jax.Array | None], g: jax.Array
) -> tuple[jax.Array | None, ...]:
    gx_MD, gw = grads  # gradients of the whole loss; its cotangent g is equal on all devices
    gw = None if gw is None else (g * gw).astype(gw.dtype)
    return (g * gx_MD).astype(gx_MD.dtype), gw, *[None] * 4


_loss.defvjp(_there, _back, symbolic_zeros=True)
