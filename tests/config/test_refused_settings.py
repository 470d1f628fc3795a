"""Every impossible setting is refused with its value, in one line."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import pytest
from support.remedies import suggestions, with_suggestion

from ppctl import config as c
from ppctl.cli.choices import request_words
from ppctl.cli.compose import compose
from ppctl.config.groups.data_settings import Mixture, Part
from ppctl.config.groups.layout_settings import Balanced, Explicit, RankAxes
from ppctl.config.groups.moe_settings import Experts
from ppctl.config.groups.rope_settings import Rope
from ppctl.errors import ConfigError


def hardware(**values: object) -> c.Hardware:
    speeds = {"reached": {"flops": 0.5}, "memory_bytes_per_s": 1e12, "link_bytes_per_s": 1e10}
    base = {
        "name": "x",
        "device_kinds": ["x"],
        "peak_flops": {"float32": 1e12},
        "link_latency_s": 0.0,
        "task_s": 0.0,
    }
    return c.Hardware(**{**base, **speeds, **values})  # type: ignore[arg-type]


def reached(**shares: float) -> c.Config:
    return config_with(hardware=hardware(reached=shares))


def joined(**network: float) -> c.Config:
    return config_with(hardware=hardware(network=network))


def config_with(**parts: object) -> c.Config:
    base = {"mesh": c.Mesh(1, 1), "data": c.Synthetic()}
    return c.Config(**{**base, **parts})  # type: ignore[arg-type]


def of_ranks(ranks: str = "1-2", **axes: int) -> c.Mesh:
    return c.Mesh(ranks=[RankAxes(fsdp=4), RankAxes(tp=2, ranks=ranks)], **axes)


def scaled(**scaling):
    return config_with(model=c.Transformer(rope=Rope(scaling=scaling)))


def mixture(mesh=None, optim=None, executor=None, **moe):
    """A request for a mixture of experts on a mesh of these sizes."""
    model = c.Transformer(num_heads=6, d_model=12, mlp_width=12, moe=Experts(**moe))
    parts = {"optim": optim or c.AdamW(), "executor": executor or c.Spmd()}
    data = c.Synthetic(batch_size=48)
    mesh = c.Mesh(**{"dp": 1, "pp": 1} | (mesh or {}))
    return config_with(model=model, mesh=mesh, data=data, **parts)


MIXTURES = [
    (
        mixture({"ep": 3, "tp": 2}, num_experts=8),
        r"model.moe.num_experts=8 is not a multiple of mesh.ep\*mesh.tp = 3\*2 = 6: each device "
        "holds equally many experts. Use mesh.ep=2, or another number of experts",
    ),
    (
        mixture({"ep": 3}, num_experts=8),
        "model.moe.num_experts=8 is not a multiple of mesh.ep = 3: .* Use mesh.ep=2, or",
    ),
    (
        mixture({"tp": 3}, num_experts=8),
        "model.moe.num_experts=8 is not a multiple of mesh.tp = 3: .* Use mesh.tp=1, or",
    ),
    (
        mixture({"tp": 2}, executor=c.Mpmd(sequence_parallel=False), num_experts=8),
        "experts with mesh.tp=2 need the rows of tokens sharded, but "
        "executor.sequence_parallel=false keeps them whole. Use executor.sequence_parallel=true, "
        "or mesh.tp=1",
    ),
    (
        mixture({"ep": 2}),
        "mesh.ep=2 divides experts, and the model has no experts. Use mesh.dp for replicas, or set",
    ),
    (
        config_with(model=c.MLP(), mesh=c.Mesh(ep=2), data=c.Regression(batch_size=64)),
        "mesh.ep=2 divides experts, and the model has no experts",
    ),
    (
        mixture(num_experts=2, top_k=3),
        "model.moe.top_k=3 is more than model.moe.num_experts=2.* Use model.moe.top_k=2 at most",
    ),
    (
        config_with(model=c.Transformer(moe=Experts(num_experts=4), linear_dtype="fp8")),
        "model.linear_dtype=fp8 with model.moe.num_experts=4: .* Use model.linear_dtype=null",
    ),
    (mixture(num_experts=2, capacity=0.9), "model.moe.capacity=0.9 must be .* at least 1"),
    (mixture(top_k=1), "model.moe.top_k=1 is not used: model.moe.num_experts=null"),
    (mixture(z_loss=0.1), "model.moe.z_loss=0.1 is not used: model.moe.num_experts=null"),
    (
        mixture(num_experts=2, choice_bias=True, bias_update=0.1, optim=c.AdamW(train="lora")),
        "model.moe.bias_update=0.1 counts tokens .* with optim.train=lora only adapters change",
    ),
    (
        mixture(num_experts=2, capacity=1.5, optim=c.AdamW(train="lora")),
        "model.moe.capacity=1.5 counts tokens .* with optim.train=lora only adapters change",
    ),
    (
        mixture(num_experts=2, bias_update=0.1),
        "model.moe.bias_update=0.1 needs model.moe.choice_bias=true",
    ),
    (
        mixture(num_experts=2, shared_gate=True),
        "model.moe.shared_gate=True needs model.moe.shared_width",
    ),
    (
        mixture(num_experts=6, num_groups=4),
        "model.moe.num_groups=4 with model.moe.top_groups=1 do not fit model.moe.num_experts=6",
    ),
    (
        mixture(num_experts=6, num_groups=6),
        "model.moe.top_groups=1 groups of 1 experts are too small for model.moe.top_k=2",
    ),
    (
        mixture(num_experts=6, first_dense=8),
        "model.moe.first_dense=8 and model.moe.period=1 leave no layer of model.num_layers=8",
    ),
]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *MIXTURES,
        (
            config_with(model=c.Transformer(num_layers=0)),
            "model.num_layers=0 must be .* at least 1",
        ),
        (
            config_with(model=c.Transformer(activation="relu")),
            "model.activation=relu is not one of gelu, gelu_exact, silu, swiglu",
        ),
        (
            config_with(model=c.Transformer(d_model=130)),
            "d_model=130 is not a multiple of .*=4. Use model.d_model=136",
        ),
        (config_with(model=c.Transformer(d_model=12)), "12/4 = 3 is odd"),
        (
            config_with(model=c.Transformer(num_kv_heads=3)),
            "num_heads=4 is not a multiple of model.num_kv_heads=3",
        ),
        (
            config_with(model=c.Transformer(rope=Rope(theta=0.5))),
            "model.rope.theta=0.5 must be .* at least 1",
        ),
        (
            config_with(model=c.Transformer(family="gemma")),
            "model.family=gemma is not one of llama, qwen2",
        ),
        (config_with(model=c.Transformer(head_dim=5)), "model.head_dim=5 is odd"),
        (
            config_with(model=c.Transformer(head_dim=12, rope=Rope(fraction=0.6))),
            "fraction=0.6 of heads 12 wide are 7.2 dims, not an even .* Use model.rope.fraction=0.666",
        ),
        (config_with(model=c.Transformer(rope=Rope(fraction=0))), "fraction=0 must be .* above 0"),
        (config_with(model=c.Transformer(head_dim=0)), "model.head_dim=0 must be .* at least 1"),
        (config_with(model=c.Transformer(mlp_width=0)), "model.mlp_width=0 must be"),
        (
            config_with(model=c.Transformer(norm_eps=0.0)),
            "model.norm_eps=0.0 must be a finite number above 0",
        ),
        (config_with(model=c.Transformer(logit_softcap=-1.0)), "model.logit_softcap=-1.0 must be"),
        (config_with(model=c.Transformer(window=0)), "model.window=0 must be"),
        (
            config_with(model=c.Transformer(window=4, window_pattern="WL")),
            "window_pattern=WL is not made of W .* and F",
        ),
        (
            config_with(model=c.Transformer(window_pattern="WF")),
            "window_pattern=WF is not used: model.window=null",
        ),
        (
            config_with(model=c.Transformer(rope=Rope(local_theta=1e4))),
            "rope.local_theta=10000.0 is not used: model.window",
        ),
        (
            scaled(rope_type="ntk"),
            "model.rope.scaling.rope_type=ntk is not one of linear, llama3, yarn",
        ),
        (scaled(factor=2.0), "model.rope.scaling.rope_type=null is not one of"),
        (scaled(rope_type="linear"), r"model.rope.scaling has no factor. It takes factor\."),
        (
            scaled(rope_type="linear", factor=2.0, beta_fast=8.0),
            r"scaling.beta_fast is not a setting of .* It takes factor\.",
        ),
        (
            scaled(rope_type="yarn", factor=2.0),
            "model.rope.scaling has no original_max_position_embeddings",
        ),
        (
            scaled(
                rope_type="llama3",
                factor=2.0,
                original_max_position_embeddings=64,
                low_freq_factor=4.0,
            ),
            "model.rope.scaling.low_freq_factor=4.0 is not below high_freq_factor=4.0",
        ),
        (config_with(model=c.MLP(d_model=0), data=c.Regression()), "model.d_model=0 must be"),
        (config_with(model=c.MLP(num_layers=0), data=c.Regression()), "model.num_layers=0 must be"),
        (
            config_with(model=c.MLP(activation="swiglu"), data=c.Regression()),
            "model.activation=swiglu is not one of",
        ),
        (config_with(mesh=c.Mesh(0, 1)), "mesh.dp=0 must be"),
        (
            config_with(schedule=c.Schedule(num_microbatches=0)),
            "schedule.num_microbatches=0 must be",
        ),
        (config_with(schedule=c.Interleaved(num_chunks=0)), "schedule.num_chunks=0 must be"),
        (
            config_with(executor=c.Reference(remat="some")),
            "executor.remat=some is not one of none, layer, full",
        ),
        (
            config_with(executor=c.Mpmd(context="rong")),
            "executor.context=rong is not one of gather, ring",
        ),
        (
            config_with(executor=c.Spmd(gather="never")),
            "executor.gather=never is not one of step, layer",
        ),
        (config_with(executor=c.Spmd(unroll=-1)), "executor.unroll=-1 must be .* at least 0"),
        (config_with(optim=c.AdamW(lr=-1.0)), "optim.lr=-1.0 must be .* at least 0"),
        (config_with(optim=c.AdamW(lr=float("inf"))), "optim.lr=inf must be a finite number"),
        (config_with(optim=c.AdamW(lr=float("nan"))), "optim.lr=nan must be"),
        (
            config_with(optim=c.AdamW(min_lr_fraction=2.0)),
            r"optim.min_lr_fraction=2.0 must lie in \[0, 1\]",
        ),
        (config_with(optim=c.AdamW(b1=1.0)), r"optim.b1=1.0 must lie in \[0, 1\)"),
        (config_with(optim=c.SGD(lr=-1.0)), "optim.lr=-1.0 must be .* at least 0"),
        (config_with(optim=c.SGD(momentum=1.0)), r"optim.momentum=1.0 must lie in \[0, 1\)"),
        (config_with(optim=c.SGD(momentum=0.0)), "optim.momentum=0 would only copy gradients"),
        (
            config_with(optim=c.SGD(clip_norm=0.0)),
            "optim.clip_norm=0 would erase every gradient. Use null",
        ),
        (
            config_with(optim=c.AdamW(clip_norm=0.0)),
            "optim.clip_norm=0 would erase every gradient. Use null",
        ),
        (config_with(optim=c.SGD(ema=0.0)), "optim.ema=0 would only copy the parameters. Use null"),
        (config_with(data=c.Synthetic(batch_size=0)), "data.batch_size=0 must be"),
        (
            config_with(data=c.Synthetic(eval_fraction=1.0)),
            r"data.eval_fraction=1.0 must lie in \[0, 1\)",
        ),
        (config_with(data=c.Synthetic(vocab_size=1)), "data.vocab_size=1 must be .* at least 2"),
        (config_with(data=c.Synthetic(num_sequences=0)), "data.num_sequences=0 must be"),
        (
            config_with(data=c.Tokens(path="x", dtype="int8")),
            "data.dtype=int8 is not one of uint8, uint16",
        ),
        (config_with(data=c.Tokens(path="x", vocab_size=0)), "data.vocab_size=0 must be"),
        (config_with(model=c.MLP(), data=c.Regression(num_rows=0)), "data.num_rows=0 must be"),
        (config_with(run=c.Run(num_steps=0)), "run.num_steps=0 must be"),
        (config_with(run=c.Run(seed=-1)), "run.seed=-1 must be"),
        (
            config_with(run=c.Run(dtype="float16")),
            "run.dtype=float16 is not one of float32, bfloat16, float64",
        ),
        (
            config_with(run=c.Run(resume="maybe")),
            "run.resume=maybe is not one of auto, must, never",
        ),
        (config_with(run=c.Run(platform="gpu")), "run.platform=gpu is not one of cpu, cuda, tpu"),
        (
            config_with(run=c.Run(distributed="on")),
            "run.distributed=on is not one of off, auto, explicit",
        ),
        (
            config_with(run=c.Run(num_processes=2)),
            "num_processes=2 needs .*=off. Leave it out, or set run.distributed=explicit and",
        ),
        (
            config_with(run=c.Run(coordinator="a:1")),
            "run.coordinator=a:1 needs a run of several processes, but",
        ),
        (
            config_with(run=c.Run(process_id=0)),
            "run.process_id=0 needs a run of several processes, but",
        ),
        (
            config_with(run=c.Run(distributed="explicit", process_id=0)),
            r"explicit needs run.coordinator=... run.num_processes=... too",
        ),
        (
            config_with(run=c.Run(distributed="auto", num_processes=2, process_id=2)),
            "process_id=2 is not one of the 2 processes of run.num_processes=2. Use 0 to 1",
        ),
        *(
            (
                config_with(run=c.Run(distributed="auto", coordinator=address)),
                f"run.coordinator={address} is not HOST:PORT, as in",
            )
            for address in ("node1", ":80", "node1:0", "node1:65536", "node1:http")
        ),
        (
            config_with(run=c.Run(distributed="auto", num_processes=0)),
            "run.num_processes=0 must be .* at least 1",
        ),
        (
            config_with(run=c.Run(distributed="auto", process_id=-1)),
            "run.process_id=-1 must be .* at least 0",
        ),
        (config_with(run=c.Run(heartbeat_s=0)), "run.heartbeat_s=0 must be"),
        (config_with(run=c.Run(slow_after_s=0)), "run.slow_after_s=0 must be"),
        (
            config_with(run=c.Run(checkpoint=c.Checkpoint(every=0))),
            "run.checkpoint.every=0 must be",
        ),
        (config_with(run=c.Run(checkpoint=c.Checkpoint(keep=0))), "run.checkpoint.keep=0 must be"),
        (config_with(run=c.Run(profile="-1")), "run.profile=-1 names no steps"),
        (config_with(run=c.Run(profile="9-3")), "run.profile=9-3 names no steps"),
        (
            config_with(run=c.Run(profile="199")),
            "run.profile=199 traces steps to 200, past the last step",
        ),
        (
            config_with(data=c.Synthetic(batch_size=12)),
            r"12 is not a multiple of .* = 8\*1\*1 = 8. Use .*=8 or 16",
        ),
        (
            config_with(partition=Explicit(layers=None)),
            r"layers=None is neither a list .*\[3,2,2,3\], nor text such as",
        ),
        (config_with(partition=Explicit(layers={"a": 1})), "layers={'a': 1} is neither a list"),
        (config_with(partition=Explicit(layers=[1, "t"])), r"layers=\[1, 't'\] is neither a list"),
        (config_with(partition=Explicit(layers=[True])), "is neither a list with the number"),
        (config_with(partition=Explicit(layers=[1, 2.0])), "is neither a list with the number"),
        (
            config_with(partition=Balanced(), executor=c.Reference()),
            "partition=balanced divides .*Use partition=",
        ),
        (
            config_with(partition=Explicit(layers=[8]), executor=c.Reference()),
            "partition=explicit divides layers",
        ),
        (
            config_with(mesh=c.Mesh(1, 2), executor=c.Reference()),
            "mesh=1x2 has 2. Use mesh=1x1, executor=spmd or",
        ),
        (
            config_with(launch=c.Launch(max_restarts=1), run=c.Run(distributed="auto")),
            "launch.max_restarts=1 is for .* with run.distributed=auto .* Use run.distributed=off",
        ),
        (config_with(launch=c.Launch(processes=0)), "launch.processes=0 must be"),
        (config_with(launch=c.Launch(max_restarts=-1)), "launch.max_restarts=-1 must be"),
        (
            config_with(launch=c.Launch(processes=2)),
            "mesh=1x1 has 1 devices, not a multiple of .*=2. Use .*=1, or",
        ),
        (
            config_with(mesh=c.Mesh(1, 2), launch=c.Launch(processes=2), run=c.Run(platform="tpu")),
            "launch.processes=2 divides GPUs or simulated CPU devices, but run.platform=tpu. Use "
            "launch.processes=1",
        ),
        (reached(flops=0.0), "hardware.reached.flops=0.0 must be .* above 0"),
        (reached(flops=1.1), r"reached.flops=1.1 must lie in \(0, 1\]"),
        (reached(flops=0.5, bytes=1.1), r"reached.bytes=1.1 must lie in \(0, 1\]"),
        (reached(flops=0.5, attention_backward=-1.0), "attention_backward=-1.0 must be"),
        (reached(flop=0.5), "hardware.reached={'flop': 0.5} has no flops"),
        (
            reached(flops=0.5, flop=0.5),
            "hardware.reached=flop is not one of flops, bytes, attention_forward",
        ),
        (
            config_with(hardware=hardware(memory_gib=math.nan)),
            "memory_gib=nan must be a finite number above 0",
        ),
        (
            config_with(hardware=hardware(memory_bytes_per_s=-1.0)),
            "memory_bytes_per_s=-1.0 must be",
        ),
        (config_with(hardware=hardware(link_bytes_per_s=0.0)), "link_bytes_per_s=0.0 must be"),
        (
            config_with(hardware=hardware(link_latency_s=-1.0)),
            "link_latency_s=-1.0 must be .* at least 0",
        ),
        (config_with(hardware=hardware(task_s=math.inf)), "task_s=inf must be a finite number"),
        (
            config_with(hardware=hardware(peak_flops={"bfloat16": 0.0})),
            "hardware.peak_flops.bfloat16=0.0 must be",
        ),
        (config_with(hardware=hardware(peak_flops={})), "peak_flops={} has no dtype. Give it one"),
        (
            joined(host_devices=0, bytes_per_s=1e9, latency_s=0),
            "host_devices=0 must be .* at least 1",
        ),
        (
            joined(host_devices=8, latency_s=1e-6),
            "hardware.network has no bytes_per_s. It takes host_devices, bytes",
        ),
        (
            config_with(model=c.MLP()),
            "model=mlp cannot learn from data=synthetic. Use data=regression or",
        ),
        (
            config_with(data=c.Regression()),
            "model=transformer cannot learn from data=regression. Use data=stdlib",
        ),
        (
            config_with(mesh=of_ranks(dp=2), executor=c.Mpmd()),
            "mesh.dp=2, but mesh.ranks states the sizes of 3 ranks. Use mesh.dp=1",
        ),
        (
            config_with(mesh=of_ranks(pp=4), executor=c.Mpmd()),
            "mesh.pp=4, but mesh.ranks states the sizes of 3 ranks",
        ),
        (
            config_with(mesh=of_ranks(pp=3)),
            "executor=spmd is one program for equal ranks, but mesh.ranks=.{fsdp:4},{ranks:1-2,tp:2}",
        ),
        (
            config_with(mesh=of_ranks(ranks="2-3"), executor=c.Mpmd()),
            r"mesh.ranks\[1\].ranks=2-3 is not the next ranks. Write 1-LAST, or leave it out",
        ),
        (
            config_with(
                mesh=c.Mesh(pp=2, ranks=[RankAxes(fsdp=4), RankAxes(dp=3)]), executor=c.Mpmd()
            ),
            r"data.batch_size=32 is not a multiple of schedule.num_microbatches\*lcm\(3, 4\)",
        ),
        (
            config_with(
                mesh=c.Mesh(pp=2, ranks=[RankAxes(fsdp=4), RankAxes(dp=2)]),
                executor=c.Mpmd(),
                plan=c.Plan(topology="h100:2x3"),
            ),
            "plan.topology=h100:2x3 has equal ranks, but mesh.ranks=.{fsdp:4},{dp:2}.. Use",
        ),
        (
            config_with(mesh=c.Mesh(1, 4), hardware=c.AutoHardware(ranks=["h100", "a100"])),
            "hardware.ranks has 2 names, but mesh.pp=4. Name the hardware of each rank",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "_", value)[:40] if isinstance(value, str) else "",
)
def test_impossible_settings_are_refused_with_their_values(config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        c.check(config)
    assert "\n" not in str(caught.value)
    for suggestion in suggestions(str(caught.value)):
        compose(with_suggestion(request_words(asdict(config)), suggestion))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": c.MLP(), "data": c.Stdlib(packing=True)},
            "but model=mlp cannot separate them. Use data.packing=f",
        ),
        (
            {"data": c.Text(path="x", document="word")},
            "data.document=word is not one of file, paragraph, line",
        ),
        (
            {"data": Mixture()},
            "data.parts=[] has nothing to mix. Use data.parts=[{path: PATH, weight: 0.7}",
        ),
        (
            {"data": Mixture(parts=[Part("x"), Part("y", weight=0.0)])},
            "data.parts[1].weight=0.0 must be a finite",
        ),
        ({"data": c.Text(path="x", on_error="fix")}, "data.on_error=fix is not one of stop, skip"),
    ],
)
def test_impossible_settings_of_text_are_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        c.check(c.Config(**settings))
