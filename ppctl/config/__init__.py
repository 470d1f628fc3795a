"""Every setting of ppctl: field, default, unit and one-field check. Standard library only.

The YAML files under `conf/` only name choices and what differs from these defaults. The classes are
not frozen because Hydra's structured configs must not be. `check` holds what involves more than one
field.
"""
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from ppctl.config.composed_config import Config, ScheduleConfig, check
from ppctl.config.groups.command_settings import Inspect, Launch, Plan, Tune, Verify
from ppctl.config.groups.data_settings import (
    CustomData,
    Data,
    Mixture,
    Regression,
    Stdlib,
    Synthetic,
    Text,
    Tokens,
)
from ppctl.config.groups.hardware_settings import AutoHardware, Hardware
from ppctl.config.groups.layout_settings import (
    Balanced,
    Explicit,
    Mesh,
    Mpmd,
    Reference,
    Spmd,
    Uniform,
)
from ppctl.config.groups.model_settings import MLP, CustomModel, Transformer
from ppctl.config.groups.optim_settings import SGD, AdamW, Optim
from ppctl.config.groups.run_settings import DTYPES, Checkpoint, Run
from ppctl.config.groups.schedule_settings import (
    Auto,
    Chunked,
    Costs,
    Csv,
    Eager1F1B,
    Hanayo,
    Interleaved,
    Schedule,
)
