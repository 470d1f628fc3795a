"""Wrong calls of the Python API are one line with the value and the remedy, before any compiling."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppctl

TOKENS = np.random.default_rng(0).integers(16, size=(8, 5), dtype=np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def make(**request):
    stack = ppctl.transformer(num_layers=2, d_model=8, num_heads=2, vocab_size=16)
    usual = {"mesh": ppctl.mesh(pp=2), "schedule": "1f1b", "num_microbatches": 2, "batch": BATCH}
    usual |= {"optimizer": optax.sgd(0.1), "dtype": "float32"}
    return ppctl.pipeline(request.pop("model", stack), **(usual | request))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"clip_norm": 0}, "clip_norm=0 must be a finite number above 0."),
        ({"clip_norm": "1"}, "clip_norm='1' must be a finite number above 0."),
        ({"ema": 1.0}, "ema=1.0 must be a number between 0 and 1, such as 0.999."),
        ({"seed": 2**31}, "seed=2147483648 is not a whole number from 0 to 2147483647. Use one."),
        ({"seed": 1.5}, "seed=1.5 is not a whole number from 0 to 2147483647. Use one."),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 is not a whole number from 1 to .*"),
        ({"dtype": "int32"}, "dtype='int32' is not a floating dtype. Use float32, .*"),
        ({"mesh": None}, r"mesh=None is not a mesh. Use ppctl.mesh\(dp=, pp=, fsdp=\)."),
        ({"model": None}, "The model is None, not a ppctl.Stack or a ppctl.Network. .*"),
        (
            {"optimizer": "adamw"},
            r"optimizer='adamw' is not an optax.GradientTransformation. Use .* optax.adamw\(1e-3\).",
        ),
        ({"batch": None}, "batch is NoneType; it must be .*"),
        (
            {"batch": BATCH | {"inputs": TOKENS[:, 1:] + 0.5}},
            "inputs are float64, not token ids. Use int32.",
        ),
        (
            {"batch": BATCH | {"inputs": jax.ShapeDtypeStruct((8, 4), jnp.float32)}},
            "inputs are float32, not token ids. Use int32.",
        ),
        (
            {"batch": BATCH | {"targets": TOKENS[:, 1:] + 1}},
            r"targets hold 16, but token ids are 0..15 \(vocab_size=16\). Use -1..15, where -1 is "
            "no target.",
        ),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused(request_, message):
    with pytest.raises(ppctl.PpctlError, match=f"^{message}$"):
        make(**request_)


ROWS = {"inputs": np.ones((8, 3), np.float32), "targets": np.ones((8, 2), np.float32)}


def make_mlp(num_layers=2, **request):
    stack = ppctl.mlp(num_layers=num_layers, d_model=4, input_dim=3, target_dim=2)
    return make(model=stack, batch=ROWS, **request)


def layers(number):
    return ppctl.transformer(num_layers=number, d_model=8, num_heads=2, vocab_size=16)


@pytest.mark.parametrize(
    ("request_", "remedy", "served"),
    [
        (
            {"num_microbatches": 3},
            "Use 6 or 9,",
            {"batch": {name: np.resize(a, (9, 4)) for name, a in BATCH.items()}},
        ),
        ({"schedule": "zb_v"}, "partition=[0, 1, 1, 0]", {"partition": [0, 1, 1, 0]}),
        ({"schedule": "zb_v"}, "Use num_layers=4", {"model": layers(4)}),
        ({"partition": [3, 1]}, "Use num_layers=4,", {"model": layers(4)}),
    ],
)
def test_the_remedy_of_a_wrong_request_is_served(request_, remedy, served):
    with pytest.raises(ppctl.PpctlError, match=re.escape(remedy)):
        make(**request_)
    make(**request_ | served)


def test_float64_is_refused_where_jax_has_32_bits():
    with (
        jax.enable_x64(False),
        pytest.raises(
            ppctl.PpctlError,
            match=r"^dtype=float64 needs 64 bits, but JAX is set to 32: call jax\.",
        ),
    ):
        make(dtype="float64")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "batch is NoneType; it must be .*"),
        ({"inputs": TOKENS[:, :-1]}, "batch is inputs; it must be .*"),
        (
            BATCH | {"inputs": TOKENS[:, :-1] + 0.5},
            "inputs are float64, but the pipeline was made for int32. Give int32.",
        ),
        (
            BATCH | {"inputs": TOKENS[:, :-1].astype(str)},
            "inputs have dtype <U.*, which is not numeric.",
        ),
        (
            BATCH | {"inputs": TOKENS[:, :-1] + np.int64(2**40)},
            "inputs hold 10995116277.., beyond int32. Use smaller numbers.",
        ),
        (
            BATCH | {"inputs": TOKENS[:, :-1] - 1},
            r"inputs hold -1, but token ids are 0..15 \(vocab_size=16\). Use 0..15.",
        ),
        (
            BATCH | {"targets": TOKENS[:, 1:] - 2},
            r"targets hold -2, but token ids are 0..15 \(vocab_size=16\). Use -1..15, where -1 .*",
        ),
        (
            {name: a[:4] for name, a in BATCH.items()},
            "The batch has shapes .*, but the pipeline was made for .*",
        ),
    ],
    ids=str,
)
def test_a_batch_that_the_model_does_not_take_is_refused(batch, message):
    pipe = make()
    with pytest.raises(ppctl.PpctlError, match=f"^{message}$"):
        pipe.put(batch)
    if isinstance(batch, dict) and "targets" not in batch:
        state, few = pipe.init(), {"inputs": batch["inputs"][:3]}
        for call in (pipe.loss, pipe.evaluate):
            with pytest.raises(ppctl.PpctlError, match=f"^{message}$"):
                call(state, few)


def test_a_packed_model_takes_the_complements_of_ids():
    stack = ppctl.transformer(num_layers=2, d_model=8, num_heads=2, vocab_size=16, packed=True)
    pipe = make(model=stack, batch=BATCH | {"inputs": np.full((8, 4), ~15)})
    with pytest.raises(ppctl.PpctlError, match=r"inputs hold -17, .* Use -16\.\.15\.$"):
        pipe.put(BATCH | {"inputs": np.full((8, 4), ~16)})


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_a_state_that_a_step_has_taken_is_refused(executor):
    """JAX ends the process by SIGSEGV where a second program takes the same memory."""
    pipe = make_mlp(executor=executor)
    state, batch = pipe.init(), pipe.put(ROWS)
    next_state, _ = pipe.step(state, batch)
    for call in (
        pipe.step,
        pipe.loss,
        pipe.loss_and_grads,
        lambda state, _: pipe.to_natural(state),
    ):
        with pytest.raises(
            ppctl.PpctlError, match=r"passed to an earlier step.* Use the state that"
        ):
            call(state, batch)
    pipe.step(next_state, pipe.put(batch))  # placed once


def test_attempts_of_post_validation_are_states_too():
    pipe = make_mlp(executor=ppctl.mpmd(post_validation=True), clip_norm=1.0)
    state, _ = pipe.step(pipe.init(), ROWS)
    pipe.step(state, ROWS)
    with pytest.raises(ppctl.PpctlError, match=r"^The state does not fit this pipeline"):
        pipe.step(make_mlp().init(), ROWS)


def test_a_state_of_another_pipeline_is_refused():
    pipe = make_mlp(schedule="interleaved", num_chunks=1)
    match = r"^The state does not fit this pipeline: {}.* Use pipe\.init\(\), or pipe\.from_nat"
    others = {
        "layers/bias is float32": make_mlp(mesh=ppctl.mesh(), executor="reference"),
        "it has no params/embed_head/embed/bias": make_mlp(executor="mpmd"),
        "its arrays are on other devices": make_mlp(mesh=ppctl.mesh(pp=2, dp=2)),
    }
    for difference, other in others.items():
        with pytest.raises(ppctl.PpctlError, match=match.format(f".*{difference}")):
            pipe.step(other.init(), ROWS)
    state = pipe.from_natural(other.to_natural(other.init(seed=7)))
    assert jax.tree.all(jax.tree.map(np.array_equal, state, pipe.init(seed=7)))
    with pytest.raises(
        ppctl.PpctlError, match=r"not fit this model and optimizer: it has no optim"
    ):
        make_mlp(optimizer=optax.adam(0.1)).from_natural(pipe.to_natural(state))


@pytest.mark.full
def test_a_state_of_equal_shapes_with_layers_in_another_order_is_refused():
    looped = make_mlp(4, schedule="interleaved", num_chunks=2)
    v_shaped = make_mlp(4, schedule="zb_v", executor="spmd")
    state, other = v_shaped.init(), looped.init()
    leaves, structure = jax.tree.leaves(other), jax.tree.structure(state)
    # a state, its copies, and its arrays in the structure of the right state, as from a file
    copies = other, copy.deepcopy(other), pickle.loads(pickle.dumps(jax.device_get(other)))
    for each in (*copies, jax.tree.map(jnp.copy, other), jax.tree.unflatten(structure, leaves)):
        with pytest.raises(ppctl.PpctlError, match="whose ranks hold other layers"):
            v_shaped.loss(each, ROWS)
    assert v_shaped.loss(jax.device_get(state), ROWS) > 0  # a copy of its state
    del state["layer_in_slot"]
    with pytest.raises(ppctl.PpctlError, match="this pipeline: it has no layer_in_slot"):
        v_shaped.loss(state, ROWS)


@pytest.mark.parametrize("seed", [-1, 2**31, "a"])
def test_a_seed_that_is_no_int32_is_refused_as_on_the_command_line(seed):
    with pytest.raises(ppctl.PpctlError, match=rf"^seed={seed!r} is not a whole number from 0 to"):
        make().init(seed)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 0}, "pp=0 must be a finite number of at least 1."),
        ({"order": "x"}, "order=x is not one of auto, .*"),
        ({"pp": 5000}, "5000 devices are more than the 4096 .* Use a smaller mesh, or attached .*"),
        (
            {"pp": 64},
            ".* needs 64 devices, .* Use .* such as ppctl.mesh.*, or call ppctl.mesh before .*",
        ),
    ],
)
def test_messages_of_a_mesh_name_its_arguments_and_no_settings(sizes, message):
    with pytest.raises(ppctl.PpctlError, match=f"^{message}$") as found:
        ppctl.mesh(**sizes)
    assert not re.search(r"\b(run|mesh|plan)\.\w+", str(found.value))
    for sizes in re.findall(r"such as ppctl\.mesh\(pp=(\d+)\)", str(found.value)):
        assert ppctl.mesh(pp=int(sizes)).size == int(sizes)
