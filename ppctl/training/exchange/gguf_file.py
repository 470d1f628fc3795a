"""A GGUF file as `transformers` would have it: config.json, tensors by name, tokenizer.json.

Quantized tensors are what `gguf` makes of them: exactly the numbers that the file stands for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.errors import ConfigError
from ppctl.training.exchange.tensors import Tensors

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {  # behind blk.L. and model.layers.L.
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SIZES = {  # key of config.json: that of the file, behind its architecture
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Gemma's norms lose bits in the file: it has 1 + scale, rounded
PERMUTED = "llama"  # of which llama.cpp turns neighbours instead of halves, and stores rows of q and k so
OF_ANGLES = "rope_freqs.weight"  # factors of rotary wavelengths, as Llama 3.1's
CONTROL = 3  # type of a token that no text becomes


def open_gguf(path: Path) -> tuple[dict[str, Any], Tensors, dict[str, str], tuple[str, ...]]:
    """Return (config.json, tensors, texts of tokenizer files by name, notes) of a GGUF file.

    ConfigError where it cannot be read, or is no model that ppctl has.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(f"{path} needs the package gguf. Install it: pip install 'ppctl[gguf]'.") from error
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ConfigError(f"{path} cannot be read as GGUF: {' '.join(str(error).split())}.") from error
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    kind = found.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{path} is of general.architecture={kind}. Of GGUF files ppctl reads {', '.join(ARCHITECTURES)}."
        )
    if found.get(f"{kind}.rope.scaling.type", "none") != "none" or any(t.name == OF_ANGLES for t in reader.tensors):
        raise ConfigError(f"{path} scales rotary positions, which ppctl reads from config.json alone.")
    config: dict[str, Any] = {"model_type": kind, "dtype": "float32"}
    config |= {key: found[f"{kind}.{name}"] for key, name in SIZES.items() if f"{kind}.{name}" in found}
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.7g}")  # written as float32
    names = [tensor.name for tensor in reader.tensors]
    config["tie_word_embeddings"] = "output.weight" not in names
    config["vocab_size"] = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    field = reader.get_field
    for key, name in TOKENS.items():
        of_tokens = field(f"tokenizer.ggml.{name}")
        if of_tokens is not None:
            config[key] = int(of_tokens.contents())
    texts, notes = _tokenizer(reader, config)
    of_turns = field("tokenizer.ggml.eot_token_id")
    if of_turns is not None and "eos_token_id" in config:
        ends = [*dict.fromkeys([config["eos_token_id"], int(of_turns.contents())])]
        of_tokens = {key: config[key] for key in TOKENS if key in config} | {"eos_token_id": ends}
        texts["generation_config.json"] = json.dumps(of_tokens, indent=2) + "\n"
    return config, _tensors(path, reader, config), texts, notes


def _tensors(path: Path, reader: Any, config: Mapping[str, Any]) -> Tensors:
    from gguf.quants import dequantize

    by_name = {_name(path, tensor.name): tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = by_name[name]
        try:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"{tensor.name} in {path} is {tensor.tensor_type.name}, which gguf does not read. Use a file of "
                "another quantization, such as Q8_0."
            ) from error
        values = values.reshape([int(size) for size in tensor.shape[::-1]])
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if config["model_type"] != PERMUTED or heads is None:
            return values
        return halves(values, config.get(heads) or config["num_attention_heads"])

    return Tensors({name: tuple(int(size) for size in t.shape[::-1]) for name, t in by_name.items()}, read)


def halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of heads whose pairs are i and i + H/2, of those whose pairs are 2i and 2i + 1.

    >>> halves(np.arange(6), 1)
    array([0, 2, 4, 1, 3, 5])
    """
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{kind}"
    first, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if first != "blk" or part not in LAYER:
        raise ConfigError(f"{name} in {path} is no tensor of a model that ppctl has.")
    return f"model.layers.{number}.{LAYER[part]}.{kind}"


def _tokenizer(reader: Any, config: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a byte-level BPE tokenizer, and notes; no file where it is another kind."""

    def get(name: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    kind, split = get("model"), get("pre")
    from_split = {"smollm": True, "gpt-2": False, "default": False}
    if kind != "gpt2" or split not in from_split:
        return {}, (f"the tokenizer ({kind}, {split}) is none that can be written as tokenizer.json",)
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ConfigError(
            "Its tokenizer needs the package tokenizers. Install it: pip install 'ppctl[gguf]'."
        ) from error
    tokens, kinds = get("tokens"), get("token_type") or []
    pairs = [tuple(merge.split(" ", 1)) for merge in get("merges") or ()]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    by_bytes = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True)] if from_split[split] else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, by_bytes()])
    made.decoder = decoders.ByteLevel()
    special = [token for token, own in zip(tokens, kinds, strict=False) if own == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {key.removesuffix("_id"): tokens[config[key]] for key in TOKENS if key in config}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        about["chat_template"] = template.contents()
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}, ()
