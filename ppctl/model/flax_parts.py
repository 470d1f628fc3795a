"""Parts of a Flax module, such as a block, as pure functions of their parameters.

A part holds the static definition of a module and its other variables; its parameters are a tree of
dicts named by the module's paths. A call joins both for one trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util
from jax.sharding import PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.model.random_keys import key_of_seed, wrapped
from ppctl.model.tree_modules import LOSSES, LinenModule, sown_scalars

Tree = Any
Path = tuple[Any, ...]  # names, and numbers of lists
Function = Callable[..., Any]  # (module, x) -> result, perhaps with a parameter `train`
MODES = {"deterministic", "use_running_average"}  # attributes that train() and eval() set
OWN = {"_pytree__nodes", "_pytree__state"}  # attributes of NNX itself
OF_LINEN = {"parent", "name"}  # fields of every linen module
Traced = tuple[bool, tuple[str, ...]]  # whether a call draws, and the names of its sown losses
MOST_DRAWS = 2**16  # largest number of draws from a stream in a call


@dataclass(frozen=True, eq=False)
class Part:
    """A module as a pure function of its parameters, the floating variables."""

    graphdef: Any
    state: dict[Path, Any]  # variables, and arrays that are plain attributes, by path
    trees: dict[Path, nnx.Variable]  # the parameters in `state`
    settings: dict[Path, Any]  # attributes and variables
    prefix: str  # start of paths in messages, such as blocks/0/
    is_stacked: bool  # whether arrays have a leading axis of layers

    @classmethod
    def of(cls, module: nnx.Module, prefix: str = "", *, is_stacked: bool = False) -> Part:
        graphdef, of_graph = nnx.split(module)
        state = dict(nnx.to_flat_state(of_graph))
        trees = {path: each for path, each in state.items() if is_parameter(each)}
        settings = {path: each for path, each in nnx.iter_graph(module) if not OWN & {*path}}
        return cls(graphdef, state, trees, settings, prefix, is_stacked)

    def of_each(self, function: Callable[[Path, nnx.Variable], Any]) -> Tree:
        """Return function(path, parameter) of each parameter, as a tree of the parameters' form."""
        flat = {path: function(path, each) for path, each in self.trees.items()}
        return traverse_util.unflatten_dict({tuple(map(str, path)): a for path, a in flat.items()})

    @property
    def params(self) -> Tree:
        return self.of_each(lambda _, each: jnp.asarray(each[...]))

    def _by_path(self, params: Tree) -> dict[Path, Any]:
        """Return parameters by path."""
        flat = traverse_util.flatten_dict(params)
        return {path: flat[tuple(map(str, path))] for path in self.trees}

    def flags(self, trainable: Any) -> Tree:
        """Return whether each parameter is trained, given a filter of NNX."""
        is_trained = nnx.filterlib.to_predicate(trainable)
        return self.of_each(lambda path, each: bool(is_trained(path, each)))

    def specs(self, axis: str) -> Tree:
        """Return the PartitionSpecs over tp, given the name of its axis; None: not divided."""

        def spec(_: Path, each: nnx.Variable) -> P | None:
            names = each.get_metadata("out_sharding", None) or ()
            first = max(0, len(names) - each.ndim + self.is_stacked)  # after the axis of layers
            dims = ["tp" if name in (axis, (axis,)) else None for name in names[first:]]
            return P(*dims) if "tp" in dims else None

        return self.of_each(spec)

    def has_modes(self, function: Function) -> bool:
        names = {name for path in self.settings for name in path[-1:]}
        streams = any(isinstance(each, nnx.RngState) for each in self.state.values())
        return streams or bool(names & MODES) or "train" in signature(function).parameters

    def traced(self, function: Function, params: Tree, x: Tree, *, is_training: bool) -> Traced:
        """Trace a call of one example, given its shapes. ConfigError if it changes variables."""
        leaves = [*self.values(params).values()]

        def run(leaves: list[Any], x: Tree) -> tuple[dict[str, jax.Array], list[Any]]:
            values = dict(zip(self.state, leaves, strict=True))
            return self.call(function, values, x, is_training=is_training)[1:]

        program, (sown, _) = jax.make_jaxpr(run, return_shape=True)(leaves, x)
        jaxpr, outs = program.jaxpr, program.jaxpr.outvars[-len(leaves) :]
        ends = zip(self.state.items(), jaxpr.invars, outs, strict=False)  # inputs: also x
        changed = [leaf for leaf, *both in ends if not _passes(jaxpr, *both)]
        for path, leaf in changed:
            if not isinstance(leaf, nnx.RngState):
                name = self.prefix + "/".join(map(str, path))
                raise ConfigError(
                    f"{name} is a {type(leaf).__name__} that a step changes, but a step changes "
                    "only parameters. Use LayerNorm or GroupNorm, or batch norm with "
                    "use_running_average=True."
                )
        return bool(changed), tuple(sown)

    def call(
        self, function: Function, values: Mapping[Path, Any], x: Tree, *, is_training: bool
    ) -> tuple[Any, dict[str, jax.Array], list[Any]]:
        """Return (function(module, x), sown losses, values afterwards), given `values`."""
        module, takes = self._with_values(values), "train" in signature(function).parameters
        if is_training:  # batch norms stay as their author set them
            module.set_attributes(deterministic=False, raise_if_not_found=False)
        else:
            module.eval()
        of_mode = functools.partial(function, train=is_training) if takes else function

        def run(module: nnx.Module, x: Tree) -> Any:
            if isinstance(module, LinenModule):
                return module.run(of_mode, x, draws=takes and is_training)
            return of_mode(module, x)

        kinds = (nnx.Intermediate, nnx.variable_type_from_name(LOSSES, allow_register=True))
        result, *sown = nnx.capture(run, *kinds)(module, x)
        after = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(module))))
        return result, sown_scalars(nnx.as_pure(sown)), [after[path] for path in self.state]

    def values(self, params: Tree, key: jax.Array | None = None) -> dict[Path, Any]:
        """Return the values of `state` for one call: parameters, streams of `key`, constants.

        All streams have the key, and each starts to count at another number: so that a layer of a
        network computes the keys of its draws by itself.
        """
        values, arrays = {}, self._by_path(params)
        for number, (path, leaf) in enumerate(self.state.items()):
            if isinstance(leaf, nnx.RngCount):
                values[path] = jnp.uint32(number * MOST_DRAWS)
            elif isinstance(leaf, nnx.RngKey):
                values[path] = wrapped(key_of_seed(0)) if key is None else key
            else:
                values[path] = arrays[path] if path in arrays else self._constant(leaf)
        return values

    def _constant(self, leaf: Any) -> np.ndarray:
        value = np.asarray(nnx.as_pure(leaf))
        if self.is_stacked and not np.array_equal(value, np.broadcast_to(value[:1], value.shape)):
            raise ConfigError(
                f"{self.prefix[:-1]} has a {type(leaf).__name__} of {value.dtype} that differs "
                "between layers, but only floating variables may. Use a list of blocks."
            )
        return value[0] if self.is_stacked else value

    def restored(self, params: Tree) -> Any:
        """Return a new module with these parameters; of linen: its variables."""
        arrays = self._by_path(params)
        module = self._with_values(
            {p: jnp.asarray(a, self.state[p].dtype) for p, a in arrays.items()}
        )
        return module.variables if isinstance(module, LinenModule) else module

    def _with_values(self, values: Mapping[Path, Any]) -> nnx.Module:
        """Return a new module with other values of some variables."""
        state = dict(self.state)
        for path, value in values.items():
            leaf = state[path]
            state[path] = leaf.copy(value) if isinstance(leaf, nnx.Variable) else value
        return nnx.merge(self.graphdef, nnx.from_flat_state(state), copy=True)


