"""The runs that are killed: of one to four processes, by both executors, started again by the
launcher, in sweeps.
"""

from __future__ import annotations

KEEP, EVERY, NUM_STEPS = 3, 3, 48  # a save takes longer than three steps: one is always under way
WORDS = (
    "train model=mlp model.d_model=16 data=regression data.batch_size=8 data.num_rows=1024 "
    "data.num_features=5 data.num_targets=3 schedule.num_microbatches=2 run.platform=cpu "
    f"run.eval_every=null run.trackers=[] run.log_every=1 run.checkpoint.every={EVERY} "
    f"run.checkpoint.keep={KEEP}"
).split()
LAYERS = "model.num_layers=2"
PROCESSES = "launch.processes"
LAYOUTS = {
    "one": f"mesh=1x2 schedule=gpipe {LAYERS}",
    "one mpmd": f"mesh=1x2 schedule=1f1b executor=mpmd {LAYERS}",
    "two": f"mesh=1x2 schedule=zb_h1 {LAYERS} {PROCESSES}=2",
    "two mpmd": f"mesh=1x2 schedule=1f1b executor=mpmd {LAYERS} {PROCESSES}=2",
    "two of two devices": f"mesh=2x2 schedule=interleaved model.num_layers=4 {PROCESSES}=2",
    "two of two devices mpmd": f"mesh=2x2 schedule=1f1b executor=mpmd {LAYERS} {PROCESSES}=2",
    "two of four devices": f"mesh=2x4 schedule=1f1b model.num_layers=4 {PROCESSES}=2",
    "three": f"mesh=1x3 schedule=1f1b model.num_layers=3 {PROCESSES}=3",
    "four": f"mesh=2x2 schedule=gpipe {LAYERS} {PROCESSES}=4",
    "four mpmd": f"mesh=2x2 schedule=1f1b executor=mpmd {LAYERS} {PROCESSES}=4",
    "four of two devices": f"mesh=4x2 schedule=zb_h1 {LAYERS} {PROCESSES}=4",
    "one restarted": f"mesh=1x2 schedule=gpipe {LAYERS} launch.max_restarts=99",
    "two restarted": f"mesh=1x2 schedule=1f1b {LAYERS} {PROCESSES}=2 launch.max_restarts=99",
    "two mpmd restarted": f"mesh=1x2 schedule=zb_h1 executor=mpmd {LAYERS} {PROCESSES}=2 launch.max_restarts=99",
    "sweep": f"-m mesh=1x2 schedule=gpipe {LAYERS} executor=spmd,mpmd run.seed=0,1",
    "sweep side by side": f"-m hydra.launcher.jobs=2 mesh=1x2 schedule=1f1b,zb_h1 {LAYERS} executor=mpmd "
    f"{PROCESSES}=2",
    "sweep restarted": f"-m mesh=1x2 schedule=gpipe {LAYERS} run.seed=0,1 {PROCESSES}=2 launch.max_restarts=99",
}
TURNS = (  # more processes cost more: fewer turns
    *(
        "two of two devices",
        "two of four devices",
        "two of two devices mpmd",
        "four of two devices",
    ),
    *(
        "one",
        "two",
        "one mpmd",
        "two restarted",
        "sweep",
        "two mpmd",
        "one restarted",
        "sweep side by side",
    ),
    *(
        "one",
        "three",
        "two mpmd restarted",
        "two",
        "sweep",
        "two mpmd",
        "one restarted",
        "sweep restarted",
    ),
    *(
        "one mpmd",
        "two restarted",
        "four",
        "sweep",
        "one",
        "two mpmd restarted",
        "sweep side by side",
        "four mpmd",
    ),
)
PHASES = (
    "starting",
    "joining",
    "restoring",
    "compiling",
    "stepping",
    "saving",
    "ending",
    "between jobs",
)
MOMENTS = (None, None, None, "saving", "saving", "joining", "compiling", "stepping", "ending")
AFTER_S = {  # at most, from when the moment was seen
    "compiling": 2.0,
    "joining": 1.5,
    "stepping": 1.0,
    "saving": 0.3,
    "ending": 0.5,
}
