"""Chat templates: render messages as training text, and locate the answers in it.

A template is a Jinja program that comes with a tokenizer, so it runs in Jinja's sandbox and in
another process (template_process.py), which ends when it has taken too much time.
"""

import atexit
import importlib.util
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from ppctl.errors import IN_BRACKETS, DataError, missing_package, one_line, os_errors
from ppctl.user_files import read_text

FILE = "chat_template.jinja"
BEGIN, END = "\ufdd0", "\ufdd1"  # noncharacters that mark the text in {% generation %}
MOST_LETTERS = 2**18  # maximum characters of a template; usual: 2,000 to 20,000
CPU_S = 10.0  # maximum CPU seconds to render a chat; usual: less than 0.001
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # special tokens in templates
GENERATION = "{% generation %}"
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
        remedy = "Restore it, or remove it."
        with os_errors(f"{file} cannot be read", remedy, DataError, IN_BRACKETS):
            return _template(file, read_text(file), tokens)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = (each for each in source if isinstance(each, dict))
        source = next((x.get("template") for x in named if x.get("name") == "default"), None)
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
    whole, is_marked = _rendered(template, messages)
    if is_marked:
        return _without_marks(whole)
    answers: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = _rendered(template, messages[:number], add_generation_prompt=True)
        through, _ = _rendered(template, messages[: number + 1])
        if not (whole.startswith(through) and through.startswith(before)):
            of = f"of {number} messages is not the beginning of its text of {number + 1}"
            remedy = f"Use a template with {GENERATION} round answers."
            what = f"the chat template's text {of}, so the answer cannot be located"
            raise DataError(f"{what}. {remedy}")
        answers.append((len(before), len(through)))
    return Chat(whole, tuple(answers))


def render_question(template: ChatTemplate, messages: Messages) -> str:
    """Render messages as text up to the start of the answer. DataError if the template fails."""
    check_messages(messages)
    text, _ = _rendered(template, messages, add_generation_prompt=True)
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
) -> tuple[str, bool]:
    """Return the text, and whether the template has {% generation %}. DataError if it fails."""
    if importlib.util.find_spec("jinja2") is None:
        raise missing_package("A chat template", "jinja2", "text")
    values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    request = {"source": template.source, "values": values | dict(template.tokens), "cpu_s": CPU_S}
    answer = _answer(json.dumps({**request, "marks": (BEGIN, END)}))
    if "why" in answer:
        why = one_line(answer["why"]).rstrip(".")
        raise DataError(f"the chat template fails ({why}). Correct it, or use another.")
    return answer["text"], answer["is_marked"]


# --- the process that renders ---------------------------------------------------------------------

ONE_AT_A_TIME = threading.Lock()


def _answer(request: str) -> dict[str, Any]:
    """Return the answer of the process that renders, or the reason why it ended as `why`."""
    with ONE_AT_A_TIME:
        process, answer = _process(), ""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not answer.endswith("\n"):  # also after Ctrl-C: no later request gets this answer
                _process.cache_clear()
                atexit.unregister(_end)
                _end(process)
    if answer.endswith("\n"):
        return json.loads(answer)
    if process.returncode == -signal.SIGPROF:
        return {"why": f"it takes more than {CPU_S:g} s"}
    return {"why": f"its process ended with code {process.returncode}"}


@cache
def _process() -> subprocess.Popen[str]:
    file = Path(__file__).with_name("template_process.py")
    command = [sys.executable, "-P", str(file)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process, unless it has ended, and close its pipes."""
    process.kill()
    with suppress(BrokenPipeError), process:
        pass


def _without_marks(marked: str) -> Chat:
    text, *parts = marked.split(BEGIN)
    answers: list[tuple[int, int]] = []
    for part in parts:
        answer, _, rest = part.partition(END)
        answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Chat(text, tuple(answers))
