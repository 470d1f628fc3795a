"""Mixtures of experts of `transformers` and GGUF in, runs out, and back."""

import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.golden_models import config_of
from support.model_copies import tensors_of
from support.oracle import FOLDER, MIXTURES

import ppctl
from ppctl.config import Transformer
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import ConfigError
from ppctl.executors.reference import outputs_of
from ppctl.language.import_model import import_model
from ppctl.language.language_model import open_language_model
from ppctl.language.tensor_names import named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.language.transformers_members import NUM_EXPERTS
from ppctl.model.transformer import transformer

MIXTURE_MISTAKES = [  # a golden mixture, changes of its config.json, the message
    ("mixtral", {"model_type": "deepseek_v3"}, r"deepseek_v3: ppctl's transformer has no multi-h"),
    ("mixtral", {"model_type": "gpt_oss"}, r"gpt_oss: ppctl's transformer has no attention sinks"),
    ("mixtral", {"model_type": "llama4_text"}, "llama4_text: ppctl's transformer has no chunked"),
    ("mixtral", {"num_experts": 3}, "states num_experts=3, num_local_experts=4. Keep the right"),
    ("mixtral", {"num_local_experts": None}, "states no num_local_experts, without which"),
    ("mixtral", {"num_experts_per_tok": 5}, "top_k=5 is more than model.moe.num_experts=4"),
    ("mixtral", {"n_shared_experts": 1}, "n_shared_experts=1 in config.json: ppctl's transformer"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] in config.json: ppctl's"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True in config.json: ppctl's"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True in config.json"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 in config.json: ppctl's transformer does not"),
    ("glm4_moe", {"n_shared_experts": 0}, "model.moe.shared_width=0 must be"),
    ("glm4_moe", {"n_group": 3}, "model.moe.num_groups=3 with model.moe.top_groups=2 do not fit"),
]


