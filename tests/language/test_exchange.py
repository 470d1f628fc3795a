"""Models of `transformers` in, runs out, and back: `ppctl import`, `ppctl export`,
`run.start_from`.
"""

import json
import math
import os
import re
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support.golden_models import config_of
from support.oracle import FOLDER, MIXTURES, MODELS, in_double
from support.selection import full_except

import ppctl
from ppctl import cli
from ppctl.config import Transformer
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import CheckpointError, ConfigError
from ppctl.executors.reference import outputs_of
from ppctl.language.export_model import BFLOAT16, _write_tensors, export_model
from ppctl.language.import_model import import_model
from ppctl.language.language_model import open_language_model
from ppctl.language.tensor_names import named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.language.transformers_members import NUM_EXPERTS
from ppctl.model.stack import init
from ppctl.model.transformer import transformer
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.pipeline.built_in_models import architecture
from ppctl.training.run.kept_tokenizer import configured_ends

NAMES = sorted(MODELS, key=lambda name: name not in ("gemma3", "qwen2", "llama3"))


def tensors_of(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 it is no mapping
    return found


def umask():
    """The umask of this process, which can only be read by setting it."""
    own = os.umask(0o077)
    os.umask(own)
    return own


@pytest.fixture
def copy(tmp_path):
    """A golden model to change: (directory, its config.json, its tensors, what writes them)."""
    directory = tmp_path / "model"
    shutil.copytree(FOLDER / "llama2", directory)

    def write(config=None, tensors=None):
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, directory / "model.safetensors")

    return (
        directory,
        json.loads((directory / "config.json").read_text()),
        tensors_of(directory),
        write,
    )


@pytest.mark.parametrize("name", full_except(NAMES, "llama3", "qwen2", "mixtral", "glm4_moe"))
def test_what_is_imported_is_exported_bit_for_bit(name, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    import_model(FOLDER / name, run)
    export_model(run, out)
    before, after = tensors_of(FOLDER / name), tensors_of(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape)
        assert tensor.tobytes() == after[key].tobytes(), key
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (FOLDER / name / "config.json").read_text()
    )
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o666 & ~umask()}
    shutil.rmtree(
        run / "source"
    )  # as of a model that was trained from scratch: config.json is made of the settings
    export_model(run, tmp_path / "made", dtype="bfloat16")
    made, given = (
        json.loads((each / "config.json").read_text())
        for each in (tmp_path / "made", FOLDER / name)
    )
    assert model_settings(made) == model_settings(given)


