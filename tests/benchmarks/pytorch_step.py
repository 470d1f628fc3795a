"""The model of accelerator.py written for PyTorch: the seconds of a train step on one GPU, compiled.

bfloat16 by autocast over float32 parameters, flash attention, gradients of 8 microbatches of 2
sequences added, their norm clipped, fused AdamW. Prints a line of JSON. Needs torch, which ppctl
does not.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 16, 2048, 16, 2048, 32000
BATCH = 16
PEAK_FLOPS = 989.4e12  # H100 and H200 SXM, bfloat16, dense


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        qkv = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def angles_of(width: int, heads: int, tokens: int) -> torch.Tensor:
    """Return the angles of rotary positions, [tokens, width of a head]."""
    half = width // heads // 2
    angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(half) / half))
    return torch.cat((angles, angles), dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = angles_of(WIDTH, HEADS, TOKENS)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, inputs, targets):
        x = self.embed(inputs).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))


def flops_of_step() -> float:
    """Return the FLOPs of a step, full attention counted."""
    matrices = LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY
    attention = LAYERS * 2 * TOKENS * WIDTH  # FLOPs of a token: scores, and their sums of values
    return 6.0 * BATCH * TOKENS * (matrices + attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true", help="not compiled")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model()
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = model if options.eager else torch.compile(model)
    number = options.microbatches
    times, began = [], time.perf_counter()
    for _ in range(options.steps):
        start = time.perf_counter()
        for part in tokens.chunk(number):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / number
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    step_s = statistics.median(times[4:])
    line = {
        "what": "PyTorch, eager" if options.eager else "PyTorch, compiled",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "microbatches": number,
        "step_s": step_s,
        "mfu": flops_of_step() / step_s / PEAK_FLOPS,
        "loss": number * float(loss),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "started_s": times[0],
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
