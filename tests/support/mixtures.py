"""The oracle of executors: a mixture whose experts compute every token, with its losses written out,
and three steps of AdamW on it.

Attention, embedding and head are those of a dense model, which other tests compare. Shape suffixes
as in the model: M tokens, E experts, B sequences.
"""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.cases import make_params, state_of

import ppctl
from ppctl.data.token_examples import PADDING

TOLERANCE, STEPS, RATE = 1e-10, 3, 0.01
SIZES = {"num_layers": 4, "d_model": 8, "num_heads": 2, "mlp_width": 6, "vocab_size": 16}
SIZES |= {"activation": "swiglu", "dtype": jnp.float64}
LOSSES = {"balance_loss": 0.1, "z_loss": 0.01}
BATCH, TOKENS = 32, 8
MIXTURES = {
    "softmax": {"num_experts": 8, "top_k": 2, **LOSSES},
    "chosen": {"num_experts": 8, "top_k": 3, "score": "softmax_chosen", "normalize": False},
    "sigmoid": {
        "num_experts": 8,
        "top_k": 3,
        "score": "sigmoid",
        "scale": 2.5,
        "choice_bias": True,
        "bias_update": RATE,
        "num_groups": 4,
        "top_groups": 2,
        "group_score": "top2",
        **LOSSES,
    },
    "dense between": {
        "num_experts": 8,
        "top_k": 2,
        "width": 5,
        "shared_width": 4,
        "shared_gate": True,
        "first_dense": 1,
        "period": 2,
        "choice_bias": True,
        "bias_update": RATE,
        **LOSSES,
    },
}
USUAL = {"score": "softmax", "normalize": True, "scale": 1.0, "num_groups": 1, "first_dense": 0}
USUAL |= {"period": 1, "balance_loss": 0.0, "z_loss": 0.0, "bias_update": 0.0}


@dataclass(frozen=True)
class Written:
    """A mixture with parameters of a separate form, whole on one device."""

    moe: dict
    packed: bool = False

    def stack(self, **moe):
        return ppctl.transformer(**SIZES, moe=self.moe | moe, packed=self.packed)

    def losses(self, params, batch):
        """(mean over targets and means over real tokens, (each loss, counts [layers, E]))."""
        moe, dense = USUAL | self.moe, ppctl.transformer(**SIZES, packed=self.packed)
        documents = documents_of(batch["inputs"])
        num_tokens, sums = batch["inputs"].shape[1], {"balance_loss": 0.0, "z_loss": 0.0}
        x, counts = dense.embed(params["embed_head"], batch["inputs"]), []
        for l in range(dense.num_layers):
            w = jax.tree.map(lambda a, l=l: a[l], params["layers"])
            names = ("attention", "attention_norm", "mlp_norm")
            own = {name: w[name] for name in names}
            if l < moe["first_dense"] or (l + 1) % moe["period"]:
                x = dense.layer(own | {"mlp": w["mlp"]}, x)
                counts.append(jnp.zeros(moe["num_experts"]))
                continue
            none = {name: {"kernel": jnp.zeros_like(a[0])} for name, a in w["experts"].items()}
            x = dense.layer(own | {"mlp": none}, x)  # attention with its residual
            rows = x[:, :num_tokens]
            rms = jnp.sqrt(jnp.square(rows).mean(-1, keepdims=True) + 1e-6)
            y, counted, added = mixture(w, rows / rms * w["mlp_norm"]["scale"], documents, moe)
            x = x.at[:, :num_tokens].add(y)
            counts.append(counted)
            sums = {name: sums[name] + added[name] for name in sums}
        main, number = dense.head(params["embed_head"], x, batch["targets"])
        num_real = (documents >= 0).sum()
        losses = {name: a / num_real for name, a in sums.items() if moe[name]}
        losses |= {"loss": main / number}
        return sum(losses.values()), (losses, jnp.stack(counts))


def mlp(w, x):
    up = x @ w["up"]["kernel"]
    return (jax.nn.silu(x @ w["gate"]["kernel"]) * up) @ w["down"]["kernel"]


def documents_of(inputs):
    """The number of each token's document in its sequence; -1 for padding."""
    starts = jnp.cumsum(inputs < 0, 1)
    is_in = starts[:, None] == jnp.arange(TOKENS + 1)[:, None]
    is_padding = (is_in & (inputs == PADDING)[:, None]).any(2)
    return jnp.where(jnp.take_along_axis(is_padding, starts, 1), -1, starts)