@pytest.mark.full
def test_training_goes_on_from_imported_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", str(FOLDER / "llama2"), "--out", "llama"]) == 0
    words = [
        "--config-dir",
        "llama",
        "recipes=imported",
        "data=synthetic",
        "data.vocab_size=90",
        "data.batch_size=4",
    ]
    words += [
        "executor=reference",
        "mesh=1x1",
        "schedule=gpipe",
        "schedule.num_microbatches=1",
        "model.seq_len=8",
    ]
    words += ["run.num_steps=1", "run.eval_every=null", "run.trackers=[]"]
    assert cli.main(["train", *words]) == 0
    imported, trained = ppctl.load_run("llama"), ppctl.load_run("runs/llama-trained")
    first = next(trained.data.batches())
    assert trained.metrics[0]["loss"] == pytest.approx(imported.loss(first), rel=1e-5)
    moved = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()), trained.params(), imported.params()
    )
    assert 0 < max(jax.tree.leaves(moved)) < 0.01
    assert cli.main(["export", "runs/llama-trained", "--out", "out"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_of_another_model_and_none_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    import_model(FOLDER / "llama2", tmp_path / "llama")
    small = [
        "train",
        "data=synthetic",
        "mesh=1x1",
        "executor=reference",
        "schedule=gpipe",
        "model.num_layers=1",
    ]
    assert cli.main([*small, "run.start_from=llama"]) == CheckpointError.exit_code
    assert "run.start_from=llama has another model: " in capsys.readouterr().err
    assert cli.main([*small, "run.start_from=nothing"]) == CheckpointError.exit_code
    assert (
        "run.start_from=nothing has no checkpoint. Name a run directory" in capsys.readouterr().err
    )
    assert cli.main([*small, "run.dir=llama"]) == CheckpointError.exit_code
    assert "is an imported model. Train it into another run.dir" in capsys.readouterr().err


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


MISTAKES = [  # changes of config.json, of tensors, what is said
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
def test_what_is_no_model_of_ours_is_refused_in_a_line(config, tensors, message, copy, tmp_path):
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
def test_a_key_that_nobody_reads_and_a_value_of_a_wrong_type_are_refused(change, message):
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


def test_files_next_to_the_one_that_is_meant_are_not_read(copy, tmp_path):
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


@pytest.mark.full
def test_the_host_holds_one_leaf_at_a_time(copy, tmp_path, monkeypatch):
    directory, config, _, write = copy
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "head_dim": 128}
    write({**config, **sizes})
    kinds = {"q_proj": (512, 512), "k_proj": (512, 512), "v_proj": (512, 512), "o_proj": (512, 512)}
    kinds |= {"gate_proj": (2048, 512), "up_proj": (2048, 512), "down_proj": (512, 2048)}
    folder = {
        name: "mlp" if shape[0] + shape[1] > 1024 else "self_attn" for name, shape in kinds.items()
    }
    tensors = {
        name: np.ones((8192, 512), np.float32)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    tensors["model.norm.weight"] = np.ones(512, np.float32)
    for l in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{l}.{name}.weight"] = np.ones(512, np.float32)
        for name, shape in kinds.items():
            tensors[f"model.layers.{l}.{folder[name]}.{name}.weight"] = np.ones(shape, np.float32)
    write(tensors=tensors)
    largest, total = 8192 * 512 * 4, sum(tensor.nbytes for tensor in tensors.values())
    assert total > 3 * largest
    del tensors
    parts, save = [], Checkpoints.save

    def saved(self, step, state, meta):
        parts.extend(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
        return save(self, step, state, meta)

    monkeypatch.setattr(Checkpoints, "save", saved)
    tracemalloc.start()
    import_model(directory, tmp_path / "run")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest
    assert sum(parts) == total / jax.device_count()


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_exported_and_has_the_same_logits(name, tmp_path):
    transformers, torch = (pytest.importorskip(module) for module in ("transformers", "torch"))
    import_model(FOLDER / name, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    expected = np.load(FOLDER / name / "expected.npz")
    ids = torch.asarray(expected["ids"][:, :-1].astype(np.int64))
    how = {"attn_implementation": "eager"}
    how |= {"experts_implementation": "eager"} if name in MIXTURES else {}
    # where torch's float32 stands for float64, no float32 of a file can be read: a router's bias
    narrow = {key: tensor.astype(BFLOAT16) for key, tensor in tensors_of(tmp_path / "out").items()}
    save_file(narrow, tmp_path / "out/model.safetensors", {"format": "pt"})
    with in_double():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float64, **how
        )
        logits = model(ids, use_cache=False).logits.detach().numpy()
    assert np.abs(logits - expected["logits_float64"]).max() < 1e-9
    ours = ppctl.load_run(tmp_path / "run").predict(expected["ids"][:, :-1])
    assert np.abs(ours - expected["logits_float32"]).max() < 1e-4


BY_HAND = {  # models whose family a user set, and not its windows and caps
    "gemma2": {"family": "gemma2", "activation": "swiglu", "query_pre_attn_scalar": 3.0},
    "gemma3": {"family": "gemma3", "activation": "geglu", "tied": True, "logit_softcap": 2.0},
    "qwen2": {"family": "qwen2", "activation": "geglu", "window": 4, "window_pattern": "FW"},
}


@pytest.mark.parametrize("changes", BY_HAND.values(), ids=BY_HAND)
def test_a_family_set_by_hand_is_exported_as_transformers_takes_it(changes, tmp_path):
    small = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48}
    model = Transformer(**small, **changes)
    config = model_config(model, 96) | {"dtype": "bfloat16", "max_position_embeddings": 64}
    if "query_pre_attn_scalar" in config:
        assert config["sliding_window"] is not None
        assert type(config["query_pre_attn_scalar"]) is int
    transformers, torch = (pytest.importorskip(module) for module in ("transformers", "torch"))
    stack = transformer(**vars(architecture(model, 96)), dtype=jnp.float64)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), init(stack, 0))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert list(_write_tensors(tmp_path, params, named_parameters(params, config), jnp.bfloat16))
    ids = np.random.default_rng(0).integers(96, size=(2, 24))
    with in_double():
        load = transformers.AutoModelForCausalLM.from_pretrained
        theirs = load(tmp_path, dtype=torch.float64, attn_implementation="eager")
        expected = theirs(torch.asarray(ids), use_cache=False).logits.detach().numpy()
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), params)
    logits = outputs_of(stack, dtype=jnp.float64)(wide, jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-9)


