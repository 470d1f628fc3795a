"""Read a GGUF file in the form of `transformers`: config.json, named tensors, tokenizer.json.

The package `gguf` dequantizes tensors exactly.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppctl.config import Transformer
from ppctl.config.field_checks import settings_from
from ppctl.errors import ConfigError, PpctlError, one_line
from ppctl.language.model_files import FETCH, Tensors
from ppctl.language.tensor_names import EMBED_HEAD, layer_names
from ppctl.language.transformers_config import model_settings

SIZES = {  # key of config.json: GGUF key without the architecture before it
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
# other keys after the architecture: without effect, or without effect at this value
NO_FUNCTION = ("vocab_size", "tensor_data_layout", "rope.scaling.type", "rope.scaling.finetuned")
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.factor": 1.0,
}
TOKENS = {key: key for key in ("bos_token_id", "eos_token_id")} | {
    "pad_token_id": "padding_token_id"
}
ARCHITECTURES = {  # general.architecture: model_type; no Gemma: GGUF rounds its norms' 1 + scale
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
}
MIXTRAL = "mixtral"  # model_type of llama files with experts
NORMED = {"norm_topk_prob": True}  # llama.cpp's rule for qwen3moe, which files do not state
PERMUTED = "llama"  # architecture with q and k rows reordered: rotary pairs are adjacent
OF_ANGLES = "rope_freqs.weight"  # factors of rotary wavelengths, such as Llama 3.1's
CONTROL = 3  # type of special tokens
MOST_READS = 2**23  # maximum values read from a header; usual: a million


def open_gguf(path: Path) -> tuple[dict[str, Any], Tensors, dict[str, str], tuple[str, ...]]:
    """Return (config.json, tensors, tokenizer files by name, notes). ConfigError if unsupported."""
    try:
        with np.errstate(all="raise"):  # raises for sizes that overflow
            return _opened(path)
    except PpctlError:
        raise
    except Exception as error:  # any error of gguf or tokenizers for a damaged file
        why = one_line(error) or type(error).__name__
        raise ConfigError(f"{path} cannot be read as GGUF: {why}. {FETCH}") from error


def _opened(path: Path) -> tuple[dict[str, Any], Tensors, dict[str, str], tuple[str, ...]]:
    # 1. read the header and its architecture
    reader = _reader(path)
    fields = reader.fields.items()
    found = {name: f.contents() for name, f in fields if not name.startswith("tokenizer.ggml.")}
    kind = found.get("general.architecture")
    if kind not in ARCHITECTURES:
        known = f"ppctl reads GGUF files of {', '.join(ARCHITECTURES)}."
        raise ConfigError(f"{path} has the unsupported general.architecture={kind}. {known}")
    names = {tensor.name: tensor for tensor in reader.tensors}
    if found.get(f"{kind}.rope.scaling.type", "none") != "none" or OF_ANGLES in names:
        what = f"{path} scales rotary positions"
        raise ConfigError(f"{what}, which ppctl reads only from a config.json.")
    # 2. make config.json
    sizes = {key: f"{kind}.{name}" for key, name in SIZES.items()}
    model_type = MIXTRAL if found.get("llama.expert_count") else ARCHITECTURES[kind]
    model_config: dict[str, Any] = {"model_type": model_type, "dtype": "float32"}
    model_config |= NORMED if kind == "qwen3moe" else {}
    model_config |= {key: found[name] for key, name in sizes.items() if name in found}
    for key, number in (("num_hidden_layers", int), ("rms_norm_eps", float)):
        if not isinstance(model_config.get(key), number):
            raise ConfigError(f"{path} states no number {sizes[key]}. {FETCH}")
    if "token_embd.weight" not in names or len(names["token_embd.weight"].shape) != 2:
        raise ConfigError(f"{path} has no matrix token_embd.weight. {FETCH}")
    eps, vocab_size = model_config["rms_norm_eps"], int(names["token_embd.weight"].shape[1])
    model_config["rms_norm_eps"] = float(f"{eps:.7g}")  # rounded, because GGUF stores float32
    model_config |= {"tie_word_embeddings": "output.weight" not in names, "vocab_size": vocab_size}
    tokens = {key: _token(path, reader, name, vocab_size) for key, name in TOKENS.items()}
    model_config |= {key: token for key, token in tokens.items() if token is not None}
    _check_unread(path, found, kind)
    # 3. make the tokenizer's files, and the list of end tokens
    texts, notes = _tokenizer(reader, model_config)
    turn_end = _token(path, reader, "eot_token_id", vocab_size)
    if turn_end is not None and "eos_token_id" in model_config:
        ends = [*dict.fromkeys([model_config["eos_token_id"], turn_end])]
        tokens = {key: model_config[key] for key in TOKENS if key in model_config}
        tokens["eos_token_id"] = ends
        texts["generation_config.json"] = json.dumps(tokens, indent=2) + "\n"
    return model_config, _tensors(path, reader, model_config, kind), texts, notes


def _check_unread(path: Path, found: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError for a key of the architecture that changes the model and is not read."""
    keys = "num_attention_heads", "head_dim"
    heads, width = (found.get(f"{kind}.{SIZES[key]}") for key in keys)
    if not width and isinstance(heads, int) and heads:
        width = found.get(f"{kind}.embedding_length", 0) // heads
    neutral = NEUTRAL | dict.fromkeys(("rope.dimension_count", "attention.value_length"), width)
    for name, value in found.items():
        of, _, key = name.partition(".")
        if of != kind or key in (*SIZES.values(), *NO_FUNCTION):
            continue
        if value != neutral[key] if key in neutral else value:
            what = f"{path} has {name}={value}, which ppctl lacks"
            raise ConfigError(f"{what}. It cannot be imported.")