@pytest.mark.parametrize(("name", "change", "message"), MIXTURE_MISTAKES)
def test_unsupported_mixtures_are_refused_in_one_line(name, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        model_settings({**config_of(name), **change})
    assert "\n" not in str(caught.value)


def test_keys_of_mixtures_have_several_names_and_defaults():
    of = {name: config_of(name) for name in MIXTURES}
    for written in of.values():
        number = next(key for key in NUM_EXPERTS if key in written)
        others = {key: value for key, value in written.items() if key != number}
        for key in NUM_EXPERTS:
            assert model_settings(others | {key: written[number]}) == model_settings(written)
    air = {**of["glm4_moe"], "attention_bias": True, "use_qk_norm": False}
    assert model_settings(air)["family"] == "qwen2"
    assert "family" not in model_settings({**of["qwen2_moe"], "qkv_bias": False})  # llama
    of_hub = {**of["glm4_moe"], "rope_parameters": None, "rope_theta": 1e4}
    for fraction in ({}, {"partial_rotary_factor": 0.5}):
        assert model_settings(of_hub | fraction) == model_settings(of["glm4_moe"])
    every_second = model_settings({**of["qwen3_moe"], "decoder_sparse_step": 2})
    assert every_second["moe"]["period"] == 2
    assert every_second["mlp_width"] == 48  # indices of the layers between


def test_a_bound_of_training_drops_no_token_of_a_text(tmp_path):
    import_model(FOLDER / "mixtral", tmp_path / "run")
    whole = open_language_model(tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(text.replace("capacity: null", "capacity: 1.0"))
    ids = np.random.default_rng(0).integers(96, size=(2, 24))
    bounded = open_language_model(tmp_path / "run")
    assert bounded.transformer.moe.capacity == 1.0
    logits = [
        jax.jit(outputs_of(m.stack(), dtype=m.dtype))(m.params, ids) for m in (whole, bounded)
    ]
    np.testing.assert_array_equal(*logits)


def test_losses_of_balance_are_noted_and_not_applied(tmp_path):
    notes = import_model(FOLDER / "mixtral", tmp_path / "run").notes
    assert notes == (
        "router_aux_loss_coef=0.001 is not applied: model.moe.balance_loss=0.001 weighs even "
        "loads alike",
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_experts_in_one_tensor_and_a_layer_after_the_last_are_read(name, tmp_path):
    """As `transformers` holds them in memory: gate and up of all experts of a layer in one."""
    before, fused = tensors_of(FOLDER / name), {}
    names = {"mixtral": "block_sparse_moe", "glm4_moe": "mlp"}
    for key, tensor in before.items():
        layer, found, rest = key.partition(f".{names[name]}.experts.")
        if not found:
            fused[key.replace("block_sparse_moe", "mlp")] = tensor
            continue
        e, kind = rest.split(".")[:2]
        both = fused.setdefault(layer, {})
        both.setdefault(
            {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(kind, kind), {}
        )[int(e)] = tensor
    for layer in [key for key, parts in fused.items() if isinstance(parts, dict)]:
        parts = {
            kind: np.stack([by_number[e] for e in sorted(by_number)])
            for kind, by_number in fused.pop(layer).items()
        }
        gate_up = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        fused[f"{layer}.mlp.experts.gate_up_proj"] = gate_up
        fused[f"{layer}.mlp.experts.down_proj"] = parts["down_proj"]
    if name == "glm4_moe":
        fused["model.layers.3.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(FOLDER / name / "config.json", directory)
    save_file(fused, directory / "model.safetensors")
    number = import_model(directory, tmp_path / "run").num_parameters
    assert number == sum(tensor.size for tensor in before.values())
    import_model(FOLDER / name, tmp_path / "other")
    params = [ppctl.load_run(tmp_path / each).params() for each in ("run", "other")]
    jax.tree.map(np.testing.assert_array_equal, *params)
    # in the other orientation, the message names the tensor in the file
    down = f"{layer}.mlp.experts.down_proj"
    fused[down] = fused[down].swapaxes(1, 2).copy()
    save_file(fused, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"\(of {down} \[\d+, \d+, \d+\]\) is \[.*requires"):
        import_model(directory, tmp_path / "third")


MADE = {  # mixtures that a user trained: settings, the model_type that they become
    "mixtral": {"num_experts": 4, "score": "softmax_chosen", "width": 16, "balance_loss": 0.01},
    "qwen3_moe": {"num_experts": 4, "width": 16, "normalize": False, "capacity": 2.0},
    "glm4_moe": {
        "num_experts": 4,
        "width": 16,
        "first_dense": 1,
        "score": "sigmoid",
        "choice_bias": True,
        "bias_update": 0.001,
        "shared_width": 32,
    },
}


@pytest.mark.parametrize("model_type", MADE)
def test_a_mixture_of_settings_is_the_family_that_has_it(model_type):
    small = {"num_layers": 3, "d_model": 32, "num_heads": 4, "activation": "swiglu"}
    family = {"mixtral": "llama", "qwen3_moe": "qwen3", "glm4_moe": "glm4p5"}[model_type]
    model = Transformer(
        **small, vocab_size=96, family=family, dropout=0.1, moe=Experts(**MADE[model_type])
    )
    config = model_config(model, 96)
    assert config["model_type"] == model_type
    stack = transformer(model.architecture, dtype=jnp.float32)
    tensors = named_parameters(stack.param_shapes, config)
    counted = sum(math.prod(each.shape) for each in tensors)
    assert counted == sum(jax.tree.leaves(stack.counts(stack.param_shapes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choice_bias": True}, r"the nearest has no model.moe.choice_bias=True. It cannot be ex"),
        ({"scale": 2.0}, r"the nearest has no model.moe.scale=2.0. It cannot be exported"),
        ({"first_dense": 1}, r"the nearest has no model.moe.first_dense=1. It cannot be exported"),
    ],
)
def test_a_mixture_that_no_family_has_is_refused(changes, message):
    model = Transformer(activation="swiglu", moe=Experts(num_experts=4, **changes))
    with pytest.raises(ConfigError, match=message):
        model_config(model, 96)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_a_gguf_file_of_a_mixture_is_the_model_that_was_written(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    kind = {"mixtral": "llama"}.get(name, name.replace("_", ""))
    config, before, after = config_of(name), tensors_of(FOLDER / name), dict[str, list]()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or 8)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_context_length(64)
    writer.add_expert_count(next(config[key] for key in NUM_EXPERTS if key in config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    arch = next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, tensor in sorted(before.items()):
        values = tensor.astype(np.float32)
        if kind == "llama" and ("q_proj" in key or "k_proj" in key):
            values = values.reshape(-1, 2, 4, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        after.setdefault(re.sub(r"experts\.\d+", "experts", key), []).append(values)
    for key, parts in after.items():
        values = np.stack(parts) if ".experts." in key else parts[0]
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    import_model(tmp_path / "model.gguf", tmp_path / "run")
    import_model(FOLDER / name, tmp_path / "other")
    runs = [ppctl.load_run(tmp_path / each) for each in ("run", "other")]
    jax.tree.map(np.testing.assert_array_equal, *(run.params() for run in runs))
    assert runs[0].settings["model"] == runs[1].settings["model"]
