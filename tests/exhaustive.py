"""Every schedule x mesh x chunks x remat x layers beside the reference, in float64: `make exhaustive`, 40 minutes.

The tests run a selection in which every pair of these values occurs; this runs the whole product, in two processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from pathlib import Path

NUM_PROCESSES = 2


def errors(part: int) -> list[tuple[float, str]]:
    """(largest relative difference of loss and gradients, name) of every NUM_PROCESSES-th case."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "runtime")]
    import conftest  # noqa: F401  simulated devices and float64, before JAX starts
    from cases import difference, make_stack, run_reference, run_spmd
    from test_spmd_equals_reference import FACTORS, case_of, name_of, possible
    from test_spmd_singles import SINGLES

    factors = FACTORS | {"schedule": [*FACTORS["schedule"], *SINGLES]}
    free = ("schedule", "mesh", "remat", "layers")
    fixed = {"model": "untied swiglu grouped", "unroll": 16, "gather_each_tick": False, "skip_idle": True}
    product = (dict(zip(free, values, strict=True)) for values in itertools.product(*(factors[name] for name in free)))
    found = []
    for values in itertools.islice(filter(possible, product), part, None, NUM_PROCESSES):
        case = case_of(values | fixed)
        params, batch, loss, grads = run_reference(case.model, case.num_layers, case.batch_size)
        got_loss, got_grads = run_spmd(case, make_stack(case.model, case.num_layers), params, batch)
        worst = max(abs(float(got_loss) - loss) / abs(loss), difference(got_grads, grads))
        found.append((worst, name_of(case)))
        print(f"{worst:.1e}  {name_of(case)}", flush=True)
    return found


def main() -> int:
    """0 when every case is within the tests' tolerance, else 1."""
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        found = sorted(itertools.chain(*pool.map(errors, range(NUM_PROCESSES), chunksize=1)))
    worst, name = found[-1]
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s; the largest relative error is {worst:.1e} ({name})")
    return int(not worst <= 1e-10)


if __name__ == "__main__":
    sys.exit(main())
