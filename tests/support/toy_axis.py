"""A mesh with one more axis, "xp", in a separate process: one record, and a model divided over it.

Run as a script, before anything of ppctl but the table is imported; prints the results as JSON. The
axis is like one of experts: its devices have different examples, and parts of each layer's hidden
columns, through which the examples of all of them go; tp divides these columns further.
"""

import contextlib
import io
import json
import sys
from functools import partial

from ppctl.schedule import axis_table

AXIS = axis_table.Axis(
    "xp",
    "parts of a toy's columns",
    ("batch", "experts"),
    hosts_place=3,
    in_stage=True,
    tuned_about="none",
)
if __name__ == "__main__":
    *outer, tp, cp = axis_table.MESH_AXES
    axis_table.MESH_AXES = (*outer, AXIS, tp, cp)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import ppctl  # noqa: E402
from ppctl.cli.entry import main  # noqa: E402
from ppctl.model.parallel import WHOLE, on_first  # noqa: E402

WIDTH, HIDDEN, FEATURES, TARGETS = 8, 12, 6, 4  # a hidden width that 2 parts divide
TRAINED = {"num_microbatches": 2, "dtype": jnp.float64, "clip_norm": 0.5}
SHARDING = {
    "embed_head": P(),
    "layers": {"up": P(None, ("xp", "tp")), "down": P(("xp", "tp")), "scale": None},
}


def layer(params, x, axes=WHOLE):
    """Return x * scale + tanh(x @ up) @ down, the columns of up divided over xp and tp."""
    rows = jax.lax.all_gather(x, "xp", tiled=True) if axes.xp > 1 else x
    y = jnp.tanh(rows @ params["up"]) @ params["down"]
    y = jax.lax.psum(y, "tp") if axes.tp > 1 else y
    return x * params["scale"] + (jax.lax.psum_scatter(y, "xp", tiled=True) if axes.xp > 1 else y)


def model(num_layers=4, dtype=None, data=None):
    del dtype, data  # arguments from the config

    def init_embed_head(key):
        first, second = jax.random.split(key)
        draw = jax.random.normal
        return {"in": draw(first, (FEATURES, WIDTH)), "out": draw(second, (WIDTH, TARGETS))}

    def init_layer(key, l):
        first, second = jax.random.split(key)
        up, down = (0.3 * jax.random.normal(k, (WIDTH, HIDDEN)) for k in (first, second))
        return {"up": up, "down": down.T, "scale": jnp.full(WIDTH, 0.9)}

    def head(params, x, targets):
        return ((x @ params["out"] - targets) ** 2).sum(), jnp.float32(targets.size)

    whole = ppctl.Stack(
        num_layers=num_layers,
        init_embed_head=init_embed_head,
        init_layer=init_layer,
        embed=lambda params, inputs: inputs.astype(params["in"].dtype) @ params["in"],
        layer=layer,
        head=head,
        options=ppctl.StackOptions(mixes_examples=False),
    )

    def divided(axes):
        def part_of_head(params, x, targets):
            return tuple(on_first(each, axes) for each in head(params, x, targets))

        part = partial(layer, axes=axes)
        return ppctl.DividedStack(whole.embed, part, part_of_head, SHARDING)

    return whole.with_options(divided=divided)


def batch():
    draw = np.random.default_rng(0)
    shapes = {"inputs": (16, FEATURES), "targets": (16, TARGETS)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def trained(stack, mesh, executor, **how):
    """Two losses, the parameters after the steps in natural order, and the state."""
    from support.cases import (
        make_params,
        state_of,
    )  # starts JAX, with as many devices as it has then

    how = {"schedule": "1f1b", "optimizer": optax.adamw(0.05), "executor": executor} | how
    pipe = ppctl.pipeline(stack, mesh=mesh, batch=batch(), **TRAINED | how)
    state, losses = state_of(pipe, make_params(stack)), []
    for _ in range(2):
        state, metrics = pipe.step(state, batch())
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, pipe.to_natural(state)["params"]), state


def unlike(found, expected):
    """The largest relative difference of two trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def differences():
    """How far training on meshes with xp is from the un-divided model; the shape of a shard."""
    whole = model(2).with_options(divided=None)
    expected = trained(whole, ppctl.mesh(), "reference")[:2]
    mpmd = trained(model(2), ppctl.mesh(pp=2, fsdp=2, xp=2), "mpmd", remat="layer")
    spmd = trained(model(2), ppctl.mesh(pp=2, xp=2, tp=2), "spmd")
    as_data = trained(whole, ppctl.mesh(pp=2, xp=2), "spmd")
    up = spmd[2]["params"]["layers"]["up"]
    return {
        "mpmd": unlike(mpmd[:2], expected),
        "spmd": unlike(spmd[:2], expected),
        "not divided": unlike(as_data[:2], expected),
        "shard": up.sharding.shard_shape(up.shape),
    }


def printed(*words):
    """The exit code and the output of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words)) or 0
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


REQUEST = (
    "model=custom",
    "model.target=support.toy_axis.model",
    "model.num_layers=4",
    "data=regression",
    f"data.num_features={FEATURES}",
    f"data.num_targets={TARGETS}",
    "data.batch_size=16",
    "schedule=1f1b",
    "schedule.num_microbatches=2",
    "run.platform=cpu",
)
# links so slow that nothing else takes time
LINKS = ("hardware=h100", "hardware.link_latency_s=1", "hardware.link_bytes_per_s=1000")


def commands():
    mesh = "mesh=1x2", "mesh.xp=2"
    tune = "tune.devices=4", "tune.xp=[2]", "tune.recipe=null"
    return {
        "plan": printed("plan", *REQUEST, *mesh, *LINKS, "run.dtype=float32", "--json"),
        "inspect": printed("inspect", *REQUEST, *mesh, "inspect.what=summary"),
        "tune": printed("tune", *REQUEST, *LINKS, *tune, "tune.schedules=[1f1b]", "--json"),
        "typo": printed("plan", *mesh, "mesh.xpp=2"),
        "batch": printed("plan", *mesh, "data.batch_size=10", "schedule.num_microbatches=2"),
        "help": printed("plan", "--help", "mesh"),
        "cfg": printed("plan", "mesh={pp:2,xp:2}", "--cfg", "job"),
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.modules["support.toy_axis"] = sys.modules["__main__"]  # the model of the commands
    shown = commands()
    jax.config.update("jax_enable_x64", True)
    print(json.dumps({"commands": shown, "training": differences()}))
