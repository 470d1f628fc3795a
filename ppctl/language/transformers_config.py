"""Conversion between a config.json of `transformers` and the settings of ppctl's transformer."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ppctl.config import Transformer
from ppctl.config.groups.model_settings import lacking
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.groups.rope_settings import SCALINGS, Rope
from ppctl.errors import ConfigError
from ppctl.language import transformers_members as members
from ppctl.language.transformers_members import FRACTION, NUM_EXPERTS, NUM_SHARED, SIZES, Member

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu_exact"}
ALSO_CALLED = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
TYPES = {True: "sliding_attention", False: "full_attention"}
FAMILY_OF = {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}
FAMILY_OF |= {(True, True): "glm4p5"}  # key: (QKV biases, norms of queries and keys)
# settings without a key in config.json
OF_TRAINING = ("name", "seq_len", "attention", "dropout", "linear_dtype")
EXPERTS_OF_TRAINING = ("balance_loss", "z_loss", "bias_update", "dispatch", "capacity", "kernel")
DROPOUT, BALANCE = "attention_dropout", "router_aux_loss_coef"
LENGTH = "original_max_position_embeddings"
LOCAL_THETA = 10000.0  # default rope_local_base_freq of gemma3_text
ROPE_KEYS = ("rope_type", "type", "rope_theta", LENGTH)
UNSCALED = {"truncate": True, FRACTION: 1.0}  # values of rotary settings that have no effect
READ: dict[str, Any] = {  # key of config.json: its type
    **dict.fromkeys(SIZES.values(), int),
    **dict.fromkeys(("head_dim", "sliding_window", "max_window_layers"), int),
    **dict.fromkeys(("sliding_window_pattern", "max_position_embeddings"), int),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", DROPOUT), float),
    **dict.fromkeys(members.CAPS.values(), float),
    **dict.fromkeys((FRACTION, "routed_scaling_factor"), float),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "norm_topk_prob"), bool),
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_qk_norm"), bool),
    **dict.fromkeys((*NUM_EXPERTS, NUM_SHARED, "num_experts_per_tok", "n_group"), int),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), int),
    **dict.fromkeys(("decoder_sparse_step", "first_k_dense_replace", "topk_group"), int),
    **dict.fromkeys(("model_type", "hidden_act", "hidden_activation"), str),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), Mapping),
    "layer_types": list,
}
NO_FUNCTION = """
architectures dtype torch_dtype transformers_version _name_or_path use_cache pretraining_tp
initializer_range bos_token_id eos_token_id pad_token_id sep_token_id
decoder_start_token_id cache_implementation is_llama_config is_decoder return_dict id2label label2id
tokenizer_class _attn_implementation attn_implementation problem_type prefix _sliding_window_pattern
output_attentions output_hidden_states transformers.js_config unsloth_version unsloth_fixed
max_length min_length temperature top_k top_p do_sample num_beams num_beam_groups typical_p
repetition_penalty length_penalty diversity_penalty num_return_sequences no_repeat_ngram_size
chunk_size_feed_forward output_router_logits router_aux_loss_coef num_nextn_predict_layers
num_mtp_layers
"""  # keys without effect on a model's outputs


def model_settings(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes and non-default settings of `Transformer` for a config.json. ConfigError."""
    # 1. check types, the architecture, and unsupported keys
    for key, value in config_json.items():
        kind = READ.get(key, object)
        is_kind = isinstance(value, (int, float) if kind is float else kind)
        is_right = is_kind and (kind in (bool, object) or not isinstance(value, bool))
        if value is not None and not is_right:
            raise ConfigError(f"{key}={value} in config.json is not of type {kind.__name__}.")
    name = config_json.get("model_type")
    if name not in members.MEMBERS:
        lacks = lacking(str(name))
        if lacks is not None:
            raise ConfigError(f"model_type={name}: ppctl's transformer has no {lacks}.")
        raise ConfigError(
            f"model_type={name} is unsupported. ppctl has {', '.join(members.MEMBERS)}: Llama 2 "
            "and 3, SmolLM 2, Mistral, Mixtral, Qwen 1.5 to 3, OLMoE, GLM 4.5, Gemma 2 and 3 "
            "(text)."
        )
    member = members.MEMBERS[name]
    given = {**member.defaults, **config_json}
    unread = members.SPECIFIC - member.specific
    for key, value in given.items():
        is_known = (key in READ and key not in unread) or key in NO_FUNCTION.split()
        if value and not is_known and value != UNSCALED.get(key):
            what = f"{key}={value} in config.json: ppctl's transformer does not support it"
            raise ConfigError(f"{what}. It cannot be imported, unless {key} has no effect.")
    for key in SIZES.values():
        if given.get(key) is None and key != "num_key_value_heads":
            raise ConfigError(f"config.json states no {key}, without which the model has no size.")
    # 2. translate the settings
    found: dict[str, Any] = {setting: given.get(key) for setting, key in SIZES.items()}
    found |= {"family": member.family, "head_dim": given.get("head_dim")}
    if member.switches:
        bias, norm = (bool(key and given.get(key)) for key in member.switches)
        found["family"] = FAMILY_OF[bias, norm]
    activation: str = given[member.activation]
    found["activation"] = ACTIVATIONS.get(ALSO_CALLED.get(activation, activation))
    if found["activation"] is None:
        have = f"ppctl has {', '.join(ACTIVATIONS)}"
        raise ConfigError(
            f"{member.activation}={activation} in config.json is not supported. {have}."
        )
    found |= {setting: given.get(members.CAPS[setting]) for setting in member.caps}
    # check num_layers before lists of this length are made
    Transformer(num_layers=given["num_hidden_layers"]).check()
    try:
        found |= (windows := _windows(member, given))
        found["rope"] = _rope(member, given, has_windows=bool(windows))
        found["moe"] = _experts(member, given)
        model = Transformer(**{key: value for key, value in found.items() if value is not None})
        model.check()
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"config.json has a wrong value: {error}. Correct it.") from error
    return _normal(model)


