"""The texts of `--help`: commands, groups and settings."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from ppctl.cli.choices import (
    GROUPS,
    PARTS,
    PLAIN,
    Setting,
    all_settings,
    default_option,
    did_you_mean,
    options,
    schema_of,
    settings_of,
    shown,
    wrong_option,
)
from ppctl.cli.commands import COMMANDS
from ppctl.cli.launchers import SWEEP_GROUPS, sweep_group_help
from ppctl.config import Costs
from ppctl.errors import ConfigError

EXAMPLES = {
    "train": (
        "ppctl train recipes=tiny",
        "ppctl train model=transformer mesh=2x4 schedule=interleaved schedule.num_microbatches=16",
        "ppctl train data=text data.path=notes.txt run.name=notes run.num_steps=1000",
        "ppctl train --multirun schedule=gpipe,eager_1f1b mesh=1x2,1x4",
        "ppctl train recipes=tiny launch.processes=2 launch.max_restarts=3",
    ),
    "verify": (
        "ppctl verify mesh=1x4 schedule=1f1b run.dtype=float64 --json",
        "ppctl verify recipes=tiny schedule=zb_h1 executor=mpmd executor.post_validation=true verify.steps=5",
        "ppctl verify mesh=1x4 schedule=1f1b partition=explicit partition.layers=[3,2,2,1]",
    ),
    "doctor": (
        "ppctl doctor mesh=2x4",
        "ppctl doctor mesh=2x4 launch.processes=2",
        "ppctl doctor mesh=8x8 data.batch_size=512 hardware=h100",
        "ppctl doctor recipes=tiny --json",
    ),
    "plan": (
        "ppctl plan mesh=2x4 schedule=1f1b executor.remat=layer",
        "ppctl plan recipes=tiny plan.compile=true plan.html=plan.html --json",
        "ppctl plan mesh=4x4 data.batch_size=64 plan.topology=v5e:4x4",
    ),
    "rehearse": (
        "ppctl rehearse mesh=1x8 schedule=zb_v model.num_layers=16",
        "ppctl rehearse mesh=2x4 executor=mpmd rehearse.html=rehearsal.html --json",
    ),
    "tune": (
        "ppctl tune mesh=2x4 data.batch_size=64 tune.measure=3",
        "ppctl tune hardware=h100 tune.devices=64 model.num_layers=64 model.d_model=8192 data.batch_size=512",
        "ppctl tune executor=mpmd tune.schedules=[1f1b,zb_h1] tune.remat=[none] tune.tp=[1]",
    ),
    "inspect": (
        "ppctl inspect mesh=1x4 schedule=eager_1f1b",
        "ppctl inspect mesh=2x4x2 inspect.out=inspected",
        "ppctl inspect mesh=1x4 schedule=1f1b executor=mpmd inspect.stage=2 inspect.task=F inspect.what=hlo",
    ),
    "bench": (
        "ppctl bench mesh=1x4 schedule=gpipe",
        "ppctl bench --multirun schedule=gpipe,interleaved --json",
    ),
}
FIRST_EXAMPLES = (  # what to try first
    "ppctl train recipes=tiny",
    "ppctl schedule show schedule=interleaved mesh=1x4",
    "ppctl plan mesh=2x4 schedule=1f1b hardware=h100",
)
APPLIES_TO = {  # the commands that a part applies to; any other part applies to all of them
    "hardware": ("train", "plan", "rehearse", "tune", "doctor"),
    "costs": ("train", "plan", "rehearse", "tune"),
    "launch": ("train", "doctor"),
    "verify": ("verify",),
    "plan": ("plan",),
    "rehearse": ("rehearse",),
    "tune": ("tune",),
    "inspect": ("inspect",),
}
MOST_USED = (
    "model.num_layers",
    "model.d_model",
    "model.seq_len",
    "schedule.num_microbatches",
    "schedule.num_chunks",
    "executor.remat",
    "optim.lr",
    "optim.warmup_steps",
    "data.batch_size",
    "run.name",
    "run.dir",
    "run.num_steps",
    "run.seed",
    "run.dtype",
    "run.platform",
    "run.resume",
    "run.resume_with",
    "run.eval_every",
    "run.checkpoint.every",
    "run.profile.start",
    "run.show_placement",
    "launch.processes",  # launch: of `ppctl train` and `doctor`
    "launch.max_restarts",
    "verify.steps",  # verify: of `ppctl verify`
    "plan.compile",  # plan: of `ppctl plan`
    "plan.topology",
    "plan.memory_gib",
    "plan.tokens",
    "plan.html",
    "rehearse.html",  # rehearse: of `ppctl rehearse`
    "tune.devices",  # tune: of `ppctl tune`
    "tune.tokens",
    "tune.measure",
    "tune.recipe",
    "tune.launch",
    "inspect.what",  # inspect: of `ppctl inspect`
    "inspect.stage",
    "inspect.task",
    "inspect.out",
)
FLAGS = """\
  --json            print the result as JSON on stdout; what ends it without one as {"error": {"kind", "message",
                    "remedy"}}, too
  --cfg job         print the composed config as YAML and stop (--resolve: with ${...} filled in)
  --info TOPIC      where the config comes from: config, defaults, defaults-tree, plugins, searchpath
  -m, --multirun    run every combination of KEY=A,B,...: each in a process and a run.dir of its own; the same line
                    again skips what is finished; hydra.launcher.jobs=N runs N side by side,
                    hydra/launcher=submitit_slurm submits them, hydra/sweeper=optuna searches instead
                    (`--help hydra/launcher hydra/sweeper`)
  --config-dir DIR  look for groups and recipes in DIR too (DIR/recipes/x.yaml is recipes=x)
  --published FILE  plan: predict the published steps of a JSON file and compare; --picture FILE.svg|png draws them
  -h, --help        this text; with part names (`--help model run`): all settings of these"""
EXIT_CODES = """\
  0  done
  1  the check failed (verify, doctor), a job of a sweep failed, or a bug
  2  the request is wrong; nothing was started
  3  another process of the run was lost; the same line resumes
  4  training met a loss that is not finite
  130, 143  interrupted (Ctrl-C, SIGTERM), after saving a checkpoint if training had begun"""


def overview() -> str:
    """Return what `ppctl --help` prints."""
    return "\n".join(
        [
            "Pipeline-parallel training in JAX.",
            "",
            "Usage: ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]",
            "",
            "Commands:",
            *(f"  {name:8} {about}" for name, about in COMMANDS.items()),
            "",
            "Examples (`ppctl examples` has more):",
            *(f"  {line}" for line in FIRST_EXAMPLES),
            "",
            "`ppctl COMMAND --help` shows groups, settings and options; `ppctl --version` the version.",
            'Completion in bash (or zsh): eval "$(ppctl --completion bash)"; in fish: ppctl --completion fish | source',
        ]
    )


def command_help(command: str, words: Sequence[str]) -> str:
    """Return the help of a command, or all settings of the parts named by `words` (`model`, `model=mlp`, `run`)."""
    if words:
        return "\n\n".join(_part_help(word) for word in words)
    known = all_settings()
    groups = [
        line
        for group in GROUPS
        if _is_for(command, group)
        for line in textwrap.wrap(f"  {group:9} {_options_text(group)}", 120, subsequent_indent=" " * 12)
    ]
    used = setting_table([known[key] for key in MOST_USED if _is_for(command, key)])
    return "\n".join(
        [
            f"ppctl {command}: {COMMANDS[command]}.",
            "",
            f"Usage: ppctl {command} [GROUP=OPTION ...] [SETTING=VALUE ...] [--json]",
            "",
            "Groups (the first option is the default):",
            *groups,
            "",
            f"Settings most used, with defaults (all of a part: ppctl {command} --help model; all: --cfg job):",
            used,
            "",
            "Options:",
            FLAGS,
            "",
            "Examples:",
            *(f"  {line}" for line in EXAMPLES[command]),
            "",
            "Exit codes:",
            EXIT_CODES,
        ]
    )


def _is_for(command: str, key: str) -> bool:
    """Return whether a part or setting applies to a command."""
    part = key.partition(".")[0]
    return part not in APPLIES_TO or command in APPLIES_TO[part]


def _options_text(group: str) -> str:
    if group == "mesh":
        return f"{default_option('mesh')} | any DPxPP or DPxPPxFSDP: data-parallel rows x pipeline ranks x shards"
    if group == "recipes":
        return ", ".join(options(group)) + " (complete runs)"
    return " | ".join(name for name in options(group) if group != "costs" or schema_of(group, name) is not Costs)


def _part_help(word: str) -> str:
    """Return all settings of a part, for each of its options unless `word` names one."""
    key, _, option = word.partition("=")
    part = key.split(".")[0]
    if (group := part.replace(".", "/")) in SWEEP_GROUPS or (
        group := ".".join(key.split(".")[:2]).replace(".", "/")
    ) in SWEEP_GROUPS:
        return "\n\n".join(
            f"{about}\n{setting_table(settings)}" for about, settings in sweep_group_help(group).values()
        )
    if part in PLAIN:
        return f"{part}: {PLAIN[part].__doc__}\n{setting_table(settings_of(part, PLAIN[part]).values())}"
    if part not in PARTS:
        raise ConfigError(f"{part} is not a part with settings.{did_you_mean(part, [*PARTS, *PLAIN])}")
    one = part == "mesh" or (option and part == key)
    names = [option or default_option(part)] if one else options(part)
    if part != "mesh" and not set(names) <= set(options(part)):
        raise ConfigError(wrong_option(part, option, options(part)))
    alike: dict[type, list[str]] = {}  # options with the same settings
    for name in names:
        alike.setdefault(schema_of(part, name), []).append(name)
    return "\n\n".join(
        "\n".join(
            [
                *textwrap.wrap(f"{part}={', '.join(same)}: {cls.__doc__}", 120, subsequent_indent="    "),
                setting_table(settings_of(part, cls).values()),
            ]
        )
        for cls, same in alike.items()
    )


def setting_table(settings: Iterable[Setting]) -> str:
    """Return a line for each setting: name, default and what it is."""
    rows = [
        (f"{s.key}={'...' if s.default == '???' else shown(s.default)}", s.about.replace("None", "null"))
        for s in settings
    ]
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(f"  {left:{width}}  {about}".rstrip() for left, about in rows)
