"""The model of `recipes=bench` written for PyTorch's pipelines on a CPU: seconds of a train step.

    python tests/benchmarks/pytorch_pipeline.py [1f1b|zbv|none] [--steps 12]

4 processes of one thread each (none: one process of two threads), Gloo, float32, AdamW. Prints a
line of JSON: CPU seconds of all processes, seconds by the clock and peak memory. Needs torch, which
ppctl does not.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from pytorch_step import Block, angles_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 8, 256, 8, 128, 512
BATCH, MICROBATCHES, RANKS = 32, 8, 4
WARM_UP = 4  # steps that are not counted


class Stage(nn.Module):
    """Consecutive blocks, with the embedding on the first stage and the head on the last."""

    def __init__(self, index: int, number: int):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS // number))
        is_last = index == number - 1
        self.norm = nn.RMSNorm(WIDTH) if is_last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None
        angles = angles_of(WIDTH, HEADS, TOKENS)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def cpu_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def train(rank: int, schedule: str, num_steps: int, results) -> None:
    """Train `num_steps` steps; put (CPU seconds, seconds of each step, peak bytes)."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if schedule == "none":
        torch.set_num_threads(2)
        stages, step = [Stage(0, 1)], None
    else:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        where = [rank] if schedule == "1f1b" else [rank, 2 * RANKS - 1 - rank]
        number = RANKS * len(where)
        stages = [Stage(index, number) for index in where]
        parts = [
            PipelineStage(stage, index, number, torch.device("cpu"))
            for stage, index in zip(stages, where, strict=True)
        ]
        if schedule == "1f1b":
            step = Schedule1F1B(parts[0], MICROBATCHES, loss_fn=loss_of)
        else:
            step = ScheduleZBVZeroBubble(parts, MICROBATCHES, loss_fn=loss_of)
        has_first, has_last = 0 in where, number - 1 in where
    params = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)

    cpu, times = [], []
    for _ in range(num_steps):
        before, start = cpu_s(), time.perf_counter()
        if step is None:
            for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                (loss_of(stages[0](x), y) / MICROBATCHES).backward()
        else:
            given = (inputs,) if has_first else ()
            step.step(*given, **({"target": targets} if has_last else {}))
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step is not None:
            dist.barrier()
        cpu.append(cpu_s() - before)
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put((cpu[WARM_UP:], times[WARM_UP:], peak))
    if step is not None:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedule", nargs="?", choices=["1f1b", "zbv", "none"], default="1f1b")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    number = 1 if options.schedule == "none" else RANKS
    mp.spawn(train, (options.schedule, options.steps, results), nprocs=number)
    found = [results.get() for _ in range(number)]
    line = {
        "what": f"PyTorch, {options.schedule}",
        "torch": torch.__version__,
        "cpu_s": statistics.median(map(sum, zip(*(cpu for cpu, _, _ in found), strict=True))),
        "step_s": statistics.median(found[0][1]),
        "peak_gib": sum(peak for _, _, peak in found) / 2**30,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