def mixture(w, x_BTD, documents_BT, moe):
    """(y, real tokens by expert [E], the sums of losses by name)."""
    # 1. scores, experts and weights of tokens
    num_experts, top_k = moe["num_experts"], moe["top_k"]
    logits = x_BTD @ w["router"]["kernel"]
    of_all = {"sigmoid": jax.nn.sigmoid}.get(moe["score"], jax.nn.softmax)(logits)
    chosen = chosen_of(of_all + (w["router"]["bias"] if "choice_bias" in moe else 0), moe)
    if moe["score"] == "softmax_chosen":
        weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
    else:
        weights = jnp.where(chosen, of_all, 0)
    if moe["normalize"]:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * moe["scale"]
    # 2. every expert computes every token
    experts = {name: {"kernel": a} for name, a in w["experts"].items()}
    outputs_E = jax.vmap(mlp, (0, None))(experts, x_BTD)
    y = (jnp.moveaxis(weights, -1, 0)[..., None] * outputs_E).sum(0)
    if "shared" in w:
        shared = mlp(w["shared"], x_BTD)
        gate = w["shared_gate"]["kernel"] if "shared_gate" in w else None
        y = y + (shared if gate is None else shared * jax.nn.sigmoid(x_BTD @ gate))
    # 3. losses: of each document of each sequence, times its tokens; of each token
    shares = of_all / of_all.sum(-1, keepdims=True)
    is_in = (documents_BT == jnp.arange(TOKENS + 1)[:, None, None])[..., None]
    num_tokens = jnp.maximum(is_in.sum(2), 1)
    f = num_experts / (top_k * num_tokens) * (chosen * is_in).sum(2)
    balance = (num_tokens * f * (shares * is_in).sum(2) / num_tokens).sum()
    is_real = documents_BT >= 0
    z = jnp.square(jax.nn.logsumexp(logits, -1)) * is_real
    losses = {"balance_loss": moe["balance_loss"] * balance, "z_loss": moe["z_loss"] * z.sum()}
    return y, (chosen * is_real[..., None]).sum((0, 1)), losses


def chosen_of(scores, moe):
    """Whether each token chose each expert."""
    if moe["num_groups"] > 1:
        groups = scores.reshape(*scores.shape[:-1], moe["num_groups"], -1)
        best = jnp.sort(groups, -1)[..., -2:].sum(-1)
        rank = jnp.argsort(jnp.argsort(-best))
        kept = jnp.where((rank < moe["top_groups"])[..., None], groups, -jnp.inf)
        scores = kept.reshape(scores.shape)
    return jnp.argsort(jnp.argsort(-scores)) < moe["top_k"]


def make_batch(packed=False):
    """A batch with masked targets; packed: also with documents of several lengths, and padding."""
    tokens = np.random.default_rng(0).integers(SIZES["vocab_size"], size=(2, BATCH, TOKENS))
    inputs, targets = tokens.astype(np.int32)
    targets[::3, :5] = -1
    if packed:
        inputs[:, 3], targets[:, 2] = ~inputs[:, 3], -1
        for row, start in enumerate(np.arange(BATCH) * 5 % (2 * TOKENS)):
            inputs[row, start : start + 1], targets[row, start:] = PADDING, -1
        inputs[4, 6] = ~inputs[4, 6]  # a document after padding
    return {"inputs": inputs, "targets": targets}


def set_bias(params, bias):
    layers = params["layers"]
    router = layers["router"] | {"bias": bias}
    return params | {"layers": layers | {"router": router}}


OPTIMIZER, CLIP_NORM = optax.adamw(1e-2, weight_decay=0.1), 0.05


def trained(written, params, batch):
    """(losses and norm of each step, gradients of the first with counts, parameters at the end)."""
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), OPTIMIZER)
    rate = written.moe.get("bias_update", 0)

    @jax.jit
    def step(params, moments):
        of = jax.value_and_grad(written.losses, has_aux=True)
        (_, (losses, counts)), grads = of(params, batch)  # the choice has no gradient
        numbers = {"grad_norm": optax.tree.norm(grads), "counts": {"router/bias": counts}}
        updates, moments = optimizer.update(grads, moments, params)
        old = params["layers"]["router"]["bias"]
        bias = old + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts)
        params = set_bias(optax.apply_updates(params, updates), bias)
        return losses | numbers, set_bias(grads, counts), params, moments

    moments, metrics, first = optimizer.init(params), [], None
    for _ in range(STEPS):
        measured, grads, params, moments = step(params, moments)
        metrics.append(measured)
        first = first or grads
    return metrics, first, params


@cache
def expected(name, packed):
    """(parameters, batch, what `trained` gives) of a mixture."""
    written = Written(MIXTURES[name], packed)
    params = jax.tree.map(jnp.asarray, make_params(written.stack()))
    batch = make_batch(packed)
    return params, batch, trained(written, params, batch)


def error(found, expected):
    """The largest difference of a leaf, relative to its largest number."""

    def of_leaf(a, b):
        a, b = np.asarray(a), np.asarray(b)
        return np.abs(a - b).max() / (np.abs(b).max() or 1.0)

    return max(jax.tree.leaves(jax.tree.map(of_leaf, found, expected)))


def check(mesh, mixture="softmax", packed=False, dispatch="gather", steps_only=False, **how):
    """Compare gradients, counts, and losses and parameters after some steps.

    steps_only: compile no program for gradients, which show in the norm and in AdamW's steps.
    """
    params, batch, (metrics, grads, trained_params) = expected(mixture, packed)
    stack = Written(MIXTURES[mixture], packed).stack(dispatch=dispatch)
    how = {"optimizer": OPTIMIZER, "clip_norm": CLIP_NORM, "num_microbatches": 4} | how
    pipe = ppctl.pipeline(stack, ppctl.mesh(**mesh), batch=batch, dtype=jnp.float64, **how)
    state = state_of(pipe, params)
    if not steps_only:
        loss, found = pipe.loss_and_grads(state, batch)
        bias = found["layers"]["router"]["bias"]
        np.testing.assert_array_equal(bias, grads["layers"]["router"]["bias"])
        assert error((loss, found), (metrics[0]["loss"], grads)) <= TOLERANCE
    for wanted in metrics:
        state, measured = pipe.step(state, batch)
        assert error(measured, wanted) <= TOLERANCE
    assert error(pipe.to_natural(state)["params"], trained_params) <= TOLERANCE
