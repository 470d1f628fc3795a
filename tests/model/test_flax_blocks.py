"""Blocks of Flax modules as layers: settings, constants, stacked parameters, shards over tp; and the
blocks that are refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from support.flax_models import (
    TOLERANCE,
    VOCAB,
    WIDTH,
    adamw,
    assert_close,
    batch_of,
    loss,
    variables,
)

import ppctl
from ppctl.errors import ConfigError


class Scale(nnx.Module):
    def __init__(self, *, rngs, factor=1.0):
        draw = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        with nnx.use_eager_sharding(False):  # the names are for ppctl
            how = {"param_dtype": jnp.float64, "kernel_init": draw}
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **how)
        self.factor = factor

    def __call__(self, x):
        return x + jnp.tanh(self.factor * self.linear(x))


class Rows(nnx.Module):
    """Blocks of rows of numbers."""

    def __init__(self, blocks):
        self.blocks = blocks

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


ROWS = {
    "inputs": np.random.default_rng(1).standard_normal((8, WIDTH)),
    "targets": np.random.default_rng(2).standard_normal((8, WIDTH)),
}


def squares(outputs, targets):
    return jnp.square(outputs - targets).sum(), jnp.asarray(targets.size, outputs.dtype)


def stack_of_rows(layers, **how):
    parts = {"embed": lambda m, x: x, "head": lambda m, x: x, "loss": squares}
    return ppctl.flax.stack(Rows(layers), **(parts | how))


def loss_of_rows(stack, **how):
    pipe = ppctl.pipeline(
        stack,
        how.pop("mesh", ppctl.mesh(pp=2)),
        how.pop("schedule", "1f1b"),
        optax.sgd(0.1),
        batch=ROWS,
        num_microbatches=2,
        dtype="float64",
        **how,
    )
    state = pipe.init()
    return float(pipe.loss(state, ROWS)), pipe, state


def test_blocks_with_other_settings_are_other_functions():
    """A block is not computed with the settings of the first."""
    rngs = nnx.Rngs(0)
    blocks = nnx.List([Scale(rngs=rngs, factor=factor) for factor in (1.0, 2.0, 1.0, 0.5)])
    stack = stack_of_rows(blocks)
    assert stack.layer[0] is stack.layer[2]
    assert len({*stack.layer}) == 3
    value, number = squares(Rows(blocks)(ROWS["inputs"]), ROWS["targets"])
    assert loss_of_rows(stack)[0] == pytest.approx(float(value / number), rel=TOLERANCE)
    alike = stack_of_rows(nnx.List([Scale(rngs=rngs) for _ in range(2)]))
    assert callable(alike.layer), "initializers that are made anew do not count as settings"


class Shifted(Scale):
    """A block with a constant of integers."""

    def __init__(self, shift, rngs):
        super().__init__(rngs=rngs)
        self.shift = nnx.Variable(jnp.full(WIDTH, shift))

    def __call__(self, x):
        return super().__call__(x + self.shift)


@pytest.mark.parametrize("shifts", [(1, 1), (0, 2)])
def test_constants_are_settings(shifts):
    made = lambda rngs: Rows(nnx.List([Shifted(shift, rngs) for shift in shifts]))
    parts = {"embed": lambda m, x: x, "head": lambda m, x: x, "loss": squares}
    stack = ppctl.flax.stack(made, **parts)
    assert isinstance(stack.layer, tuple) == (shifts[0] != shifts[1])
    found, pipe, state = loss_of_rows(stack)
    value, number = squares(pipe.flax_model(state)(ROWS["inputs"]), ROWS["targets"])
    assert found == pytest.approx(float(value / number), rel=TOLERANCE)


def test_stacked_blocks_are_layers():
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0)
    def made(rngs):
        return Scale(rngs=rngs)

    blocks = made(nnx.Rngs(0))
    stack = stack_of_rows(blocks)
    assert stack.num_layers == 4
    assert stack.options.sharding["layers"]["linear"]["kernel"] == P(None, "tp")
    graph, state = nnx.split(blocks)
    x = ROWS["inputs"]
    for l in range(4):
        x = nnx.merge(graph, jax.tree.map(lambda a, l=l: a[l], state))(x)
    value, number = squares(x, ROWS["targets"])
    found, pipe, state = loss_of_rows(stack)
    assert found == pytest.approx(float(value / number), rel=TOLERANCE)
    assert_close(variables(pipe.flax_model(state).blocks), variables(blocks))


def test_names_of_axes_become_shards_over_tp():
    stack = stack_of_rows(nnx.List([Scale(rngs=nnx.Rngs(l)) for l in range(2)]))
    assert stack.options.sharding["layers"]["linear"]["kernel"] == P(None, "tp")
    whole = loss_of_rows(stack)[0]
    divided, *_ = loss_of_rows(stack, mesh=ppctl.mesh(pp=2, tp=2), executor="mpmd")
    assert divided == pytest.approx(whole, rel=TOLERANCE)


def test_boxes_of_linen_become_shards_over_tp():
    class Rows(linen.Module):
        def setup(self):
            draw = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
            how = {"param_dtype": jnp.float64, "kernel_init": draw}
            self.blocks = [linen.Dense(WIDTH, **how) for _ in range(2)]

        def __call__(self, x):
            return self.blocks[1](self.blocks[0](x))

    given = Rows().init(jax.random.key(0), ROWS["inputs"])
    parts = {"embed": lambda m, x: x, "head": lambda m, x: x, "loss": squares}
    stack = ppctl.flax.stack(Rows(), given, **parts)
    assert stack.options.sharding["layers"]["kernel"] == P(None, "tp")
    value, number = squares(Rows().apply(given, ROWS["inputs"]), ROWS["targets"])
    assert loss_of_rows(stack)[0] == pytest.approx(float(value / number), rel=TOLERANCE)


# --- refused --------------------------------------------------------------------------------------


class Normed(nnx.Module):
    def __init__(self, *, rngs, **how):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=jnp.float64, **how)

    def __call__(self, x):
        return x + self.norm(x)


def test_batch_norm_is_refused_by_its_path_but_not_with_running_averages():
    blocks = lambda **how: nnx.List([Normed(rngs=nnx.Rngs(0), **how) for _ in range(2)])
    with pytest.raises(ConfigError, match=r"^blocks/0/norm/mean is a BatchStat .* GroupNorm"):
        loss_of_rows(stack_of_rows(blocks()))[1].compile()
    found = loss_of_rows(stack_of_rows(blocks(use_running_average=True)))
    found[1].step(found[2], ROWS)


def test_unequal_and_shared_blocks_are_refused_by_name():
    rngs = nnx.Rngs(0)
    with pytest.raises(
        ConfigError, match=r"^linear/bias is float64\[8\] in blocks/0, but missing in blocks/1"
    ):
        stack_of_rows(nnx.List([Scale(rngs=rngs), Normed(rngs=rngs)]))
    same = Scale(rngs=rngs)
    with pytest.raises(
        ConfigError, match=r"^blocks/0/linear/\w+ and blocks/1/linear/\w+ are the same"
    ):
        stack_of_rows(nnx.List([same, same]))
    with pytest.raises(ConfigError, match=r"^Rows has no modules layers\. Name them: blocks="):
        stack_of_rows(nnx.List([same]), blocks="layers")


def test_a_network_with_other_shapes_in_training_names_the_boundary():
    def apply(params, x, key=None):
        wide = ppctl.stage_boundary(x * params["b"] if key is None else jnp.tile(x * 2, (1, 2)))
        return wide @ params["w"][: wide.shape[1]]

    params = {"w": jnp.ones((2 * WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    network = ppctl.Network(lambda key: params, apply, squares)
    said = r"^At boundary 1 of apply float\d+\[2, 16\] cross with a key, but float\d+\[2, 8\] with"
    with pytest.raises(ConfigError, match=said):
        ppctl.pipeline(network, ppctl.mesh(pp=2), "1f1b", adamw(), batch=ROWS, num_microbatches=2)


@pytest.mark.parametrize("name", ["linen_module", "params", "run"])
def test_a_parameter_named_as_an_attribute_is_refused(name):
    class Named(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Embed(VOCAB, VOCAB, name=name)(tokens)

    made = Named().init(jax.random.key(0), batch_of()["inputs"])
    with pytest.raises(ConfigError, match=rf"^{name} is a parameter, and an attribute of ppctl's"):
        ppctl.flax.network(Named(), made, loss=loss)
