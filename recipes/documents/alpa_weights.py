"""The trained weights of a run of recipes=alpa_mlp in the form of its author's `init`, ready for `apply`.

python recipes/documents/alpa_weights.py runs/alpa_mlp weights.npz
"""

import sys
from pathlib import Path

import jax
import numpy as np

from ppctl.cli.compose import compose
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.job import assemble


def weights(run_dir, *overrides):
    """The parameters of the newest checkpoint; overrides: what was asked of the run besides the recipe."""
    job = assemble(compose(["recipes=alpa_mlp", *overrides], [], ["train"]))
    with Checkpoints(Path(run_dir) / "checkpoints", keep=None) as checkpoints:
        state = checkpoints.restore(checkpoints.latest(), job.pipe.states.natural)
    return job.pipe.stack.export(state["params"])


if __name__ == "__main__":
    run_dir, file, *overrides = sys.argv[1:]
    leaves = jax.tree_util.tree_leaves_with_path(weights(run_dir, *overrides))
    np.savez(file, **{jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves})
