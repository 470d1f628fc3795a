"""Random transformers for `support.fuzz_requests`: each feature is in half of those it applies to."""

from __future__ import annotations

import random
from dataclasses import dataclass

WIDTHS = ((4, 1), (6, 1), (8, 2), (8, 4), (10, 1), (12, 2), (16, 4), (18, 3), (24, 6))
TP_SHARE = 0.2  # also of cp: each compiles for longer
DOCUMENTS = "data=custom data.target=tests.support.fuzz_models.documents"


@dataclass
class Axes:
    """Devices of a stage, and the dtypes that can be compared with those of another layout."""

    ep: int = 1
    tp: int = 1
    cp: int = 1
    is_rounded: bool = False  # 8-bit products: comparable in float64 only
    chooses: bool = False  # experts: not comparable in bfloat16, which changes their choice

    @property
    def sizes(self) -> dict[str, int]:
        return {"ep": self.ep, "tp": self.tp, "cp": self.cp}


def transformer(rng: random.Random, room: int) -> tuple[list[str], list[str], Axes]:
    """Return the words of a model and its data, those of its training, and its axes.

    room: most devices of a stage.
    """
    axes, (d_model, heads) = Axes(), rng.choice(WIDTHS)
    is_odd = _often(rng)
    seq_len = rng.choice((1, 3, 5, 7) if is_odd else (4, 8))
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    width = d_model * rng.choice((1, 2, 4)) + (is_odd and rng.randint(0, 1))
    has_experts = _often(rng)
    # 1. the axes of a stage, and sizes that they divide
    if has_experts and room >= 2 and _often(rng):
        axes.ep = rng.choice([n for n in (2, 2, 4) if n <= room])
    if heads % 2 == 0 and axes.ep * 2 <= room and rng.random() < TP_SHARE:
        axes.tp, width = 2, 2 * width
    if axes.ep * axes.tp * 2 <= room and rng.random() < TP_SHARE:
        axes.cp, seq_len = 2, max(4, seq_len)
    if has_experts and axes.tp * axes.cp > 1:
        seq_len = 8  # experts would compute padding
    # 2. the model
    words = ["model=transformer", f"model.d_model={d_model}", f"model.num_heads={heads}"]
    activation = rng.choice(("gelu", "swiglu"))
    words += [f"model.num_kv_heads={kv_heads}", f"model.mlp_width={width}"]
    words += [f"model.activation={activation}", f"model.tied={rng.choice(('true', 'false'))}"]
    words += [f"model.seq_len={seq_len}", f"model.rope.theta={rng.choice((100, 10000, 500000))}"]
    if axes.cp == 1:
        words.append(f"model.attention={rng.choice(('auto', 'auto', 'xla', 'chunked'))}")
    words += [f"model.window={rng.randint(1, 8)}"] * (rng.random() < 0.2)
    words += [f"model.dropout={rng.choice((0.1, 0.5))}"] * _often(rng)
    has_adapters = _often(rng)
    if has_experts:
        words += _experts(rng, axes, width, has_adapters)
        axes.chooses = True
    elif axes.tp <= kv_heads and _often(rng):
        words.append("model.linear_dtype=fp8")
        axes.is_rounded = True
    # 3. its data and adapters
    words += _data(rng, seq_len, packs=axes.cp == 1 and _often(rng))
    gates = activation == "swiglu" and not has_experts
    return words, _adapters(rng, gates, has_experts) if has_adapters else [], axes


def _often(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _experts(rng: random.Random, axes: Axes, width: int, has_adapters: bool) -> list[str]:
    """Return the words of a mixture of experts that ep and tp divide."""
    number = axes.ep * axes.tp * rng.choice((1, 2, 3))
    number = max(number, 2)
    groups = rng.choice([n for n in range(1, number + 1) if number % n == 0])
    top_groups = rng.randint(1, groups)
    top_k = rng.randint(1, min(3, number // groups * top_groups))
    score = rng.choice(("softmax", "softmax_chosen", "sigmoid"))
    moe = {"num_experts": number, "top_k": top_k, "score": score}
    if groups > 1:
        moe |= {"num_groups": groups, "top_groups": top_groups}
        moe["group_score"] = rng.choice(("max", "top2") if number // groups > 1 else ("max",))
    moe["normalize"] = rng.choice(("true", "false"))
    moe["width"] = rng.choice((3, 4, 8))
    if _often(rng):
        moe |= {"shared_width": width, "shared_gate": rng.choice(("true", "false"))}
    moe["period"] = rng.choice((1, 1, 2)) if not has_adapters else 1
    moe["balance_loss"] = rng.choice((0, 0.01, 0.5))
    moe["z_loss"] = rng.choice((0, 0.01, 0.5))
    moe["dispatch"] = rng.choice(("gather", "alltoall"))
    if _often(rng):
        moe["choice_bias"] = "true"
        moe["bias_update"] = 0 if has_adapters else rng.choice((0, 0.01))
    if not has_adapters and _often(rng):
        # never a dropped row: results would depend on the layout
        moe["capacity"] = axes.ep * axes.tp * rng.choice((1, 1.5))
    return [f"model.moe.{name}={value}" for name, value in moe.items()]


def _data(rng: random.Random, seq_len: int, *, packs: bool) -> list[str]:
    """Return the words of dense sequences, or of documents, with masked targets or packed."""
    vocab = rng.randint(2, 32)
    more = [f"model.vocab_size={vocab + rng.randint(0, 5)}"] * (rng.random() < 0.3)
    masked = rng.choice((0.3, 0.9)) if _often(rng) else 0
    if not packs and not masked:
        return [*more, "data=synthetic", "data.num_sequences=512", f"data.vocab_size={vocab}"]
    options = {"seq_len": seq_len, "vocab_size": vocab, "packs": str(packs).lower()}
    options["masked"] = float(masked)
    return [*more, *DOCUMENTS.split(), *(f"+data.options.{k}={v}" for k, v in options.items())]


def _adapters(rng: random.Random, gates: bool, has_experts: bool) -> list[str]:
    """Return the words of LoRA."""
    maps = ["q", "k", "v", "o"] + ["up", "down"] * (not has_experts) + ["gate"] * gates
    words = ["optim.train=lora", f"optim.lora_rank={rng.randint(1, 4)}"]
    words.append(f"optim.lora_alpha={rng.choice((1, 16))}")
    words += [f"optim.lora_dropout={rng.choice((0.1, 0.5))}"] * _often(rng)
    if _often(rng):
        words.append(
            f"optim.lora_targets=[{','.join(rng.sample(maps, rng.randint(1, len(maps))))}]"
        )
    return words
