"""Directories that `ppctl import` refuses in one line, and files that it ignores."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.oracle import FOLDER

import ppctl
from ppctl import cli
from ppctl.errors import ConfigError
from ppctl.language.export_model import export_model
from ppctl.language.import_model import import_model
from ppctl.language.transformers_config import model_settings


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


MISTAKES = [  # changes of config.json, changes of tensors, message
    (
        {"model_type": "phi3"},
        None,
        "model_type=phi3 is unsupported. ppctl has llama, mistral, qwen2",
    ),
    ({"attention_bias": True}, None, "attention_bias=True in config.json"),
    (
        {"tie_word_embeddings": True},
        None,
        "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings=true",
    ),
    ({"hidden_act": "relu"}, None, "hidden_act=relu in config.json is not supported"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        None,
        "rope_type=dynamic in config.json",
    ),
    ({"hidden_size": None}, None, "config.json states no hidden_size"),
    (
        {"intermediate_size": 40},
        None,
        r"layers.0.mlp.down_proj.weight is \[32, 48\], but config.json requires \[32, 40",
    ),
    (
        {},
        lambda t: without(t, "lm_head.weight"),
        r"lm_head.weight \[96, 32\] of the model is missing\.",
    ),
    (
        {},
        lambda t: t | {"model.extra.weight": t["lm_head.weight"]},
        r"model.extra.weight \[96, 32\] is not a tensor of",
    ),
    (
        {},
        lambda t: t | {"lm_head.weight": np.zeros((96, 32))},
        "lm_head.weight in .* is F64, but parameters are stored",
    ),
]


@pytest.mark.parametrize(
    ("config", "tensors", "message"), MISTAKES, ids=[message[:30] for *_, message in MISTAKES]
)
def test_unsupported_models_are_refused_in_one_line(config, tensors, message, copy, tmp_path):
    directory, before, own, write = copy
    write({**before, **config}, None if tensors is None else tensors(own))
    with pytest.raises(ConfigError, match=message) as caught:
        import_model(directory, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


UNREAD = [  # changes of config.json: keys that change the function, values that are of no use
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 2.0}}, "mscale=2.0"),
    ({"rope_parameters": [1]}, "config.json"),
    ({"rope_parameters": {"rope_theta": "big"}}, "config.json|theta"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    ({"num_local_experts": 8}, "num_local_experts=8"),
    ({"logit_scale": 0.1}, "logit_scale=0.1"),
    ({"layer_norm_type": "pre"}, "layer_norm_type=pre"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_key_value_heads": [1]}, "num_key_value_heads"),
    ({"hidden_act": 3}, "hidden_act=3"),
    ({"hidden_act": [1]}, "hidden_act"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings"),
    ({"attention_dropout": "some"}, "attention_dropout"),
]


@pytest.mark.parametrize(("change", "message"), UNREAD, ids=[str(change) for change, _ in UNREAD])
def test_unread_keys_and_values_of_a_wrong_type_are_refused(change, message):
    before = json.loads((FOLDER / "llama2/config.json").read_text())
    with pytest.raises(ConfigError, match=message) as caught:
        model_settings({**before, **change})
    assert "\n" not in str(caught.value)


def test_keys_that_change_no_function_are_passed_over():
    before = json.loads((FOLDER / "llama2/config.json").read_text())
    nothing = {"attention_bias": False, "num_local_experts": None, "_name_or_path": "x"}
    nothing |= {"partial_rotary_factor": 1.0, "use_cache": True, "is_llama_config": True}
    nothing |= {"temperature": 0.6, "id2label": {"0": "A"}, "quantization_config": {}}
    assert model_settings({**before, **nothing}) == model_settings(before)


def test_dropout_of_attention_is_noted(copy, tmp_path):
    directory, before, _, write = copy
    for value in (0.1, 0.0):
        write({**before, "attention_dropout": value})
        notes = import_model(directory, tmp_path / f"run{value}").notes
        text = f"attention_dropout={value} is not applied: unsupported"
        assert notes == ((text,) if value else ())


def test_places_that_are_no_models_are_refused(copy, tmp_path, capsys):
    directory, _, _, _ = copy
    (tmp_path / "file").write_text("")
    for source, message in (
        (tmp_path / "none", "none has no config.json. Name a model directory"),
        (tmp_path / "file", "file has no config.json"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            import_model(source, tmp_path / "run")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        import_model(directory, directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        import_model(directory, tmp_path / "run")
    for words, message in (
        (["import"], "are required: --out. Write ppctl import DIR --out RUN_DIR"),
        (["import", "a"], "are required: --out. Write ppctl import DIR --out RUN_DIR"),
        (["import", "a", "--out"], "argument --out: expected one argument"),
        (
            ["export", "a", "--out", "b", "--stap", "3"],
            "--stap is not an option. Did you mean --step?",
        ),
        (["export", "a", "--out", "b", "--step", "x"], "argument --step: invalid int value: 'x'"),
        (["export", "a", "--out", "b"], "a is no run: it has no config.yaml"),
    ):
        assert cli.main(words) == ConfigError.exit_code
        assert message in capsys.readouterr().err


def test_only_the_model_file_of_a_directory_is_read(copy, tmp_path):
    """The index, else model.safetensors, else its numbered parts, else exactly one file."""
    directory, _, tensors, _ = copy
    model, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    other = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    places = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    for step, (meant, neighbours) in enumerate(
        (
            ("model.safetensors", ("consolidated.safetensors", "model.bak.safetensors")),
            ("model-00001-of-00001.safetensors", ("consolidated.safetensors", "old.safetensors")),
            ("weights.safetensors", ()),
        )
    ):
        for file in directory.glob("*.safetensors"):
            file.unlink()
        save_file({"tok_embeddings.weight": np.zeros(3)} | other, directory / "other")
        save_file(tensors, directory / meant)
        for name in neighbours:
            shutil.copy(directory / "other", directory / name)
        import_model(directory, tmp_path / f"run{step}")
        embedding = ppctl.load_run(tmp_path / f"run{step}").params()["embed_head"]["embedding"]
        np.testing.assert_array_equal(embedding, tensors["model.embed_tokens.weight"])
    shutil.copy(directory / "other", directory / "old.safetensors")
    with pytest.raises(ConfigError, match=r"old.safetensors, weights.safetensors.*Keep one"):
        import_model(directory, tmp_path / "none")
    save_file(tensors, directory / "model-00001-of-00001.safetensors")
    shutil.copy(directory / "other", model)
    index.write_text(json.dumps({"weight_map": places}))
    import_model(directory, tmp_path / "indexed")
    for text in ("{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}', "\\xff"):
        index.write_text(text)
        with pytest.raises(ConfigError, match="is not an index of safetensors"):
            import_model(directory, tmp_path / "none")


def test_a_model_that_transformers_has_not_is_refused(tmp_path):
    run = tmp_path / "run"
    import_model(FOLDER / "llama2", run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("activation: swiglu", "activation: silu"))
    with pytest.raises(
        ConfigError, match=r"the nearest has no .*model.activation=silu.* It cannot be exported"
    ):
        export_model(run, tmp_path / "out")
