"""The families of language models that `transformers` and ppctl both have: a config.json as settings, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ppctl.config import Transformer
from ppctl.errors import ConfigError

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu_exact"}
ALSO_CALLED = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
SIZES = {  # setting: key of config.json
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
GEMMA = {"norm_plus_one": True, "post_norms": True, "scale_embedding": True}
CAPS = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
SCALED = {  # setting: key of rope_scaling
    "rope_factor": "factor",
    "rope_original_len": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
}
WITHOUT = ("attention_bias", "mlp_bias", "use_bidirectional_attention")  # what ppctl's transformer does not have
TYPES = {True: "sliding_attention", False: "full_attention"}


@dataclass(frozen=True)
class Family:
    """A model_type of `transformers`: what all its members are, and what its config.json leaves out."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    activation: str = "hidden_act"  # key of config.json
    windows: str | None = None  # all: sliding_window is every layer's; upper: of those from max_window_layers on;
    #                             pattern: of all but each so many'th. None: no layer has one
    pattern: int = 1  # of windows=pattern, where config.json does not say
    caps: tuple[str, ...] = ()  # of CAPS
    has_local_theta: bool = False


PLAIN = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
QWEN = PLAIN | {"sliding_window": 4096, "max_window_layers": 28}
GEMMAS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
GEMMAS = GEMMAS | {"sliding_window": 4096, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {}, PLAIN),  # Llama 2 and 3, SmolLM 2
    "mistral": Family("MistralForCausalLM", {}, PLAIN | {"sliding_window": 4096}, windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, QWEN, windows="upper"),  # Qwen 2 and 2.5
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, QWEN | {"head_dim": 128}, windows="upper"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA,
        GEMMAS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="hidden_activation",
        windows="pattern",
        pattern=2,
        caps=tuple(CAPS),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA | {"qk_norm": True},
        GEMMAS | {"rope_theta": 1e6},
        activation="hidden_activation",
        windows="pattern",
        pattern=6,
        caps=("query_pre_attn_scalar", "logit_softcap"),
        has_local_theta=True,
    ),
}
LOCAL_THETA = 10000.0  # of gemma3_text, where config.json does not say


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `config.Transformer` that differ from the defaults, of a config.json.

    ConfigError for an architecture, or a part of one, that ppctl does not have.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type={name} is none that ppctl knows. It has {', '.join(FAMILIES)}: Llama 2 and 3, SmolLM 2, "
            "Mistral, Qwen 2, 2.5 and 3, Gemma 2 and 3 (text, dense)."
        )
    family = FAMILIES[name]
    given = {**family.defaults, **config}
    for key in WITHOUT:
        if given.get(key):
            raise ConfigError(
                f"{key}={given[key]} in config.json: ppctl's transformer has none. It cannot be imported."
            )
    missing = [
        key for key in SIZES.values() if given.get(key) is None and key not in ("num_key_value_heads", "rope_theta")
    ]
    if missing:
        raise ConfigError(f"config.json states no {missing[0]}, without which the model has no size.")
    found = {setting: given.get(key) for setting, key in SIZES.items()} | dict(family.settings)
    found["head_dim"] = given.get("head_dim")
    found["activation"] = _activation(given[family.activation], family.activation)
    found |= {setting: given.get(CAPS[setting]) for setting in family.caps}
    found |= _rope(family, given)
    windows = _windows(family, given)
    found |= windows or {"rope_local_theta": None}
    model = Transformer(**{key: value for key, value in found.items() if value is not None})
    model.check()
    return _normal(model)


def _normal(model: Transformer) -> dict[str, Any]:
    """Return the settings that are not the default, those that say the same in one way only."""
    if model.head_dim == model.d_model / model.num_heads:
        model.head_dim = None
    if model.query_pre_attn_scalar == model.head_width:
        model.query_pre_attn_scalar = None
    if model.num_kv_heads == model.num_heads:
        model.num_kv_heads = None
    model.mlp_width, model.mlp_ratio = model.hidden_width, Transformer.mlp_ratio
    usual = asdict(Transformer())
    return {key: value for key, value in asdict(model).items() if value != usual[key] or key in SIZES}


def _activation(name: str, key: str) -> str:
    found = ACTIVATIONS.get(ALSO_CALLED.get(name, name))
    if found is None:
        raise ConfigError(f"{key}={name} in config.json is no activation that ppctl has: {', '.join(ACTIVATIONS)}.")
    return found


