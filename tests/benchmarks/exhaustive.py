"""Every schedule x mesh x chunks x remat x layers equals the reference: `make exhaustive`, an hour.

The tests run a selection with every pair of these values; this runs the whole product, in two processes: of executor=spmd, and of executor=mpmd (every family x {1x4, 2x4, 2x2x2} x remat x
layers). `exhaustive.py mpmd` runs one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2


def spmd_cases() -> Iterator[tuple[str, Any, Callable]]:
    from support.cases import make_stack, run_spmd
    from support.spmd_cases import FACTORS, SINGLE_OP, case_of, name_of, possible

    factors = FACTORS | {"schedule": [*FACTORS["schedule"], *SINGLE_OP.items()]}
    free = ("schedule", "mesh", "remat", "layers")
    fixed = {"model": "untied swiglu grouped", "unroll": 16, "gather": "step", "loops": False}
    product = (
        dict(zip(free, values, strict=True))
        for values in itertools.product(*(factors[name] for name in free))
    )
    for case in (case_of(values | fixed) for values in filter(possible, product)):
        run = lambda params, batch, case=case: run_spmd(
            case, make_stack(case.model, case.num_layers), params, batch
        )
        yield f"spmd {name_of(case)}", case, run


def mpmd_cases() -> Iterator[tuple[str, Any, Callable]]:
    from support.mpmd_cases import MESHES, REMAT, MpmdCase, name_of, run_mpmd

    from ppctl.schedule.families.registry import FAMILIES

    for family, mesh, remat, num_layers in itertools.product(FAMILIES, MESHES, REMAT, (8, 10)):
        case = MpmdCase(family, mesh, num_layers=num_layers, remat=remat, model="mlp")
        yield f"mpmd {name_of(case)}", case, lambda params, batch, case=case: run_mpmd(case)


def errors(part: int) -> list[tuple[float, str]]:
    """(largest relative difference of loss and gradients, name) of every NUM_PROCESSES-th case."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  simulated devices and float64, before JAX starts
    from support.cases import difference, run_reference

    of_executor = {"spmd": spmd_cases, "mpmd": mpmd_cases}
    cases = itertools.chain.from_iterable(
        of_executor[name]() for name in sys.argv[1:] or of_executor
    )
    found = []
    for name, case, run in itertools.islice(cases, part, None, NUM_PROCESSES):
        params, batch, loss, grads = run_reference(case.model, case.num_layers, case.batch_size)
        got_loss, got_grads = run(params, batch)
        worst = max(abs(float(got_loss) - loss) / abs(loss), difference(got_grads, grads))
        found.append((worst, name))
        print(f"{worst:.1e}  {name}", flush=True)
    return found


def main() -> int:
    """0 when every case is within the tests' tolerance, else 1."""
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        found = sorted(itertools.chain(*pool.map(errors, range(NUM_PROCESSES), chunksize=1)))
    worst, name = found[-1]
    print(
        f"{len(found)} cases in {time.monotonic() - began:.0f} s; the largest relative error is "
        f"{worst:.1e} ({name})"
    )
    return int(not worst <= 1e-10)


if __name__ == "__main__":
    sys.exit(main())
