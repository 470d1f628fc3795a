"""Every setting of ppctl: field, default, unit and one-field check. Standard library only.

The YAML files under `conf/` only name choices and what differs from these defaults. The classes are not frozen because
Hydra's structured configs must not be. `check` holds what involves more than one field.
"""

from ppctl.config.costs import Analytic, Costs, Measure
from ppctl.config.data import CustomData, Data, Mixture, Regression, Stdlib, Synthetic, Text, Tokens
from ppctl.config.executor import Mpmd, Reference, Spmd
from ppctl.config.hardware import AutoHardware, Hardware
from ppctl.config.inspection import Inspect
from ppctl.config.launch import Launch
from ppctl.config.mesh import Mesh
from ppctl.config.model import MLP, CustomModel, Transformer
from ppctl.config.optim import SGD, AdamW, Optim
from ppctl.config.partition import Balanced, Explicit, Uniform
from ppctl.config.plan import Plan, Rehearse
from ppctl.config.request import Config, ScheduleConfig, check
from ppctl.config.run import DTYPES, Checkpoint, Profile, Run
from ppctl.config.schedule import Auto, Chunked, Csv, Eager1F1B, Gis, Hanayo, Interleaved, Schedule
from ppctl.config.tune import Tune
from ppctl.config.verify import Verify

__all__ = [
    "DTYPES",
    "MLP",
    "SGD",
    "AdamW",
    "Analytic",
    "Auto",
    "AutoHardware",
    "Balanced",
    "Checkpoint",
    "Chunked",
    "Config",
    "Costs",
    "Csv",
    "CustomData",
    "CustomModel",
    "Data",
    "Eager1F1B",
    "Explicit",
    "Gis",
    "Hanayo",
    "Hardware",
    "Inspect",
    "Interleaved",
    "Launch",
    "Measure",
    "Mesh",
    "Mixture",
    "Mpmd",
    "Optim",
    "Plan",
    "Profile",
    "Reference",
    "Regression",
    "Rehearse",
    "Run",
    "Schedule",
    "ScheduleConfig",
    "Spmd",
    "Stdlib",
    "Synthetic",
    "Text",
    "Tokens",
    "Transformer",
    "Tune",
    "Uniform",
    "Verify",
    "check",
]
