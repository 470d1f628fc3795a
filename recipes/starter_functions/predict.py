"""Use what was trained: python predict.py, after ppctl train --config-dir . recipes=mine."""

import jax

import ppctl

run = ppctl.load_run("runs/mine")
print("steps of checkpoints", run.steps, "loss of the last step", run.metrics[-1]["loss"])
for path, array in jax.tree_util.tree_leaves_with_path(
    run.params()
):  # those of a layer: [num_layers, ...]
    print("parameter", jax.tree_util.keystr(path, simple=True, separator="/"), array.shape)

batch = next(run.data.eval_batches(1))  # held out
outputs = run.predict(batch["inputs"])  # or of inputs of yours: any number of them
print(f"held out: loss {run.loss(batch):.4f}")
print("amplitude and frequency, predicted", outputs[0], "and true", batch["targets"][0])
