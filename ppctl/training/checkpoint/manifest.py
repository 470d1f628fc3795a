"""The manifest of a checkpoint: step, arrays, checksums, metadata, and a hash of these.

The checksum of an array is the same for every mesh, sharding and number of processes.

With w_k the k-th 32-bit word of an array in natural order, R odd and h a mixing bijection of
32-bit words, the checksum is sum_k h(w_k ^ (R k mod 2^32)) mod 2^32, for two functions h: 64 bits.

One wrong word is always detected: h is a bijection, so exactly one term changes. Other damage is
missed with a probability of about 2^-64. That includes swapped words, because R k differs for each
k below 2^32 if R is odd. (Sums of words times odd weights would miss two flipped signs: 2^31 odd +
2^31 odd = 0.) Addition mod 2^32 has no rounding and any order, so each device sums its shards.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ppctl.errors import ConfigError
from ppctl.reports.foreign_files import printable
from ppctl.user_files import check_text

Tree = Any
# (shift, factor, shift, factor, shift) of murmur3's fmix32 and of lowbias32
H = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16)
R = 0x9E3779B9  # 2^32 / golden ratio


class Manifest(NamedTuple):
    step: int
    arrays: dict[str, str]  # dtype and shape by name
    checksums: dict[str, str]  # 16 hexadecimal digits by name
    meta: dict[str, Any]  # metadata passed to `Checkpoints.save`


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as plain JSON, with a SHA-256 of its content."""
    content = json.loads(json.dumps(manifest._asdict(), allow_nan=False))
    return {**content, "sha256": _hash(content)}


def from_json(record: Any, step: int) -> Manifest:
    """Return the manifest of `step`. ValueError if incomplete, damaged or another step's."""
    if not isinstance(record, dict) or set(record) != {*Manifest._fields, "sha256"}:
        raise ValueError("meta/data.json does not have the entries that ppctl writes")
    content = {name: value for name, value in record.items() if name != "sha256"}
    if record["sha256"] != _hash(content):
        raise ValueError("meta/data.json does not have the hash stored in it")
    if content["step"] != step:
        raise ValueError(f"it was saved as step {content['step']}")
    return Manifest(**content)


def array_types(tree: Any) -> dict[str, str]:
    """Return the dtype and shape of each array of a state, by name.

    >>> array_types({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    {'w': 'float32[2,3]'}
    """
    types = {}
    for name, leaf in zip(names(tree), jax.tree.leaves(tree), strict=True):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # stored as integers
        plain = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
        types[name] = f"{np.dtype(plain.dtype).name}[{','.join(map(str, plain.shape))}]"
    return types


def differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return a phrase for each array whose stored dtype or shape differs from the wanted one.

    >>> differences({"w": "float32[2,3]"}, {"w": "float32[4,3]"})
    ['w is stored as float32[2,3], wanted float32[4,3]']
    """
    phrases = []
    for name in sorted({*stored, *wanted}):
        is_stored = f"stored as {stored[name]}" if name in stored else "not stored"
        is_wanted = f"wanted {wanted[name]}" if name in wanted else "not wanted"
        if stored.get(name) != wanted.get(name):
            phrases.append(f"{name} is {is_stored}, {is_wanted}")
    return phrases


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Digest(NamedTuple):
    is_finite: bool  # True if every number of the tree is
    checksums: dict[str, str]  # 16 hexadecimal digits by name


def digest(tree: Tree) -> Digest:
    """Return the checksums of a tree's arrays. All processes must call it.

    >>> digest({"w": jnp.arange(3), "b": jnp.zeros(())}).checksums.keys()
    dict_keys(['b', 'w'])
    """
    shardings = {leaf.sharding for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    is_finite, sums = _program(None if mesh is None else NamedSharding(mesh, PartitionSpec()))(tree)
    texts = ["".join(f"{word:08x}" for word in pair) for pair in np.asarray(sums).tolist()]
    return Digest(bool(is_finite), dict(zip(names(tree), texts, strict=True)))


def names(tree: Tree) -> list[str]:
    """Return the name of each array: the keys of its path, joined by /."""
    paths = jax.tree.leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def check_names(tree: Tree) -> None:
    """Raise ConfigError if a checkpoint cannot name each array of a tree.

    Orbax joins the keys of a path by dots, and a manifest by slashes.

    >>> check_names({"a": {"b": 0}, "a.b": 0})
    Traceback (most recent call last):
    ppctl.errors.ConfigError: a/b and a.b have the same name in a checkpoint. Rename one of them.
    """
    known = dict[str, str]()
    for name in sorted(names(tree), reverse=True):  # parameters before the optimizer's state
        key = "/".join(filter(None, re.split("[./]", name)))
        if key in known:
            what = f"{printable(known[key])} and {printable(name)} have the same name"
            raise ConfigError(f"{what} in a checkpoint. Rename one of them.")
        known[key] = name
        try:
            check_text(name)
        except ValueError as error:
            what = f"The name {printable(name)} of an array {error}"
            raise ConfigError(f"{what}. Rename it.") from error


@functools.cache
def _program(everywhere: NamedSharding | None) -> Any:
    """Return `_sums` under jit, its results replicated so that every process can read them."""
    return jax.jit(_sums, out_shardings=everywhere)


def _sums(tree: Tree) -> tuple[jax.Array, jax.Array]:
    checksums = [_checksum(leaf) for leaf in jax.tree.leaves(tree)]
    if not checksums:
        return jnp.array(True), jnp.zeros((0, len(H)), jnp.uint32)
    is_finite, sums = zip(*checksums, strict=True)
    return jnp.stack(is_finite).all(), jnp.stack(sums)


def _words(a: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32; 64-bit numbers get one more dimension of size 2."""
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        a = jnp.stack([a.real, a.imag], axis=-1)
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.uint8)
    if a.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(a, jnp.uint32)
    return lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}")).astype(jnp.uint32)


def _checksum(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (all finite, checksums [2] uint32) by one reduction; three would take 3x as long."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    words = _words(a)
    k = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = math.prod(words.shape[dim + 1 :]) * R % 2**32
        k += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride)
    finite = jnp.isfinite(a).astype(jnp.uint32)
    finite = finite.reshape(finite.shape + (1,) * (words.ndim - a.ndim))
    *sums, is_finite = lax.reduce(
        [*(_mix(words ^ k, h) for h in H), jnp.broadcast_to(finite, words.shape)],
        [*(np.uint32(0) for _ in H), np.uint32(1)],
        lambda x, y: [*(i + j for i, j in zip(x[:-1], y[:-1], strict=True)), x[-1] & y[-1]],
        tuple(range(words.ndim)),
    )
    return is_finite == 1, jnp.stack(sums)


def _mix(x: jax.Array, h: tuple[int, ...]) -> jax.Array:
    """Return h(x): h holds the right shifts to xor with and the odd factors, alternating."""
    for shift, factor in zip(h[0::2], (*h[1::2], None), strict=True):
        x = x ^ (x >> np.uint32(shift))
        x = x if factor is None else x * np.uint32(factor)
    return x
