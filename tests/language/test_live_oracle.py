"""ppctl compared with `transformers` and PyTorch themselves (extra oracle): each tensor, and a run
of `ppctl train`.
"""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden_models import by_name, computed, read_model, sizes_of
from support.oracle import (
    ADAMW,
    CLIP_NORM,
    FOLDER,
    LR,
    MIXTURES,
    MODELS,
    NUM_STEPS,
    as_in_files,
    build,
    cases,
    computed as computed_by_torch,
    in_double,
    tokens,
    trained,
)

import ppctl
from ppctl import cli
from ppctl.config import Transformer
from ppctl.config.field_checks import settings_from
from ppctl.executors.reference import reference
from ppctl.language.export_model import export_model
from ppctl.language.import_model import import_model
from ppctl.model.cached_decoding import Decoder
from ppctl.model.transformer import transformer

pytestmark = pytest.mark.full
WITHIN = {
    "float32": (1e-4, 1e-5),
    "float64": (1e-9, 1e-9),
}  # logits, absolute; loss and gradients, relative


@pytest.fixture(autouse=True)
def oracle():
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'ppctl[oracle]'")


def live(name, dtype):
    """Return the model of `transformers`, and the context for its computation."""
    import torch

    with in_double() if dtype == "float64" else contextlib.nullcontext():
        return build(name, getattr(torch, dtype))


@pytest.mark.parametrize("case", ["whole", "packed", "padded"])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_each_gradient(name, dtype, case, record_property):
    given, (logits_within, relative) = cases(name)[case], WITHIN[dtype]
    with in_double() if dtype == "float64" else contextlib.nullcontext():
        theirs = computed_by_torch(live(name, dtype), given.ids, given.targets, **given.how)
    stack, params = read_model(name, dtype, packed=case == "packed")
    logits, loss, grads = computed(stack, params, given.inputs, given.targets, dtype)
    found = {
        "logits": np.abs(logits - theirs["logits"])[given.counts].max(),
        "loss": abs(loss / theirs["loss"] - 1),
    }
    grads = by_name(grads, name)
    assert grads.keys() == theirs["grads"].keys()
    errors = {
        key: np.linalg.norm(grads[key] - g) / np.linalg.norm(g)
        for key, g in theirs["grads"].items()
    }
    found["gradients"] = max(errors.values())
    for key, error in found.items():
        record_property(key, float(error))
    assert found["logits"] < logits_within
    assert found["loss"] < relative
    assert found["gradients"] < relative, max(errors, key=errors.get)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_unequal_lengths_read_piece_by_piece(name, dtype, record_property):
    lengths = (24, 15)  # padded in front
    ids = tokens(name)[:, :-1]
    starts = ids.shape[1] - np.array(lengths)
    mask = np.arange(ids.shape[1]) >= starts[:, None]
    with in_double() if dtype == "float64" else contextlib.nullcontext():
        how = {"attention_mask": mask.astype(np.int64)}
        theirs = computed_by_torch(live(name, dtype), ids, np.zeros_like(ids), **how)["logits"]
    model, params = settings_from(Transformer, sizes_of(name), "model"), read_model(name, dtype)[1]
    sizes, cached = model.architecture, model.attention_form.cached
    make = lambda mix, rotate: transformer(sizes, dtype=jnp.dtype(dtype), mix=mix, rotate=rotate)
    decoder = Decoder(make, params, jax.devices()[:2], 32, cached, jnp.dtype(dtype))
    cache, errors = decoder.empty(2), []
    for first, last in ((0, 8), (8, 16), *((n, n + 1) for n in range(16, 24))):
        piece = jnp.asarray(ids[:, first:last])
        logits, cache = decoder.read(piece, cache, first, jnp.asarray(starts))
        errors.append(np.abs(np.asarray(logits) - theirs[:, last - 1])[mask[:, last - 1]].max())
    error = max(errors)
    record_property("logits", float(error))
    assert error < WITHIN[dtype][0]


