"""Chat templates: render messages as training text, and locate the answers in it.

A template is a Jinja program that comes with a tokenizer, so it runs in Jinja's sandbox: it reads
the messages, but no private attribute, file or module of this process, and it changes nothing.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from ppctl.errors import DataError, missing_package, one_line
from ppctl.user_files import check_text, read_text

FILE = "chat_template.jinja"
BEGIN, END = "\ufdd0", "\ufdd1"  # noncharacters that mark the text in {% generation %}
MOST_LETTERS = 2**18  # maximum characters of a template; usual: 2,000 to 20,000
MOST_STEPS = 2**20  # maximum steps (loop items, calls) to render a chat; usual: a few per message
CALL_STEPS = 8  # steps of a call, which takes longer than a loop item (1 step)
# maximum characters or items of a product such as "ab" * 3; for integers see _size
MOST_PRODUCT = 2**24
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # special tokens in templates
GENERATION = "{% generation %}"
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # all spellings of the tag
CHATML = (  # OpenAI's ChatML; {% generation %} encloses the assistant's words
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Messages = Sequence[Mapping[str, Any]]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may name."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()


class Chat(NamedTuple):
    """Rendered messages, and the ranges (start, stop) of answers with their end-of-turn marks."""

    text: str
    answers: tuple[tuple[int, int], ...]


def chat_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template of chat_template.jinja, else of a tokenizer's settings, else None.

    If the settings list several templates, the one named "default" is returned. Raises DataError if
    the file cannot be read, or if the template is not a string or too long.
    """
    tokens = tuple((name, token) for name in TOKENS if (token := special_token(settings, name)))
    file = directory / FILE
    if file.is_file():
        try:
            return _template(file, read_text(file), tokens)
        except OSError as error:
            why = f"{file} cannot be read ({error.strerror})"
            raise DataError(f"{why}. Restore it, or remove it.") from error
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = (each for each in source if isinstance(each, dict))
        defaults = (each.get("template") for each in named if each.get("name") == "default")
        source = next(defaults, None)
    if source is None:
        return None
    if not isinstance(source, str):
        kind = type(source).__name__
        raise DataError(f"{directory}: chat_template is {kind}, not a text. Restore or remove it.")
    return _template(directory, source, tokens)


def _template(place: Path, source: str, tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    if len(source) > MOST_LETTERS:
        what = f"{place}: a chat template of {len(source):,} characters; at most {MOST_LETTERS:,}"
        raise DataError(f"{what} are allowed. Use another, or remove it.")
    return ChatTemplate(source, tokens)


def special_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a special token such as eos_token from settings: a string, or an object's "content".

    >>> special_token({"eos_token": {"content": "</s>"}}, "eos_token")
    '</s>'
    """
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = cast("Mapping[str, Any]", value).get("content")
    return value if isinstance(value, str) else None


def render(template: ChatTemplate, messages: Messages) -> Chat:
    """Render messages as text, and locate the answers in it.

    A template with {% generation %} marks the answers. With other templates, an answer lies between
    the ends of two more texts: the messages before the answer, rendered with the prompt for an
    answer, and the messages up to and including the answer. Raises DataError if the template fails,
    or if the text of all messages does not begin with each of the two texts.
    """
    check_messages(messages)
    marked = _rendered(template, messages)
    if MARKS.search(template.source):
        return _without_marks(marked)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(template, messages[:number], add_generation_prompt=True)
        through = _rendered(template, messages[: number + 1])
        if not (marked.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template's text of {number} messages is not the beginning of its text "
                f"of {number + 1}, so the answer cannot be located. "
                f"Use a template with {GENERATION} round answers."
            )
        answers.append((len(before), len(through)))
    return Chat(marked, tuple(answers))


def render_question(template: ChatTemplate, messages: Messages) -> str:
    """Render messages as text up to the start of the answer. DataError if the template fails."""
    check_messages(messages)
    text = _rendered(template, messages, add_generation_prompt=True)
    return text.replace(BEGIN, "").replace(END, "")


def check_messages(messages: object) -> None:
    """Raise DataError for a value that is not a list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{_shown(messages)} is not a list of messages.")
    for message in cast("Sequence[Any]", messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            example = '{"role": ..., "content": ...}'
            raise DataError(f"{_shown(message)} is not a message: write {example}.")
        if BEGIN in (text := json.dumps(message, ensure_ascii=False)) or END in text:
            raise DataError("a message holds U+FDD0 or U+FDD1, which are not characters.")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rendered(
    template: ChatTemplate, messages: Messages, *, add_generation_prompt: bool = False
) -> str:
    values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    try:
        compiled = _compiled(template.source)
        compiled.environment.num_steps = 0
        text = compiled.render(**values, **dict(template.tokens))
        check_text(text)
        return text
    except DataError:
        raise
    except Exception as error:  # any error of the template, which is a program
        why = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
        raise DataError(f"the chat template fails ({why}). Correct it, or use another.") from error


@lru_cache(8)
def _compiled(source: str) -> Any:
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise missing_package("A chat template", "jinja2", "text") from error

    # 1. the tag {% generation %}
    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: marks the enclosed text with BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja names it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    # 2. the functions of transformers, except strftime_now: the text must not depend on the day
    def refuse(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    # 3. count steps, so that no loop, call or product runs forever
    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))
        num_steps = 0

        def count(self, item: Any = None, cost: int = 1) -> Any:
            self.num_steps += cost
            if self.num_steps > MOST_STEPS:
                raise ValueError(f"it takes more than {MOST_STEPS:,} steps")
            return item

        def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
            self.count(cost=CALL_STEPS)
            return super().call(context, function, *args, **options)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size(operator, left, right) > MOST_PRODUCT:
                raise ValueError(f"the result of {operator} is too large")
            return super().call_binop(context, operator, left, right)

    # 4. the template, with a counter in each loop
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters |= {"tojson": to_json, "counted": partial(map, environment.count)}
    environment.globals["raise_exception"] = refuse
    del environment.globals["lipsum"]  # it makes texts of any length
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
    return environment.from_string(tree)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return the length of a text or list left * right; for integers, 256 times the result's bits.

    So both have the limit MOST_PRODUCT, which allows integers of 65,536 bits.
    """
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return 256 * (bits * right if operator == "**" else bits + right.bit_length())
    parts = [len(part) if isinstance(part, Sized) else part for part in (left, right)]
    return math.prod(part for part in parts if isinstance(part, int))


def _without_marks(marked: str) -> Chat:
    text, *parts = marked.split(BEGIN)
    answers: list[tuple[int, int]] = []
    for part in parts:
        answer, _, rest = part.partition(END)
        answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Chat(text, tuple(answers))
