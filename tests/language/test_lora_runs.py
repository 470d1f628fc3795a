"""Runs of optim.train=lora: from an imported model, on any layout, to merged models and adapters
that others load.
"""

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.oracle import FOLDER
from support.selection import full

import ppctl
from ppctl import cli
from ppctl.config import MLP, AdamW, Config, CustomModel, Regression, Transformer, check
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import CheckpointError, ConfigError
from ppctl.language.import_model import import_model
from ppctl.language.language_model import open_language_model

SMALL = [
    "data=synthetic",
    "data.vocab_size=90",
    "data.batch_size=8",
    "schedule.num_microbatches=4",
    "model.seq_len=8",
]
SMALL += ["run.trackers=[]", "run.eval_every=null", "optim.lr=0.05"]
LORA = ["optim.train=lora", "optim.lora_rank=4", "optim.lora_alpha=8"]
PIPED, ALONE = ["mesh=1x2", "schedule=1f1b"], ["executor=reference", "mesh=1x1", "schedule=gpipe"]


def train(*words):
    return cli.main(["train", "--config-dir", "base", "recipes=imported", *SMALL, *words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a base, a run of its adapters on one device, and these as PEFT stores them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path := tmp_path_factory.mktemp("trained"))
        import_model(FOLDER / "llama2", path / "base")
        assert train(*LORA, *ALONE, "run.num_steps=2") == 0
        assert cli.main(["export", "runs/base-trained", "--out", "adapter", "--adapter"]) == 0
    return path


@pytest.fixture
def base(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "base", tmp_path / "base")
    return tmp_path


@pytest.fixture
def finished(trained, base):
    """Directory `base` with the run of adapters."""
    for name in ("runs", "adapter"):
        shutil.copytree(trained / name, base / name)
    return base


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts",
    [
        [],  # the run of `trained`
        full([PIPED, ALONE]),
        full([[*PIPED, "executor=mpmd"], ["mesh=1x2x2", "schedule=zb_h1"]]),
    ],
)
def test_a_run_of_adapters_from_an_imported_model(layouts, base, request, capsys):
    """Begins as the base, resumes on other executors and meshes, refuses other settings, and is
    exported both ways.
    """
    if not layouts:
        request.getfixturevalue("finished")
    for num_steps, layout in enumerate(layouts, start=2):
        assert train(*LORA, *layout, f"run.num_steps={num_steps}") == 0
        assert "27,680 parameters (3,968 trained)" in capsys.readouterr().out
    run, imported = ppctl.load_run("runs/base-trained"), ppctl.load_run("base")
    first = next(run.data.batches())
    assert run.metrics[0]["loss"] == pytest.approx(imported.loss(first), rel=1e-5)
    assert [each["step"] for each in run.metrics] == [*range(1, (len(layouts) or 1) + 2)]
    _, lora, params = open_language_model(run.directory).adapters
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, None)
    for name in ("embedding", "head"):
        np.testing.assert_array_equal(
            params["embed_head"][name], imported.params()["embed_head"][name]
        )
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(kernel, imported.params()["layers"]["mlp"]["up"]["kernel"])
    assert run.loss(first) < imported.loss(first)
    capsys.readouterr()
    for words, message in (
        (PIPED, "holds other arrays: optim.train: lora then, all now"),
        (
            [*LORA, *PIPED, "optim.lora_targets=[q]"],
            "holds other arrays: optim.lora_targets: null then, [q] now",
        ),
        (
            [*LORA, *PIPED, "optim.lora_alpha=4"],
            "is of another model: optim.lora_alpha: 8.0 then, 4.0 now",
        ),
        (
            [*PIPED, "run.name=other", "run.start_from=runs/base-trained"],
            "run.start_from=runs/base-trained has adapters, Lora(rank=4, alpha=8.0, targets=None, dropout=0.0), "
            "and this run trains none. Use the same optim.train",
        ),
    ):
        assert train(*words, "run.num_steps=4") == CheckpointError.exit_code
        assert message in capsys.readouterr().err
    assert cli.main(["export", "runs/base-trained", "--out", "merged", "--dtype", "float32"]) == 0
    import_model(base / "merged", base / "again")
    ids = np.random.default_rng(0).integers(0, 90, (2, 8))
    again = ppctl.load_run("again").predict(ids)
    assert np.abs(again - run.predict(ids)).max() < 1e-6
    assert np.abs(again - imported.predict(ids)).max() > 1e-3
    if layouts:
        assert cli.main(["export", "runs/base-trained", "--out", "adapter", "--adapter"]) == 0
    config, tensors = (
        json.loads((base / "adapter/adapter_config.json").read_text()),
        load_file("adapter/adapter_model.safetensors"),
    )
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["base_model_name_or_path"] == str(FOLDER / "llama2")
    assert sorted(config["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    np.testing.assert_array_equal(
        tensors[name.format("A")], params["layers"]["mlp"]["down"]["lora_a"][1].T
    )
    assert tensors[name.format("B")].shape == (32, 4)
    assert cli.main(["export", "base", "--out", "none", "--adapter"]) == ConfigError.exit_code
    assert "--adapter: base was not trained with optim.train=lora" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_adapters_at_the_attention_of_a_mixture(name, tmp_path, monkeypatch, capsys):
    """Trained over ep, merged, exported both ways, generated from and evaluated."""
    monkeypatch.chdir(tmp_path)
    import_model(FOLDER / name, tmp_path / "base")
    layout = ["mesh=1x1x1x2", "schedule.num_microbatches=2", "schedule=gpipe"]
    assert train(*LORA, *layout, "run.num_steps=2") == 0
    run, imported = ppctl.load_run("runs/base-trained"), ppctl.load_run("base")
    first = next(run.data.batches())
    assert run.metrics[0]["loss"] == pytest.approx(imported.loss(first), rel=1e-5)
    assert run.loss(first) < imported.loss(first)
    experts = [each.params()["layers"]["experts"]["up"] for each in (run, imported)]
    np.testing.assert_array_equal(*experts)
    assert cli.main(["export", "runs/base-trained", "--out", "merged", "--dtype", "float32"]) == 0
    import_model(tmp_path / "merged", tmp_path / "again")
    ids = np.random.default_rng(0).integers(0, 90, (2, 8))
    again = ppctl.load_run("again").predict(ids)
    assert np.abs(again - run.predict(ids)).max() < 1e-6
    assert np.abs(again - imported.predict(ids)).max() > 1e-3
    assert cli.main(["export", "runs/base-trained", "--out", "adapter", "--adapter"]) == 0
    modules = {f"{each}_proj" for each in "qkvo"}
    if name == "glm4_moe":  # its first layer has an MLP
        modules |= {f"model.layers.0.mlp.{each}_proj" for each in ("gate", "up", "down")}
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert {*config["target_modules"]} == modules
    tensors = load_file("adapter/adapter_model.safetensors")
    num_layers = 3 if name == "glm4_moe" else 2
    assert len(tensors) == 2 * (4 * num_layers + (3 if name == "glm4_moe" else 0))
    capsys.readouterr()
    words = ["evaluate", "runs/base-trained", "--json"]
    assert cli.main(words) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert loss < 5


@pytest.mark.full
def test_the_page_of_a_run_of_adapters_draws_its_costs(base, capsys):
    """It drew F = I = W; W is the trained share of the matrices."""
    assert train(*LORA, "mesh=1x2", "schedule=zb_h1", "run.num_steps=1") == 0
    layers = open_language_model(Path("runs/base-trained")).adapters[2]["layers"]
    matrices = [(k, a.size) for k, a in jax.tree.leaves_with_path(layers) if a.ndim == 3]
    share = sum(n for k, n in matrices if "lora_" in str(k)) / sum(n for _, n in matrices)
    assert cli.main(["report", "base-trained", "--out", "page.html"]) == 0
    assert f"takes F 1 s, I 1 s, W {share:.5g} s" in Path("page.html").read_text()


@pytest.mark.full
def test_a_run_starts_from_the_adapters_of_another(base, capsys):
    """With its adapters and its base, and moments of zero; other adapters are refused."""
    assert train(*LORA, *ALONE, "run.num_steps=2") == 0
    second = [*ALONE, "run.num_steps=1", "run.name=second", "run.start_from=runs/base-trained"]
    for words, message in (
        (
            ["optim.train=lora", "optim.lora_rank=4", "optim.lora_alpha=4"],
            "Lora(rank=4, alpha=4.0, targets=None, dropout=0.0)",
        ),
        (
            ["optim.train=lora", "optim.lora_rank=2", "optim.lora_alpha=8"],
            "Lora(rank=2, alpha=8.0, targets=None, dropout=0.0)",
        ),
        ([*LORA, "optim.lora_targets=[q]"], "Lora(rank=4, alpha=8.0, targets=('q',), dropout=0.0)"),
    ):
        assert train(*words, *second) == CheckpointError.exit_code
        assert f"and this run trains {message}. Use" in capsys.readouterr().err
    assert train(*LORA, *second) == 0
    before, after = ppctl.load_run("runs/base-trained"), ppctl.load_run("runs/second")
    assert after.metrics[0]["loss"] == pytest.approx(
        before.loss(next(after.data.batches())), rel=1e-5
    )
    assert after.metrics[0]["loss"] != pytest.approx(
        ppctl.load_run("base").loss(next(after.data.batches())), rel=1e-3
    )
    (*_, old), (*_, new) = (
        open_language_model(each.directory).adapters for each in (before, after)
    )
    for name, part in old["layers"]["mlp"]["up"].items():
        moved = np.abs(new["layers"]["mlp"]["up"][name] - part).max()
        assert moved == 0 if name == "kernel" else 0 < moved < 0.1


@pytest.mark.parametrize(
    ("optim", "more", "message"),
    [
        (
            {"train": "all", "lora_rank": 8},
            {},
            "optim.lora_rank=8 applies to adapters, but optim.train=all trains none. Leave it out",
        ),
        ({"lora_rank": 0}, {}, "optim.lora_rank=0"),
        ({"lora_alpha": 0.0}, {}, "optim.lora_alpha=0"),
        ({"lora_targets": []}, {}, "optim.lora_targets=[] leaves nothing to choose from"),
        ({"lora_targets": ["q_proj"]}, {}, "optim.lora_targets=q_proj"),
        ({"train": "half"}, {}, "optim.train=half"),
        (
            {"lora_targets": ["gate"]},
            {},
            "optim.lora_targets has gate, but with model.activation=gelu",
        ),
        (
            {"lora_targets": ["q", "up"]},
            {"model": Transformer(moe=Experts(num_experts=4))},
            "optim.lora_targets has up, but with model.moe.num_experts=4 all layers have experts "
            "instead of an MLP, and experts take no adapters. Leave it out.",
        ),
        ({}, {"model": MLP(), "data": Regression()}, "but model=mlp has none. Use optim.train=all"),
        (
            {},
            {"model": CustomModel(target="a.b"), "data": Regression()},
            "A custom model has trainable=... in StackOptions or Network instead.",
        ),
    ],
)
def test_impossible_settings_are_refused(optim, more, message):
    with pytest.raises(ConfigError) as error:
        check(Config(optim=AdamW(**{"train": "lora"} | optim), **more))
    assert message in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [["mesh=1x2", "schedule=zb_h1"], ["mesh=1x2x2", "executor=mpmd", "schedule=1f1b"]]
)
def test_verify_finds_the_steps_of_adapters_right(layout, capsys):
    sizes = [
        "model.num_layers=2",
        "model.d_model=16",
        "model.num_heads=2",
        "optim.train=lora",
        "optim.lora_rank=2",
    ]
    assert cli.main(["verify", *SMALL, *sizes, *layout]) == 0
    assert "lora_b" in capsys.readouterr().out


