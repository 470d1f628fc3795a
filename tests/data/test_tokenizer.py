"""Tokenizers: trained offline, read back, and chats that say which tokens are the assistant's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from ppctl.cli.compose import compose
from ppctl.data.chat_templates import CHATML, ChatTemplate, render
from ppctl.data.document_files import Fields, Source
from ppctl.data.tokenizer import (
    SPECIAL,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
    turn_end,
    write_tokenizer,
)
from ppctl.errors import DataError
from ppctl.language.text_evaluation import num_target_bytes
from ppctl.training.pipeline.job import open_data

TEXT = "the quick brown fox jumps over the lazy dog; 12 dogs, naïve füchse\n" * 40
CHAT = [
    {"role": "user", "content": "how many?"},
    {"role": "assistant", "content": "twelve dogs"},
    {"role": "user", "content": "and füchse?"},
    {"role": "assistant", "content": "one"},
]
TRIMMED_CHATML = CHATML.replace("{% generation %}", "{%- generation -%}")
PLAIN_CHATML = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def trained(directory, text=TEXT, vocab_size=300):
    (directory / "corpus.txt").write_text(text)
    found = train_bpe(Source([directory / "corpus.txt"], frozenset(), Fields(), False), vocab_size)
    write_tokenizer(directory, found.tokenizer)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("tokenizer"))


def test_the_same_text_gives_the_same_tokenizer(directory, tmp_path):
    digests = [
        hashlib.sha256((trained(d) / "tokenizer.json").read_bytes()).hexdigest()
        for d in (directory, tmp_path)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("text", [TEXT, "", "unseen: \0 \t日本語 🦊\r\n  x", "a<|endoftext|>b"])
def test_any_text_is_encoded_without_loss_and_as_it_stands(directory, text):
    tokenizer = load_tokenizer(str(directory), None)
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.end == 0
    assert tokenizer.end not in ids, "what looks like a special token is text"
    assert tokenizer.vocab_size == 300
    assert len(ids) <= len(text.encode())


def byte_level(library, words, *, prefix=False):
    """Byte-level BPE, which cuts most characters in two."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    made.train_from_iterator([words], trainer)
    return made