def _reader(path: Path) -> Any:
    """Return gguf's reader of a file. ValueError if its parts overlap or lie beyond its end.

    Without these checks, gguf reads parts beyond the end as empty; with a damaged size in the
    header, it reads such parts endlessly.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package gguf. Install it: pip install 'ppctl[gguf]'."
        ) from error

    class Reader(GGUFReader):
        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            self.num_reads += 1
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if not 0 <= int(offset) <= end <= len(self.data) or self.num_reads > MOST_READS:
                raise ValueError(f"its parts reach byte {end}, but the file has {len(self.data)}")
            return super()._get(offset, dtype, count, *order, **named)

    reader = Reader(path)
    end = reader.data_offset
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        if tensor.data_offset < end:
            begin = f"{tensor.name} begins at byte {tensor.data_offset}"
            raise ValueError(f"{begin}, but the part before it ends at byte {end}")
        end = tensor.data_offset + tensor.n_bytes
    return reader


def _content(reader: Any, name: str) -> Any:
    """Return the content of tokenizer.{name}; None if the file lacks it."""
    field = reader.get_field(f"tokenizer.{name}")
    return None if field is None else field.contents()


def _token(path: Path, reader: Any, name: str, vocab_size: int) -> int | None:
    """Return the token id in tokenizer.ggml.{name}, if any. ConfigError if the model lacks it."""
    token = _content(reader, f"ggml.{name}")
    if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
        what = f"tokenizer.ggml.{name}={token} in {path} is not one of the {vocab_size} tokens"
        raise ConfigError(f"{what}. {FETCH}")
    return token


def _tensors(path: Path, reader: Any, model_config: Mapping[str, Any], kind: str) -> Tensors:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from gguf.quants import dequantize

    # 1. name the tensors as in transformers
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    model = settings_from(Transformer, model_settings(model_config), "model")
    num_layers = min(model.num_layers, len(tensors))
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    to_gguf, by_name = get_tensor_name_map(arch, num_layers), dict[str, Any]()
    names = layer_names(model).values()
    layers = (f"model.layers.{l}.{name}" for l in range(num_layers) for name in names)
    for name in (*EMBED_HEAD.values(), *layers):
        whole = name.replace(".{}", "")  # fused tensor of all experts; `by_expert` splits it
        in_file = to_gguf.get_name(whole, (".weight", ".bias"))
        if (tensor := tensors.pop(in_file, None)) is not None:
            by_name[name if whole == name else whole.removesuffix(".weight")] = tensor
    if tensors:
        what = f"{next(iter(tensors))} in {path} is not a tensor of a model that ppctl supports"
        raise ConfigError(f"{what}. It cannot be imported.")

    # 2. read a tensor's numbers
    def read(name: str) -> np.ndarray:
        tensor = by_name[name]
        try:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise ConfigError(
                f"{tensor.name} in {path} is {tensor.tensor_type.name}, which gguf does not "
                "read. Use a file of another quantization, such as Q8_0."
            ) from error
        values = values.reshape([int(size) for size in tensor.shape[::-1]])
        of_module = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        heads = of_module.get(name.split(".")[-2])
        if kind != PERMUTED or heads is None:
            return values
        return halves(values, model_config.get(heads) or model_config["num_attention_heads"])

    shapes = {name: tuple(map(int, t.shape[::-1])) for name, t in by_name.items()}
    return Tensors(shapes, read)


def halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows [num_heads * H, ...], reordered in each head of H rows.

    The rotary pair in rows (2i, 2i + 1) moves to rows (i, i + H/2).

    >>> halves(np.arange(6), 1)
    array([0, 2, 4, 1, 3, 5])
    """
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(
    reader: Any, model_config: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a byte-level BPE tokenizer, and notes; no files for other kinds."""
    # 1. check its kind
    kind, split = _content(reader, "ggml.model"), _content(reader, "ggml.pre")
    from_split = {"smollm": True, "gpt-2": False, "default": False}
    if kind != "gpt2" or split not in from_split:
        return {}, (f"the tokenizer ({kind}, {split}) cannot be written as tokenizer.json",)
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ConfigError(
            "Its tokenizer needs the package tokenizers. Install it: pip install 'ppctl[gguf]'."
        ) from error
    # 2. make tokenizer.json
    tokens, kinds = _content(reader, "ggml.tokens"), _content(reader, "ggml.token_type") or []
    if not isinstance(tokens, list) or len({*tokens}) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens is not a list of distinct texts")
    pairs = [tuple(merge.split(" ", 1)) for merge in _content(reader, "ggml.merges") or ()]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    by_bytes = partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    parts = [pre_tokenizers.Digits(individual_digits=True)] if from_split[split] else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, by_bytes()])
    made.decoder = decoders.ByteLevel()
    special = [token for token, each in zip(tokens, kinds, strict=False) if each == CONTROL]
    added = partial(AddedToken, special=True, normalized=False)
    made.add_special_tokens([added(token) for token in special])
    # 3. make tokenizer_config.json
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    present = [key for key in TOKENS if key in model_config]
    about |= {key.removesuffix("_id"): tokens[model_config[key]] for key in present}
    template = _content(reader, "chat_template")
    about |= {} if template is None else {"chat_template": template}
    settings = json.dumps(about, indent=2) + "\n"
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": settings}, ()