CHATS = [("hi", "hello there"), ("bye", "see you"), ("how many", "twelve dogs")]


@pytest.mark.full
def test_adapters_learn_other_answers_than_the_base_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    questions, answers = zip(*CHATS, strict=True)
    for name, given in (("old", answers), ("new", answers[1:] + answers[:1])):
        chats = [
            [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
            for q, a in zip(questions, given, strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": each}) + "\n" for each in chats * 60)
        )
    (tmp_path / "text.txt").write_text("\n\n".join(f"{q} {a}" for q, a in CHATS) * 40)
    assert cli.main(["tokenize", "text.txt", "--out", "tok", "--vocab-size", "300"]) == 0
    words = [
        "data=text",
        "data.field=messages",
        "data.tokenizer=tok",
        "data.packing=true",
        "data.batch_size=8",
    ]
    words += [
        "data.eval_fraction=0",
        "run.eval_every=null",
        "run.trackers=[]",
        "model.activation=swiglu",
    ]
    words += [
        "model.num_layers=2",
        "model.d_model=32",
        "model.num_heads=2",
        "model.seq_len=48",
        "mesh=1x2",
    ]
    words += ["schedule=zb_h1", "schedule.num_microbatches=4", "optim.lr=0.02", "run.num_steps=60"]
    assert cli.main(["train", *words, "data.path=old.jsonl", "run.name=old"]) == 0
    adapters = ["optim.train=lora", "optim.lora_rank=8", "run.start_from=runs/old"]
    assert cli.main(["train", *words, *adapters, "data.path=new.jsonl", "run.name=new"]) == 0
    losses = [each["loss"] for each in ppctl.load_run("runs/new").metrics]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # names of transformers, for those of PEFT
@pytest.mark.parametrize("name", ["llama2", "qwen3", "gemma3"])
def test_peft_loads_the_adapters_and_has_the_logits_of_the_merged_model(
    name, tmp_path, monkeypatch
):
    if any(
        importlib.util.find_spec(module) is None for module in ("torch", "transformers", "peft")
    ):
        pytest.skip("needs torch, transformers and peft")
    import torch
    import transformers
    from peft import PeftModel

    monkeypatch.chdir(tmp_path)
    import_model(FOLDER / name, tmp_path / "base")
    assert train(*LORA, *PIPED, "run.num_steps=2", "optim.lora_targets=[q,v,o,up,down]") == 0
    for out, option in (("merged", []), ("adapter", ["--adapter"])):
        assert (
            cli.main(["export", "runs/base-trained", "--out", out, "--dtype", "float32", *option])
            == 0
        )
    ids = np.random.default_rng(0).integers(0, 90, (2, 12))
    of_files = partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        attn_implementation="eager",
        dtype=torch.float64,
    )
    adapted = PeftModel.from_pretrained(of_files(FOLDER / name), tmp_path / "adapter")
    merged = of_files(tmp_path / "merged")
    logits = lambda model: model(torch.asarray(ids), use_cache=False).logits.detach().numpy()
    found, wanted = map(logits, (adapted, merged))
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(ppctl.load_run("runs/base-trained").predict(ids) - found).max() < 1e-4
    assert np.abs(ppctl.load_run("base").predict(ids) - found).max() > 1e-3


def change_config(base, changes):
    file = base / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# the other settings that PEFT 0.21 writes for adapters as those of ppctl
OF_PEFT = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config")),
    **dict.fromkeys(("exclude_modules", "kasa_config", "layer_replication", "layers_pattern")),
    **dict.fromkeys(("layers_to_transform", "lora_ga_config", "megatron_config", "revision")),
    **dict.fromkeys(("modules_to_save", "monteclora_config", "target_parameters", "use_bdlora")),
    **dict.fromkeys(("trainable_token_indices", "velora_config", "auto_mapping")),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "ensure_weight_tying"), False),
    **{key: {} for key in ("rank_pattern", "alpha_pattern", "loftq_config")},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "peft_version": "0.21.2",
    "inference_mode": True,
    "init_lora_weights": "gaussian",
}


