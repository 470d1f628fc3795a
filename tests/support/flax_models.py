"""Small models as Flax modules, and their training by plain Flax and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import ppctl

WIDTH, VOCAB, TOKENS = 8, 16, 6
TOLERANCE = 1e-10


def batch_of(size=8):
    """Sequences that a model learns: each id is the one before plus a step."""
    rng = np.random.default_rng(0)
    start, step = rng.integers(VOCAB, size=(size, 1)), rng.integers(1, 4, size=(size, 1))
    ids = ((start + step * np.arange(TOKENS + 1)) % VOCAB).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def loss(logits, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.sum(), jnp.asarray(losses.size, losses.dtype)


class Block(nnx.Module):
    """Attention and a perceptron, with dropout, and a sown loss if `sows`."""

    def __init__(self, rate=0.0, *, rngs, sows=False, remat=False):
        how = {"rngs": rngs, "param_dtype": jnp.float64}
        self.norm = nnx.LayerNorm(WIDTH, **how)
        self.attention = nnx.Linear(WIDTH, 3 * WIDTH, **how)  # nnx's computes in float32
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, **how)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, **how)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.sows, self.remat = sows, remat

    def __call__(self, x):
        q, k, v = jnp.split(self.attention(self.norm(x)), 3, axis=-1)
        is_seen = jnp.tri(x.shape[1], dtype=bool)
        scores = jnp.where(is_seen, jnp.einsum("bsd,btd->bst", q, k), -jnp.inf)
        x = x + self.dropout(jax.nn.softmax(scores) @ v)
        inner = nnx.remat(Block.inner) if self.remat else Block.inner
        return x + self.dropout(inner(self, x))

    def inner(self, x):
        y = self.up(x)
        if self.sows:
            self.sow(nnx.Intermediate, "small", 0.1 * jnp.square(y).mean())
        return self.down(nnx.gelu(y))


class Gpt(nnx.Module):
    """A small GPT with a tied head."""

    def __init__(self, layers=4, rate=0.0, *, rngs, marks=False, **how):
        self.token = nnx.Embed(VOCAB, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.place = nnx.Embed(TOKENS, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.first = nnx.Dropout(rate, rngs=rngs)
        self.blocks = nnx.List([Block(rate, rngs=rngs, **how) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.marks = marks

    def embed(self, tokens):
        return self.first(self.token(tokens) + self.place(jnp.arange(tokens.shape[1])))

    def head(self, x):
        return self.token.attend(self.norm(x))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.marks and number:
                x = ppctl.stage_boundary(x)
            x = block(x)
        return self.head(x)


def make(form="stack", *, model=None, **how):
    """(module, the model of ppctl made of it)."""
    model = Gpt(rngs=nnx.Rngs(0), marks=form == "network", **how) if model is None else model
    if form == "network":
        return model, ppctl.flax.network(model, loss=loss)
    return model, ppctl.flax.stack(model, embed=Gpt.embed, head=Gpt.head, loss=loss)


class LinenBlock(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, *, train):
        y = linen.gelu(linen.Dense(2 * WIDTH, param_dtype=jnp.float64)(x))
        self.sow("losses", "small", 0.1 * jnp.square(y).mean())
        y = linen.Dropout(self.rate, deterministic=not train)(y)
        return x + linen.Dense(WIDTH, param_dtype=jnp.float64)(y)


class LinenGpt(linen.Module):
    layers: int = 4
    rate: float = 0.0
    marks: bool = False

    def setup(self):
        self.token = linen.Embed(VOCAB, WIDTH, param_dtype=jnp.float64)
        self.blocks = [LinenBlock(self.rate) for _ in range(self.layers)]

    def embed(self, tokens):
        return self.token(tokens)

    def head(self, x):
        return self.token.attend(x)

    def __call__(self, tokens, *, train=False):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if self.marks and number:
                x = ppctl.stage_boundary(x)
            x = block(x, train=train)
        return self.head(x)


def make_linen(form="stack", **how):
    """(module, variables, the model of ppctl made of both)."""
    model = LinenGpt(marks=form == "network", **how)
    variables = model.init(jax.random.key(0), batch_of()["inputs"])
    if form == "network":
        call = lambda m, x, train: m(x, train=train)
        return model, variables, ppctl.flax.network(model, variables, loss=loss, call=call)
    parts = {"embed": LinenGpt.embed, "head": LinenGpt.head, "loss": loss}
    block = lambda block, x, train: block(x, train=train)
    return model, variables, ppctl.flax.stack(model, variables, block=block, **parts)


def adamw():
    mask = lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    # eps: gradients that are zero but for rounding have no effect
    return optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=mask)


def clipped():
    return optax.chain(optax.clip_by_global_norm(1.0), adamw())


def trained(model, steps=3):
    """(losses of steps, trained module) of plain Flax and Optax."""
    model = nnx.clone(model)
    update = nnx.Optimizer(model, clipped(), wrt=nnx.Param)

    @nnx.jit
    def step(model, update, batch):
        def mean(model):
            run = nnx.capture(lambda m, x: m(x), nnx.Intermediate)
            logits, sown = run(model, batch["inputs"])
            total, number = loss(logits, batch["targets"])
            return total / number + sum(map(jnp.sum, jax.tree.leaves(sown))), total / number

        (_, value), grads = nnx.value_and_grad(mean, has_aux=True)(model)
        update.update(model, grads)
        return value

    return [float(step(model, update, batch_of())) for _ in range(steps)], model


def variables(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), found, wanted)


class Heads(nnx.Module):
    """Attention of Flax as the blocks, in float64: it computes scores in float32."""

    def __init__(self, rngs):
        how = {"rngs": rngs, "param_dtype": jnp.float64}
        self.token = nnx.Embed(16, 16, **how)
        heads = [nnx.MultiHeadAttention(2, 16, decode=False, **how) for _ in range(2)]
        self.blocks = nnx.List(heads)


def heads_of_flax():
    parts = {"embed": lambda m, x: m.token(x), "head": lambda m, x: m.token.attend(x)}
    return ppctl.flax.stack(Heads, **parts, loss=ppctl.flax.next_token_loss)
