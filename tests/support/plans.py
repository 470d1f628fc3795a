"""A small request to plan, its variations, and their output."""

import json
from dataclasses import replace

from ppctl import config
from ppctl.cli.commands.plan import plan as run_plan
from ppctl.planner import make_plan as plan
from ppctl.planner.show.plan_terminal import show_plan
from ppctl.training.pipeline.job import assemble

TINY = config.Config(
    model=config.MLP(num_layers=4, d_model=32),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Spmd(remat="layer"),
    data=config.Regression(batch_size=16),
    run=config.Run(dtype="float32"),
)


def request(schedule="1f1b", num_microbatches=8, *, executor="spmd", remat="layer", **changes):
    """A variation of TINY: two examples a microbatch."""
    kind = {"spmd": config.Spmd, "mpmd": config.Mpmd}[executor]
    size = changes.setdefault("mesh", TINY.mesh)
    data = replace(TINY.data, batch_size=2 * num_microbatches * size.dp * size.fsdp)
    return replace(
        TINY,
        schedule=config.Schedule(schedule, num_microbatches),
        executor=kind(remat=remat),
        data=data,
        **changes,
    )


def plan_json(capsys, asked):
    code = run_plan(asked, as_json=True)
    return code, json.loads(capsys.readouterr().out)


def planned(asked):
    """The prediction for a request."""
    return plan.predicted(assemble(asked, only_planned=True))


def said_of(asked, capsys):
    """(prediction, its output)."""
    found = planned(asked)
    show_plan(found)
    return found, capsys.readouterr().out