@pytest.mark.parametrize("case", ["one layer, one sequence", "joined"])
def test_the_balance_loss_of_transformers_is_top_k_times_the_mean_over_layers(case):
    """With one layer and one sequence; `transformers` joins them, so other batches differ."""
    import torch

    sizes, params = sizes_of("mixtral"), read_model("mixtral", "float64")[1]
    inputs = tokens("mixtral")[:, :-1]
    model = live("mixtral", "float64")
    if case == "one layer, one sequence":
        sizes["num_layers"], inputs, model.model.layers = 1, inputs[:1], model.model.layers[:1]
        params["layers"] = jax.tree.map(lambda a: a[:1], params["layers"])
    with in_double():
        ids = torch.asarray(inputs.astype(np.int64))
        theirs = float(model(ids, output_router_logits=True).aux_loss.detach())
    stack = ppctl.transformer(
        **sizes | {"moe": sizes["moe"] | {"balance_loss": 1.0}}, dtype="float64"
    )
    step = reference(stack, num_microbatches=1, remat="none", unroll=8, dtype="float64")
    ours = float(jax.jit(step)(params, {"inputs": inputs, "targets": inputs})[0]["balance_loss"])
    top_k = MODELS["mixtral"][1]["num_experts_per_tok"]
    ours *= top_k / sizes["num_layers"]
    if case == "joined":
        assert (round(theirs, 4), round(ours, 4)) == (2.0202, 2.0974)
    else:
        assert ours == pytest.approx(theirs, rel=1e-9)
        assert abs(ours - top_k) > 0.1  # uneven loads


@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma3", "glm4_moe"])
def test_five_steps_of_ppctl_train_from_an_import_equal_a_pytorch_loop(
    name, tmp_path, monkeypatch, record_property
):
    import torch
    import transformers

    monkeypatch.chdir(tmp_path)
    import_model(FOLDER / name, tmp_path / "start")
    # none is 0: torch makes no gradient of the embedding of the token that Gemma pads with
    np.save("ids.npy", 1 + 7 * np.arange(4000, dtype=np.int32) % 95)
    ranks = settings_from(Transformer, sizes_of(name), "model").num_layers
    words = f"""--config-dir start recipes=imported data=tokens data.path=ids.npy
        data.batch_size=8 model.seq_len=16 mesh=1x{ranks} schedule=1f1b schedule.num_microbatches=4
        run.dir=run run.num_steps={NUM_STEPS} run.eval_every=null run.trackers=[]
        run.dtype=float32 optim.clip_norm={CLIP_NORM} optim.lr={LR["lr"]}
        optim.min_lr_fraction={LR["min_lr_fraction"]} optim.warmup_steps={LR["warmup_steps"]}"""
    words = [*words.split(), *(f"optim.{key}={value}" for key, value in ADAMW.items())]
    assert cli.main(["train", *words]) == 0
    run = ppctl.load_run("run")
    data = run.data.batches()
    ids = []
    for _ in range(NUM_STEPS):
        batch = next(data)
        ids.append(np.concatenate([batch["inputs"], batch["targets"][:, -1:]], 1))
    load = partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        attn_implementation="eager",
        dtype=torch.float32,
        **({"experts_implementation": "eager"} if name in MIXTURES else {}),
    )
    expected = trained(load(FOLDER / name), ids)
    losses = np.array([each["loss"] for each in run.metrics])
    record_property("losses", float(np.abs(losses - expected["losses"]).max()))
    assert np.abs(losses - expected["losses"]).max() < 1e-4
    assert losses[0] - losses[-1] > 1  # it learns
    np.testing.assert_allclose(
        [each["grad_norm"] for each in run.metrics], expected["norms"], rtol=1e-4
    )

    # its export equals the model trained by transformers, and has the same logits
    export_model(tmp_path / "run", tmp_path / "out", dtype="float32")
    model = load(tmp_path / "out")
    tensors = {key: tensor.detach().numpy() for key, tensor in model.named_parameters()}
    for key, tensor in as_in_files(model, tensors).items():
        wanted = expected["params"][key]
        assert np.linalg.norm(tensor - wanted) < 1e-3 * np.linalg.norm(wanted), key
    inputs = tokens(name)[:, :-1]
    with torch.no_grad():
        logits = model(torch.asarray(inputs.astype(np.int64)), use_cache=False).logits.numpy()
    assert np.abs(run.predict(inputs) - logits).max() < 1e-4
