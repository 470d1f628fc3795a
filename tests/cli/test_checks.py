"""Requests that are impossible, of a config or of a command, refused without composing them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ppctl import config as c
from ppctl.cli.entry import refuse_inapplicable
from ppctl.config.groups.layout_settings import Balanced, Explicit
from ppctl.errors import ConfigError

REFERENCE = c.Reference()
TOPOLOGY = c.Plan(topology="v5e:2x2")
IMPOSSIBLE = [
    ({"run": c.Run(num_steps=0)}, "run.num_steps=0 must be"),
    (
        {"executor": REFERENCE},
        "executor=reference is the un-pipelined model .*mesh=2x4 has 8. Use mesh=1x1",
    ),
    (
        {"executor": REFERENCE, "mesh": c.Mesh(1, 1), "partition": Balanced()},
        "partition=balanced divides layers .* has none",
    ),
    (
        {"launch": c.Launch(processes=3)},
        "mesh=2x4 has 8 devices, not a multiple of launch.processes=3. Use .*processes=2",
    ),
    (
        {"launch": c.Launch(max_restarts=2), "run": c.Run(checkpoint=c.Checkpoint(enabled=False))},
        "launch.max_restarts=2 starts a crashed run again .* but run.checkpoint.enabled=false "
        "writes none",
    ),
    ({"partition": Explicit(layers={"a": 1})}, "partition.layers={'a': 1} is neither a list"),
    ({"partition": Explicit(layers=4)}, "partition.layers=4 is neither a list .* nor text"),
    ({"partition": Explicit(layers=[4, "x"])}, r"partition.layers=\[4, 'x'\] is neither a list"),
    (
        {"plan": c.Plan(topology="v5e")},
        "plan.topology=v5e is not a topology. Write the kind of chip",
    ),
    ({"run": c.Run(name="")}, "run.name='' names no directory below runs/"),
    (
        {"run": c.Run(name="../../x")},
        "run.name='../../x' names no directory below runs/. Use letters",
    ),
    ({"run": c.Run(name="a//b")}, "run.name='a//b' names no directory"),
    ({"run": c.Run(dir=" ")}, "run.dir=' ' is not a directory. Use a path"),
    ({"plan": TOPOLOGY, "run": c.Run(platform="cuda")}, "run.platform=cuda starts devices. Use"),
    (
        {"mesh": c.Mesh(2, 4, tp=3)},
        "model.num_heads=4 is not a multiple of mesh.tp=3: each .* Use mesh.tp=2, or other sizes",
    ),
    (
        {
            "mesh": c.Mesh(2, 4, tp=4),
            "model": c.Transformer(num_heads=12, d_model=96, num_kv_heads=6),
        },
        "num_kv_heads=6 and mesh.tp=4: devices would",
    ),
    (
        {"mesh": c.Mesh(2, 4, cp=8), "model": c.Transformer(seq_len=15)},
        "15 tokens are fewer than the 2.mesh.cp = 2.8 = 16 .* Use mesh.cp=7 at mo",
    ),
    ({"verify": c.Verify(steps=-1)}, "verify.steps=-1 must be a finite number of at least 0"),
    ({"plan": c.Plan(memory_gib=0.0)}, "plan.memory_gib=0.0 must be a finite number above 0"),
]
PLANNERS = "`ppctl train`, `ppctl plan`, `ppctl rehearse` and `ppctl tune`"
INAPPLICABLE = [
    (
        "verify",
        {"launch": c.Launch(processes=2)},
        "launch.processes=2: applies to `ppctl train` and `ppctl doctor`",
    ),
    (
        "bench",
        {"launch": c.Launch(max_restarts=2)},
        "launch.max_restarts=2: applies to `ppctl train` and `ppctl doct",
    ),
    (
        "plan",
        {"launch": c.Launch(processes=2)},
        "launch.processes=2: applies to `ppctl train` and `ppctl doctor`",
    ),
    (
        "train",
        {"plan": c.Plan(compile=True)},
        "plan.compile=true: applies to `ppctl plan` only. Leave it out",
    ),
    (
        "bench",
        {"plan": c.Plan(memory_gib=3.0)},
        "plan.memory_gib=3.0: applies to `ppctl plan` and `ppctl tune` only. Leave it out",
    ),
    ("train", {"tune": c.Tune(devices=3)}, "tune.devices=3: applies to `ppctl tune` only"),
    (
        "train",
        {"verify": c.Verify(steps=5)},
        "verify.steps=5: applies to `ppctl verify` only. Leave it out",
    ),
]


@pytest.mark.parametrize(
    ("parts", "message"), IMPOSSIBLE, ids=[message[:40] for _, message in IMPOSSIBLE]
)
def test_an_impossible_config_is_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        c.check(replace(c.Config(mesh=c.Mesh(2, 4)), **parts))


@pytest.mark.parametrize(("command", "parts", "message"), INAPPLICABLE)
def test_settings_of_other_commands_are_refused(command, parts, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        refuse_inapplicable(command, replace(c.Config(), **parts))
