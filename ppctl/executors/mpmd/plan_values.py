"""The values of a plan: what the key of each holds, its form on a rank's devices, its memory.

A value has the same kind after "next_" (the plan `try`) and before "_there" (a copy elsewhere).
"""

from typing import NamedTuple

from ppctl.model.layer_reports import COUNTS
from ppctl.model.random_keys import KEYS, SEED


class ValueKind(NamedTuple):
    """The traits of a value.

    key: the numbers after its name: rank | stage | task (stage, microbatch) | microbatch (rank,
    microbatch). form: the value on the devices of a rank, see `ProgramLibrary.specs`: number (equal
    on all devices) | part (of each device) | activation (a part, rows in the order of devices) |
    batch | state | layers | embed_head | sum | grads | shared | sums, layer_sums, embed_head_sums
    (of each device, with a leading dim over devices). memory: its part of a rank's memory.
    """

    key: str
    form: str
    memory: str = "transfers"


NUMBER, ARRIVING = ValueKind("rank", "number"), ValueKind("task", "activation")
VALUES = {
    # the state of a rank, and the batch
    "params": ValueKind("rank", "state", "parameters"),
    "optimizer": ValueKind("rank", "state", "optimizer"),
    "step": ValueKind("rank", "state"),
    **dict.fromkeys(("inputs", "targets"), ValueKind("rank", "batch", "batch")),
    # numbers: of a microbatch, a vocabulary part, layers; keys of the seed and of examples
    "m": ValueKind("microbatch", "number"),
    "part": NUMBER,
    "layer_numbers": NUMBER,
    SEED: NUMBER,
    KEYS: ValueKind("rank", "part"),
    # the layers of a stage, a rank's embedding and head (None: unused), sums of their gradients
    "w": ValueKind("stage", "layers", "weights"),
    "acc": ValueKind("stage", "layer_sums", "gradients"),
    "embed_head": ValueKind("rank", "embed_head", "weights"),
    "acc_embed_head": ValueKind("rank", "embed_head_sums", "gradients"),
    # a stage's input and output for a microbatch, and their gradients
    **dict.fromkeys(("x", "y", "gx", "gy"), ARRIVING),
    # sum of losses, and their number; values from a forward to its backward, from I to W, S to T
    "losses": ValueKind("rank", "sums"),
    **dict.fromkeys(("stash", "pending", "logits"), ValueKind("task", "sums", "activations")),
    # with a divided vocabulary: summands of the first stage's input and of the last stage's gy,
    # and their copies where they are added; the last output and the first gradient on each rank
    **dict.fromkeys(("own_x", "part_x", "own_gy", "part_gy", "last_y", "first_gx"), ARRIVING),
    # log sums of S: a part's, its copy on the last stage's rank, and those of all on each rank
    **dict.fromkeys(("own_log_sums", "log_sums", "all_log_sums"), ValueKind("task", "part")),
    # gradients: of a stage, summed over devices; of a rank; of leaves that ranks share; mean
    "sum": ValueKind("stage", "sum", "gradients"),
    "grads": ValueKind("rank", "grads", "gradients"),
    "mean_grads": ValueKind("rank", "state"),
    **dict.fromkeys(("given", "shared_sum", "shared"), ValueKind("rank", "shared", "gradients")),
    # numbers of a step
    **dict.fromkeys(("loss", "number", "squares", "attached", "numbers", COUNTS), NUMBER),
}


def value_kind(name: str) -> ValueKind:
    """Return the kind of a value."""
    return VALUES[name.removeprefix("next_").removesuffix("_there")]
