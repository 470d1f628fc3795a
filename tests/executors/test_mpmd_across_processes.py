"""The mpmd executor on several processes: the reference's losses and parameters, wherever the
ranks' devices are.
"""

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import COMPILE_FAST, difference, make_batch, make_params, make_stack
from support.mpmd_cases import LR_SCHEDULE, MpmdCase, make_optimizer

from ppctl.executors.reference import reference
from ppctl.training.pipeline.optimizers import init_state, train_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
]  # make test: four processes of tests/promises/test_goes_on.py
WORKER = Path(__file__).parents[1] / "support/mpmd_worker.py"
LIMIT_S = 600  # seconds, for a busy machine
MLP = {"model": "mlp", "num_layers": 6, "num_microbatches": 4, "batch_size": 16, "remat": "layer"}
# (processes, devices of each) -> name -> (settings of the case, the worker's actions)
LAUNCHES = {
    (4, 1): {
        "many chunks and microbatches, late hosts": (
            {
                "schedule": "interleaved",
                "mesh": (1, 4, 1),
                "num_chunks": 3,
                "num_layers": 12,
                "num_microbatches": 8,
            },
            {"slow": True},
        ),
        "tied embeddings": (
            {"schedule": "zb_h1", "mesh": (1, 4, 1), "model": "tied swiglu", "num_layers": 4},
            {},
        ),
        "a split backward, no barrier": (
            {"schedule": "zb_h1", "mesh": (1, 4, 1)},
            {"post_validation": True, "clip_norm": 2.0},  # reached by one step of three
        ),
    },
    (2, 2): {
        "two ranks a process, no barrier, uneven stages, the vocabulary on all": (
            {
                "mesh": (1, 4, 1),
                "model": "tied swiglu",
                "num_layers": 2,
                "sizes": (1, 0, 1, 0),
                "has_parts": True,
            }
            | {"schedule": "1f1b"},
            {
                "post_validation": True,
                "clip_norm": 3.2,
                "evaluate": True,
                "round_trip": True,
            },  # reached by one step
        )
    },
    (4, 2): {
        "a V on shards, ranks of two processes, late hosts": (
            {"schedule": "zb_v", "mesh": (2, 2, 2), "num_microbatches": 8, "batch_size": 32},
            {"slow": True, "evaluate": True, "round_trip": True},
        ),
        "ranks of four processes": ({"schedule": "1f1b", "mesh": (4, 2, 1), "remat": "full"}, {}),
    },
}
NAMES = [(launch, name) for launch, cases in LAUNCHES.items() for name in cases]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(processes, devices of each) -> (the directory with their results, how they ended if not
    well).
    """

    @cache
    def launch(num_processes, num_devices):
        out = tmp_path_factory.mktemp(f"{num_processes}x{num_devices}")
        cases = LAUNCHES[num_processes, num_devices].items()
        text = json.dumps([(name, MLP | settings, how) for name, (settings, how) in cases])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        logs = [out / f"{i}.log" for i in range(num_processes)]
        processes = []
        for i, log in enumerate(logs):
            command = [
                sys.executable,
                WORKER,
                address,
                str(num_processes),
                str(i),
                str(num_devices),
                out,
                text,
            ]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
                )
        deadline = time.monotonic() + LIMIT_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() for p in processes):
                deadline = min(deadline, time.monotonic() + 5)  # the others wait for it
            time.sleep(0.1)
        codes = [p.poll() for p in processes]
        for process in processes:
            process.kill()
            process.wait()
        ends = zip(codes, logs, strict=True)
        told = "\n".join(
            f"--- process {i}: {code}\n{log.read_text()[-3000:]}"
            for i, (code, log) in enumerate(ends)
        )
        return out, None if codes == [0] * num_processes else told

    return launch


@cache
def by_reference(model, num_layers, batch_size, clip_norm):
    """(losses and norms of three steps and the loss of one more batch, the state after them) on one
    device.
    """
    stack, optimizer = make_stack(model, num_layers), make_optimizer(clip_norm)
    build = partial(reference, stack, num_microbatches=1, remat="none", unroll=0, dtype=jnp.float64)
    step = jax.jit(train_step(build(), optimizer, LR_SCHEDULE), compiler_options=COMPILE_FAST)
    state = init_state(make_params(stack), optimizer)
    metrics = []
    for k in range(3):
        state, numbers = step(state, make_batch(model, batch_size, k))
        metrics.append([numbers["loss"], numbers["grad_norm"]])
    eval_loss, _ = jax.jit(build(with_grads=False), compiler_options=COMPILE_FAST)(
        state["params"], make_batch(model, batch_size)
    )
    return {"metrics": np.array(metrics), "eval_loss": np.array(eval_loss)}, jax.tree.leaves(state)


@pytest.mark.parametrize(
    ("launch", "name"), [pytest.param(launch, name, id=name) for launch, name in NAMES]
)
def test_several_processes_train_the_same_model_as_one(launched, launch, name):
    settings, how = LAUNCHES[launch][name]
    case = MpmdCase(**MLP | settings)
    out, failure = launched(*launch)
    assert failure is None, failure
    found = dict(np.load(out / f"{name}.npz"))
    expected, state = by_reference(
        case.model, case.num_layers, case.batch_size, how.get("clip_norm", 0.05)
    )
    if not how.get("evaluate"):
        expected = {key: values for key, values in expected.items() if key != "eval_loss"}
    for key, values in expected.items():
        np.testing.assert_allclose(found.pop(key), values, rtol=1e-10, err_msg=key)
    assert difference([found[f"state{i}"] for i in range(len(found))], state) < 1e-10
