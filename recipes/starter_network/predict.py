"""Use what was trained: python predict.py, after ppctl train --config-dir . recipes=mine."""

import jax
import numpy as np

import ppctl

run = ppctl.load_run("runs/mine")
print("steps of checkpoints", run.steps, "loss of the last step", run.metrics[-1]["loss"])
for path, array in jax.tree_util.tree_leaves_with_path(run.params()):  # the tree that init returned
    print("parameter", jax.tree_util.keystr(path, simple=True, separator="/"), array.shape)

batch = next(run.data.eval_batches(1))  # held out
logits = run.predict(batch["inputs"])  # or of images of yours: any number of them
right = np.mean(np.argmax(logits, axis=-1) == batch["targets"])
print(f"held out: loss {run.loss(batch):.4f}, {right:.0%} of {len(logits)} right")
