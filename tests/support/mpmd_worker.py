"""One process of several that train `MpmdCase`s.

python mpmd_worker.py ADDRESS NUM_PROCESSES INDEX NUM_DEVICES OUT CASES

CASES is a JSON list of (name, settings of MpmdCase, settings of `trained`). Process 0 writes
OUT/<name>.npz.
"""

import json
import os
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
ADDRESS, NUM_PROCESSES, INDEX, NUM_DEVICES, OUT, CASES = sys.argv[1:]
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": NUM_DEVICES, "JAX_ENABLE_X64": "1"}

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    ADDRESS,
    int(NUM_PROCESSES),
    int(INDEX),
    heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=20,
)

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402
from support.cases import make_batch  # noqa: E402
from support.mpmd_cases import MpmdCase, make_engine  # noqa: E402


def slowed(walk, seed):
    """The walk with a host that now and then is late."""
    late = random.Random(seed)

    def at_random(call):
        def run(*values):
            if late.random() < 0.05:
                time.sleep(0.02 * late.random())
            return call(*values)

        return run

    return replace(walk, steps=tuple((at_random(call), *rest) for call, *rest in walk.steps))


def whole(tree, mesh):
    """The leaves of a tree on the whole mesh as NumPy arrays, in every process."""
    everywhere = jax.jit(lambda tree: jax.tree.leaves(tree), out_shardings=NamedSharding(mesh, P()))
    return [np.asarray(leaf.addressable_data(0)) for leaf in everywhere(tree)]


def trained(
    case, *, slow=False, evaluate=False, round_trip=False, clip_norm=0.05, post_validation=False
):
    """Return the values that the test compares, after three steps."""
    used, batch = make_engine(case, clip_norm, post_validation=post_validation)
    runtime, mesh = used.runtime, used.layout.mesh
    placed = lambda batch: used.batches.put(
        {name: a[list(used.batches.examples)] for name, a in batch.items()}
    )
    used.compile(evaluate=evaluate)
    ranks = {rank for _, rank in runtime.programs.compiled}
    assert ranks == {r for r in used.ranks if runtime.is_mine[r]}, (ranks, runtime.is_mine)
    assert all(runtime.is_mine[a] or runtime.is_mine[b] for *_, a, b in runtime.programs.crossings)
    if slow:
        used.walks |= {name: slowed(walk, INDEX) for name, walk in used.walks.items()}
    compiled = len(runtime.programs.compiled), len(runtime.programs.crossings)
    multihost_utils.sync_global_devices("compiled")  # like a run
    state, metrics = used.new_state(), []
    began = time.perf_counter()
    for k in range(3):
        state, numbers = used.step(state, placed(make_batch(case.model, case.batch_size, k)))
        metrics.append([numbers["loss"], numbers["grad_norm"]])
    found = {"metrics": np.array([list(map(float, each)) for each in metrics])}
    print(
        f"{INDEX}: ranks {sorted(ranks)}, {len(used.batches.examples)} examples, "
        f"{time.perf_counter() - began:.2f} s",
        flush=True,
    )
    if evaluate:
        found["eval_loss"] = np.array(float(used.loss(state, placed(batch))[0]))
    natural = used.to_natural(state)
    leaves = whole(natural, mesh)
    if round_trip:
        again = whole(used.to_natural(used.from_natural(natural)), mesh)
        assert all(map(np.array_equal, again, leaves))
    assert (len(runtime.programs.compiled), len(runtime.programs.crossings)) == compiled, (
        "a step has compiled"
    )
    return found | {f"state{i}": leaf for i, leaf in enumerate(leaves)}


def main():
    multihost_utils.sync_global_devices("started")
    for name, settings, how in json.loads(CASES):
        settings = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in settings.items()
        }
        began = time.perf_counter()
        found = trained(MpmdCase(**settings), **how)
        if INDEX == "0":
            print(name, f"{time.perf_counter() - began:.1f} s", flush=True)
            np.savez(Path(OUT) / f"{name}.npz", **found)


try:
    main()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # at once: the others wait for this process
