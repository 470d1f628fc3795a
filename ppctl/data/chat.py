"""Chat templates: messages to the text that a model is trained on, and which of it are the assistant's words.

A template is a program in Jinja's language that comes with a tokenizer, so it runs in Jinja's sandbox: it reaches the
messages and no attribute, file or module of this process, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from ppctl.errors import DataError

FILE = "chat_template.jinja"
BEGIN, END = "\ufdd0", "\ufdd1"  # no characters of any text: round what {% generation %} encloses, until it is rendered
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # that templates read by these names
CHATML = (  # OpenAI's ChatML, with the assistant's words marked
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
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
    """Messages as text, and the characters (from, to) that the assistant says, which ends a turn too."""

    text: str
    answers: tuple[tuple[int, int], ...]


def chat_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template of a tokenizer's directory: chat_template.jinja, or what its settings name; None for none.

    Of several the one named default. Raises DataError for what is no template.
    """
    tokens: list[tuple[str, str]] = []
    for name in TOKENS:
        token = special_token(settings, name)
        tokens += [] if token is None else [(name, token)]
    file = directory / FILE
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), tuple(tokens))
    source = settings.get("chat_template")
    if isinstance(source, list):
        several = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = several.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise DataError(f"{directory}: chat_template is {type(source).__name__}, not a text. Restore it, or remove it.")
    return ChatTemplate(source, tuple(tokens))


def special_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a special token that the settings name, such as eos_token, which may be a text or an object with one.

    >>> special_token({"eos_token": {"content": "</s>"}}, "eos_token"), special_token({}, "eos_token")
    ('</s>', None)
    """
    found = settings.get(name)
    if isinstance(found, Mapping):
        found = cast("Mapping[str, Any]", found).get("content")
    return found if isinstance(found, str) else None


def render(template: ChatTemplate, messages: Messages) -> Chat:
    """Return messages as text, with the assistant's words.

    These are what the template encloses in {% generation %}; of a template without it, what an assistant's message adds
    to the text of those before it and the template's own prompt for an answer. Raises DataError where the template
    fails, or the text of some messages is not the beginning of the text of more.
    """
    check_messages(messages)
    marked = _rendered(template, messages)
    if "generation %}" in template.source.replace("-%}", " %}"):
        return _without_marks(marked)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(template, messages[:number], add_generation_prompt=True)
        through = _rendered(template, messages[: number + 1])
        if not (marked.startswith(through) and through.startswith(before)):
            raise DataError(
                f"the chat template's text of {number} messages is not the beginning of its text of {number + 1}, so "
                "that an answer's words are not known. Use a template with {% generation %} round them."
            )
        answers.append((len(before), len(through)))
    return Chat(marked, tuple(answers))


def render_question(template: ChatTemplate, messages: Messages) -> str:
    """Return messages as text, up to where the assistant's answer begins. Raises DataError as `render`."""
    check_messages(messages)
    text = _rendered(template, messages, add_generation_prompt=True)
    return text.replace(BEGIN, "").replace(END, "")


def check_messages(messages: object) -> None:
    """Raise DataError for what are no messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{_shown(messages)} is no list of messages.")
    for message in cast("Sequence[object]", messages):
        if not isinstance(message, Mapping) or not isinstance(cast("Mapping[str, Any]", message).get("role"), str):
            raise DataError(f'{_shown(message)} is no message: write {{"role": ..., "content": ...}}.')
        if BEGIN in (text := json.dumps(message, ensure_ascii=False)) or END in text:
            raise DataError("a message holds U+FDD0 or U+FDD1, which are no characters.")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rendered(template: ChatTemplate, messages: Messages, *, add_generation_prompt: bool = False) -> str:
    given = {"messages": messages, "add_generation_prompt": add_generation_prompt, **dict(template.tokens)}
    try:
        return _compiled(template.source).render(**given)
    except Exception as error:  # whatever the template's own program raises
        raise DataError(f"the chat template fails: {type(error).__name__}: {error}.") from error


@lru_cache(8)
def _compiled(source: str) -> Any:
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError(
            "A chat template needs jinja2, which is not installed. Install it: pip install 'ppctl[text]'."
        ) from error

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: what it encloses, between BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja names it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    def refuse(message: str) -> None:
        raise ValueError(message)

    # as transformers makes it, but for strftime_now: the same messages are to be the same text on any day
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def _without_marks(marked: str) -> Chat:
    first, *others = marked.split(BEGIN)
    text, answers = first, []
    for part in others:
        answer, _, rest = part.partition(END)
        answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Chat(text, tuple(answers))
