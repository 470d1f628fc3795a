"""The experts of a layer in place of its MLP: their parameters, and their function on a stage.

Experts are divided over ep and tp. If tp > 1, it must divide the rows of activations too, so that
all devices along ep and tp have different tokens. The rest of the layer is whole on every device
along ep.

Shape suffixes: M rows of this device, R sorted rows, E experts, D d_model, F width of an expert.
"""

from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.sharding import PartitionSpec as P

from ppctl.config.groups.moe_settings import Experts
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.model.experts.counted_products import counting
from ppctl.model.experts.dispatch import WAYS, Group, num_rows
from ppctl.model.experts.grouped_products import Kernel, kernel_for, product
from ppctl.model.experts.router import Tokens, route
from ppctl.model.layer_reports import report
from ppctl.model.parallel import StageAxes
from ppctl.model.random_keys import Draw

Params = dict[str, Any]
EXPERT_AXES = ("ep", "tp")
PARTS = ("router", "experts", "shared", "shared_gate")  # parameters of a layer with experts
COUNTED, DROPPED = ("router", "bias"), ("router", "dropped")  # parameters with counts as gradients

CHOICE_BIAS = "/".join(COUNTED)


def new_experts(sizes: Architecture, draw: Draw) -> Params:
    """Return initial parameters of a layer's router and experts."""
    E, D, F = sizes.moe.number, sizes.d_model, sizes.expert_width
    kernel = initializers.lecun_normal(batch_axis=0)
    router = {"kernel": draw(initializers.lecun_normal(), D, E)}
    router |= {"bias": draw(initializers.zeros, E)}
    if sizes.moe.capacity is not None:
        router |= {"dropped": draw(initializers.zeros, 1)}
    names = ("up", "gate") if sizes.is_gated else ("up",)
    experts = {name: draw(kernel, E, D, F) for name in names}
    return {"router": router, "experts": experts | {"down": draw(kernel, E, F, D)}}


def expert_group(sizes: Experts, axes: StageAxes) -> Group:
    """Return the devices that divide the experts."""
    named = {name: size for name, size in axes.divided.items() if name in EXPERT_AXES}
    number = axes.parts(EXPERT_AXES)
    return Group(tuple(named), number, sizes.number // number)


def expert_specs(axes: StageAxes) -> P:
    """Return the PartitionSpec of the experts' matrices: experts over ep and tp."""
    names = tuple(name for name in EXPERT_AXES if getattr(axes, name) > 1)
    return P(names) if names else P()


def experts(
    params: Params,
    x_MD: jax.Array,
    sizes: Experts,
    activation: Any,
    axes: StageAxes,
    tokens: Tokens,
    *,
    device: Any,
    imbalance: float | None,
    is_counted: bool,
) -> jax.Array:
    """Return [M, D], each token's weighted sum of its experts' outputs.

    activation: function applied to the output of `gate`, or without a gate to the output of `up`.
    tokens: the sequences of the rows. Padding is sent to no expert: its result is 0. device: target
    device of the kernels; None: the first attached one. imbalance: for predictions, which count
    products but do not run them, the load of the fullest device relative to the mean; None:
    products run. is_counted: whether to report counts.
    """
    group = expert_group(sizes, axes)
    times = product(_kernel(sizes, group, x_MD, device, imbalance))

    def compute(rows_RD: jax.Array, sizes_L: jax.Array, weights_R: jax.Array) -> jax.Array:
        of = lambda name: checkpoint_name(times(rows_RD, w[name], sizes_L), "saved")  # noqa: E731
        w = params["experts"]
        hidden = activation(of("gate")) * of("up") if "gate" in w else activation(of("up"))
        # weights apply before `down`, so that their gradient does not need the result of `down`
        hidden = (hidden * weights_R[:, None]).astype(hidden.dtype)
        return times(hidden, w["down"], sizes_L)

    router = params["router"]
    routed = route(router, x_MD, sizes, tokens, axes, is_counted=is_counted)
    dispatch = WAYS[sizes.dispatch if group.axes else "gather"]
    dispatch = partial(dispatch, group=group, capacity=sizes.capacity, compute=compute)
    y_MD, num_dropped = dispatch(*routed)
    if sizes.capacity is not None and is_counted:
        # the report must reach the output, or its counts are lost
        y_MD = y_MD + 0 * report(router["dropped"], num_dropped[None]).sum().astype(y_MD.dtype)
    return y_MD


def _kernel(
    sizes: Experts, group: Group, x_MD: jax.Array, device: Any, imbalance: float | None
) -> Kernel:
    """Return the kernel for the device, or the counting kernel for predictions."""
    if imbalance is not None:
        most = num_rows(len(x_MD), sizes.top_k, group, sizes.capacity)
        return counting(min(most, ceil(imbalance * len(x_MD) * sizes.top_k)))
    place = jax.devices()[0] if device is None else device
    return kernel_for(sizes.kernel, place, x_MD.dtype)


def counted_updates(sizes: Experts) -> dict[str, Any]:
    """Return `StackOptions.updates` of layers with experts.

    After a step the choice bias rises for experts with fewer tokens than the mean, and falls for
    experts with more (DeepSeek-V3, section 2.1.2). The counter of dropped tokens stays unchanged.
    """

    def moved(bias_E: jax.Array, counts_E: jax.Array) -> jax.Array:
        return bias_E + sizes.bias_update * jnp.sign(counts_E.mean() - counts_E)

    updates = {CHOICE_BIAS: moved}
    return updates if sizes.capacity is None else updates | {"/".join(DROPPED): lambda a, _: a}


def used_layers(sizes: Architecture) -> dict[str, int]:
    """Return `StackOptions.used_layers`: the number of layers that use each part.

    It is 0 for parameters that exist only to return token counts as their gradients, so that
    parameter counts leave them out.
    """
    number = sum(sizes.has_experts)
    if not number:
        return {}
    counters = (DROPPED,) if sizes.moe.choice_bias else (COUNTED, DROPPED)
    used = {"mlp": sizes.num_layers - number} | dict.fromkeys(PARTS, number)
    return used | {"/".join(names): 0 for names in counters}


def without_unused(layer: Params, has_experts: jax.Array) -> Params:
    """Return a layer's parameters with zeros for unused parts: the MLP, or those of experts."""
    unused = {"mlp": has_experts} | dict.fromkeys(PARTS, ~has_experts)

    def kept(name: str, part: Any) -> Any:
        if name not in unused:
            return part
        return jax.tree.map(lambda a: jnp.where(unused[name], 0, a), part)

    return {name: kept(name, part) for name, part in layer.items()}