def _normal(model: Transformer) -> dict[str, Any]:
    """Return sizes and non-default settings in normal form: equal models have equal settings."""
    implied = {"head_dim": model.d_model / model.num_heads, "num_kv_heads": model.num_heads}
    implied |= {"query_pre_attn_scalar": model.head_width}
    unset: dict[str, Any] = {key: None for key in implied if getattr(model, key) == implied[key]}
    moe, width = _normal_experts(model)
    model = replace(model, mlp_width=width, rope=_normal_rope(model.rope), moe=moe, **unset)
    values, usual = asdict(model), asdict(Transformer())
    values["moe"] = {key: n for key, n in values["moe"].items() if n != usual["moe"][key]}
    usual["moe"] = {}
    return {key: values[key] for key in values if values[key] != usual[key] or key in SIZES}


def _normal_experts(model: Transformer) -> tuple[Experts, int]:
    """Return (experts, MLP width) in normal form: an MLP width that no layer uses is theirs."""
    moe, width = model.moe, model.hidden_width
    if moe.num_experts is None:
        return moe, width
    if all(model.has_experts):
        width = moe.width or width
    if moe.score == "softmax_chosen":  # equals a softmax over all, normalized over the chosen
        moe = replace(moe, score="softmax", normalize=True)
    group_score = Experts.group_score if moe.num_groups == 1 else moe.group_score
    of_expert = None if moe.width == width else moe.width
    return replace(moe, width=of_expert, group_score=group_score), width


def _normal_rope(rope: Rope) -> Rope:
    """Return rotary positions whose scaling states all parameters of its type."""
    if rope.scaling is None or rope.record is None:
        return rope
    values = {key: value for key, value in vars(rope.record).items() if value is not None}
    return replace(rope, scaling={"rope_type": rope.scaling["rope_type"], **values})


def _experts(member: Member, given: Mapping[str, Any]) -> Experts:
    """Return the settings of experts. ConfigError if a size is missing or contradictory."""
    if not member.experts:
        return Experts()
    numbers = {key: given[key] for key in NUM_EXPERTS if given.get(key) is not None}
    if len({*numbers.values()}) > 1:
        stated = ", ".join(f"{key}={number}" for key, number in numbers.items())
        raise ConfigError(f"config.json states {stated}. Keep the right one.")
    given = {**given, member.experts["num_experts"]: next(iter(numbers.values()), None)}
    for key in member.experts.values():
        if given.get(key) is None:
            raise ConfigError(f"config.json states no {key}, without which experts have no size.")
    found = {setting: given[key] for setting, key in member.experts.items()}
    found |= member.of_experts
    if NUM_SHARED in member.defaults:
        found["shared_width"] = given[NUM_SHARED] * found["width"]
    return Experts(**found)


