"""A network, any function of a batch, as a stack: its operations in order, cut into layers.

x is one vector per example. A mark is a call of stage_boundary. Leaves are a trace's arguments
besides the batch: parameters, then a scalar for each attached loss, then keys.
docs/executors-internals.md: "A network as a stack".
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError, setting
from ppctl.executors.stage.layer_programs import pack_flat, unpack_flat
from ppctl.executors.stage.network_parameters import NetworkLeaves, NetworkParameters
from ppctl.executors.stage.traced_operations import (
    Contents,
    NetworkCuts,
    Trace,
    integers_crossing,
    is_floating,
    no_floats,
)
from ppctl.model.layer_inputs import attached_in, place_of_loss, placing
from ppctl.model.network import Network
from ppctl.model.random_keys import SIZE as KEY_SIZE, names_key, wrapped
from ppctl.model.stack import Stack, StackOptions, num_examples

Tree = Any
Shape = jax.ShapeDtypeStruct
NUM_EXAMPLES = (2, 3)  # batch sizes to trace: crossing values must grow with them


class TracedNetwork:
    """A traced network and its cuts. Raises ConfigError if it cannot be cut.

    auto: cut into num_layers layers of equal work, else at the marks (num_layers=None: any number).
    inputs: shapes of a batch. dtype: dtype of parameters. compute: dtype of parameters and floating
    inputs in `apply`. A network with a key is traced and cut twice into the same layers: with keys
    for steps, without for evaluations.
    """

    def __init__(
        self,
        network: Network,
        num_layers: int | None,
        *,
        auto: bool,
        inputs: Tree,
        dtype: Any,
        compute: Any,
    ):
        self.network, self.auto, self.has_key = network, auto, names_key(network.apply)
        self.inputs, self.dtype, self.compute = inputs, jnp.dtype(dtype), jnp.dtype(compute)
        self.leaves = NetworkLeaves.of(network)
        # 1. losses that layers attach, and the cuts of the trace
        leaves = [Shape(shape, self.compute) for shape in self.leaves.shapes]
        params = jax.tree.unflatten(self.leaves.treedef, leaves)
        examples = self._examples(NUM_EXAMPLES[0])
        apply = partial(network.apply, key=None) if self.has_key else network.apply
        # names of losses; after the parameters a trace has one leaf for each, in this order
        self.losses = attached_in(apply, params, examples)
        self.traces: dict[tuple[int, bool], Trace] = {}
        trace = self.trace = self.at(NUM_EXAMPLES[0])
        self.num_layers = len(trace.marks) + 1 if num_layers is None else num_layers
        self.bounds = NetworkCuts(
            trace, self.num_layers, len(self.leaves.shapes), self.auto
        ).bounds()
        places = places_of(trace, self.bounds, self.leaves.names)
        self.parameters = NetworkParameters(self.leaves, places, self.num_layers, self.dtype)
        traces = [self.at(number) for number in NUM_EXAMPLES]
        self.widths = [width_of(traces, place, l) for l, place in enumerate(self.bounds)]
        self.keyed_bounds = self._bounds_with_key() if self.has_key else self.bounds

    # traces and cuts

    def at(self, num_examples: int, with_key: bool = False) -> Trace:
        """Return the network traced for this number of examples."""
        if (num_examples, with_key) not in self.traces:
            leaves = [Shape(shape, self.compute) for shape in self.leaves.shapes]
            leaves += [Shape((), self.dtype) for _ in self.losses]
            leaves += [Shape((num_examples, KEY_SIZE), jnp.uint32)] * with_key
            trace = Trace(self._apply, leaves, self._examples(num_examples))
            others = (trace for (_, keyed), trace in self.traces.items() if keyed == with_key)
            usual = next(others, trace)
            if trace.names != usual.names or (trace.marks != usual.marks and not self.auto):
                raise ConfigError(
                    f"apply runs other operations on {num_examples} examples than on "
                    f"{NUM_EXAMPLES[0]}. Let it run the same ones for any number."
                )
            self.traces[num_examples, with_key] = trace
        return self.traces[num_examples, with_key]

    def _examples(self, number: int) -> Tree:
        """Return the shapes of `number` examples, as `apply` gets them."""
        dtype = lambda a: self.compute if is_floating(a) else a.dtype  # noqa: E731
        return jax.tree.map(lambda a: Shape((number, *a.shape[1:]), dtype(a)), self.inputs)

    def _apply(self, leaves: list, inputs: Tree) -> Tree:
        params = leaves[: len(self.leaves.shapes)]
        places = leaves[len(self.leaves.shapes) : self._key_leaf]
        given: dict[str, Any] = {"key": None} if self.has_key else {}
        if len(leaves) > self._key_leaf:
            given = {"key": wrapped(leaves[self._key_leaf])}
        with placing(dict(zip(self.losses, places, strict=True)).__getitem__):
            return self.network.apply(
                jax.tree.unflatten(self.leaves.treedef, params), inputs, **given
            )

    @property
    def _key_leaf(self) -> int:
        """Index of the keys among the leaves of a trace with keys."""
        return len(self.leaves.shapes) + len(self.losses)

    def _attached(self, start: int, stop: int, with_key: bool = False) -> dict[int, str]:
        """Return {leaf index: name} of losses that operations `start`, ..., `stop` - 1 attach."""
        users, trace = range(start, stop), self.at(NUM_EXAMPLES[0], with_key)
        named = enumerate(self.losses, len(self.leaves.shapes))
        return {i: name for i, name in named if any(op in users for op in trace.users(i))}

    def _bounds_with_key(self) -> tuple[int, ...]:
        """Return the bounds in the trace with keys. Raises ConfigError if its layers differ."""
        if self.auto:
            raise ConfigError(
                f"{setting('model.layers', 'auto', 'layers=NUMBER')} cuts a network by its "
                "operations, and apply has different ones with a key. Set stage_boundary "
                f"marks, and use {setting('model.layers', 'marks', 'layers=None')}."
            )
        trace, plain = self.at(NUM_EXAMPLES[0], True), self.trace
        bounds = NetworkCuts(trace, self.num_layers, len(self.leaves.shapes), self.auto).bounds()
        use = "with key=None (evaluations). Let both do the same, apart from random draws."
        for number, (place, usual) in enumerate(zip(bounds, self.bounds, strict=True)):
            found, wanted = (
                ", ".join(f"{a.dtype}{list(a.shape)}" for a in each.crossing(at))
                for each, at in ((trace, place), (plain, usual))
            )
            if found != wanted:
                where = (
                    f"boundary {number}" if 0 < number < self.num_layers else "embedding or head"
                )
                raise ConfigError(
                    f"At {where} of apply {found} cross with a key, but {wanted} {use}"
                )
        places = places_of(trace, bounds, self.leaves.names)
        pairs = zip(self.leaves.names, places, self.parameters.places, strict=True)
        if moved := next((name for name, place, usual in pairs if place != usual), None):
            raise ConfigError(f"Parameter {moved} is used by another layer with a key than {use}")
        return bounds

    @property
    def contents(self) -> tuple[Contents, ...]:
        """The names, parameters and operations of the embedding, each layer and the head."""
        trace, names = self.trace, ["embedding", *map(str, range(self.num_layers)), "head"]
        params: list[dict[str, tuple[int, ...]]] = [{} for _ in names]
        for i, (name, place) in enumerate(
            zip(self.leaves.names, self.parameters.places, strict=True)
        ):
            first_or_last = {0 if op < self.bounds[0] else len(names) - 1 for op in trace.users(i)}
            for user in first_or_last if place is None else (place + 1,):
                params[user][name] = self.leaves.shapes[i]
        bounds = pairwise((0, *self.bounds, trace.num_ops))
        counts = [dict(Counter(trace.needed(start, stop))) for start, stop in bounds]
        return tuple(map(Contents, names, params, counts))

    # the functions of a stack

    @cached_property
    def x(self) -> tuple[int, Any]:
        """(width, dtype) of x: the widest boundary's width, and the boundaries' widest dtype."""
        values = (a for place in self.bounds for a in self.trace.crossing(place))
        dtypes = [a.dtype for a in values if is_floating(a)]
        return max(1, *self.widths), jnp.result_type(self.compute, *dtypes)

    def _packed(self, values: Sequence[jax.Array], num_examples: int) -> jax.Array:
        return pack_flat(values, Shape((num_examples, self.x[0]), self.x[1]))

    def _unpacked(self, x: jax.Array, place: int) -> list[jax.Array]:
        shapes = self.at(len(x)).crossing(place)
        return [_back(a, shape) for a, shape in zip(unpack_flat(shapes, x), shapes, strict=True)]

    def initial(self, key: jax.Array) -> Tree:
        """Return initial parameters in the form of the stack."""
        return self.parameters.to_parts(self.network.init(key))

    def _leaves(
        self, params: Mapping[int, jax.Array], start: int, stop: int, key: jax.Array | None
    ) -> dict[int, jax.Array]:
        """Return the leaves for operations `start`, ..., `stop` - 1 of the trace."""
        leaves = {i: leaf.astype(self.compute) for i, leaf in params.items()}
        for i, name in self._attached(start, stop, key is not None).items():
            leaves[i] = place_of_loss(name).astype(self.dtype)
        if key is not None:
            leaves[self._key_leaf] = jax.random.key_data(key)
        return leaves

    def _cuts(self, key: jax.Array | None) -> tuple[int, ...]:
        return self.bounds if key is None else self.keyed_bounds

    def embed(self, embed_head: Tree, inputs: Tree, key: jax.Array | None = None) -> jax.Array:
        number, stop = num_examples(inputs), self._cuts(key)[0]
        leaves = self._leaves(self.parameters.embed_head_leaves(embed_head), 0, stop, key)
        cast = lambda a, shape: a.astype(self.compute) if is_floating(shape) else a  # noqa: E731
        trace, inputs = self.at(number, key is not None), jax.tree.map(cast, inputs, self.inputs)
        return self._packed(trace.run(0, stop, trace.entering(inputs), leaves), number)

    def layer(self, l: int, w: Tree, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        start, stop = self._cuts(key)[l : l + 2]
        leaves = self._leaves(self.parameters.leaves_of(l, w), start, stop, key)
        values = self._unpacked(x, self.bounds[l])
        trace = self.at(len(x), key is not None)
        return self._packed(trace.run(start, stop, values, leaves), len(x))

    def outputs(self, embed_head: Tree, x: jax.Array, key: jax.Array | None = None) -> Tree:
        start, trace = self._cuts(key)[-1], self.at(len(x), key is not None)
        params = self.parameters.embed_head_leaves(embed_head)
        leaves = self._leaves(params, start, trace.num_ops, key)
        return trace.outputs(start, self._unpacked(x, self.bounds[-1]), leaves)

    def head(
        self, embed_head: Tree, x: jax.Array, targets: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        return self.network.loss(self.outputs(embed_head, x, key), targets)


def stack_of(network: TracedNetwork) -> Stack:
    """Return the stack of a cut network."""

    def keyed(function: Callable) -> Callable:
        """Return a function of the network; without `key` if the network has none."""
        return function if network.has_key else lambda *args: function(*args)

    layers = (partial(network.layer, l) for l in range(network.num_layers))
    options = StackOptions(
        outputs=network.outputs,
        trainable=True if all(network.leaves.is_trained) else network.parameters.trainable,
        mixes_examples=network.network.mixes_examples,
        divisors=network.network.divisors,
        initial=network.initial,
        author_model=network.network.author_model,
        network=network,
    )
    return Stack(
        network.num_layers,
        lambda key: network.initial(key)["embed_head"],
        lambda key, l: jax.tree.map(lambda a: a[l], network.initial(key)["layers"]),
        keyed(network.embed),
        tuple(map(keyed, layers)),
        keyed(network.head),
        options,
    )


def _back(a: jax.Array, shape: Shape) -> jax.Array:
    return a != 0 if shape.dtype == jnp.bool_ else a.astype(shape.dtype)


def places_of(trace: Trace, bounds: Sequence[int], names: Sequence[str]) -> tuple[int | None, ...]:
    """Return the layer that uses each parameter in the trace; None: embedding or head."""
    places: list[int | None] = []
    for i, name in enumerate(names):
        layers = (bisect_right(bounds, op) - 1 for op in trace.users(i))
        # an unused parameter is stored in layer 0
        users = {l if 0 <= l < len(bounds) - 1 else None for l in layers} or {0}
        if len(users) > 1:
            named = (
                "embedding/head" if l is None else f"layer {l}" for l in sorted(users, key=str)
            )
            raise ConfigError(
                f"parameter {name} is used by {', '.join(named)}, but a parameter lives in one "
                "layer. Give each layer a separate array, or move the boundaries."
            )
        places.append(users.pop())
    return tuple(places)


def width_of(traces: Sequence[Trace], place: int, l: int) -> int:
    """Return the number of scalars per example that cross the cut before layer l, at `place`.

    traces: of `NUM_EXAMPLES` examples. Raises ConfigError if no value crosses, or one is an integer
    or does not grow with the batch.
    """
    few, many = (trace.crossing(place) for trace in traces)
    if integers := integers_crossing(traces[0], place):
        raise no_floats(integers, l)
    if not few:
        raise ConfigError(
            f"no value that depends on the inputs is used after layer {l - 1}. Use fewer layers."
        )
    for a, b in zip(few, many, strict=True):
        if a.size * NUM_EXAMPLES[1] != b.size * NUM_EXAMPLES[0]:
            raise ConfigError(
                f"{a.dtype}{list(a.shape)} of {NUM_EXAMPLES[0]} examples crosses the boundary "
                f"before layer {l} and does not grow with the batch ({b.dtype}{list(b.shape)} "
                f"of {NUM_EXAMPLES[1]}), so microbatches would differ from the whole batch. "
                "Compute each example by itself, or move the boundary."
            )
    return sum(a.size for a in few) // NUM_EXAMPLES[0]
