"""Flax modules as models: their blocks are the layers, their paths are the names of parameters.

    model = Gpt(rngs=nnx.Rngs(0))
    stack = ppctl.flax.stack(model, embed=Gpt.embed, head=Gpt.logits, loss=loss)
    pipe = ppctl.pipeline(stack, ...)
    model = pipe.flax_model(state)  # trained

Available as `ppctl.flax`. Only it, `flax_parts` and `tree_modules` import Flax.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from ppctl.errors import ConfigError
from ppctl.model.flax_parts import Function, Part, Traced, takes_train, variables_of
from ppctl.model.layer_inputs import attach_loss
from ppctl.model.network import Network
from ppctl.model.random_keys import KIND, names_key, without_key
from ppctl.model.stack import Stack, num_examples
from ppctl.model.tree_modules import LinenModule, StackModule, module

__all__ = ["StackModule", "module", "network", "next_token_loss", "stack"]

Tree = Any
Model = nnx.Module | Callable[[nnx.Rngs], nnx.Module] | linen.Module
Variables = Mapping[str, Any] | Callable[[jax.Array], Mapping[str, Any]] | None
Loss = Callable[[Tree, Any], tuple[jax.Array, jax.Array]]


def stack(
    model: Model,
    variables: Variables = None,
    *,
    embed: Function,
    head: Function,
    loss: Loss,
    blocks: str = "blocks",
    block: Function = lambda block, x: block(x),
    trainable: Any = nnx.Param,
    tp: str = "model",
) -> Stack:
    """Return a Flax module as a `Stack` whose layers are its blocks.

    The parameters are the floating variables of the module. In training, `nnx.Dropout` and other
    users of random numbers draw by example from the keys of ppctl. A floating scalar that the
    module sows (an `nnx.Intermediate`, or in the collection "losses") is an attached loss of its
    name: its mean over examples, each computed by itself, is added to the trained loss.

    Args:
        model: An `nnx.Module`, whose values the parameters start with, or a function of `nnx.Rngs`
            that makes one, to draw them from the run's seed; or a `flax.linen` module.
        variables: Of a linen module: the result of its init, or a function of a key that makes it.
        embed: (model, inputs) -> x, the activation between blocks, [batch, ...].
        head: (model, x) -> outputs, such as logits.
        loss: (outputs, targets) -> (sum of losses, number of losses): scalars.
        blocks: Name of the list of blocks, which have parameters of equal shapes, or of one module
            with stacked parameters, as `nnx.vmap` makes it.
        block: (block, x) -> x. This function, `embed` and `head` get `train`, a bool, if they have
            a parameter of this name: linen modules need it.
        trainable: Filter of NNX for trained variables, such as `nnx.LoRAParam`. Others are frozen.
        tp: Name of the mesh axis in the shardings of variables that stands for axis tp.

    Raises:
        ConfigError: Blocks differ in shapes or share variables; or, when it is traced, a step would
            change variables, such as those of `nnx.BatchNorm`.
    """
    drawn = _drawing(model, variables)
    parts = _parts(*drawn(_usual_key()), blocks)
    if isinstance(model, linen.Module):
        embed, head, block = map(_of_linen, (embed, head, block))
    # blocks with equal settings have one function
    alike = [next(part for part in parts.layers if each.equals(part)) for each in parts.layers]
    functions = {id(part): _function(part, block) for part in alike}
    of_layers = tuple(functions[id(part)] for part in alike)
    layer = of_layers[0] if len(functions) == 1 else of_layers
    embed, outputs = (_function(parts.embed_head, each) for each in (embed, head))

    def initial(key: jax.Array) -> Tree:
        return _parts(*drawn(key), blocks).params

    stack = Stack(
        parts.num_layers,
        lambda key: initial(key)["embed_head"],
        lambda key, l: jax.tree.map(lambda a: a[l], initial(key)["layers"]),
        *(embed, layer, _with_loss(outputs, loss)),
    )
    return _with_options(stack, parts, outputs, loss, trainable, tp).with_options(initial=initial)


def _with_options(
    stack: Stack, parts: "Parts", outputs: Function, loss: Loss, trainable: Any, tp: str
) -> Stack:
    flags = parts.of_each(lambda part: part.flags(trainable))
    specs = parts.of_each(lambda part: part.specs(tp))
    embed, outputs = without_key(stack.embed), without_key(outputs)
    return stack.with_options(
        outputs=outputs,
        trainable=all(jax.tree.leaves(flags)) or flags,
        divisors=_divisors(parts.embed_head, lambda w, inputs: outputs(w, embed(w, inputs)), loss),
        sharding=specs if jax.tree.leaves(specs) else None,
        author_model=lambda params: parts.restored(params["embed_head"], params["layers"]),
    )


def network(
    model: Model,
    variables: Variables = None,
    *,
    loss: Loss,
    call: Function = lambda model, inputs: model(inputs),
    trainable: Any = nnx.Param,
) -> Network:
    """Return a Flax module as a `Network`, which is cut where it calls `ppctl.stage_boundary`.

    Its blocks may differ in anything. Parameters, random numbers and sown losses are as in `stack`.

    Args:
        model, variables, loss, trainable: As in `stack`.
        call: (model, inputs) -> outputs. It gets `train`, a bool, if it has this parameter.

    Raises:
        ConfigError: When it is traced: a step would change variables (see `stack`).
    """
    drawn, is_linen = _drawing(model, variables), isinstance(model, linen.Module)
    made, given = drawn(_usual_key())
    part = Part.of(_as_nnx(made, given))
    apply = _function(part, _of_linen(call) if is_linen else call, as_trained=True)
    flags = part.flags(trainable)
    return Network(
        lambda key: Part.of(_as_nnx(*drawn(key))).params,
        apply,
        loss,
        trainable=all(jax.tree.leaves(flags)) or flags,
        divisors=_divisors(part, without_key(apply), loss),
        author_model=partial(_linen_variables, given) if is_linen else part.restored,
    )


def next_token_loss(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sum, number) of the cross entropies of targets, ids [...]; none where negative.

    logits: [..., vocabulary].
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), jnp.maximum(targets, 0)
    )
    return jnp.where(targets >= 0, losses, 0).sum(), (targets >= 0).sum().astype(losses.dtype)


# --- the parts of a module ----------------------------------------------------------------------


def _drawing(model: Any, variables: Any) -> Callable[[jax.Array], tuple[Any, Any]]:
    """Return the function (key) -> (module, its variables), without variables for NNX."""
    name = model.__name__ if hasattr(model, "__name__") else type(model).__name__
    if isinstance(model, linen.Module):
        return lambda key: (model, variables(key) if callable(variables) else variables)
    if variables is not None:
        raise ConfigError(f"{name} is an nnx.Module, which holds its variables. Leave them out.")

    def drawn(key: jax.Array) -> tuple[Any, None]:
        is_maker = callable(model) and not isinstance(model, nnx.Module)
        made = model(nnx.Rngs(key)) if is_maker else model
        if isinstance(made, nnx.Module):
            return made, None
        use = "Use an nnx.Module, a function of rngs that makes one, or a flax.linen module."
        raise ConfigError(f"{name} is not a Flax module. {use}")

    return drawn


def _usual_key() -> jax.Array:
    """Return the key that draws the module whose structure counts."""
    return jax.random.key(0, impl=KIND)


def _as_nnx(model: Any, variables: Any) -> nnx.Module:
    """Return a module of NNX. ConfigError for one of linen without variables."""
    if not isinstance(model, linen.Module):
        return model
    if not isinstance(variables, Mapping) or "params" not in variables:
        name = type(model).__name__
        raise ConfigError(
            f"{name} is a flax.linen module, which needs its variables. Use {name}().init(key, "
            "inputs) as the second argument."
        )
    return LinenModule(model, variables)


def _of_linen(function: Function) -> Function:
    """Return a function of a linen module as one of a `LinenModule`."""
    if takes_train(function):
        return lambda module, x, train: module.run(partial(function, train=train), x, draws=train)
    return lambda module, x: module.run(function, x)


class Parts(NamedTuple):
    """Embedding and head, and the blocks."""

    embed_head: Part
    layers: list[Part]
    restored: Callable[[Tree, Tree], Any]  # (embed_head, layers) -> the module with them

    @property
    def params(self) -> Tree:
        """The parameters in the form of a stack."""
        each = [part.params for part in self.layers]
        is_stacked = self.layers[0].is_stacked
        stacked = each[0] if is_stacked else jax.tree.map(lambda *a: jnp.stack(a), *each)
        return {"embed_head": self.embed_head.params, "layers": stacked}

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        first = self.layers[0]
        return len(jax.tree.leaves(first.params)[0]) if first.is_stacked else len(self.layers)

    def of_each(self, function: Callable[[Part], Tree]) -> Tree:
        """Return function(part) of embedding and head, and of one layer, by their names."""
        return {"embed_head": function(self.embed_head), "layers": function(self.layers[0])}


def _parts(model: Any, variables: Any, blocks: str) -> Parts:
    is_linen = isinstance(model, linen.Module)
    parts = _linen_parts(model, variables, blocks) if is_linen else _nnx_parts(model, blocks)
    for number, part in enumerate(parts.layers[1:], 1):
        _check_shapes(parts.layers[0].params, part.params, blocks, number)
    return parts


def _nnx_parts(model: nnx.Module, blocks: str) -> Parts:
    rest = nnx.clone(model)
    found = getattr(rest, blocks, None)
    is_list = isinstance(found, nnx.List | list | tuple)
    if not (found and is_list) and not isinstance(found, nnx.Module):
        raise ConfigError(f"{type(model).__name__} has no modules {blocks}. Name them: blocks=...")
    places = [(blocks, i) for i in range(len(found))] if is_list else [(blocks,)]
    modules = [*found] if is_list else [found]
    delattr(rest, blocks)
    owners: dict[int, str] = {}
    for part, place in zip([rest, *modules], [(), *places], strict=True):
        for number, path in variables_of(part).items():
            name = "/".join(map(str, (*place, path)))
            if owners.setdefault(number, name) != name:
                raise ConfigError(
                    f"{owners[number]} and {name} are the same variable, but blocks may be on "
                    "different devices. Make separate variables; only embedding and head may share."
                )
    names = ["/".join(map(str, place)) for place in places]
    layers = [Part.of(*each, is_stacked=not is_list) for each in zip(modules, names, strict=True)]
    outer, whole = Part.of(rest), Part.of(model)

    def restored(embed_head: Tree, params: Tree) -> nnx.Module:
        values = outer.by_path(embed_head)
        for number, (part, place) in enumerate(zip(layers, places, strict=True)):
            own = jax.tree.map(lambda a, l=number: a[l], params) if is_list else params
            values |= {(*place, *path): a for path, a in part.by_path(own).items()}
        return whole.with_values(values)

    return Parts(outer, layers, restored)


def _linen_parts(model: linen.Module, variables: Any, blocks: str) -> Parts:
    """Return the parts of a linen module, whose parameters are blocks_0, blocks_1, ..."""
    params = _as_nnx(model, variables) and variables["params"]
    names = [f"{blocks}_{l}" for l in range(len(params)) if f"{blocks}_{l}" in params]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no parameters {blocks}_0, {blocks}_1, ...: its setup() "
            f"must set self.{blocks} to a list of modules. Name it: blocks=..."
        )
    found = [each.unbind() for each in getattr(model.bind(variables), blocks)]
    layers = [Part.of(LinenModule(*each), name) for each, name in zip(found, names, strict=True)]
    rest = {name: tree for name, tree in params.items() if name not in names}
    outer = Part.of(LinenModule(model, {**variables, "params": rest}))

    def restored(embed_head: Tree, params: Tree) -> Tree:
        each = {name: jax.tree.map(lambda a, l=l: a[l], params) for l, name in enumerate(names)}
        return _linen_variables(variables, embed_head | each)

    return Parts(outer, layers, restored)


def _linen_variables(variables: Any, params: Tree) -> Tree:
    """Return variables of a linen module with other parameters."""
    return {**variables, "params": {name: params[name] for name in variables["params"]}}


def _check_shapes(first: Tree, other: Tree, blocks: str, number: int) -> None:
    """Raise ConfigError if two blocks have parameters of other names, shapes or dtypes."""
    shapes = [
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{a.dtype}{list(a.shape)}"
            for path, a in jax.tree.leaves_with_path(params)
        }
        for params in (first, other)
    ]
    for name in sorted({*shapes[0], *shapes[1]}):
        wanted, found = (each.get(name, "missing") for each in shapes)
        if found != wanted:
            raise ConfigError(
                f"{name} is {wanted} in {blocks}/0, but {found} in {blocks}/{number}: blocks of a "
                "stack have equal shapes. Use ppctl.flax.network(model, loss=...), with "
                "ppctl.stage_boundary(x) between the blocks."
            )


# --- their functions ----------------------------------------------------------------------------


def _function(part: Part, function: Function, *, as_trained: bool = False) -> Callable[..., Any]:
    """Return (params, x) -> function(module, x), with a parameter `key` if training differs.

    as_trained: evaluations have the same arrays as training, which may compute by example.
    """
    known: dict[Any, Traced] = {}

    def run(params: Tree, x: Any, key: jax.Array | None, *, is_training: bool) -> Any:
        # 1. the whole batch, if no random numbers and no losses depend on the example
        shapes = jax.tree.map(lambda a: (a.shape[1:], a.dtype), x)
        which = is_training or as_trained, str(shapes), jax.tree.structure(x)
        if which not in known:
            known[which] = part.traced(function, params, x, is_training=which[0])
        if not (known[which].losses or known[which].draws):
            return part.call(function, params, x, None, is_training=is_training)[0]

        # 2. each example by itself
        def of_one(x: Any, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
            alone = jax.tree.map(lambda a: a[None], x)
            result, sown = part.call(function, params, alone, key, is_training=is_training)
            return jax.tree.map(lambda a: a[0], result), sown

        result, sown = jax.vmap(of_one, in_axes=(0, None if key is None else 0))(x, key)
        for name in known[which].losses:
            result = attach_loss(result, sown[name].sum(), name=name)
        return result

    def plain(params: Tree, x: Any) -> Any:
        return run(params, x, None, is_training=True)

    def with_key(params: Tree, x: Any, key: jax.Array | None = None) -> Any:
        return run(params, x, key, is_training=key is not None)

    return with_key if part.has_modes(function) else plain


def _with_loss(outputs: Callable[..., Any], loss: Loss) -> Callable[..., Any]:
    """Return the head of a stack, with a parameter `key` if `outputs` has one."""

    def plain(w: Tree, x: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
        return loss(outputs(w, x), targets)

    def with_key(
        w: Tree, x: jax.Array, targets: Any, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        return loss(outputs(w, x, key), targets)

    return with_key if names_key(outputs) else plain


def _divisors(
    part: Part, outputs: Callable[[Tree, Any], Any], loss: Loss
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return `StackOptions.divisors`: sown losses are means over examples."""

    def divisors(inputs: Any, targets: Any) -> tuple[Any, Any]:
        shapes = jax.eval_shape(outputs, part.params, inputs)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return loss(zeros, targets)[1], jnp.float32(num_examples(inputs))

    return divisors
