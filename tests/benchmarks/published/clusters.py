"""Layouts that `ppctl tune` finds on published clusters, next to the published ones: prints a line
for each.

python tests/benchmarks/published/clusters.py [NAME ...]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from ppctl.cli.compose import compose
from ppctl.config import Config
from ppctl.planner.make_plan import Prediction, predicted
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.schedule.partition.partition import layout_text
from ppctl.training.pipeline.job import assemble

COMMON = (
    "data=synthetic executor=mpmd executor.remat=none run.dtype=bfloat16 hardware=h100 "
    "run.platform=cpu plan.memory_gib=1000"
)
GPT3 = (
    "model.num_layers=96 model.d_model=12288 model.num_heads=96 model.activation=gelu "
    "model.seq_len=2048 data.vocab_size=51200"
)
LLAMA = "data.vocab_size=128256 model.seq_len=8192"


@dataclass(frozen=True)
class Cluster:
    """A model on a cluster, its published layout, and the choices of the search, as overrides."""

    name: str
    model: str
    published: str
    search: str


CLUSTERS = (
    Cluster(
        "GPT-3 175B on 128 H100",
        f"{GPT3} data.batch_size=256",
        "mesh.dp=4 mesh.pp=8 mesh.tp=4 schedule=interleaved schedule.num_chunks=6 "
        "schedule.num_microbatches=64",
        "tune.devices=128 tune.tp=[2,4,8] tune.cp=[1]",
    ),
    Cluster(
        "Llama 3 70B on 64 H100",
        f"model=llama3_70b {LLAMA} data.batch_size=128",
        "mesh.dp=2 mesh.pp=8 mesh.tp=4 schedule=interleaved schedule.num_chunks=5 "
        "schedule.num_microbatches=64",
        "tune.devices=64 tune.tp=[2,4,8] tune.cp=[1]",
    ),
    Cluster(
        "Llama 3.1 405B on 512 H100",
        f"model=llama3_405b {LLAMA} data.batch_size=256",
        "mesh.dp=4 mesh.pp=8 mesh.tp=8 mesh.cp=2 schedule=interleaved schedule.num_chunks=8 "
        "schedule.num_microbatches=64 partition=explicit partition.layers='Et|(tt|)*62,tL'",
        "tune.devices=512 tune.tp=[8] tune.cp=[1,2]",
    ),
)
CHOICES = "tune.schedules=[interleaved,1f1b] tune.remat=[none] tune.max_chunks=8 tune.best=1"


def request(*overrides: str) -> Config:
    return compose([word for text in (COMMON, *overrides) for word in text.split()])


def plan(config: Config) -> Prediction:
    return predicted(assemble(config, only_planned=True))


def published_and_found(cluster: Cluster) -> tuple[Prediction, Prediction, Config]:
    """Return the prediction of the published layout, of the fastest one that needs no more memory,
    and its request.
    """
    published = plan(request(cluster.model, cluster.published))
    room = max(published.total_bytes) / 2**30
    tuned = request(cluster.model, cluster.search, CHOICES, f"plan.memory_gib={room:.4f}")
    found = tune_layouts(tuned).found.best[0].request.config
    return (published, plan(replace(found, plan=replace(found.plan, memory_gib=1000.0))), found)


def difference(cluster: Cluster) -> str:
    """Return the published layout and the best ones, in a line."""
    published, found, config = published_and_found(cluster)
    mesh = config.mesh
    axes = " ".join(
        f"{axis}{n}" for axis in ("dp", "pp", "fsdp", "tp", "cp") if (n := getattr(mesh, axis)) > 1
    )
    stages = (
        layout_text(found.partition)
        if len(set(found.partition)) > 1
        else f"{found.partition[0]} layers a stage"
    )
    number = config.schedule.num_microbatches
    return (
        f"{cluster.name}: published {published.step_time_s:.3f} s, found {found.step_time_s:.3f} "
        f"s ({found.step_time_s / published.step_time_s:.3f}): {axes}, {found.schedule}, "
        f"{number} microbatches, {stages}; {max(found.total_bytes) / 2**30:.0f} of "
        f"{max(published.total_bytes) / 2**30:.0f} GiB"
    )


if __name__ == "__main__":
    for each in CLUSTERS:
        if not sys.argv[1:] or any(name in each.name for name in sys.argv[1:]):
            print(difference(each), flush=True)