def _windows(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of windows."""
    number, window = given["num_hidden_layers"], given.get("sliding_window")
    if family.windows is None or window is None or (family.windows == "upper" and not given.get("use_sliding_window")):
        return {}
    if family.windows == "all":
        have = [True] * number
    elif given.get("layer_types") is not None:
        have = [kind == TYPES[True] for kind in given["layer_types"]]
    elif family.windows == "upper":
        have = [l >= given["max_window_layers"] for l in range(number)]
    else:
        have = [(l + 1) % given.get("sliding_window_pattern", family.pattern) > 0 for l in range(number)]
    if not any(have):
        return {}
    periods = (p for p in range(1, number + 1) if all(has == have[l % p] for l, has in enumerate(have)))
    return {"window": window, "window_pattern": "".join("FW"[has] for has in have[: next(periods)])}


def _rope(family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, of either form that transformers writes."""
    found: dict[str, Any] = {}
    stated = given.get("rope_parameters") or {}
    if family.has_local_theta:
        local = stated.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ConfigError("config.json scales the rotary positions of layers with a window, which ppctl does not.")
        found["rope_local_theta"] = local.get("rope_theta", given.get("rope_local_base_freq", LOCAL_THETA))
        stated = stated.get("full_attention") or {}
    scaling = {**(given.get("rope_scaling") or {}), **stated}
    found["rope_theta"] = scaling.get("rope_theta", given.get("rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return found
    if kind not in Transformer.SCALINGS or kind == "none":
        names = ", ".join(name for name in Transformer.SCALINGS if name != "none")
        raise ConfigError(f"rope_type={kind} in config.json is no scaling that ppctl has: {names}.")
    used = Transformer.SCALINGS[kind]
    found["rope_scaling"] = kind
    found |= {setting: scaling.get(key) for setting, key in SCALED.items() if setting in used}
    if "rope_original_len" in used and found["rope_original_len"] is None:
        found["rope_original_len"] = given.get("max_position_embeddings")
    if kind == "yarn":
        if scaling.get("truncate") is False:
            raise ConfigError(
                "rope_scaling with truncate=false in config.json: ppctl's yarn has whole pairs. It cannot be imported."
            )
        found["rope_attention_factor"] = _attention_factor(scaling)
    return found


def _attention_factor(scaling: Mapping[str, Any]) -> float | None:
    """Return the factor that yarn states, in one number or in two that are compared."""
    if scaling.get("attention_factor") is not None or not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        return scaling.get("attention_factor")
    of = [1 + 0.1 * scaling[key] * math.log(scaling["factor"]) for key in ("mscale", "mscale_all_dim")]
    return of[0] / of[1]


def model_config(model: Transformer, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a model, without dtype and what belongs to a tokenizer.

    ConfigError where no family of `transformers` is this model.
    """
    model = replace(model, name=Transformer.name, seq_len=Transformer.seq_len, attention=Transformer.attention)
    model.vocab_size = vocab_size
    wanted, nearest = _normal(replace(model)), list[str]()
    for name, family in FAMILIES.items():
        config = _config_of(name, family, model)
        try:
            found = model_settings(config)
        except ConfigError:
            continue
        unlike = [f"model.{key}={wanted[key]}" for key in wanted if wanted[key] != found.get(key)]
        unlike += [f"model.{key}={getattr(Transformer, key)}" for key in found if key not in wanted]
        if not unlike:
            return config
        nearest = min(nearest or unlike, unlike, key=len)
    raise ConfigError(
        f"None of {', '.join(FAMILIES)} of transformers is this model: the nearest has no "
        f"{' '.join(nearest) or f'model.activation={model.activation}'}. It cannot be exported."
    )


def _config_of(name: str, family: Family, model: Transformer) -> dict[str, Any]:
    """Return the config.json of the member of a family that is most like a model."""
    names = {value: key for key, value in ACTIVATIONS.items()}
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    config |= {key: getattr(model, setting) for setting, key in SIZES.items()}
    config |= {"num_key_value_heads": model.kv_heads, "intermediate_size": model.hidden_width}
    config[family.activation] = names.get(model.activation, model.activation)
    if "head_dim" in family.defaults or model.head_width * model.num_heads != model.d_model:
        config["head_dim"] = model.head_width
    config |= {CAPS[setting]: getattr(model, setting) for setting in family.caps}
    if "query_pre_attn_scalar" in family.caps and model.query_pre_attn_scalar is None:
        config["query_pre_attn_scalar"] = model.head_width
    have = [window is not None for window in model.windows]
    if family.windows is not None:
        config["sliding_window"] = model.window
    if family.windows == "upper":
        first = have.index(True) if any(have) else len(have)
        config |= {"use_sliding_window": any(have), "max_window_layers": first}
    if family.windows in ("upper", "pattern"):
        config["layer_types"] = [TYPES[has] for has in have]
    if family.has_local_theta:
        config["rope_local_base_freq"] = LOCAL_THETA if model.rope_local_theta is None else model.rope_local_theta
    if model.rope_scaling != "none":
        used = Transformer.SCALINGS[model.rope_scaling]
        values = {key: getattr(model, setting) for setting, key in SCALED.items() if setting in used}
        config["rope_scaling"] = {"rope_type": model.rope_scaling}
        config["rope_scaling"] |= {key: value for key, value in values.items() if value is not None}
    return config