def test_a_scalar_of_scores_that_transformers_refuses_is_refused():
    model = Transformer(family="gemma2", activation="geglu", query_pre_attn_scalar=3.5)
    with pytest.raises(ConfigError, match=r"no model.query_pre_attn_scalar=3.5. It cannot be exp"):
        model_config(model, 96)


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
def test_what_is_no_mixture_of_ours_is_refused_in_a_line(name, change, message):
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
    assert every_second["mlp_width"] == 48  # of the layers between


def test_a_bound_of_training_drops_no_token_of_a_text(tmp_path):
    import_model(FOLDER / "mixtral", tmp_path / "run")
    whole = open_language_model(tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(text.replace("capacity: null", "capacity: 1.0"))
    ids = np.random.default_rng(0).integers(96, size=(2, 24))
    bounded = open_language_model(tmp_path / "run")
    assert bounded.transformer.moe.capacity == 1.0
    logits = [outputs_of(m.stack(), dtype=m.dtype)(m.params, ids) for m in (whole, bounded)]
    np.testing.assert_array_equal(*logits)


def test_losses_of_balance_are_noted_and_not_applied(tmp_path):
    notes = import_model(FOLDER / "mixtral", tmp_path / "run").notes
    assert notes == (
        "router_aux_loss_coef=0.001 is not applied: ppctl's balance loss per sequence is "
        "model.moe.balance_loss",
    )


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
    model = Transformer(**small, family=family, dropout=0.1, moe=Experts(**MADE[model_type]))
    config = model_config(model, 96)
    assert config["model_type"] == model_type
    stack = transformer(**vars(architecture(model, 96)), dtype=jnp.float32)
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
def test_a_gguf_file_is_the_model_that_was_written(copy, tmp_path):
    gguf = pytest.importorskip("gguf")
    directory, config, tensors, _ = copy
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_context_length(64)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, tensor in tensors.items():
        values = tensor.astype(np.float32)
        if "q_proj" in name or "k_proj" in name:  # as llama.cpp writes them: pairs are neighbours
            values = values.reshape(4, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = import_model(tmp_path / "model.gguf", tmp_path / "run")
    assert found.notes == ("the tokenizer (None, None) cannot be written as tokenizer.json",)
    import_model(directory, tmp_path / "other")
    runs = [ppctl.load_run(tmp_path / each) for each in ("run", "other")]
    jax.tree.map(np.testing.assert_array_equal, *(run.params() for run in runs))
    unlike = {
        key
        for key, value in runs[0].settings["model"].items()
        if value != runs[1].settings["model"][key]
    }
    assert not unlike
    assert configured_ends(tmp_path / "run") == (2, 5)
    export_model(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [
        2,
        5,
    ]


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
