"""Trainers of published rows: how each differs from ppctl's own executors. Standard library only.

Set by hand from their code and papers, which were not all opened again for it, and in sight of the errors of all rows: the error on the half without fitted constants does not test it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published.rows import Row

# docs/benchmarks.md, one H100: PyTorch takes 0.425 s compiled and 0.575 s eager for a step that is
# counted as 0.344 s, including 0.065 s of element-wise work; products and attention are the same.
COMPILED, EAGER = 2.2, 4.5
# Megatron-LM core/tensor_parallel/cross_entropy.py, a logit: to float32 6, maximum 4, subtract 8,
# exp 8, sum 4, divide 8, times the gradient 8, to bfloat16 6: 52 bytes, including 16 counted
LOGIT_BYTES = 36


@dataclass(frozen=True)
class System:
    """A trainer.

    gradient_bytes: what adding gradients of a microbatch to their sums moves besides the products,
    a parameter; 0: these add them (`gradient_accumulation_fusion`). reduce_bytes: of a gradient
    that is summed over replicas.
    """

    name: str
    pattern: str  # pattern of the row's `system`
    flash: bool = True  # attention as one kernel; otherwise all scores are in memory
    sequence_parallel: bool = True
    shards: str = (
        "optimizer"  # over replicas: nothing | optimizer (ZeRO-1) | parameters (FSDP), over fsdp
    )
    hides_replicas: bool = True  # sums over replicas and gathers of parameters overlap computing
    hides_tp: float = 0.0  # 0..1: share of the sends of tp that overlaps products
    gradient_bytes: float = 0.0
    reduce_bytes: int = 2
    stored_gradient_bytes: int = 4
    logit_bytes: float = (
        LOGIT_BYTES  # traffic of a loss of several kernels, a logit, besides the counted bytes
    )
    element_wise: float = (
        1.0  # traffic of element-wise kernels over that of XLA's fused ones, as counted
    )


SYSTEMS = (
    # unfused: autograd writes a gradient (2), main_grad is read and written (8), .grad read (2)
    System(
        "Megatron-LM of 2021",
        r"SC21",
        flash=False,
        sequence_parallel=False,
        shards="nothing",
        hides_replicas=False,
        gradient_bytes=12,
        reduce_bytes=4,
    ),
    # XLA fuses element-wise work, as counted; bfloat16 parameters and gradients
    System("Marin's trainer", r"Marin", shards="nothing", stored_gradient_bytes=2, logit_bytes=0),
    # Reducing Activation Recomputation (Korthikanti et al. 2022): sequence parallelism, fused sums
    # bytes of gradients
    System(
        "Megatron-LM of 2022",
        r"2205\.05198|Korthikanti",
        flash=False,
        shards="nothing",
        hides_replicas=False,
        reduce_bytes=4,
    ),
    # BF16Optimizer.update_hp_grads: write 2; cast to float32 6, add 12, zero 2
    System(
        "Megatron-DeepSpeed",
        r"Megatron-DeepSpeed|BLOOM",
        flash=False,
        sequence_parallel=False,
        hides_replicas=False,
        gradient_bytes=22,
        reduce_bytes=4,
    ),
    System(
        "Megatron-LM fork of vocabulary parallelism",
        r"VocabularyParallelism",
        flash=False,
        sequence_parallel=False,
        shards="nothing",
        hides_replicas=False,
        reduce_bytes=4,
    ),
    # sums of .grad in bfloat16: write 2, read 4, write 2
    System(
        "Aleph Alpha's trainer",
        r"Aleph Alpha",
        sequence_parallel=False,
        hides_replicas=False,
        gradient_bytes=8,
        stored_gradient_bytes=2,
        element_wise=COMPILED,
    ),
    System("torchtitan", r"torchtitan", shards="parameters", element_wise=COMPILED),
    System("fms-fsdp", r"fms-fsdp", shards="parameters", element_wise=COMPILED),
    # XLA combines collectives of one kind up to gigabytes, so that they run before and after all
    # layers
    System(
        "PaxML", r"PaxML", shards="parameters", hides_replicas=False, reduce_bytes=4, logit_bytes=0
    ),
    # The Llama 3 Herd of Models (2024, arXiv 2407.21783), 3.3.2: gradients are summed over replicas
    # in float32
    System("Meta's trainer", r"Meta Llama", logit_bytes=0, reduce_bytes=4),
    # userbuffers: gathers and scatters along tp in four pieces; all but the first
    # overlap products
    System(
        "NeMo", r"NeMo|Megatron-Bridge", hides_tp=0.75, stored_gradient_bytes=2
    ),  # grad_sync_dtype=bf16
    # arguments.py: bf16 turns on accumulate_allreduce_grads_in_fp32
    System("Megatron-Core", r"Megatron", hides_tp=0.75, reduce_bytes=4),
)
OTHER = System("another trainer", r"", element_wise=COMPILED)


def system_of(row: Row) -> System:
    """Return the trainer of a row, with sequence parallelism as the row states it.

    A trainer that is not known is taken for a recent one that hides nothing along tp.
    """
    found = next((system for system in SYSTEMS if re.search(system.pattern, row.system)), OTHER)
    if row.sequence_parallel is not None:
        found = replace(found, sequence_parallel=row.sequence_parallel)
    if re.search(r"\beager\b|no compile", f"{row.id} {row.notes}"):
        found = replace(found, element_wise=EAGER)
    if row.fsdp > 1 and found.shards != "parameters":
        found = replace(found, shards="parameters")
    return found
