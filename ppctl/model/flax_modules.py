"""Flax modules as models: their blocks are the layers, their paths are the names of parameters.

    model = Gpt(rngs=nnx.Rngs(0))
    stack = ppctl.flax.stack(model, embed=Gpt.embed, head=Gpt.logits, loss=loss)
    pipe = ppctl.pipeline(stack, ...)
    model = pipe.flax_model(state)  # trained

Available as `ppctl.flax`. Only it, `flax_parts` and `tree_modules` import Flax.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx, traverse_util

from ppctl.errors import ConfigError
from ppctl.model.flax_parts import Function, Part, Traced, are_equal, is_parameter
from ppctl.model.layer_inputs import attach_loss
from ppctl.model.network import Network
from ppctl.model.random_keys import key_of_seed, names_key, without_key, wrapped
from ppctl.model.stack import Stack, StackOptions, num_examples, shapes_like
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
    made = partial(_made, model, variables)
    parts = Parts.of(made(wrapped(key_of_seed(0))), blocks)
    # blocks with equal settings have one function
    layers = [*parts.layers.values()]
    alike = [next(a for a in layers if are_equal(a.settings, each.settings)) for each in layers]
    functions = {part: _function(part, block) for part in {*alike}}
    layer = functions[alike[0]] if len(functions) == 1 else tuple(functions[a] for a in alike)
    embed, outputs = (_function(parts.embed_head, each) for each in (embed, head))

    def initial(key: jax.Array) -> Tree:
        return Parts.of(made(key), blocks).params

    return Stack(
        parts.num_layers,
        lambda key: initial(key)["embed_head"],
        lambda key, l: jax.tree.map(lambda a: a[l], initial(key)["layers"]),
        *(embed, layer, _with_loss(outputs, loss)),
        _options(parts, embed, outputs, loss, trainable, tp),
    ).with_options(initial=initial)


def _options(
    parts: "Parts", embed: Function, outputs: Function, loss: Loss, trainable: Any, tp: str
) -> StackOptions:
    embed, outputs = without_key(embed), without_key(outputs)
    outer, layer = parts.embed_head, parts.first
    specs = {"embed_head": outer.specs(tp), "layers": layer.specs(tp)}
    return StackOptions(
        outputs=outputs,
        trainable={"embed_head": outer.flags(trainable), "layers": layer.flags(trainable)},
        divisors=partial(_divisors, outer, (embed, outputs), loss),
        sharding=specs if jax.tree.leaves(specs) else None,
        author_model=parts.restored,
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
    made = partial(_made, model, variables)
    part = Part.of(made(wrapped(key_of_seed(0))))
    apply = _function(part, call, as_trained=True)
    return Network(
        lambda key: Part.of(made(key)).params,
        apply,
        loss,
        trainable=part.flags(trainable),
        divisors=partial(_divisors, part, (without_key(apply),), loss),
        author_model=part.restored,
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


def _made(model: Any, variables: Any, key: jax.Array) -> nnx.Module:
    """Return a module of NNX; key: draws its variables if they are not given."""
    name = model.__name__ if hasattr(model, "__name__") else type(model).__name__
    if isinstance(model, linen.Module):
        given = variables(key) if callable(variables) else variables
        if isinstance(given, Mapping) and "params" in given:
            return LinenModule(model, given, given["params"])
        use = f"Use {name}().init(key, inputs) as the second argument."
        raise ConfigError(f"{name} is a flax.linen module, which needs its variables. {use}")
    if variables is not None:
        raise ConfigError(f"{name} is an nnx.Module, which holds its variables. Leave them out.")
    made = model if isinstance(model, nnx.Module) or not callable(model) else model(nnx.Rngs(key))
    if isinstance(made, nnx.Module):
        return made
    use = "Use an nnx.Module, a function of rngs that makes one, or a flax.linen module."
    raise ConfigError(f"{name} is not a Flax module. {use}")


class Parts(NamedTuple):
    """Embedding and head, and the blocks, of a module."""

    whole: Part
    embed_head: Part
    layers: dict[str, Part]  # the blocks by their paths; of stacked blocks, one
    first: Part  # the first block, or the stacked blocks
    num_layers: int

    @classmethod
    def of(cls, model: nnx.Module, blocks: str) -> "Parts":
        """Return the parts of a module. ConfigError if blocks differ in shapes, or share."""
        rest = nnx.clone(model)
        modules = _blocks(rest, blocks)
        for name in {path.split("/")[0] for path in modules}:
            delattr(rest, name)
        layers = {p: Part.of(each, f"{p}/", is_stacked=p == blocks) for p, each in modules.items()}
        embed_head, first = Part.of(rest), next(iter(layers.values()))
        _check_owners([embed_head, *layers.values()])
        _check_shapes(layers)
        number = len(jax.tree.leaves(first.params)[0]) if first.is_stacked else len(layers)
        return cls(Part.of(model), embed_head, layers, first, number)

    @property
    def params(self) -> Tree:
        """The parameters in the form of a stack."""
        each = [part.params for part in self.layers.values()]
        stacked = each[0] if self.first.is_stacked else jax.tree.map(lambda *a: jnp.stack(a), *each)
        return {"embed_head": self.embed_head.params, "layers": stacked}

    def restored(self, params: Tree) -> Any:
        """Return a new module with the parameters of a stack; of linen: its variables."""
        indices = [...] if self.first.is_stacked else range(self.num_layers)
        places = zip(self.layers, indices, strict=True)
        layers = {path: jax.tree.map(lambda a, l=l: a[l], params["layers"]) for path, l in places}
        tree = traverse_util.unflatten_dict(layers, sep="/")
        return self.whole.restored(params["embed_head"] | tree)


def _blocks(model: nnx.Module, blocks: str) -> dict[str, nnx.Module]:
    """Return the blocks by their paths, blocks/0 or blocks_0 of linen; stacked blocks as one."""
    owner = model.linen_module.bind(model.variables) if isinstance(model, LinenModule) else model
    found = getattr(owner, blocks, None)
    if found and isinstance(found, nnx.List | list | tuple):
        if owner is model:
            return {f"{blocks}/{l}": each for l, each in enumerate(found)}
        each = {f"{blocks}_{l}": block.unbind() for l, block in enumerate(found)}
        return {n: LinenModule(m, v, vars(model)[n]) for n, (m, v) in each.items()}
    if isinstance(found, nnx.Module) and not isinstance(found, nnx.List):
        return {blocks: found}
    use = "Name them: blocks=..., a list; of flax.linen one that setup() sets."
    raise ConfigError(f"{type(owner).__name__} has no modules {blocks}. {use}")


def _check_owners(parts: list[Part]) -> None:
    """Raise ConfigError if two parts share a parameter."""
    owners: dict[int, str] = {}
    for part in parts:
        for path, each in part.settings.items():
            name = part.prefix + "/".join(map(str, path))
            if is_parameter(each) and owners.setdefault(id(each), name) != name:
                raise ConfigError(
                    f"{owners[id(each)]} and {name} are the same variable, but blocks may be on "
                    "different devices. Make separate variables; only embedding and head may share."
                )


def _check_shapes(layers: dict[str, Part]) -> None:
    """Raise ConfigError if blocks have parameters of different names, shapes or dtypes."""
    shapes = {
        place: {"/".join(map(str, p)): f"{a.dtype}{list(a.shape)}" for p, a in part.trees.items()}
        for place, part in layers.items()
    }
    first, *others = shapes
    for name, other in product(sorted(set().union(*shapes.values())), others):
        wanted, found = (shapes[each].get(name, "missing") for each in (first, other))
        if found != wanted:
            raise ConfigError(
                f"{name} is {wanted} in {first}, but {found} in {other}: blocks of a stack have "
                "equal shapes. Use ppctl.flax.network(model, loss=...), with "
                "ppctl.stage_boundary(x) between the blocks."
            )


# --- their functions ----------------------------------------------------------------------------


def _function(part: Part, function: Function, *, as_trained: bool = False) -> Callable[..., Any]:
    """Return (params, x) -> function(module, x), with a parameter `key` if training differs.

    as_trained: evaluations have the same arrays as training, which may compute by example.
    """
    known: dict[Any, Traced] = {}
    has_modes = part.has_modes(function)

    def run(params: Tree, x: Any, key: jax.Array | None = None) -> Any:
        is_training = key is not None or not has_modes
        # 1. the whole batch, if no random numbers and no losses depend on the example
        one = shapes_like(x, 1, first=1)
        which = is_training or as_trained, str(one)
        if which not in known:
            known[which] = part.traced(function, params, one, is_training=which[0])
        draws, losses = known[which]
        if not (losses or draws):
            return part.call(function, part.values(params), x, is_training=is_training)[0]

        # 2. each example by itself
        def of_one(x: Any, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
            return part.call(function, part.values(params, key), x, is_training=is_training)[:2]

        alone = jax.tree.map(lambda a: a[:, None], x)
        result, sown = jax.vmap(of_one, in_axes=(0, None if key is None else 0))(alone, key)
        result = jax.tree.map(lambda a: a[:, 0], result)
        for name in losses:
            result = attach_loss(result, sown[name].sum(), name=name)
        return result

    return run if has_modes else without_key(run)


def _with_loss(outputs: Callable[..., Any], loss: Loss) -> Callable[..., Any]:
    """Return the head of a stack, with a parameter `key` if `outputs` has one."""

    def head(w: Tree, x: jax.Array, targets: Any, key: jax.Array | None = None) -> Any:
        return loss(outputs(w, x, key) if names_key(outputs) else outputs(w, x), targets)

    return head if names_key(outputs) else without_key(head)


def _divisors(
    part: Part, functions: tuple[Function, ...], loss: Loss, inputs: Any, targets: Any
) -> tuple[Any, Any]:
    """Return `StackOptions.divisors` of a batch: sown losses are means over examples."""
    shapes = inputs
    for function in functions:
        shapes = jax.eval_shape(function, part.params, shapes)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return loss(zeros, targets)[1], jnp.float32(num_examples(inputs))
