"""Models of `transformers` in, runs out, and back: `ppctl import`, `ppctl export`,
`run.start_from`.
"""

import json
import os
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from support.model_copies import tensors_of
from support.oracle import FOLDER, MIXTURES, MODELS, in_double
from support.selection import full_except

import ppctl
from ppctl import cli
from ppctl.config import Transformer
from ppctl.errors import CheckpointError, ConfigError
from ppctl.executors.reference import outputs_of
from ppctl.language.export_model import BFLOAT16, _write_tensors, export_model
from ppctl.language.import_model import import_model
from ppctl.language.tensor_names import named_parameters
from ppctl.language.transformers_config import model_config, model_settings
from ppctl.model.stack import init
from ppctl.model.transformer import transformer
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.run.kept_tokenizer import configured_ends

NAMES = sorted(MODELS, key=lambda name: name not in ("gemma3", "qwen2", "llama3"))


def umask():
    """The umask of this process, which can only be read by setting it."""
    own = os.umask(0o077)
    os.umask(own)
    return own


@pytest.mark.parametrize("name", full_except(NAMES, "llama3"))
def test_imported_parameters_are_exported_bit_for_bit(name, tmp_path):
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
    )  # like a model trained from scratch: config.json is made of the settings
    export_model(run, tmp_path / "made", dtype="bfloat16")
    made, given = (
        json.loads((each / "config.json").read_text())
        for each in (tmp_path / "made", FOLDER / name)
    )
    assert model_settings(made) == model_settings(given)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_an_imported_model_is_a_flax_module_with_the_same_logits_bit_for_bit(name, tmp_path):
    import_model(FOLDER / name, tmp_path / "run")
    run = ppctl.load_run(tmp_path / "run")
    module = run.flax_model()
    inputs = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = nnx.jit(lambda model, x: model(x))(module, inputs)
    np.testing.assert_array_equal(logits, run.predict(inputs))
    assert len(module.blocks) == run.config.model.num_layers


@pytest.mark.full
def test_training_starts_from_imported_parameters(tmp_path, monkeypatch):
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


def test_run_start_from_refuses_another_model_and_a_missing_run(tmp_path, monkeypatch, capsys):
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
def test_transformers_loads_an_export_and_has_the_same_logits(name, tmp_path):
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
    model = Transformer(**small, vocab_size=96, **changes)
    config = model_config(model, 96) | {"dtype": "bfloat16", "max_position_embeddings": 64}
    if "query_pre_attn_scalar" in config:
        assert config["sliding_window"] is not None
        assert type(config["query_pre_attn_scalar"]) is int
    transformers, torch = (pytest.importorskip(module) for module in ("transformers", "torch"))
    stack = transformer(model.architecture, dtype=jnp.float64)
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


def test_settings_of_training_are_not_exported():
    small = {
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 4,
        "mlp_width": 48,
        "activation": "swiglu",
    }
    trained = Transformer(**small, linear_dtype="fp8", dropout=0.1, attention="xla")
    assert model_config(trained, 96) == model_config(Transformer(**small), 96)


@pytest.mark.full
def test_a_model_trained_in_8_bits_is_exported_as_the_same_parameters(tmp_path, capsys):
    assert cli.main(["import", str(FOLDER / "llama2"), "--out", str(tmp_path / "llama")]) == 0
    words = ["--config-dir", str(tmp_path / "llama"), "recipes=imported", "data=synthetic"]
    words += [
        "data.vocab_size=90",
        "data.batch_size=4",
        "schedule.num_microbatches=2",
        "mesh=1x2",
        "schedule=1f1b",
    ]
    words += ["model.linear_dtype=fp8", "run.num_steps=1", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(["train", *words]) == 0
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert (
        "without model.linear_dtype=fp8: its readers round no products" in capsys.readouterr().out
    )
    made, given = (
        json.loads((each / "config.json").read_text())
        for each in (tmp_path / "out", FOLDER / "llama2")
    )
    assert model_settings(made) == model_settings(given)


def test_a_scalar_of_scores_that_transformers_refuses_is_refused():
    model = Transformer(family="gemma2", activation="geglu", query_pre_attn_scalar=3.5)
    with pytest.raises(ConfigError, match=r"no model.query_pre_attn_scalar=3.5. It cannot be exp"):
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
        if "q_proj" in name or "k_proj" in name:  # llama.cpp's order: pairs are neighbours
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
