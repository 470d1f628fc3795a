"""Modules of NNX around trees of parameters: of a `Stack`, and of a module of `flax.linen`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from ppctl.errors import ConfigError
from ppctl.model.random_keys import key_of_seed, names_key, without_key, wrapped
from ppctl.model.stack import Stack, init, num_examples

Tree = Any
LEAVES = linen.Partitioned | nnx.Variable  # leaves of a tree of parameters, besides arrays
LOSSES = "losses"  # name of the collection of sown losses


def sown_scalars(sown: Tree) -> dict[str, jax.Array]:
    """Return the sums of the floating scalars in a tree of sown values, by name."""
    sums: dict[str, jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(sown):
        value, name = jnp.asarray(leaf), [key.key for key in path if hasattr(key, "key")][-1]
        if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
            sums[name] = sums[name] + value if name in sums else value
    return sums


class TreeModule(nnx.Module):
    """A module whose attributes are the parts of a tree of parameters, by their names."""

    def __init__(self, params: Tree, seed: int):
        """Raise ConfigError if a parameter has the name of an attribute that exists by now."""
        self.param_names = tuple(params)
        self.random_stream = nnx.RngStream(wrapped(key_of_seed(seed)), tag="dropout")
        for name, tree in params.items():
            if name in vars(self) or hasattr(type(self), name):
                raise ConfigError(
                    f"{name} is a parameter, and an attribute of ppctl's {type(self).__name__}. "
                    "Rename the parameter."
                )
            leaves = jax.tree.map(_param, tree, is_leaf=lambda a: isinstance(a, LEAVES))
            setattr(self, name, nnx.data(leaves))

    @property
    def params(self) -> Tree:
        """The parameters as arrays."""
        names = (name for name in self.param_names if name in vars(self))
        return nnx.as_pure({name: getattr(self, name) for name in names})


def _param(leaf: Any) -> nnx.Variable:
    if isinstance(leaf, nnx.Variable):
        return leaf
    value, names = (leaf.value, leaf.names) if isinstance(leaf, linen.Partitioned) else (leaf, None)
    return nnx.Param(jnp.asarray(value), eager_sharding=False, out_sharding=names)


# --- a stack ------------------------------------------------------------------------------------


class StackPart(TreeModule):
    """A layer of a stack, or its embedding and head."""

    def __init__(self, params: Tree, functions: tuple[Callable[..., Any], ...], seed: int):
        """functions: of (params, inputs), and of the examples' keys if they have a `key`."""
        self.functions, self.deterministic = functions, False
        super().__init__(params, seed)

    def __call__(self, x: Any, number: int = 0) -> Any:
        """Return function `number` of x, with random numbers unless `deterministic`."""
        function = self.functions[number]
        if self.deterministic or not names_key(function):
            return without_key(function)(self.params, x)
        return function(self.params, x, key=jax.random.split(self.random_stream(), num_examples(x)))


class StackModule(nnx.Module):
    """A stack as a module: `outer` is embedding and head, `blocks` the list of its layers.

    The result of `ppctl.flax.module`, `pipe.flax_model(state)` and `run.flax_model()`. As a model:
    ppctl.flax.stack(module, embed=StackModule.embed, head=StackModule.head, loss=loss).
    """

    def __init__(self, stack: Stack, params: Tree):
        if stack.options.outputs is None:
            raise ConfigError("The Stack has no outputs, only a loss. Give it outputs=...")
        self.outer = StackPart(params["embed_head"], (stack.embed, stack.options.outputs), 0)
        self.blocks = nnx.List()
        for l in range(stack.num_layers):
            layer = jax.tree.map(lambda a, l=l: a[l], params["layers"])
            self.blocks.append(
                StackPart(layer, (stack.functions[l % len(stack.functions)],), 1 + l)
            )

    def embed(self, inputs: Any) -> jax.Array:
        """Return x, the input of the first block, [batch, ...]."""
        return self.outer(inputs)

    def head(self, x: jax.Array) -> Tree:
        """Return the outputs, such as logits, of the last block's x."""
        return self.outer(x, 1)

    def __call__(self, inputs: Any) -> Tree:
        """Return the outputs of inputs, an array [batch, ...] or a dict of them."""
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def module(stack: Stack, *, seed: int = 0) -> StackModule:
    """Return a `Stack`, such as `ppctl.transformer(...)`, as an `nnx.Module` with new parameters.

    It has the parameters and outputs of a pipeline of the stack. It can be called, inspected, given
    other blocks, and turned into a model again by `ppctl.flax.stack`.

    Raises:
        ConfigError: The stack has no outputs.
    """
    return StackModule(stack, init(stack, seed))


# --- flax.linen ---------------------------------------------------------------------------------


class LinenModule(TreeModule):
    """A module of `flax.linen`, with its variables."""

    def __init__(self, module: linen.Module, variables: Tree, params: Tree):
        rest = {name: a for name, a in variables.items() if name not in ("params", LOSSES)}
        self.linen_module = module
        self.linen_variables = nnx.data(jax.tree.map(nnx.Variable, rest))
        super().__init__(params, 0)

    @property
    def variables(self) -> Tree:
        """The variables as arrays, without sown losses."""
        return {"params": self.params} | nnx.as_pure(self.linen_variables)

    def run(self, function: Callable[..., Any], x: Any, *, draws: bool) -> Any:
        """Return function(module, x); draws: whether it has random numbers."""
        key = self.random_stream() if draws else None  # one for all streams: `make_rng`
        given = self.variables
        result, state = self.linen_module.apply(given, x, method=function, mutable=True, rngs=key)
        for name, value in sown_scalars(state.get(LOSSES, {})).items():
            self.sow(nnx.Intermediate, name, value)
        after = {name: state[name] for name in self.linen_variables}
        self.linen_variables = nnx.data(jax.tree.map(nnx.Variable, after))  # see `Part.traced`
        return result
