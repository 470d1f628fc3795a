"""Models and data sets of the user's own: functions named by dotted paths, and whether what they return fits.

They are looked for in the current directory first; those of ppctl's own recipes (recipes.documents...) also where
these stand. They are checked before anything is compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.config.files import ROOT
from ppctl.data import Batch, DataSet
from ppctl.data.arrays import from_arrays
from ppctl.errors import ConfigError
from ppctl.executors.stage.traced_network import TracedNetwork, stack_of
from ppctl.model.network import Network
from ppctl.model.stack import Stack

T = TypeVar("T")
NUM_TRIED = 2  # examples of the batch that a model is tried on
ALL = (Stack, DataSet)  # what is made with everything that a function is given
WHOSE: dict[Any, str] = {Mapping: "a dict of arrays with inputs and targets"}  # where not the name of the kind


def custom_stack(
    target: str,
    num_layers: int,
    options: Mapping[str, Any],
    *,
    data: DataSet,
    dtype: jnp.dtype,
    layers: str = "marks",
    mixes_examples: bool = False,
    compute: jnp.dtype | None = None,
    device: Any = None,
) -> Stack:
    """Return the model that model.target returns for (num_layers, dtype, data, **options), a network as a stack.

    dtype, compute: of parameters, and of compute with them. device: one that it is for, which a function that names
    `device` is given too. ConfigError where it cannot be called so, or where its result takes no example of `data`, or
    cannot be cut.
    """
    key, auto = f"model.target={target}", layers == "auto"
    given = {"num_layers": num_layers, "dtype": dtype, "data": data}
    stack = _call_target((Stack, Network), key, target, given, options, {"device": device})
    head = "head"  # as the author calls it
    if isinstance(stack, Network):
        head = f"the Network's loss, {getattr(stack.loss, '__name__', 'which has no name')},"
        network, inputs = stack, data.read(np.arange(NUM_TRIED))["inputs"]
        shape = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)
        cut = partial(
            TracedNetwork, network, num_layers, auto=auto, inputs=shape, dtype=dtype, compute=compute or dtype
        )
        stack = stack_of(call_user_code(key, "cutting it into layers", cut))
    elif auto:
        raise ConfigError(f"{key} returns a Stack, which has its layers: model.layers=auto is for a ppctl.Network.")
    if stack.num_layers != num_layers:
        raise ConfigError(
            f"{key} returns a Stack of {stack.num_layers} layers, but model.num_layers={num_layers}. "
            "Let num_layers say how many there are."
        )
    _check_stack(key, stack, data.read(np.arange(NUM_TRIED)), head)
    return replace(stack, mixes_examples=True) if mixes_examples else stack


def custom_data(
    target: str, batch_size: int, eval_fraction: float, options: Mapping[str, Any], *, seed: int
) -> DataSet:
    """Return the data set that data.target returns for (batch_size, seed, eval_fraction, **options), or that of the
    arrays by name that it returns, of which it may take fewer.

    ConfigError or DataError where it cannot be called so, or where its result is no data set of such batches.
    """
    key = f"data.target={target}"
    given = {"batch_size": batch_size, "seed": seed, "eval_fraction": eval_fraction}
    data = _call_target((DataSet, Mapping), key, target, given, options)
    if isinstance(data, Mapping):
        data = from_arrays(data, source=key, **given)
    if data.batch_size != batch_size:
        raise ConfigError(f"{key} makes batches of {data.batch_size}, but data.batch_size={batch_size}.")
    if data.num_examples < batch_size:
        raise ConfigError(
            f"{key} has {data.num_examples} examples to train on, fewer than data.batch_size={batch_size}."
        )
    _check_reading(key, data)
    return data


def _call_target(
    kind: type[T] | tuple[type[T], ...],
    key: str,
    target: str,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    offered: Mapping[str, Any] | None = None,
) -> T:
    """Return the result of a target, which is of this kind; ConfigError where it is not.

    What the function does not name of `given` it is not called with. That is an error where the result is one of ALL,
    which are made with them. Of `offered` it gets what it names and options do not give.
    """
    function = _function(key, target)
    named = inspect.signature(function).parameters
    offers = {name: value for name, value in (offered or {}).items() if name in named and name not in options}
    taken = _taken(function, given) | offers
    result = _call(key, function, given, taken, options)
    if not isinstance(result, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(WHOSE.get(each, f"a {each.__module__}.{each.__qualname__}") for each in kinds)
        raise ConfigError(f"{key} returns {_kind(result)}, not {expected}.")
    missing = [name for name in given if name not in taken]
    if missing and isinstance(result, ALL):
        raise ConfigError(
            f"{key} returns {_kind(result)}, and does not take {', '.join(missing)}, which would be ignored. Let it "
            f"take {', '.join(given)} by name."
        )
    return result


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function takes by name of what it may be given."""
    kinds = {each.name: each.kind for each in inspect.signature(function).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return {name: value for name, value in given.items() if takes_any or name in kinds}


def _function(key: str, target: str) -> Callable[..., Any]:
    module_name, _, name = target.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = _module(module_name)
    except ModuleNotFoundError as error:
        if _is_missing(module_name, error):
            raise ConfigError(
                f"{key}: there is no module {error.name}, neither in {here} nor where Python looks for packages."
            ) from error
        raise ConfigError(f"{key}: importing {module_name} fails: {_error_text(error)}") from error
    except Exception as error:  # whatever the user's own lines raise
        raise ConfigError(f"{key}: importing {module_name} fails: {_error_text(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module_name)
        raise ConfigError(f"{key}: {module_name} has no function {name}. It has {', '.join(found) or 'none'}.")
    return function


def _module(name: str) -> ModuleType:
    """Return the module of this name; of recipes.*, the one that ppctl ships where there is no other."""
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
    """Return whether it is this module that is missing, or a package that it lies in, and not one that it imports."""
    return error.name is not None and (name + ".").startswith(error.name + ".")


def _call(
    key: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    taken: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    part = key.partition(".")[0]
    both = sorted(given.keys() & options.keys())
    if both:
        raise ConfigError(f"{part}.options.{both[0]} is given by ppctl itself. Leave it out.")
    try:
        inspect.signature(function).bind(**taken, **options)
    except TypeError as error:
        raise ConfigError(
            f"{key} is called with {', '.join([*given, *options])}, which it does not take so: {error}. "
            f"Let it take {', '.join(given)} by name; the rest is +{part}.options.NAME=VALUE."
        ) from error
    return call_user_code(key, "calling it", lambda: function(**taken, **options))


def call_user_code(key: str, what: str, call: Callable[[], Any]) -> Any:
    """Return the result of `call`; ConfigError for whatever the user's own lines raise."""
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: {what} fails: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    """Return an error with the line that raised it, if that is not JAX's or ppctl's."""
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not _is_of_a_library(line.filename)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        where = f" ({Path(error.filename).name}:{error.lineno})"
    else:
        where = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{where}"


def _is_of_a_library(file: str) -> bool:
    return "site-packages" in file or Path(__file__).parents[1] in Path(file).parents or "importlib" in file


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_stack(key: str, stack: Stack, batch: Batch, head: str) -> None:
    """Raise ConfigError where the functions of a stack do not fit each other, or these examples; head: its name."""
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()}
    random = jax.eval_shape(lambda: jax.random.key(0))

    def shaped(what: str, *args: Any) -> Any:
        functions = stack.layer if what == "layer" and isinstance(stack.layer, tuple) else (getattr(stack, what),)
        return [call_user_code(key, what, lambda f=f: jax.eval_shape(f, *args)) for f in functions][-1]

    index = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    ends, layer = shaped("init_ends", random), shaped("init_layer", random, index)
    for what, tree in (("init_ends", ends), ("init_layer", layer)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                name = f"{what}{jax.tree_util.keystr(path)}"
                raise ConfigError(f"{key}: {name} is of {leaf.dtype}, and parameters are trained: use dtype.")
    x = shaped("embed", ends, shapes["inputs"])
    if not isinstance(x, jax.ShapeDtypeStruct) or x.shape[:1] != (NUM_TRIED,):
        raise ConfigError(
            f"{key}: embed makes {_shape(x)} of {NUM_TRIED} examples; it must make one array [examples, ...], which "
            "goes from stage to stage."
        )
    y = shaped("layer", layer, x)
    if not isinstance(y, jax.ShapeDtypeStruct) or (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ConfigError(f"{key}: layer makes {_shape(y)} of {_shape(x)}; it must keep shape and dtype.")
    losses = shaped("head", ends, y, shapes["targets"])
    is_pair = isinstance(losses, tuple) and len(losses) == 2
    if not is_pair or any(getattr(loss, "shape", None) != () for loss in losses):
        raise ConfigError(f"{key}: {head} returns {_shape(losses)}; it must return (sum of losses, number of losses).")


def _shape(tree: Any) -> str:
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree)).replace("'", "")


def _check_reading(key: str, data: DataSet) -> None:
    """Raise ConfigError where examples are not arrays that depend on their numbers alone."""
    both: Batch = call_user_code(key, "reading examples 0 and 1", lambda: data.read(np.arange(2)))
    if not isinstance(both, dict) or not both.keys() >= {"inputs", "targets"}:
        names = ", ".join(both) if isinstance(both, dict) else _kind(both)
        raise ConfigError(f"{key} reads {names}; it must read a dict with inputs and targets.")
    for name, array in both.items():
        if not isinstance(array, np.ndarray) or array.shape[:1] != (2,):
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else _kind(array)
            raise ConfigError(f"{key} reads {name} of 2 examples as {found}; it must be a numpy array [2, ...].")
    second: Batch = call_user_code(key, "reading example 1", lambda: data.read(np.arange(1, 2)))
    for name, array in both.items():
        if not np.array_equal(second[name][0], array[1]):
            raise ConfigError(
                f"{key}: {name} of example 1 are others when it is read alone; an example must depend on its number "
                "alone, or no run could be repeated or resumed."
            )
