"""The user's models, data sets and optimizers: call functions by dotted path, check the results.

Modules are searched in the current directory first; modules of ppctl's recipes (recipes.documents
...) are also found where ppctl is installed. Results are checked before any compilation.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ppctl.config.code_digests import is_installed
from ppctl.config.config_dirs import ROOT
from ppctl.data import Batch, DataSet
from ppctl.data.array_data import from_arrays
from ppctl.errors import ConfigError, as_setting, written_as
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.network import Network
from ppctl.model.random_keys import without_key
from ppctl.model.stack import Stack, shapes_like

NUM_TRIED = 2  # examples in the batch that checks a model
# result types whose functions must take every argument
NEED_ALL = (DataSet, optax.GradientTransformation)
WORDS: dict[Any, str] = {Mapping: "a dict of arrays with inputs and targets"}  # names of types


@written_as(as_setting)
def custom_stack(
    target: str,
    num_layers: int | None,
    options: Mapping[str, Any],
    *,
    data: DataSet,
    dtype: jnp.dtype,
    layers: str = "marks",
    mixes_examples: bool = False,
    compute: jnp.dtype | None = None,
    device: Any = None,
) -> Stack:
    """Return model.target(num_layers, dtype, data, **options); a `Network` is cut into a `Stack`.

    The target gets the arguments among its parameters, and its result is checked. A target with a
    parameter `rngs` is a Flax module, or a function that returns one.

    dtype: dtype of the parameters. compute: compute dtype. device: a target device, passed if the
    function has a `device` parameter. num_layers: None: not passed, the model decides; required
    with layers=auto. layers: marks (cut a network at each `stage_boundary`) | auto (into num_layers
    layers of equal work). mixes_examples: as in `StackOptions`. ConfigError if the call fails, or
    its result does not accept examples of `data` or cannot be cut into layers.
    """
    # 1. the call
    key, auto = f"model.target={target}", layers == "auto"
    takes = _signature(key, _function(key, target)).parameters
    is_needed = "num_layers" in takes and takes["num_layers"].default is inspect.Parameter.empty
    if num_layers is None and (auto or is_needed):
        who = "model.layers=auto cuts a Network into" if auto else f"{key} takes"
        raise ConfigError(f"{who} model.num_layers layers, but it is not set. Use 8 or the like.")
    given = {} if num_layers is None else {"num_layers": num_layers}
    given |= {"dtype": dtype, "data": data}
    call = partial(_call_target, key=key, target=target, options=options)
    if "rngs" in takes:
        if num_layers is not None and "num_layers" not in takes:
            raise ConfigError(f"{key} takes no num_layers. Leave model.num_layers out.")
        given |= {"param_dtype": dtype, "dtype": compute or dtype}
        stack = _flax_network(partial(call, given=given), {"device": device})
    else:
        stack = call((Stack, Network), given=given, offered={"device": device})
    # 2. cut a network into layers
    head = "head"  # the author's name of the loss function
    if isinstance(stack, Network):
        head = f"the Network's loss, {getattr(stack.loss, '__name__', 'which has no name')},"
        how = {"inputs": shapes_like(data.read(np.arange(NUM_TRIED))["inputs"]), "dtype": dtype}
        cut = partial(TracedNetwork, stack, num_layers, auto=auto, compute=compute or dtype, **how)
        stack = stack_of(call_user_code(key, "cutting it into layers", cut))
    elif auto:
        why = f"{key} returns a Stack, which already has layers"
        raise ConfigError(f"{why}: model.layers=auto is for a ppctl.Network. Leave it out.")
    # 3. check the functions and the sizes
    _check_stack(key, stack, data.read(np.arange(NUM_TRIED)), head)
    _check_arguments(key, stack, num_layers, takes, dtype)
    return stack.with_options(mixes_examples=True) if mixes_examples else stack


def _check_arguments(
    key: str,
    stack: Stack,
    num_layers: int | None,
    takes: Mapping[str, inspect.Parameter],
    dtype: jnp.dtype,
) -> None:
    """Raise ConfigError if a stack has another number of layers or another dtype than requested.

    takes: the parameters of the target.
    """
    if num_layers not in (None, stack.num_layers):
        what = f"{key} returns a Stack of {stack.num_layers} layers"
        use = f"model.num_layers={num_layers}. Let it make num_layers layers."
        raise ConfigError(f"{what}, but {use}")
    held = {str(a.dtype) for a in jax.tree.leaves(stack.param_shapes)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    if not (takes_any or {"dtype", "param_dtype"} & {*takes}) and held - {str(dtype)}:
        made = f"{key} makes parameters of {', '.join(sorted(held))}, not of {dtype}"
        raise ConfigError(f"{made}, and takes no dtype. Let it take dtype by name.")


def custom_data(
    target: str, batch_size: int, eval_fraction: float, options: Mapping[str, Any], *, seed: int
) -> DataSet:
    """Return the data set of data.target(batch_size, seed, eval_fraction, **options).

    A function that returns a dict of arrays may omit some of these arguments. ConfigError or
    DataError if the call fails, or its result is not a data set with such batches.
    """
    key = f"data.target={target}"
    given = {"batch_size": batch_size, "seed": seed, "eval_fraction": eval_fraction}
    data = _call_target((DataSet, Mapping), key, target, given, options)
    if isinstance(data, Mapping):
        data = from_arrays(data, source=key, **given)
    if data.batch_size != batch_size:
        batches = f"batches of {data.batch_size}"
        raise ConfigError(f"{key} makes {batches}, but data.batch_size={batch_size}.")
    if data.num_examples < batch_size:
        count = f"{data.num_examples} examples to train on"
        raise ConfigError(f"{key} has {count}, fewer than data.batch_size={batch_size}.")
    _check_reading(key, data)

    def read(numbers: np.ndarray) -> Batch:
        what = f"reading examples {', '.join(map(str, numbers[:4]))}, ..."
        return call_user_code(key, what, lambda: data.read(numbers))

    return replace(data, read=read)


def custom_optimizer(
    target: str, options: Mapping[str, Any], rates: optax.Schedule
) -> optax.GradientTransformation:
    """Return optim.target(learning_rate=rates, **options).

    ConfigError if the call fails, or its result is not an optax.GradientTransformation.
    """
    given, kinds = {"learning_rate": rates}, (optax.GradientTransformation,)
    return _call_target(kinds, f"optim.target={target}", target, given, options)


def _call_target(
    kinds: tuple[type[Any], ...],
    key: str,
    target: str,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """Return the result of a target. ConfigError unless it is of one of these kinds.

    The function gets those arguments of `given` and `offered` that are among its parameters, except
    offered ones that the options set. If the result is one of NEED_ALL, the function must take all
    arguments of `given`.
    """
    function, part = _function(key, target), key.partition(".")[0]
    # 1. the arguments
    both = sorted(given.keys() & options.keys())
    if both:
        raise ConfigError(f"{part}.options.{both[0]} is set by ppctl. Leave it out.")
    signature = _signature(key, function)
    parameters = signature.parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments = {name: value for name, value in given.items() if takes_any or name in parameters}
    missing = [name for name in given if name not in arguments]
    wanted = parameters.keys() - options.keys()
    arguments |= {name: value for name, value in (offered or {}).items() if name in wanted}
    # 2. the call
    try:
        signature.bind(**arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"{key} does not accept the arguments {', '.join([*given, *options])}: {error}. Let it "
            f"take {', '.join(given)} by name; others are +{part}.options.NAME=VALUE."
        ) from error
    result = call_user_code(key, "calling it", lambda: function(**arguments, **options))
    # 3. the result
    if not isinstance(result, kinds):
        names = (WORDS.get(each, f"a {each.__module__}.{each.__qualname__}") for each in kinds)
        raise ConfigError(f"{key} returns {_kind(result)}, not {' or '.join(names)}.")
    if missing and isinstance(result, NEED_ALL):
        what = f"{key} returns {_kind(result)}, but does not take {', '.join(missing)}"
        raise ConfigError(
            f"{what}, which would be ignored. Let it take {', '.join(given)} by name."
        )
    return result


def _flax_network(call: Callable[..., Any], offered: Mapping[str, Any]) -> Network:
    """Return the Flax module that a target makes, as a `Network`; call: as `_call_target`.

    Its loss is the module's function `loss` (outputs, targets), or that of next tokens.
    """
    from flax import nnx

    from ppctl.model import flax_modules as flax

    def made(rngs: nnx.Rngs) -> nnx.Module:
        return call((nnx.Module,), offered={**offered, "rngs": rngs})

    module = made(nnx.Rngs(0))
    return flax.network(made, loss=getattr(type(module), "loss", flax.next_token_loss))


def _signature(key: str, function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of the constructor of a class."""
    try:
        is_class = isinstance(function, type)  # its constructor is bound: without self
        return inspect.signature(MethodType(function.__init__, 0) if is_class else function)
    except ValueError as error:  # raised for some built-in functions of Python
        raise ConfigError(f"{key} has no signature. Use a function that calls it.") from error


