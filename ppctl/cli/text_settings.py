"""Keep text settings as typed: run.name=12e4567 is text, on the command line and in YAML.

Hydra and YAML choose the type of a value without its setting. So texts that look like numbers or
booleans are quoted before Hydra parses them; in YAML files, they are read again as text.
"""

import dataclasses
import functools
import io
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from antlr4 import InputStream
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer as Lexer
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from ppctl.cli.choices import GROUPS, SWEEP_PARTS, default_option, options, schema_of, schemas
from ppctl.errors import ConfigError, os_errors
from ppctl.user_files import read_text

MOST_BYTES = 2**20  # maximum bytes of a settings file
MOST_VALUES = 2**16  # maximum values after aliases and interpolations are replaced
TYPED = (Lexer.INT, Lexer.FLOAT, Lexer.BOOL)
BEFORE = (None, Lexer.COMMA, Lexer.POPEN, Lexer.BRACKET_OPEN)
AFTER = (None, Lexer.COMMA, Lexer.PCLOSE, Lexer.BRACKET_CLOSE, Lexer.BRACE_CLOSE)
COMMANDS = ("run.on_event",)  # settings with quotes for a shell
OF_NUMBERS = ("range", "interval")  # Hydra's functions with numbers as arguments


@functools.cache
def text_settings() -> frozenset[str]:
    """Return the groups, and the keys of all settings that hold a text or a list of texts.

    >>> [key in text_settings() for key in ("run.name", "data.parts.path", "optim.lr")]
    [True, True, False]
    """
    of_sweeps = (each for part in SWEEP_PARTS.values() for each in part.values())
    classes = [*schemas().values(), *of_sweeps]
    keys = (key for cls in classes if hasattr(cls, "prefix") for key in _texts(cls.prefix, cls))
    return frozenset({*GROUPS, *keys})


def _texts(prefix: str, cls: Any) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        for kind in _kinds(hints[name]):
            if dataclasses.is_dataclass(kind):
                yield from _texts(f"{prefix}.{name}", kind)
            elif kind is str:
                yield f"{prefix}.{name}"


def _kinds(hint: Any) -> list[Any]:
    """Return the types of a setting's value, or of the entries of a list."""
    if typing.get_origin(hint) is dict:
        return []
    inner = typing.get_args(hint)
    return [kind for each in inner for kind in _kinds(each)] if inner else [hint]


def as_typed(override: str) -> str:
    """Return an override with quotes around texts that Hydra would read as numbers or booleans.

    A command that Hydra cannot read, such as one with quotes, is quoted as a whole.

    >>> as_typed("run.name=12e4"), as_typed("+run.name=a,1_0"), as_typed("optim.lr=1_000")
    ("run.name='12e4'", "+run.name=a,'1_0'", 'optim.lr=1_000')
    """
    # 1. a command; the tokens of any other value
    head, _, value = override.partition("=")
    if head.lstrip("+") in COMMANDS and not _is_readable(override):
        return f"{head}={QuotedString(value, Quote.single).with_quotes()}"
    lexer = Lexer(InputStream(value))
    lexer.removeErrorListeners()  # a fault is reported when the override is parsed
    lexer.mode(Lexer.VALUE_MODE)
    tokens = [token for token in lexer.getAllTokens() if token.type != Lexer.WS]
    if any(token.text in OF_NUMBERS for token in tokens):
        return override
    # 2. quotes around each token that is a whole value of a text setting
    key, types = head.lstrip("+"), [None, *(token.type for token in tokens), None]
    text, end = "", 0
    for at, token in enumerate(tokens):
        before, after = types[at], types[at + 2]
        is_entry = before == Lexer.COLON and at > 1  # an entry of {name: value}
        place = f"{key}.{tokens[at - 2].text}" if is_entry else key
        is_whole = (is_entry or before in BEFORE) and after in AFTER
        if is_whole and token.type in TYPED and place in text_settings():
            text += f"{value[end : token.start]}'{token.text}'"
            end = token.stop + 1
    return f"{head}={text}{value[end:]}" if text else override


def _is_readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


class TextSource(FileConfigSource):
    """Hydra's source of recipes/ and --config-dir. It keeps text settings as typed in the file.

    Recipes lose settings of their options that the request replaces, as schedule=1f1b does.
    """

    chosen: ClassVar[Mapping[str, str]] = {}  # the request's options by group; set on the class

    @staticmethod
    def scheme() -> str:
        return "text"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        with os_errors(f"{path} cannot be read"):
            text = read_text(path, MOST_BYTES)
        header, stream = self._get_header_dict(text), io.StringIO(text)
        stream.name = str(path)  # file name in errors
        # check the size before anything is expanded, which takes time and memory
        node = yaml.compose(stream)
        if _num_values(node, {}) * _num_interpolated(text) > MOST_VALUES:
            what = f"{path}: its aliases and interpolations stand for more than {MOST_VALUES:,}"
            raise ConfigError(f"{what} values. Write them out, or use fewer.")
        stream.seek(0)
        found: Any = OmegaConf.load(stream)
        package = header["package"] or config_path.rpartition("/")[0].replace("/", ".")
        _take_texts(found, node, "" if package == "_global_" else package)
        if package == "_global_":
            _drop_replaced(found, self.chosen)
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, where, found, header)


def _drop_replaced(recipe: Any, chosen: Mapping[str, str]) -> None:
    """Remove settings of a recipe that only its option has, if `chosen` has another option."""
    defaults = [each for each in recipe.get("defaults") or () if isinstance(each, DictConfig)]
    named = {str(key).removeprefix("override /"): each[key] for each in defaults for key in each}
    for group, option in chosen.items():
        own, shipped = named.get(group, default_option(group)), options(group)
        if group not in recipe or own == option or not {own, option} <= {*shipped}:
            continue
        fields = (dataclasses.fields(schema_of(group, name)) for name in (own, option))
        replaced, kept = ({each.name for each in one} for one in fields)
        for name in (replaced - kept) & {*recipe[group]}:
            del recipe[group][name]


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Return the number of values below a node, each alias replaced; inf if one contains itself.

    known: the numbers of nodes met before, by id.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        is_list = isinstance(node, yaml.SequenceNode)
        below = node.value if is_list else [each for pair in node.value for each in pair]
        known[id(node)] = 1 + sum(_num_values(each, known) for each in below)
    return known[id(node)]


def _num_interpolated(text: str) -> int:
    """Return an upper bound of the texts that one value's interpolations stand for."""
    scalars = (each for each in yaml.parse(text) if isinstance(each, yaml.ScalarEvent))
    return math.prod(max(1, each.value.count("${")) for each in scalars) if "${" in text else 1


def _take_texts(config: Any, node: yaml.Node | None, key: str) -> None:
    """Replace numbers and booleans in text settings of `config` by their text in the file."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(name.value, each) for name, each in node.value if name.value in config]
        entries = [(name, each, f"{key}.{name}".lstrip(".")) for name, each in pairs]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(index, each, key) for index, each in enumerate(node.value)]
    else:
        return
    for at, each, place in entries:
        if not isinstance(each, yaml.ScalarNode):
            _take_texts(config[at], each, place)
        elif place in text_settings() and isinstance(
            config._get_node(at)._value(), bool | int | float
        ):
            config[at] = each.value