def _windows(member: Member, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings window and window_pattern; {} without windows."""
    number, window = given["num_hidden_layers"], given.get("sliding_window")
    is_off = member.windows == "upper" and not given.get("use_sliding_window")
    if member.windows is None or window is None or is_off:
        return {}
    if member.windows == "all":
        have = [True] * number
    elif given.get("layer_types") is not None:
        have = [kind == TYPES[True] for kind in given["layer_types"]]
    elif member.windows == "upper":
        have = [l >= given["max_window_layers"] for l in range(number)]
    else:
        pattern = given.get("sliding_window_pattern", member.pattern)
        have = [(l + 1) % pattern > 0 for l in range(number)]
    if not any(have):
        return {}
    period = next(p for p in range(1, number + 1) if have == [have[l % p] for l in range(number)])
    return {"window": window, "window_pattern": "".join("FW"[has] for has in have[:period])}


def _rope(member: Member, given: Mapping[str, Any], *, has_windows: bool) -> Rope:
    """Return the rotary positions, from rope_parameters or the older rope_scaling."""
    # 1. read the thetas
    stated, local_theta = given.get("rope_parameters") or {}, None
    if member.has_local_theta:
        local = stated.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            what = "config.json scales rotary positions of layers with a window"
            raise ConfigError(f"{what}: unsupported.")
        if has_windows:
            local_theta = local.get("rope_theta", given.get("rope_local_base_freq", LOCAL_THETA))
        stated = stated.get("full_attention") or {}
    found = {**(given.get("rope_scaling") or {}), **stated}
    theta: float = found.get("rope_theta", given["rope_theta"])
    fraction = 1.0
    if member.has_fraction:
        fraction = found.pop(FRACTION, None) or given.get(FRACTION) or 0.5
    # 2. read the scaling
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        have = ", ".join(SCALINGS)
        raise ConfigError(f"rope_type={kind} in config.json is not supported. ppctl has {have}.")
    names = [] if kind == "default" else [each.name for each in fields(SCALINGS[kind])]
    for key in found.keys() - {*names, *ROPE_KEYS}:
        if found[key] not in (None, UNSCALED.get(key)):
            what = f"{key}={found[key]} of rotary positions in config.json"
            raise ConfigError(f"{what}: ppctl's {kind} lacks it. It cannot be imported.")
    if kind == "default":
        return Rope(theta, local_theta, fraction=fraction)
    if found.get(LENGTH) is None:
        found[LENGTH] = given.get("max_position_embeddings")
    scaling = {name: found[name] for name in names if found.get(name) is not None}
    return Rope(theta, local_theta, {"rope_type": kind, **scaling}, fraction)


def model_config(model: Transformer, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a model, without dtype and token ids. ConfigError if none fits."""
    moe = replace(model.moe, **{name: getattr(Experts, name) for name in EXPERTS_OF_TRAINING})
    usual_values = {name: getattr(Transformer, name) for name in OF_TRAINING}
    model = replace(model, vocab_size=vocab_size, moe=moe, **usual_values)
    wanted, usual, nearest = _flat(_normal(model)), _flat(asdict(Transformer())), list[str]()
    for name, member in members.MEMBERS.items():
        config = _config_of(name, member, model)
        try:
            found = _flat(model_settings(config))
        except ConfigError:
            continue
        unlike = [f"model.{key}={wanted[key]}" for key in wanted if wanted[key] != found.get(key)]
        unlike += [f"model.{key}={usual[key]}" for key in found if key not in wanted]
        if not unlike:
            return config
        nearest = min(nearest or unlike, unlike, key=len)
    raise ConfigError(
        f"None of {', '.join(members.MEMBERS)} of transformers fits this model: the nearest has no "
        f"{' '.join(nearest) or f'model.activation={model.activation}'}. It cannot be exported."
    )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of experts under flat keys, such as moe.top_k."""
    experts = {f"moe.{key}": value for key, value in settings.get("moe", {}).items()}
    return {key: value for key, value in settings.items() if key != "moe"} | experts


def _config_of(name: str, member: Member, model: Transformer) -> dict[str, Any]:
    """Return `model` as config.json of model_type `name`, without inexpressible settings."""
    # 1. sizes and the activation
    names = {value: key for key, value in ACTIVATIONS.items()}
    config: dict[str, Any] = {"architectures": [member.architecture], "model_type": name}
    config |= {key: getattr(model, setting) for setting, key in SIZES.items()}
    config |= {"num_key_value_heads": model.kv_heads, "intermediate_size": model.hidden_width}
    config[member.activation] = names.get(model.activation, model.activation)
    if "head_dim" in member.defaults or model.head_width * model.num_heads != model.d_model:
        config["head_dim"] = model.head_width
    # 2. caps, experts and switches
    config |= {members.CAPS[setting]: getattr(model, setting) for setting in member.caps}
    moe, width = _normal_experts(model)
    of_experts = vars(replace(moe, width=moe.width or width))
    config |= {key: of_experts[setting] for setting, key in member.experts.items()}
    config |= {"intermediate_size": width} if member.experts else {}
    if NUM_SHARED in member.defaults:
        config[NUM_SHARED] = (moe.shared_width or 0) // of_experts["width"]
    stated = model.traits.qkv_bias, model.traits.qk_norm
    states = zip(member.switches, stated, strict=False)
    config |= {key: is_on for key, is_on in states if key}
    if member.has_fraction:
        config[FRACTION] = model.rope.fraction
    if "query_pre_attn_scalar" in member.caps:  # transformers takes only integers
        config["query_pre_attn_scalar"] = int(model.query_pre_attn_scalar or model.head_width)
    # 3. windows and rotary positions
    have = [window is not None for window in model.windows]
    if member.windows is not None:
        config["sliding_window"] = model.window
    if member.windows == "pattern" and model.window is None:  # required, though no layer has one
        config |= members.SLIDING
    if member.windows == "upper":
        first = have.index(True) if any(have) else len(have)
        config |= {"use_sliding_window": any(have), "max_window_layers": first}
    if member.windows in ("upper", "pattern"):
        config["layer_types"] = [TYPES[has] for has in have]
    if member.has_local_theta:
        theta = model.rope.local_theta
        config["rope_local_base_freq"] = LOCAL_THETA if theta is None else theta
    config["rope_theta"] = model.rope.theta
    scaling = _normal_rope(model.rope).scaling
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config
