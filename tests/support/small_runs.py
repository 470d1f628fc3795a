"""Runs of a few steps, and their files."""

import json

TOKENS = (
    "mesh=1x2 schedule=gpipe schedule.num_microbatches=2 data=synthetic data.batch_size=16 "
    "data.vocab_size=16 data.num_sequences=512 data.eval_fraction=0.1 model.num_layers=2 "
    "model.d_model=16 model.num_heads=2 model.seq_len=8 run.dtype=float32 run.platform=cpu "
    "run.eval_every=null run.trackers=[] run.checkpoint.every=null run.num_steps=6"
)
ROWS = (
    "model=mlp model.num_layers=2 model.d_model=16 data=regression data.batch_size=16 "
    "data.num_rows=512 data.num_features=5 data.num_targets=3 mesh=1x2 schedule=gpipe "
    "schedule.num_microbatches=2 run.platform=cpu run.dtype=float32 run.eval_every=null "
    "run.trackers=[] run.checkpoint.every=null run.num_steps=6"
)


def records(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir):
    return [record["loss"] for record in records(run_dir)]


def checkpoints(run_dir):
    return sorted(
        int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()
    )
