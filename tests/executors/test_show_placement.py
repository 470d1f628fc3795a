"""`run.show_placement`: what is said of parameters is where their numbers are."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from io import StringIO

import jax
import numpy as np
import pytest
from rich.console import Console
from support.selection import full_except

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.executors.parameter_placement import placement, print_placement
from ppctl.training.pipeline.job import assemble

TINY = (
    "model=mlp model.num_layers=6 model.d_model=8 data=regression data.batch_size=16 "
    "schedule.num_microbatches=4 run.platform=cpu run.dtype=float32"
)
TRAIN = (
    "run.num_steps=1 run.eval_every=null run.trackers=[] run.checkpoint.every=null "
    "run.show_placement=true optim.warmup_steps=0"
)
CASES = {
    "spmd": "mesh=2x2x2 schedule=interleaved model.num_layers=8",
    "spmd, padded": "mesh=1x2 schedule=zb_v",
    "mpmd": "mesh=2x2x2 schedule=interleaved executor=mpmd model.num_layers=8",
    "mpmd, padded": "mesh=1x2x2 schedule=1f1b executor=mpmd partition=explicit partition.layers=[4,2]",
    "mpmd, no barrier": "mesh=1x2 schedule=zb_h1 executor=mpmd executor.post_validation=true",
    "tied": "mesh=1x2 schedule=1f1b executor=mpmd model=transformer model.num_layers=2 "
    "model.tied=true model.d_model=16 model.num_heads=2 model.seq_len=8 data=synthetic",
    "reference": "mesh=1x1 schedule=gpipe executor=reference",
}


def job_of(words):
    return assemble(compose([*TINY.split(), *words.split()], [], ["train"]))


def numbered(job):
    """A state in natural order in which every entry of a layer is its number plus one."""
    state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), job.pipe.states.natural)
    layers = lambda a: np.broadcast_to(
        np.arange(1, 1 + len(a)).reshape(-1, *(1,) * (a.ndim - 1)), a.shape
    )
    params = state["params"] | {
        "layers": jax.tree.map(lambda a: layers(a).astype(a.dtype), state["params"]["layers"])
    }
    shardings = jax.tree.map(lambda a: a.sharding, job.pipe.states.natural)
    return jax.device_put(state | {"params": params}, shardings)


def alone(text):
    return [text]


@pytest.mark.parametrize("words", full_except(CASES, "mpmd", "tied"))
def test_a_layer_is_on_the_devices_that_hold_its_numbers(words):
    job = job_of(words)
    trees = job.pipe.engine.parameters(job.pipe.engine.from_natural(numbered(job)))
    found = placement(trees, job.pipe.layout, alone)
    layers, embed_head, sizes = (
        {},
        {},
        {},
    )  # by parameter: of each device its layers; the devices; bytes of each device
    for tree in trees:
        for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            for shard in a.addressable_shards:
                here = shard.device.id
                sizes[here] = sizes.get(here, 0) + shard.data.nbytes
                if name.startswith("layers"):
                    there = {
                        int(n) - 1 for n in np.unique(np.asarray(shard.data)) if n
                    }  # 0 is padding
                    layers.setdefault(name, {}).setdefault(here, set()).update(there)
                else:
                    embed_head.setdefault(name, set()).add(here)
    said_layers, said_embed_head = {}, {}
    for row in found.rows:
        for name in row.parameters:
            if row.layers:
                for device in row.devices:
                    said_layers.setdefault(name, {}).setdefault(device, set()).update(row.layers)
                layout = job.pipe.layout
                assert {layout.rank_of[stage] for stage in row.stages} == set(row.ranks)
                assert set(row.layers) == {
                    layer for stage in row.stages for layer in layout.partition[stage]
                }
            else:
                said_embed_head.setdefault(name, set()).update(row.devices)
    assert said_layers == layers
    assert said_embed_head == embed_head
    pp = np.moveaxis(job.pipe.mesh.devices, 1, 0)
    assert found.rank_bytes == tuple(max(sizes[device.id] for device in row.flat) for row in pp)


def test_shapes_shardings_and_bytes_are_those_of_a_layer():
    job = job_of("mesh=2x2x2 schedule=1f1b model.num_layers=4")
    rows = placement(
        job.pipe.engine.parameters(job.pipe.engine.new_state()), job.pipe.layout, alone
    ).rows
    matrix = next(row for row in rows if row.layers == (0, 1) and len(row.shape) == 2)
    assert matrix.sharding == str(
        jax.sharding.PartitionSpec(None, "pp", None, *_over_fsdp(matrix.shape))
    )
    assert matrix.bytes_a_device == np.prod(matrix.shape) * 4 // 2
    assert (matrix.stages, matrix.ranks) == ((0,), (0,))
    assert len(matrix.devices) == 4


def _over_fsdp(shape):
    return (None,) * next(dim for dim, n in enumerate(shape) if n % 2 == 0) + (("fsdp",),)


def test_layers_and_parameters_that_lie_alike_share_a_row():
    job = job_of("mesh=1x2 schedule=1f1b model.num_layers=64")
    found = placement(
        job.pipe.engine.parameters(job.pipe.engine.new_state()), job.pipe.layout, alone
    )
    of_layers = [row for row in found.rows if row.layers]
    assert {row.layers for row in of_layers} == {tuple(range(32)), tuple(range(32, 64))}
    text = StringIO()
    print_placement(Console(file=text, width=80), found)
    assert "32-63" in text.getvalue()
    assert len(text.getvalue().splitlines()) < 30


def test_what_other_processes_hold_is_told_by_them():
    job = job_of("mesh=1x2 schedule=1f1b executor=mpmd")
    layout = job.pipe.layout
    trees = job.pipe.engine.parameters(job.pipe.engine.new_state())
    blank = [jax.tree.map(lambda _: None, tree) for tree in trees]
    texts = []

    def heard(text):
        texts.append(text)
        return (
            texts
            if len(texts) == 2
            else [json.dumps([[], [[d.id, 0] for d in job.pipe.mesh.devices.flat]])]
        )

    placement([trees[0], blank[1]], layout, heard)
    assert placement([blank[0], trees[1]], layout, heard) == placement(trees, layout, alone)


def test_training_says_it_before_the_first_step(tmp_path, capsys):
    words = [*TINY.split(), *TRAIN.split(), "mesh=1x2", "schedule=1f1b", "--json"]
    assert cli.main(["train", *words, f"run.dir={tmp_path / 'run'}"]) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)["placement"]
    assert {tuple(row["layers"]) for row in said["rows"] if row["layers"]} == {(0, 1, 2), (3, 4, 5)}
    lines = err.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("where parameters lie"))
    assert table < next(i for i, line in enumerate(lines) if line.startswith("step 1/1"))
    assert "parameters of a device" in err
    again = [*words[:-1], "run.num_steps=2", "run.show_placement=false"]
    assert cli.main(["train", *again, f"run.dir={tmp_path / 'run'}"]) == 0
    assert "where parameters lie" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_of_two_processes_the_first_says_it_for_both(executor, tmp_path):
    words = [
        *TINY.split(),
        *TRAIN.split(),
        f"executor={executor}",
        "mesh=1x2",
        "schedule=1f1b",
        "launch.processes=2",
    ]
    command = [
        sys.executable,
        "-m",
        "ppctl.cli",
        "train",
        *words,
        f"run.dir={tmp_path / 'run'}",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["placement"]
    assert done.stderr.count("where parameters lie") == 1
    job = job_of(f"executor={executor} mesh=1x2 schedule=1f1b")
    here = asdict(
        placement(job.pipe.engine.parameters(job.pipe.engine.new_state()), job.pipe.layout, alone)
    )
    for row in [*here["rows"], *said["rows"]]:
        del row["devices"]  # ids of other processes' are others
    assert said == json.loads(json.dumps(here))