def sentence_piece(library, words):
    """As Llama 2: a space before all texts, which the decoder strips; bytes of rare characters."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += [*dict.fromkeys(letter for letter in words if letter.isalpha())]
    model = library.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    made, parts = library.Tokenizer(model), library.decoders
    before, space = (
        library.normalizers.Prepend("\u2581"),
        library.normalizers.Replace(" ", "\u2581"),
    )
    made.normalizer = library.normalizers.Sequence([before, space])
    strip = parts.Strip(content=" ", left=1, right=0)
    made.decoder = parts.Sequence(
        [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), strip]
    )
    made.add_special_tokens(["</s>"])
    return made


MAKERS = {
    "byte-level": byte_level,
    "with a space before a text": lambda library, words: byte_level(library, words, prefix=True),
    "sentence piece": sentence_piece,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("seq_len", [3, 32])
@pytest.mark.parametrize("packing", [False, True])
def test_bytes_of_targets_equal_the_bytes_of_the_text_in_any_windows(
    kind, seq_len, packing, tmp_path
):
    words = "the quick brown fox naïve"
    made = MAKERS[kind](pytest.importorskip("tokenizers"), words)
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    texts = ["天地玄黃, the 宇宙洪荒", "быстрая лиса 🦊", "x", "\ufffd  naïve fox "]
    lines = (json.dumps({"text": each}) + "\n" for each in ("x", *texts))
    (tmp_path / "documents.jsonl").write_text("".join(lines))
    words = ["model=transformer", "data=text", f"data.path={tmp_path / 'documents.jsonl'}"]
    words += [f"data.tokenizer={tmp_path}", f"data.packing={packing}", "data.eval_fraction=0"]
    words += [f"data.cache_dir={tmp_path}", "data.batch_size=1", f"model.seq_len={seq_len}"]
    data = open_data(
        compose([*words, "schedule.num_microbatches=1", "mesh=1x1", "run.eval_every=null"])
    )
    tokenizer, found = load_tokenizer(str(tmp_path), None), 0
    for example in data.numbers(held_out=False):
        found += num_target_bytes(tokenizer, data.read(np.array([example])))
    if packing:  # the first token of each document is no target
        first = [tokenizer.encode([each])[0].tolist()[0] for each in ("x", *texts)]
        texts += ["x"]
        found += sum(tokenizer.num_bytes(token, True) for token in first)
    else:  # the first token of all is no target
        texts += ["x"] if kind != "byte-level" else []  # "x" follows the space before the text
    assert found == sum(len(each.encode()) for each in texts)


def test_a_file_of_tokenizer_json_and_its_directory_are_the_same(directory):
    a, b = (load_tokenizer(str(path), None) for path in (directory, directory / "tokenizer.json"))
    assert (
        a.fingerprint == b.fingerprint != load_tokenizer(str(directory), "<|im_end|>").fingerprint
    )


def test_tokens_that_a_post_processor_prepends_start_documents(directory, tmp_path):
    made = json.loads((directory / "tokenizer.json").read_text())
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    assert load_tokenizer(str(tmp_path), "<|im_end|>").start == (1,)


@pytest.mark.parametrize(
    "template",
    [CHATML, TRIMMED_CHATML, CHATML.replace("{% generation %}", "{%generation+%}"), PLAIN_CHATML],
    ids=["marked", "trimmed", "without spaces", "by prefixes"],
)
def test_the_assistants_words_are_the_learned_tokens(directory, template):
    tokenizer = load_tokenizer(str(directory), None)
    chat = render(ChatTemplate(template), CHAT)
    ids, is_learned = tokenizer.encode_chat(chat.text, chat.answers)
    assert chat.text.startswith(
        "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\ntwelve dogs<|im_end|>\n"
    )
    assert tokenizer.decode(ids.tolist()) == chat.text
    end = "\n" if template == PLAIN_CHATML else ""
    assert (
        tokenizer.decode(ids[is_learned].tolist())
        == f"twelve dogs<|im_end|>{end}one<|im_end|>{end}"
    )
    assert 2 in ids, "special tokens of a template are special"
    of_bytes = byte_tokenizer().encode_chat(chat.text, chat.answers)
    assert (
        bytes(of_bytes[0][of_bytes[1]]).decode() == f"twelve dogs<|im_end|>{end}one<|im_end|>{end}"
    )


def test_a_template_knows_the_special_tokens_and_jinja_of_others():
    source = (
        "{{- bos_token }}{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ m.content | trim | tojson }}{%- endfor %}"
    )
    messages = [{"role": "user", "content": " é "}, {"role": "tool", "content": "x"}]
    assert render(ChatTemplate(source, (("bos_token", "<s>"),)), messages).text == '<s>"é"'


TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content + END + '\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_end|>"),
        (PLAIN_CHATML, "<|im_end|>"),
        (TURNS.replace("END", "' ' + eos_token"), "<|endoftext|>"),
        (TURNS.replace("END", "''"), None),
        (None, None),
    ],
)
def test_a_turn_ends_with_the_special_token_after_an_answer(directory, template, expected):
    tokens = (("eos_token", "<|endoftext|>"),)
    found = turn_end(
        replace(
            load_tokenizer(str(directory), None),
            template=template and ChatTemplate(template, tokens),
        )
    )
    assert found == (None if expected is None else SPECIAL.index(expected))


@pytest.mark.parametrize(
    "around", ["{{# {} #}}", "{{% raw %}}{}{{% endraw %}}", "{{% set a = '{}' %}}"]
)
def test_only_a_tag_marks_answers(around):
    """The tag's name in a comment or a text is no tag: the answers are found as without it."""
    named = around.format("{% generation %}").replace("' %}' ", "' ")
    found = render(ChatTemplate(named + PLAIN_CHATML), CHAT)
    plain = render(ChatTemplate(PLAIN_CHATML), CHAT)
    assert [found.text[a:b] for a, b in found.answers] == [
        plain.text[a:b] for a, b in plain.answers
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('no system') }}", "ValueError: no system"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages | length }}{{ messages[0].content }}", "of 1 messages is not the beginning"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template, message):
    with pytest.raises(DataError, match=message):
        render(ChatTemplate(template), CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", '"hi" is not a list of messages'),
        ([], "not a list"),
        ([{"content": "x"}], 'write {"role": ..., "content"'),
    ],
)
def test_invalid_messages_are_refused(messages, message):
    with pytest.raises(DataError, match=message):
        render(ChatTemplate(CHATML), messages)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_a_chat_template_is_found_where_tokenizers_have_it(directory, tmp_path, place):
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "config"}
    if place == "list":
        settings["chat_template"] = [
            {"name": "tool", "template": "x"},
            {"name": "default", "template": "config"},
        ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if place == "chat_template.jinja":
        (tmp_path / place).write_text("file")
    tokenizer = load_tokenizer(str(tmp_path), None)
    assert tokenizer.end == SPECIAL.index("<|im_end|>")
    assert tokenizer.template == ChatTemplate(
        "file" if "jinja" in place else "config", (("eos_token", "<|im_end|>"),)
    )


@pytest.mark.parametrize(
    ("write", "end_token", "message"),
    [
        (
            None,
            None,
            r"tokenizer.json cannot be read \(No such file or directory\)\. Use bytes, a "
            r"tokenizer.json",
        ),
        ("{}", None, r"the tokenizers library fails \(Model missing"),
        (
            "good",
            None,
            r"no tokenizer_config.json with an eos_token, .* use 'data.end_token=\"TOKEN\"' "
            r".*<|im_end|>\)",
        ),
        ("good", "</s>", r"</s> is not one of its tokens\. Use 'data.end_token="),
    ],
)
def test_an_invalid_tokenizer_is_refused_with_the_remedy(
    directory, tmp_path, write, end_token, message
):
    if write is not None:
        good = (directory / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(good if write == "good" else write)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path), end_token)


def test_bytes_have_no_special_tokens():
    with pytest.raises(
        DataError, match=r"data.end_token=x: data.tokenizer=bytes has no special tokens"
    ):
        load_tokenizer("bytes", "x")
    assert np.array_equal(byte_tokenizer().encode(["é"])[0], [0xC3, 0xA9])
