"""The trained weights of a run of recipes=alpa_mlp in the form of its author's `init`, ready for
`apply`.

python recipes/documents/alpa_weights.py runs/alpa_mlp weights.npz
"""

import sys

import jax
import numpy as np

import ppctl

if __name__ == "__main__":
    run_dir, file = sys.argv[1:]
    leaves = jax.tree_util.tree_leaves_with_path(ppctl.load_run(run_dir).params())
    np.savez(
        file,
        **{jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves},
    )
