"""A run of `ppctl train` on a tiny model with two traced steps."""

from ppctl import cli

TINY = (
    "data=synthetic data.batch_size=16 data.vocab_size=16 data.num_sequences=512 "
    "data.eval_fraction=0.1 model.d_model=16 model.num_heads=2 model.seq_len=8 run.platform=cpu "
    "run.dtype=float32 run.eval_every=null run.trackers=[] run.checkpoint.every=null "
    "run.num_steps=6 run.profile=2"
)


def traced_run(run_dir, *words):
    return cli.main(["train", *TINY.split(), f"run.dir={run_dir}", *words])