def is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _passes(jaxpr: Any, source: Any, out: Any) -> bool:
    """Return whether `out` is `source`, perhaps passed through an inner program (nnx.remat)."""
    if out is source:
        return True
    made = next((each for each in jaxpr.eqns if out in each.outvars), None)
    params = {} if made is None else made.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    if made is None or inner is None or len(inner.invars) != len(made.invars):
        return False
    end = inner.outvars[made.outvars.index(out)]
    given = zip(inner.invars, made.invars, strict=True)
    return any(_passes(inner, a, end) and _passes(jaxpr, source, b) for a, b in given)


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two settings are equal. Functions are, if their code and its values are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, nnx.RngState | nnx.Pytree) or is_parameter(a):
        return True  # an argument of each call; the contents of nodes have other paths
    if isinstance(a, nnx.Variable | jax.Array | np.ndarray):
        return np.array_equal(np.asarray(nnx.as_pure(a)), np.asarray(nnx.as_pure(b)))
    if isinstance(a, linen.Module):
        names = [each.name for each in dataclasses.fields(a) if each.name not in OF_LINEN]
        return all(are_equal(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(are_equal(a[name], b[name]) for name in a)
    if isinstance(a, functools.partial):
        return are_equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if code := getattr(a, "__code__", None):
        held = [[f.__defaults__, *(c.cell_contents for c in f.__closure__ or ())] for f in (a, b)]
        return code == b.__code__ and are_equal(*held)
    return bool(a == b)
