"""A small data set of every kind, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ppctl import data
from ppctl.data import DataSet

SEQ_LEN, BATCH_SIZE, VOCAB_SIZE = 16, 8, 97

Build = Callable[..., DataSet]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def build(tmp_path, cache_dir) -> Build:
    """build(name, **settings): the data set of that kind with small settings, those given aside."""
    text_file, token_file = tmp_path / "text.txt", tmp_path / "ids.npy"
    text_file.write_text("".join(f"line {i} of the text\n" for i in range(400)))
    np.save(token_file, np.random.default_rng(0).integers(VOCAB_SIZE, size=6000).astype(np.uint16))
    common = {"batch_size": BATCH_SIZE, "seed": 0, "eval_fraction": 0.1}
    language = common | {"seq_len": SEQ_LEN}
    text = language | {
        "cache_dir": cache_dir,
        "tokenizer": "bytes",
        "end_token": None,
        "packing": False,
    }
    records = {"field": "text", "prompt_field": None, "document": "file", "on_error": "stop"}
    other_file = tmp_path / "other.txt"
    other_file.write_text("".join(f"{i * i}; other words\n" for i in range(300)))
    fields = {key: value for key, value in records.items() if key != "on_error"}
    parts = [
        fields | {"path": str(file), "weight": w}
        for file, w in ((text_file, 3.0), (other_file, 1.0))
    ]
    settings = {
        "stdlib": text,
        "text": text | records | {"path": str(text_file)},
        "mixture": text | {"on_error": "stop", "parts": parts},
        "tokens": language
        | {"path": str(token_file), "dtype": "uint16", "vocab_size": None, "tokenizer": None},
        "synthetic": language | {"vocab_size": VOCAB_SIZE, "num_sequences": 300},
        "regression": common | {"num_features": 6, "num_targets": 3, "num_rows": 300},
    }
    return lambda name, **given: getattr(data, name)(**settings[name] | given)
