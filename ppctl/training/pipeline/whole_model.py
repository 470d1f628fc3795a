"""The un-pipelined model on all devices of a pipeline's mesh: predictions, losses and metrics.

Each device computes some of the examples with the whole model; XLA gathers the layers from the
devices of the pipeline. So results do not depend on schedule, executor or mesh. Any number of
examples is possible: copies of the first example fill the last group, with weight 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import compiled_quickly
from ppctl.executors.programs_under_way import ProgramsUnderWay
from ppctl.executors.reference import by_example, outputs_of, reference
from ppctl.model.parallel import WHOLE, StageAxes
from ppctl.model.random_keys import SEED, key_of_seed, names_key, with_example_keys, without_key
from ppctl.model.stack import DividedStack, Stack, divisor, in_microbatches, init, num_examples
from ppctl.training.pipeline.user_code import call_user_code

Tree = Any
# the user's: outputs, {"targets"} -> values of each example or token, or (values, weights)
Metric = Callable[[Tree, Tree], Any]
RESERVED = ("loss", "grad_norm", "lr", "number", "counts")  # names already used by a step's numbers


def with_metrics(
    stack: Stack, metrics: Mapping[str, Metric], shapes: Mapping[str, Any], dtype: jnp.dtype
) -> Stack:
    """Return the model with a head that also sums metrics: see `ppctl.model.stack.divisor`.

    It sums them like the number of losses, so their means are right for any schedule and mesh.
    With vocab=parallel no rank has whole outputs, so the head sums no metrics.
    shapes: shapes of a batch. dtype: compute dtype. ConfigError for a wrong name, a model without
    outputs, or a metric that fails or does not return a value for each example.
    """
    # 1. checks
    outputs = stack.options.outputs
    if not metrics:
        return stack
    if outputs is None:
        raise ConfigError("metrics need the outputs of the model. Give the Stack outputs=...")
    for name, metric in metrics.items():
        if name in RESERVED or not isinstance(name, str) or not callable(metric):
            what = f"metrics has {name!r}: {type(metric).__name__}"
            raise ConfigError(f"{what}. Give functions by names other than {', '.join(RESERVED)}.")

    # 2. the head, and the head on one device of a divided stage
    def with_sums(head: Callable[..., tuple], outputs: Callable[..., Tree], axes: StageAxes) -> Any:
        """Return a head that also sums metrics; devices' sums are added, so only one has them."""

        def of_head(embed_head: Tree, x: Array, targets: Array, key: Any = None) -> tuple:
            given = {"key": key} if names_key(head) else {}
            loss, number = head(embed_head, x, targets, **given)
            found = outputs(*jax.lax.stop_gradient((embed_head, x)), targets)
            sums = {n: metric_sums(n, f, found, targets, dtype) for n, f in metrics.items()}
            for name in axes.divided:
                is_first = jax.lax.axis_index(name) == 0
                sums = jax.tree.map(lambda a, first=is_first: jnp.where(first, a, 0), sums)
            return loss, {"number": number} | sums

        return of_head if names_key(head) else without_key(of_head)

    def divided(axes: StageAxes) -> DividedStack:
        part = stack.options.divided(axes)  # pyright: ignore[reportOptionalCall] see below
        if part.outputs is None or axes.vocab_parts:
            return part
        return replace(part, head=with_sums(part.head, part.outputs, axes))

    # 3. the model, checked on shapes
    counting = replace(stack, head=with_sums(stack.head, lambda e, x, _: outputs(e, x), WHOLE))
    embed_head = stack.param_shapes["embed_head"]
    x = jax.eval_shape(stack.outer[0], embed_head, shapes["inputs"])
    jax.eval_shape(counting.outer[1], embed_head, x, shapes["targets"])
    return counting.with_options(divided=divided) if stack.options.divided else counting


