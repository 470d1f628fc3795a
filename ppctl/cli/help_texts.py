"""The texts of `--help`: commands, groups and settings."""

import textwrap
from collections.abc import Iterable, Sequence

from ppctl.cli import choices
from ppctl.cli.choices import (
    PARTS,
    PLAIN,
    SWEEP_PARTS,
    default_option,
    options,
    schema_of,
    settings_of,
)
from ppctl.cli.command_options import composed_parser
from ppctl.cli.commands import COMMANDS
from ppctl.config.changed_settings import shown
from ppctl.errors import ConfigError

FIRST_EXAMPLES = (  # what to try first
    "ppctl train recipes=tiny",
    "ppctl schedule show schedule=interleaved mesh=1x4",
    "ppctl plan mesh=2x4 schedule=1f1b hardware=h100",
)
APPLIES_TO = {  # commands of a part or a setting; any other applies to all of them
    "hardware": ("train", "plan", "rehearse", "tune", "doctor"),
    "launch": ("train", "doctor"),
    "verify": ("verify",),
    "plan.compile": ("plan",),
    "plan.topology": ("plan",),
    "plan.memory_gib": ("plan", "tune"),
    "plan.tokens": ("plan", "tune"),
    "plan.html": ("plan", "rehearse"),
    "tune": ("tune",),
    "inspect": ("inspect",),
}
_MOST_USED = {
    "model": "num_layers d_model seq_len",
    "schedule": "num_microbatches num_chunks",
    "executor": "remat",
    "optim": "lr warmup_steps",
    "data": "batch_size",
    "run": "name dir num_steps seed dtype platform resume resume_with eval_every checkpoint.every "
    "profile",
    "launch": "processes max_restarts",
    "verify": "steps",
    "plan": "compile topology memory_gib tokens html",
    "tune": "devices measure recipe launch",
    "inspect": "what",
}
MOST_USED = [f"{part}.{name}" for part, names in _MOST_USED.items() for name in names.split()]
EXIT_CODES = """\
  0  done
  1  the check failed (verify, doctor), a job of a sweep failed, or a bug
  2  the request is wrong; nothing was started
  3  another process of the run was lost; the same line resumes
  4  training met a loss that is not finite
  130, 143  interrupted (Ctrl-C, SIGTERM), after saving a checkpoint if training had begun"""


OVERVIEW = """\
Pipeline-parallel training in JAX.

Usage: ppctl COMMAND [GROUP=OPTION ...] [SETTING=VALUE ...]

Commands:
{commands}

Examples (`ppctl examples` has more):
{examples}

`ppctl COMMAND --help` shows groups, settings and options; `ppctl --version` the version."""
COMMAND_NOTES = """\
Groups (the first option is the default):
{groups}

Settings most used, with defaults (all of a part: ppctl {command} --help model; all: --cfg job):
{settings}"""


def overview() -> str:
    """Return the text of `ppctl --help`."""
    commands = "\n".join(f"  {name:8} {about}" for name, about in COMMANDS.items())
    return OVERVIEW.format(
        commands=commands, examples="\n".join(f"  {line}" for line in FIRST_EXAMPLES)
    )


def command_help(command: str, words: Sequence[str]) -> str:
    """Return the help of a command, or all settings of parts (`model`, `model=mlp`, `run`)."""
    if words:
        return "\n\n".join(_part_help(word) for word in words)
    known = choices.all_settings()
    groups = [f"  {g:9} {_options_text(g)}" for g in choices.GROUPS if _is_for(command, g)]
    settings = setting_table([known[key] for key in MOST_USED if _is_for(command, key)])
    wrapped = "\n".join(_wrapped(line, 12) for line in groups)
    parser = composed_parser(command)
    notes = COMMAND_NOTES.format(command=command, groups=wrapped, settings=settings)
    parser.description = f"{parser.description}\n\n{notes}"
    parser.epilog = f"{parser.epilog}\n\nExit codes:\n{EXIT_CODES}"
    return parser.format_help().rstrip()


def _wrapped(line: str, indent: int) -> str:
    return "\n".join(textwrap.wrap(line, 120, subsequent_indent=" " * indent))


def _is_for(command: str, key: str) -> bool:
    """Return whether a part or setting applies to a command."""
    commands = APPLIES_TO.get(key) or APPLIES_TO.get(key.partition(".")[0])
    return commands is None or command in commands


def _options_text(group: str) -> str:
    if group == "mesh":
        sizes = "any DPxPP or DPxPPxFSDP: data-parallel rows x pipeline ranks x shards"
        return f"{default_option('mesh')} | {sizes}"
    if group == "recipes":
        return ", ".join(options(group)) + " (complete runs)"
    return " | ".join(options(group))


def _part_help(word: str) -> str:
    """Return all settings of a part, for each of its options unless `word` names one."""
    # 1. the part, and its options
    key, _, option = word.replace("hydra/", "hydra.").partition("=")
    parts = (*PARTS, *PLAIN, *SWEEP_PARTS)
    part = choices.part_of(key, parts)
    if part is None:
        raise ConfigError(f"{key} is not a part with settings.{choices.did_you_mean(key, parts)}")
    if part in PLAIN:
        cls = PLAIN[part]
        return f"{part}: {cls.__doc__}\n{setting_table(settings_of(part, cls).values())}"
    names = [option or default_option(part)] if option or part == "mesh" else options(part)
    if part != "mesh" and not set(names) <= set(options(part)):
        raise ConfigError(choices.wrong_option(part, option, options(part)))
    # 2. options with the same settings together
    alike: dict[type, list[str]] = {}
    for name in names:
        alike.setdefault(schema_of(part, name), []).append(name)
    group = part.replace(".", "/")
    return "\n\n".join(
        _wrapped(f"{group}={', '.join(same)}: {cls.__doc__}", 4)
        + f"\n{setting_table(settings_of(part, cls).values())}"
        for cls, same in alike.items()
    )


def setting_table(settings: Iterable[choices.Setting]) -> str:
    """Return a line for each setting: name, default and comment."""
    rows = [
        (f"{s.key}={'...' if s.default == choices.REQUIRED else shown(s.default)}", s.about)
        for s in settings
    ]
    width = max((len(left) for left, _ in rows), default=0)
    lines = (f"  {left:{width}}  {about.replace('None', 'null')}" for left, about in rows)
    return "\n".join(map(str.rstrip, lines))
