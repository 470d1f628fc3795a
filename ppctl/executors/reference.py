"""The reference executor: the un-pipelined model by plain autodiff, microbatches in one program.

It is the oracle for every other executor and shares no code with them.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.model.layer_inputs import LOSS, LayerInputs, outer_numbers
from ppctl.model.layer_reports import divided_by
from ppctl.model.random_keys import KEYS, without_key
from ppctl.model.stack import Stack, divisor, metric_means, number_of
from ppctl.model.trainable_parameters import trained_part, with_trained
from ppctl.schedule.remat import Remat

Tree = Any
MOST_UNROLLED = 16  # maximum number of unrolled layers; deeper models are scanned


def reference(
    stack: Stack,
    *,
    num_microbatches: int,
    remat: Remat | str,
    dtype: Any,
    unroll: int = MOST_UNROLLED,
    with_grads: bool = True,
) -> Callable[[Tree, Tree], tuple[Any, Tree]]:
    """Return the function (params, batch) -> (losses, gradients) of the un-pipelined model.

    Args:
      num_microbatches: number of microbatches, whose gradients are summed in turn.
      remat: none, layer (the backward recomputes each layer) or full (the whole model).
      dtype: the compute dtype.
      unroll: maximum number of equal layers in succession to unroll; more are scanned.
      with_grads: if False, the function returns (loss, number of losses in the mean).

    Returns:
      A function of params in natural order and of batch {"inputs", "targets"}, arrays [batch, ...],
      with "keys" of the examples (`ppctl.model.random_keys`) for layers with a key.
      losses: {"loss": mean over the batch}, with each attached loss (divided by the same number)
      and each metric of the head by name. Gradients have the parameters' dtype; None if frozen.
    """
    # 1. the loss of a microbatch; layers carry their extra inputs
    setting = Remat.of(remat)

    def loss_of(inputs: LayerInputs) -> Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]:
        embed, head = inputs.outer_functions(stack)
        model = replace(stack, embed=embed, layer=inputs.functions(stack.layer), head=head)

        def layer(l: int) -> Callable[[Tree, jax.Array], jax.Array]:
            run = model.layer_of(l)
            return jax.checkpoint(run) if setting.keeps_layer_inputs else run

        def loss_sum(params: Tree, microbatch: Tree) -> tuple[jax.Array, jax.Array]:
            params = inputs.computed(params, dtype, stack.uncast)
            keys = microbatch.get(KEYS)
            params["layers"] = inputs.with_keys(params["layers"], keys)
            params["embed_head"] = inputs.outer.with_keys(params["embed_head"], keys)
            x = _before_head(model, params, microbatch["inputs"], layer, unroll)
            return model.head(params["embed_head"], x, microbatch["targets"])

        return jax.checkpoint(loss_sum) if setting.keeps_input_only else loss_sum

    # 2. loss and gradients summed over microbatches, or only the loss
    if with_grads:
        return _accumulated(stack, loss_of, num_microbatches)

    def loss_only(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        loss, number = loss_of(LayerInputs())(params, batch)
        return loss / divisor(number), number_of(number)

    return loss_only


def _accumulated(
    stack: Stack, loss_of: Callable[[LayerInputs], Callable], num_microbatches: int
) -> Callable[[Tree, Tree], tuple[dict[str, jax.Array], Tree]]:
    """Return the function of `reference` for with_grads=True."""

    def loss_and_grads(params: Tree, batch: Tree) -> tuple[dict[str, jax.Array], Tree]:
        # 1. parameters, extended by the extra inputs of layers
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        first = jax.tree.map(lambda a: a[0], microbatches)
        x = jax.eval_shape(stack.outer[0], params["embed_head"], first["inputs"])
        layer = jax.eval_shape(lambda tree: jax.tree.map(lambda a: a[0], tree), params["layers"])
        inputs = LayerInputs.of(stack, params | {"layers": layer}, x, first)
        scale = inputs.places(batch, lambda numbers: numbers, jax.tree.leaves(params)[0].dtype)
        places, number = jnp.full(stack.num_layers, scale), stack.num_layers
        params = {
            "embed_head": inputs.outer.extended(params["embed_head"], scale, outer_numbers(number)),
            "layers": inputs.extended(params["layers"], places, jnp.arange(number)),
        }
        trained = trained_part(params, inputs.trainable(stack))
        # 2. sums over microbatches
        loss_sum = loss_of(inputs)
        of_trained = lambda trained, microbatch: loss_sum(with_trained(trained, params), microbatch)  # noqa: E731
        grad = jax.value_and_grad(of_trained, has_aux=True)

        def add(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
            (loss, number), grads = grad(trained, microbatch)
            return jax.tree.map(jnp.add, sums, (loss, number, grads)), None

        loss, number = jax.eval_shape(loss_sum, params, first)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (loss, number, trained))
        (loss, number, grads), _ = jax.lax.scan(add, zeros, microbatches)
        # 3. means over the losses
        metrics, number = metric_means(number), divisor(number)
        grads, attached = inputs.separate_all(grads)
        losses = {LOSS: loss / number} | metrics
        losses |= {name: a / number.astype(a.dtype) for name, a in attached.items()}
        return losses, divided_by(grads, number, stack.options.updates)

    return loss_and_grads


def outputs_of(stack: Stack, *, dtype: Any) -> Callable[[Tree, jax.Array], Tree]:
    """Return the function (params, inputs) -> outputs of the head; arguments as in `reference`."""
    outputs = stack.options.outputs
    assert outputs is not None, "the stack has no outputs function"

    def predict(params: Tree, inputs: jax.Array) -> Tree:
        params = LayerInputs().computed(params, dtype, stack.uncast)
        x = _before_head(stack, params, inputs, stack.layer_of)
        return outputs(params["embed_head"], x)

    return predict


def by_example(
    stack: Stack, *, dtype: Any
) -> Callable[[Tree, Tree], tuple[jax.Array, jax.Array, Tree]]:
    """Return the function (params, batch) -> (losses, numbers of losses, outputs) per example.

    losses and numbers: [examples]. outputs: None if the stack has no outputs function. Arguments as
    in `reference`.
    """

    def run(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array, Tree]:
        params = LayerInputs().computed(params, dtype, stack.uncast)
        embed_head = params["embed_head"]
        x = _before_head(stack, params, batch["inputs"], stack.layer_of)
        outputs = None if stack.options.outputs is None else stack.options.outputs(embed_head, x)
        head = stack.outer[1]
        losses = jax.vmap(lambda x, target: head(embed_head, x[None], target[None]))
        return *losses(x, batch["targets"]), outputs

    return run


def _before_head(
    stack: Stack,
    params: Tree,
    inputs: jax.Array,
    layer: Callable[[int], Callable[[Tree, jax.Array], Any]],
    unroll: int = MOST_UNROLLED,
) -> jax.Array:
    """Return the output of the last layer."""
    x, number = without_key(stack.embed)(params["embed_head"], inputs), stack.num_layers
    # 1. runs of layers with one function, which is traced once
    functions = [stack.layer_of(0 if stack.are_alike else l) for l in range(number)]
    runs = [[*run] for _, run in groupby(range(number), key=lambda l: id(functions[l]))]
    repeated = ((l, f) for l, f in enumerate(functions) if functions.count(f) > 1)
    traced_once = {} if len(runs) == 1 else {id(f): jax.jit(layer(l)) for l, f in repeated}
    # 2. long runs are scanned, others unrolled
    for run in runs:
        function, layers = traced_once.get(id(functions[run[0]]), layer(run[0])), params["layers"]
        if len(run) > max(unroll, 1):
            if len(run) < number:
                layers = jax.tree.map(lambda a, run=run: a[run[0] : run[-1] + 1], layers)
            x, _ = jax.lax.scan(lambda x, w, f=function: (f(w, x), None), x, layers)
        else:
            for l in run:
                x = function(jax.tree.map(lambda a, l=l: a[l], layers), x)
    return x