def test_adapters_of_peft_come_in_and_train_on(finished, capsys):
    change_config(finished, OF_PEFT | {"lora_dropout": 0.1})
    run, ids = ppctl.load_run("runs/base-trained"), np.random.default_rng(0).integers(0, 90, (2, 8))
    assert cli.main(["import", "adapter", "--base", "base", "--out", "back"]) == 0
    out = capsys.readouterr().out
    assert "3,968 parameters" in out
    assert cli.main(["export", "back", "--out", "again", "--adapter"]) == 0
    assert json.loads((finished / "again/adapter_config.json").read_text())["lora_dropout"] == 0.1
    np.testing.assert_array_equal(ppctl.load_run("back").predict(ids), run.predict(ids))
    # on another layout, from these adapters, without their dropout
    words = ["train", "--config-dir", "back", "recipes=imported", *SMALL, *PIPED, "run.num_steps=1"]
    words += ["optim.lora_dropout=0"]
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "27,680 parameters (3,968 trained)" in capsys.readouterr().out
    first = next(run.data.batches())
    again = ppctl.load_run("runs/back-trained")
    assert again.metrics[0]["loss"] == pytest.approx(run.loss(first), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        (
            {},
            [],
            "adapter holds adapters. Import their base model first, then add its --base RUN_DIR",
        ),
        ({"peft_type": "IA3"}, ["--base", "base"], "states peft_type=IA3. Only LORA"),
        ({"use_dora": True}, ["--base", "base"], "has use_dora=True, which ppctl's adapters"),
        (
            {"r": 8},
            ["--base", "base"],
            "lora_A.weight is [4, 32], but config.json requires [8, 32]",
        ),
        *(
            ({key: value}, ["--base", "base"], f"has {key}={value}, which ppctl's adapters lack")
            for key, value in {
                "init_lora_weights": "pissa_niter_4",
                "alora_invocation_tokens": [1, 2],
                "use_qalora": True,
                "lora_bias": True,
                "use_bdlora": {"nblocks": 2},
                "trainable_token_indices": [5],
                "layers_to_transform": 0,
                "a_setting_of_tomorrow": 1,
            }.items()
        ),
        ({"r": True}, ["--base", "base"], "has r=True, of a wrong type"),
        ({"lora_dropout": "x"}, ["--base", "base"], "has lora_dropout=x, of a wrong type"),
        ({"lora_alpha": -1}, ["--base", "base"], "has r=4 and lora_alpha=-1: both must be"),
        ({}, ["--base", "adapter"], "adapter"),
    ],
)
def test_adapters_that_cannot_come_in_are_refused(
    trained, tmp_path, monkeypatch, capsys, changes, words, message
):
    """No setting of their file is dropped: it is read, has no effect, or the import is refused."""
    shutil.copytree(trained / "adapter", tmp_path / "adapter")
    (tmp_path / "base").symlink_to(trained / "base")
    monkeypatch.chdir(tmp_path)
    change_config(tmp_path, changes)
    assert cli.main(["import", "adapter", *words, "--out", "back"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "back").exists()