def _function(key: str, target: str) -> Callable[..., Any]:
    module_name, _, name = target.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = _module(module_name)
    except Exception as error:  # any exception of the user's code
        if isinstance(error, ModuleNotFoundError) and _is_missing(module_name, error):
            places = f"neither in {here} nor among the installed packages"
            raise ConfigError(f"{key}: there is no module {error.name}, {places}.") from error
        raise ConfigError(f"{key}: importing {module_name} fails: {_error_text(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        have = ", ".join(n for n, f in functions if f.__module__ == module_name)
        raise ConfigError(f"{key}: {module_name} has no function {name}. It has {have or 'none'}.")
    return function


def _module(name: str) -> ModuleType:
    """Return the module of this name; a missing recipes.* module comes from ppctl."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        shipped = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if not (_is_missing(name, error) and name.startswith("recipes.") and shipped.is_file()):
            raise
    spec = importlib.util.spec_from_file_location(name, shipped)
    assert spec is not None, shipped
    assert spec.loader is not None, shipped
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_missing(name: str, error: ModuleNotFoundError) -> bool:
    """Return whether this module or its package is missing, rather than one of its imports."""
    return error.name is not None and (name + ".").startswith(error.name + ".")


def call_user_code(key: str, what: str, call: Callable[[], Any]) -> Any:
    """Return call(). ConfigError for any exception of the user's code; what: name of the call."""
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {what} fails: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    """Return an error as text, with the last line of the user's code in its traceback."""
    places = ((line.filename, line.lineno) for line in traceback.extract_tb(error.__traceback__))
    lines = [place for place in places if not (is_installed(place[0]) or "importlib" in place[0])]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines = [(error.filename, error.lineno)]
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else ""
    message = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {message}{where}"


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_stack(key: str, stack: Stack, batch: Batch, head: str) -> None:
    """Raise ConfigError if functions do not fit each other or the batch; head: name of the head."""
    shapes = shapes_like(batch)
    random = jax.eval_shape(lambda: jax.random.key(0))

    def shaped(what: str, *args: Any) -> Any:
        functions = getattr(stack, what)
        functions = functions if isinstance(functions, tuple) else (functions,)
        functions = map(without_key, functions) if what == "layer" else functions
        calls = (partial(jax.eval_shape, function, *args) for function in functions)
        return [call_user_code(key, what, call) for call in calls][-1]

    # 1. parameters
    index = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    embed_head, layer = shaped("init_embed_head", random), shaped("init_layer", random, index)
    for what, tree in (("init_embed_head", embed_head), ("init_layer", layer)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                is_of = f"{what}{jax.tree_util.keystr(path)} has dtype {leaf.dtype}"
                raise ConfigError(f"{key}: {is_of}, but parameters must be floating. Use dtype.")
    # 2. embedding, layer and head
    x = shaped("embed", embed_head, shapes["inputs"])
    if not isinstance(x, jax.ShapeDtypeStruct) or x.shape[:1] != (NUM_TRIED,):
        raise ConfigError(
            f"{key}: embed returns {_shape(x)} for {NUM_TRIED} examples; it must return one array "
            "[examples, ...], the activation between stages."
        )
    y = shaped("layer", layer, x)
    if not isinstance(y, jax.ShapeDtypeStruct) or (y.shape, y.dtype) != (x.shape, x.dtype):
        what = f"{key}: layer returns {_shape(y)} for {_shape(x)}"
        raise ConfigError(f"{what}; it must keep shape and dtype.")
    losses = shaped("head", embed_head, y, shapes["targets"])
    is_pair = isinstance(losses, tuple) and len(losses) == 2
    if not is_pair or any(getattr(loss, "shape", None) != () for loss in losses):
        what = f"{key}: {head} returns {_shape(losses)}"
        raise ConfigError(f"{what}; it must return (sum of losses, number of losses).")


def _shape(tree: Any) -> str:
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)).replace("'", "")


def _check_reading(key: str, data: DataSet) -> None:
    """Raise ConfigError unless the data set reads arrays that depend only on example numbers."""
    both: Batch = call_user_code(key, "reading examples 0 and 1", lambda: data.read(np.arange(2)))
    if not isinstance(both, dict) or not both.keys() >= {"inputs", "targets"}:
        names = ", ".join(both) if isinstance(both, dict) else _kind(both)
        raise ConfigError(f"{key} reads {names}; it must read a dict with inputs and targets.")
    for name, array in both.items():
        is_array = isinstance(array, np.ndarray)
        if not is_array or array.shape[:1] != (2,):
            kind = _shape(array) if is_array else _kind(array)
            what = f"{key} reads {name} of 2 examples as {kind}"
            raise ConfigError(f"{what}; it must be a numpy array [2, ...].")
    second: Batch = call_user_code(key, "reading example 1", lambda: data.read(np.arange(1, 2)))
    for name, array in both.items():
        is_floating = np.issubdtype(array.dtype, np.floating)
        if not np.array_equal(second[name][0], array[1], equal_nan=is_floating):
            raise ConfigError(
                f"{key}: {name} of example 1 differ when it is read by itself; an example must "
                "depend only on its number, or runs could not be repeated or resumed."
            )