def metric_sums(
    name: str, metric: Metric, outputs: Tree, targets: Array, dtype: Any, valid: Array | None = None
) -> tuple[Array, Array]:
    """Return (weighted sum of a metric's values, sum of weights), in at least float32.

    valid: booleans [examples], whether each example counts; None: all do. ConfigError for a metric
    that fails or does not return a value for each example.
    """
    call = partial(metric, outputs, {"targets": targets})
    found = call_user_code(f"metric {name}", 'metric(outputs, {"targets"})', call)
    values, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, 1)
    values, number = jnp.asarray(values), len(targets)
    if values.shape[:1] != (number,):
        raise ConfigError(
            f"metric {name} returns the shape {values.shape} for {number} examples. Return a value "
            f"for each example or token, [{number}, ...], not their mean."
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = jnp.broadcast_to(jnp.asarray(weights, wide), values.shape)
    if valid is not None:
        weights = jnp.where(valid.reshape(-1, *(1,) * (values.ndim - 1)), weights, 0)
    return jnp.where(weights == 0, 0, values.astype(wide) * weights).sum(), weights.sum()


@dataclass(frozen=True)
class WholeModel:
    """The model of a pipeline without its stages.

    metrics: functions by name, see `ppctl.pipeline`. num_examples: examples that a device
    computes at a time.
    """

    stack: Stack
    mesh: Mesh
    dtype: jnp.dtype
    metrics: Mapping[str, Metric]
    num_examples: int

    def predict(self, params: Tree, inputs: Tree) -> Tree:
        """Return the outputs [examples, ...] for inputs [examples, ...]."""
        ended, groups = ProgramsUnderWay(self.mesh).ended, self._groups({"inputs": inputs})
        parts = [ended(self._predict(params, group["inputs"])) for group, _ in groups]
        return ended(self._joined(num_examples(inputs), parts))

    def evaluate(self, params: Tree, batch: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """Return the means of the loss and of each metric over a batch {"inputs", "targets"}."""
        ended, groups = ProgramsUnderWay(self.mesh).ended, self._groups(batch)
        sums = [ended(self._sums(params, group, valid)) for group, valid in groups]
        totals = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *sums)
        return ended({name: total / divisor(n) for name, (total, n) in totals.items()})

    @cached_property
    def _predict(self) -> Callable[[Tree, Tree], Tree]:
        return jax.jit(outputs_of(self.stack, dtype=self.dtype))

    @cached_property
    def _joined(self) -> Callable[[int, Sequence[Tree]], Tree]:
        def joined(number: int, parts: Sequence[Tree]) -> Tree:
            return jax.tree.map(lambda *arrays: jnp.concatenate(arrays)[:number], *parts)

        return jax.jit(joined, static_argnums=0)

    @cached_property
    def _sums(self) -> Callable[..., dict[str, tuple[Array, Array]]]:
        """The program (params, batch, valid [examples]) -> (sum, weight) of loss and metrics."""

        def sums_of(params: Tree, batch: Tree, valid: Array) -> dict[str, Any]:
            *of_loss, outputs = by_example(self.stack, dtype=self.dtype)(params, batch)
            loss, number = (jnp.where(valid, a, 0).sum() for a in of_loss)
            sums = {"loss": (loss, number)}
            for name, metric in self.metrics.items():
                sums[name] = metric_sums(name, metric, outputs, batch["targets"], self.dtype, valid)
            return sums

        return jax.jit(sums_of)

    def _groups(self, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[Tree, Array]]:
        """Yield groups of examples for all devices, padded to one size: (group, valid [size])."""
        number, size = num_examples(batch["inputs"]), self.mesh.size * self.num_examples
        sharding = NamedSharding(self.mesh, P(self.mesh.axis_names))
        put = lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__)  # noqa: E731
        for start in range(0, number, size):
            rows = np.arange(start, start + size)
            valid = rows < number
            of, examples = np.where(valid, rows, 0), dict(batch)
            yield jax.tree.map(lambda a, of=of: put(a[of]), examples), put(valid)


def flax_model_of(stack: Stack, params: Tree) -> Any:
    """Return the result of `Pipeline.flax_model` for these parameters, in their author's form."""
    if stack.options.author_model is not None:
        return stack.options.author_model(params)
    from ppctl.model.tree_modules import StackModule  # imports Flax

    return StackModule(stack, params)


def of_author(stack: Stack, tree: Tree) -> Tree:
    """Return a tree with the parameters in it named as by the network's author.

    Converts each subtree {"embed_head", "layers"}, such as gradients. If the model is not a
    network, the tree stays unchanged. The arrays may be divided over devices, so that a program
    converts them: single operations, each with collectives, would be too many programs under way.
    """
    network = stack.options.network
    if network is None:
        return tree
    is_form = lambda node: isinstance(node, dict) and {*node} == {"embed_head", "layers"}  # noqa: E731
    whole = compiled_quickly(network.parameters.from_parts)
    return jax.tree.map(
        lambda a: jax.block_until_ready(whole(a)) if is_form(a) else a, tree, is_leaf=is_form
    )


def initial_params(stack: Stack, seed: int) -> Tree:
    """Return the initial parameters of a model on the host, in natural order."""
    return jax.device_get(compiled_quickly(lambda: init(stack, seed))())


def plain_functions(
    stack: Stack, dtype: jnp.dtype, num_parts: int, seed: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a model's functions by plain autodiff, on batches in num_parts parts.

    They are (params, batch, step) -> (mean losses, gradients), and (params, batch) -> (sum of
    losses, number of losses). seed: seed of the layers' random keys.
    """
    of_parts = partial(reference, stack, remat="none", dtype=dtype)
    mean_loss = of_parts(num_microbatches=1, with_grads=False)

    def losses(params: Tree, batch: Tree) -> tuple[Array, Array]:
        means, numbers = jax.lax.map(partial(mean_loss, params), in_microbatches(batch, num_parts))
        return (means * numbers).sum(), numbers.sum()

    summed = of_parts(num_microbatches=num_parts)
    key = {SEED: key_of_seed(seed)} if stack.takes_key else {}

    def loss_and_grads(params: Tree, batch: Tree, step: int) -> tuple[dict[str, Array], Tree]:
        return summed(params, with_example_keys({**batch, **key}, jnp.asarray(step)))

    return compiled_quickly(loss_and_grads), compiled_quickly(losses)
