"""The commands, the parsers for their options (not GROUP=OPTION, SETTING=VALUE), and the help."""

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from ppctl.cli import choices
from ppctl.config.changed_settings import shown
from ppctl.errors import ConfigError
from ppctl.schedule.axis_table import MESH_AXES

# in the order of `ppctl --help`
COMPOSED = ("train", "verify", "doctor", "plan", "rehearse", "tune", "inspect", "bench")
OTHERS = (
    *("schedule", "tokenize", "import", "export", "generate", "evaluate"),
    *("runs", "stop", "report", "examples", "init"),
)


def about(name: str) -> str:
    """Return the help of a command, from the first line of its file."""
    with (Path(__file__).parent / "commands" / f"{name}.py").open(encoding="utf-8") as file:
        head, _, text = file.readline().partition("`: ")
    assert head == f'"""`ppctl {name}', f"{name}.py does not open with its help"
    return text.rstrip().removesuffix('"""').removesuffix(".")


COMMANDS = {name: about(name) for name in (*COMPOSED, *OTHERS)}
APPLIES_TO = {  # commands that read a part or setting; all commands read the unlisted ones
    "hardware": ("train", "plan", "rehearse", "tune", "doctor"),
    "launch": ("train", "doctor"),
    "verify": ("verify",),
    "plan.compile": ("plan",),
    "plan.topology": ("plan", "inspect"),
    "plan.memory_gib": ("plan", "tune"),
    "plan.tokens": ("plan", "tune"),
    "plan.html": ("plan", "rehearse"),
    "tune": ("tune",),
    "inspect": ("inspect",),
}
OUTPUTS = {  # setting that names the output of a command without --out
    "ppctl plan": "plan.html=FILE.html",
    "ppctl rehearse": "plan.html=FILE.html",
    "ppctl train": "run.dir=DIR",
    "ppctl tune": "tune.recipe=NAME",
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
  130, 143  interrupted (Ctrl-C, SIGTERM), after saving a checkpoint if training had begun;
            a second one ends the process at once, unsaved"""


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

Most used settings, with defaults (all of a part: ppctl {command} --help model; all: --cfg job):
{settings}"""
# pairs of a comment and a command, for `ppctl examples` and the help; a test composes each command
_EXAMPLES = """\
# train a small model on this machine, without an accelerator, in seconds
ppctl train recipes=tiny
# resume it after Ctrl-C or a crash, or train it for more steps
ppctl train recipes=tiny run.num_steps=60
# list the runs and how they ended
ppctl runs
# save and end a run from another terminal
ppctl stop tiny
# list the runs by status, the newest first
ppctl runs --sort status,started:desc
# write a page on a run, or on several compared, to send to others
ppctl report tiny
# train on your text
ppctl train data=text data.path=notes.txt run.name=notes run.num_steps=1000
# train a tokenizer on it, for data.tokenizer=tokenizer
ppctl tokenize notes.txt --vocab-size 4096 --out tokenizer
# import a model of Hugging Face's format, or a GGUF file, to train it further
ppctl import DIR --out runs/imported
# export a trained model for transformers
ppctl export tiny --out exported
# let a model continue a text
ppctl generate tiny --prompt "import " --max-tokens 100 --temperature 0
# measure the perplexity of a text
ppctl evaluate tiny data=text data.path=notes.txt
# measure how often the model finds the right answer likeliest
ppctl evaluate tiny --choices questions.jsonl
# write a custom model and data set to start from, with a recipe that trains them
ppctl init mine
# the same with any JAX function as a model and .npy files as data
ppctl init mine --network
# look at a schedule before choosing it
ppctl schedule show schedule=zb_h1 mesh=1x4
# compare all schedules, with assumed costs
ppctl schedule list mesh=1x8 schedule.num_microbatches=32 costs.transfer_s=0.1
# see how the bubble shrinks with more microbatches
ppctl schedule curves schedule=1f1b --ranks 2,4,8,16 --microbatches 1-64
# compare schedules on your number of ranks and microbatches
ppctl schedule compare gpipe 1f1b interleaved zb_v mesh=1x8 schedule.num_microbatches=32
# predict how long a step takes and whether it fits in memory
ppctl plan mesh=2x4 schedule=1f1b hardware=h100 data.batch_size=64
# predict it from ranks that run one by one, with one accelerator for eight
ppctl rehearse mesh=1x8 schedule=zb_v model.num_layers=16
# find the fastest layout for your devices
ppctl tune hardware=h100 tune.devices=64 data.batch_size=512
# predict a step on TPUs that are not attached, with their compiler
ppctl plan mesh=4x4 data.batch_size=64 plan.topology=v5e:4x4
# try several settings, each in a separate run
ppctl train --multirun recipes=tiny run.name=sweep schedule=gpipe,1f1b optim.lr=1e-3,3e-3
# check that the pipeline trains the same model
ppctl verify recipes=tiny schedule=1f1b
# check it with layers divided by hand, in float64
ppctl verify mesh=1x4 schedule=1f1b partition=explicit partition.layers=[3,2,2,1]
# compare the time and memory of a step with those of the un-pipelined model
ppctl bench mesh=1x4 schedule=gpipe
# check that a machine can train before you start a long run
ppctl doctor mesh=2x4
# train with several processes that restart after a crash
ppctl train recipes=tiny launch.processes=2 launch.max_restarts=3
# look at the program before it runs: the tasks of each rank in every tick, and transfers
ppctl inspect mesh=1x4 schedule=eager_1f1b
# record a trace of every rank, for xprof and Perfetto
ppctl train recipes=tiny run.profile=10
"""
_LINES = _EXAMPLES.splitlines()
EXAMPLES = [*zip((line[2:] for line in _LINES[::2]), _LINES[1::2], strict=True)]


def examples_of(command: str) -> list[str]:
    return [line for _, line in EXAMPLES if line.split()[1] == command]


# --- options --------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """The parser for a command's options, which may stand anywhere. It adds --json and --help.

    usage: text after `ppctl COMMAND`. notes: text after the first line of the help. words: name of
    the attribute that holds the words that are not options. nargs: the number of these words, as in
    argparse. Wrong options raise ConfigError.
    """

    def __init__(
        self,
        command: str,
        usage: str,
        *,
        notes: str = "",
        words: str = "words",
        nargs: str | None = "*",
    ):
        lines = examples_of(command)
        examples_text = "\n".join(["Examples:", *(f"  {line}" for line in lines)])
        super().__init__(
            prog=f"ppctl {command}",
            usage=f"ppctl {command} {usage}",
            description=f"ppctl {command}: {COMMANDS[command]}.\n\n{notes}".rstrip(),
            epilog=examples_text if lines else None,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=22, width=110
            ),
            add_help=False,
            allow_abbrev=False,
        )
        self.add_argument(words, nargs=nargs, metavar=words.upper(), help=argparse.SUPPRESS)
        self.add_argument("-h", "--help", action="store_true", help="print this text")
        about = 'print the result as JSON; an error as {"error": {"kind", "message", "remedy"}}'
        self.add_argument("--json", action="store_true", help=about)

    def error(self, message: str) -> NoReturn:
        write = f" Write {self.usage}." if "are required" in message else ""
        raise ConfigError(f"{message}.{write}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options in `words`. ConfigError for unknown, missing or wrong ones."""
        known = [name for action in self._actions for name in action.option_strings]
        names = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
        # argparse would report missing options first
        self._refuse([name for name in names if name not in known], known)
        options, unknown = self.parse_known_intermixed_args(words)
        self._refuse(unknown, known)
        config_dir = None if options.help else getattr(options, "config_dir", None)
        if config_dir is not None and not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such directory.")
        return options

    def _refuse(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        for bad in (word.partition("=")[0] for word in unknown):
            if not bad.startswith("-"):
                raise ConfigError(f"{bad} is one word too many. Leave it out.")
            near = choices.did_you_mean(bad, known)
            if bad == "--out" and (use := OUTPUTS.get(self.prog)):
                near = f" Use {use}."
            raise ConfigError(f"{bad} is not an option.{near} ({', '.join(known)})")


def composed_parser(command: str) -> Parser:
    """Return the parser for a command that composes a config."""
    usage = "[GROUP=OPTION ...] [SETTING=VALUE ...]"
    parser = Parser(command, usage, words="overrides")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config as YAML and stop")
    parser.add_argument(
        *("-m", "--multirun"),
        action="store_true",
        help="run every combination of KEY=A,B,..., each in a process and a run.dir; the same line "
        "again skips finished jobs; hydra.launcher.jobs=N runs N side by side, "
        "hydra/launcher=submitit_slurm submits them, hydra/sweeper=optuna searches instead "
        "(`--help hydra/launcher hydra/sweeper`)",
    )
    about = "look for groups and recipes in DIR too (DIR/recipes/x.yaml is recipes=x)"
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help=about)
    about = "with --help GROUP: the settings that describe models, chips and assumed costs, too"
    parser.add_argument("--all", action="store_true", help=about)
    return parser


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """Return the options and overrides, in any order in `words`. ConfigError for wrong options."""
    options = composed_parser(command).read(words)
    if options.cfg and options.multirun:
        raise ConfigError("--cfg and --multirun exclude each other.")
    if options.all and not (options.help and options.overrides):
        raise ConfigError("--all shows all settings of a group. Use it with --help GROUP.")
    return options


# --- help -----------------------------------------------------------------------------------------


def overview() -> str:
    """Return the text of `ppctl --help`."""
    commands = "\n".join(f"  {name:8} {about}" for name, about in COMMANDS.items())
    first = "\n".join(f"  {examples_of(name)[0]}" for name in ("train", "schedule", "plan"))
    return OVERVIEW.format(commands=commands, examples=first)


def command_help(command: str, words: Sequence[str], *, shows_all: bool = False) -> str:
    """Return the help of a command, or the settings of the parts in `words` (run, model=mlp).

    shows_all: include the settings marked as a `DESCRIPTION`.
    """
    if words:
        return "\n\n".join(_part_help(command, word, shows_all) for word in words)
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
        abouts = " x ".join(axis.about.partition(";")[0] for axis in MESH_AXES)
        return f"{choices.default_option('mesh')} | any {choices.MESH_TEXT}: {abouts}"
    if group == "recipes":
        return ", ".join(choices.options(group)) + " (complete runs)"
    return " | ".join(choices.options(group))


def _part_help(command: str, word: str, shows_all: bool) -> str:
    """Return the help of a part: all its options' settings, or one option's for PART=OPTION."""
    see = None if shows_all else f"ppctl {command} --help {word} --all"
    # 1. the part, and its options
    key, _, option = word.replace("hydra/", "hydra.").partition("=")
    parts = (*choices.PARTS, *choices.PLAIN, *choices.SWEEP_PARTS)
    part = choices.part_of(key, parts)
    if part is None:
        raise ConfigError(f"{key} is not a part with settings.{choices.did_you_mean(key, parts)}")
    if part in choices.PLAIN:
        cls = choices.PLAIN[part]
        return f"{part}: {cls.__doc__}\n{_settings_text(part, cls, see)}"
    names = shipped = choices.options(part)
    if option or part == "mesh":
        names = [option or choices.default_option(part)]
    if part != "mesh" and not set(names) <= set(shipped):
        raise ConfigError(choices.wrong_option(part, option, shipped))
    # 2. its settings; options of the same dataclass are listed together
    alike: dict[type, list[str]] = {}
    for name in names:
        alike.setdefault(choices.schema_of(part, name), []).append(name)
    group = part.replace(".", "/")
    return "\n\n".join(
        _wrapped(f"{group}={', '.join(same)}: {cls.__doc__}", 4)
        + f"\n{_settings_text(part, cls, see)}"
        for cls, same in alike.items()
    )


def _settings_text(part: str, cls: type, see: str | None) -> str:
    """Return the table of a part's settings. see: command that shows those left out; None: all."""
    settings = [*choices.settings_of(part, cls).values()]
    shown_ones = [each for each in settings if see is None or not each.describes]
    table, hidden = setting_table(shown_ones), len(settings) - len(shown_ones)
    if not hidden:
        return table
    those = "settings describe models, chips or assumed costs"
    return f"{table}\n  {hidden} more {those}: {see}".lstrip("\n")


def setting_table(settings: Iterable[choices.Setting]) -> str:
    """Return the settings as text, one line each: name, default and comment."""
    rows = [
        (f"{s.key}={'...' if s.default == choices.REQUIRED else shown(s.default)}", s.about)
        for s in settings
    ]
    width = max((len(left) for left, _ in rows), default=0)
    lines = (f"  {left:{width}}  {about.replace('None', 'null')}" for left, about in rows)
    return "\n".join(map(str.rstrip, lines))
