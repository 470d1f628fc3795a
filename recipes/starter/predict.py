"""Use what was trained: python predict.py, after ppctl train --config-dir . recipes=mine."""

import numpy as np
from flax import nnx

import ppctl

run = ppctl.load_run("runs/mine")
print("steps of checkpoints", run.steps, "loss of the last step", run.metrics[-1]["loss"])
model = run.flax_model()  # the module with its trained parameters
model.eval()
for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    print("parameter", "/".join(map(str, path)), variable.shape)

batch = next(run.data.eval_batches(1))  # held out
outputs = model(batch["inputs"])  # or of inputs of yours: any number of them
np.testing.assert_allclose(outputs, run.predict(batch["inputs"]), atol=1e-4)
print(f"held out: loss {run.loss(batch):.4f}")
print("amplitude and frequency, predicted", outputs[0], "and true", batch["targets"][0])
