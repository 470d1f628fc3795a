"""The un-pipelined model on all devices of a pipeline's mesh: predictions, losses and metrics.

Each device computes some of the examples with the whole model; XLA gathers the layers from the
devices of the pipeline. So results do not depend on schedule, executor or mesh. Any number of
examples is possible: copies of the first example fill the last group, with weight 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl.executors.compiler_options import compiled_quickly
from ppctl.executors.programs_under_way import ProgramsUnderWay
from ppctl.executors.reference import by_example, outputs_of, reference
from ppctl.model.random_keys import SEED, key_of_seed, with_example_keys
from ppctl.model.stack import Stack, divisor, in_microbatches, init, num_examples
from ppctl.training.pipeline.unpipelined.head_metrics import Metric, metric_sums

Tree = Any


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

    def evaluate(self, params: Tree, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
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
    def _sums(self) -> Callable[[Tree, Tree, jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
        return jax.jit(self._sums_of)

    def _sums_of(
        self, params: Tree, batch: Tree, valid: jax.Array
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return (sum, weight) of the loss and each metric; valid: whether an example counts."""
        losses, numbers, outputs = by_example(self.stack, dtype=self.dtype)(params, batch)
        total = lambda a: jnp.where(valid, a, 0).sum()  # noqa: E731
        sums = {"loss": (total(losses), total(numbers))}
        for name, metric in self.metrics.items():
            sums[name] = metric_sums(name, metric, outputs, batch["targets"], self.dtype, valid)
        return sums

    def _groups(self, batch: Mapping[str, np.ndarray]) -> Iterator[tuple[Tree, jax.Array]]:
        """Yield groups of examples for all devices, padded to one size: (group, valid [size])."""
        number, size = num_examples(batch["inputs"]), self.mesh.size * self.num_examples
        sharding = NamedSharding(self.mesh, P(self.mesh.axis_names))
        put = lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__)  # noqa: E731
        for start in range(0, number, size):
            rows = np.arange(start, start + size)
            valid = rows < number
            of, examples = np.where(valid, rows, 0), dict(batch)
            yield jax.tree.map(lambda a, of=of: put(a[of]), examples), put(valid)


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

    def losses(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        parts = in_microbatches(batch, num_parts)
        means, numbers = jax.lax.map(partial(mean_loss, params), parts)
        return (means * numbers).sum(), numbers.sum()

    summed = of_parts(num_microbatches=num_parts)
    key = {SEED: key_of_seed(seed)} if stack.takes_key else {}

    def loss_and_grads(params: Tree, batch: Tree, step: int) -> tuple[dict[str, jax.Array], Tree]:
        return summed(params, with_example_keys({**batch, **key}, jnp.asarray(step)))

    return compiled_quickly(loss_and_grads), compiled_quickly(losses)
