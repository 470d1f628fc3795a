"""The manifest of a checkpoint: step, arrays, checksums, metadata, and a hash of all that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ppctl.training.checkpoint.checksum import names


class Manifest(NamedTuple):
    step: int
    arrays: dict[str, str]  # dtype and shape by name
    checksums: dict[str, str]  # by name
    meta: dict[str, Any]  # as it was given to `Checkpoints.save`


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as plain JSON, with a hash of all of it."""
    content = json.loads(json.dumps(manifest._asdict(), allow_nan=False))
    return {**content, "sha256": _hash(content)}


def from_json(record: Any, step: int) -> Manifest:
    """Return the manifest of `step`; ValueError if the record is incomplete or another step's."""
    if not isinstance(record, dict) or set(record) != {*Manifest._fields, "sha256"}:
        raise ValueError("meta/data.json is not what ppctl writes")
    content = {name: value for name, value in record.items() if name != "sha256"}
    if record["sha256"] != _hash(content):
        raise ValueError("meta/data.json does not have the hash stored in it")
    if content["step"] != step:
        raise ValueError(f"it was saved as step {content['step']}")
    return Manifest(**content)


def array_types(tree: Any) -> dict[str, str]:
    """Return dtype and shape by name of each array of a state.

    >>> array_types({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    {'w': 'float32[2,3]'}
    """
    leaves = []
    for leaf in jax.tree.leaves(tree):
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # stored as integers
        plain = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
        leaves.append(f"{np.dtype(plain.dtype).name}[{','.join(map(str, plain.shape))}]")
    return dict(zip(names(tree), leaves, strict=True))


def differences(stored: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return a phrase for each array that is not stored as wanted.

    >>> differences({"w": "float32[2,3]"}, {"w": "float32[4,3]"})
    ['w is stored as float32[2,3], wanted float32[4,3]']
    """
    phrases = []
    for name in sorted({*stored, *wanted}):
        is_stored = f"stored as {stored[name]}" if name in stored else "not stored"
        is_wanted = f"wanted {wanted[name]}" if name in wanted else "not wanted"
        if name not in stored or name not in wanted or stored[name] != wanted[name]:
            phrases.append(f"{name} is {is_stored}, {is_wanted}")
    return phrases


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
