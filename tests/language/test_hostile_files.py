"""Files of models that are damaged, or made to do damage: one line, and no file is left."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.oracle import FOLDER
from support.selection import full_except

import ppctl
from ppctl.data import chat_templates
from ppctl.data.chat_templates import ChatTemplate, chat_template, render_question
from ppctl.data.tokenizer import load_tokenizer
from ppctl.errors import ConfigError, DataError, PpctlError
from ppctl.language.gguf_file import open_gguf
from ppctl.language.import_model import import_model

MODEL = FOLDER / "llama2"


def refused(source, out):
    """The line that refuses an import."""
    with pytest.raises(PpctlError) as caught:
        import_model(source, out)
    assert not out.exists()
    return str(caught.value)


# --- safetensors ----------------------------------------------------------------------------------

RAW = (MODEL / "model.safetensors").read_bytes()
LENGTH = struct.unpack("<Q", RAW[:8])[0]
HEADER, BODY = json.loads(RAW[8 : 8 + LENGTH]), RAW[8 + LENGTH :]
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def packed(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + BODY


def changed(**values):
    return packed({**HEADER, NORM: {**HEADER[NORM], **values}})


SAFETENSORS = {
    "empty": b"",
    "a header longer than the file": struct.pack("<Q", 2**63) + RAW[8:],
    "a header that is no JSON": packed(b"{"),
    "a header without end": packed(b'{"a":' * 40_000),
    "offsets that overlap": changed(data_offsets=HEADER[HEAD]["data_offsets"]),
    "offsets beyond the end": changed(data_offsets=[len(BODY), len(BODY) + 64]),
    "a size that overflows": changed(shape=[2**40, 2**40]),
    "a size below 0": changed(shape=[-32]),
    "an unknown type": changed(dtype="Q4"),
    "a type of other numbers": changed(dtype="I16"),
    "cut short": RAW[:-100],
    "letters for the terminal": packed(
        {**{k: v for k, v in HEADER.items() if k != NORM}, "\x1b[2J": HEADER[NORM]}
    ),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_damaged_safetensors_file_is_refused_in_one_line(case, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    (directory / "model.safetensors").write_bytes(SAFETENSORS[case])
    said = refused(directory, tmp_path / "run")
    assert "model.safetensors" in said or "of the model is missing" in said


PLACES = {
    "a directory": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_special_files_in_place_of_a_models_files_are_named(name, place, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    (directory / name).unlink(missing_ok=True)
    PLACES[place](directory / name)
    assert f"{directory / name} cannot be read" in refused(directory, tmp_path / "run")


@pytest.mark.parametrize(
    "names", ["[" * 100_000, json.dumps({"weight_map": {HEAD: "a" * 5000}}), '{"weight_map": [1]}']
)
def test_an_index_without_files_is_refused_in_one_line(names, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    (directory / "model.safetensors.index.json").write_text(names)
    assert "index" in refused(directory, tmp_path / "run")


def test_a_tensor_in_two_files_is_refused_in_one_line(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    for part in (1, 2):
        shutil.copy(
            MODEL / "model.safetensors", directory / f"model-0000{part}-of-00002.safetensors"
        )
    (directory / "model.safetensors").unlink()
    said = refused(directory, tmp_path / "run")
    assert " is in model-00001-of-00002.safetensors and model-00002-of-00002" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"max_position_embeddings": -5},
        {"model_type": "mistral", "sliding_window": 4, "num_hidden_layers": 10**12},
        {"model_type": "gemma2", "sliding_window_pattern": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**30},
        {"rms_norm_eps": "x"},
    ],
)
def test_impossible_sizes_of_a_model_are_refused_in_one_line(settings, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    before = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(before | settings))
    assert "bug" not in refused(directory, tmp_path / "run")


# --- GGUF -----------------------------------------------------------------------------------------

FORMS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}  # types of GGUF: of struct
TEXT, LIST = 8, 9
KEYS = {
    "general.architecture": (TEXT, "llama"),
    "llama.block_count": (4, 2),
    "llama.embedding_length": (4, 32),
    "llama.feed_forward_length": (4, 48),
    "llama.attention.head_count": (4, 4),
    "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
}
TOKENS = [chr(33 + i) for i in range(96)]
OF_TOKENIZER = {
    "tokenizer.ggml.model": (TEXT, "gpt2"),
    "tokenizer.ggml.pre": (TEXT, "gpt-2"),
    "tokenizer.ggml.tokens": (LIST, (TEXT, TOKENS)),
}


def text(letters):
    letters = letters if isinstance(letters, bytes) else letters.encode()
    return struct.pack("<Q", len(letters)) + letters


def value(kind, content):
    if kind == TEXT:
        return text(content)
    if kind == LIST:
        inner, contents = content
        return struct.pack("<IQ", inner, len(contents)) + b"".join(
            value(inner, c) for c in contents
        )
    return content if isinstance(content, bytes) else struct.pack(FORMS[kind], content)


def gguf(keys=(), without=(), num_tensors=None, shapes=(), offsets=(), twice=b"", num_twice=0):
    """A GGUF file of the golden model's tensors, with these changes."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    with safe_open(MODEL / "model.safetensors", "numpy") as opened:
        tensors = {
            names.get_name(name, (".weight",)): opened.get_tensor(name).astype(np.float32)
            for name in opened.keys()  # noqa: SIM118 it is no mapping
        }
    keys = {name: item for name, item in (KEYS | dict(keys)).items() if name not in without}
    head = b"".join(
        text(k) + struct.pack("<I", kind) + value(kind, v) for k, (kind, v) in keys.items()
    )
    infos, data = b"", b""
    for name, tensor in tensors.items():
        shape = dict(shapes).get(name, tensor.shape[::-1])
        place = dict(offsets).get(name, len(data))
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, place)
        data += tensor.tobytes()
    number = len(tensors) if num_tensors is None else num_tensors
    file = b"GGUF" + struct.pack("<IQQ", 3, number, len(keys) + num_twice) + head + twice + infos
    return file + b"\0" * (-len(file) % 32) + data


def more(kind, content, name="more"):
    return {"twice": text(name) + struct.pack("<I", kind) + content, "num_twice": 1}


NORM_, EMBED = "output_norm.weight", "token_embd.weight"
GGUF = {
    "a number of tensors without end": {"num_tensors": 2**63},
    "no tensors": {"num_tensors": 0},
    "a list without end": more(LIST, struct.pack("<IQ", 0, 2**31)),
    "lists in lists": more(LIST, struct.pack("<IQ", LIST, 1) * 3000),
    "a text without end": more(TEXT, struct.pack("<Q", 2**64 - 1)),
    "an unknown type": more(99, b""),
    "a key twice": more(4, struct.pack("<I", 3), "llama.block_count"),
    "a size that overflows": {"shapes": {NORM_: (2**40, 2**40)}},
    "a size of 64 bits": {"shapes": {NORM_: (2**63,)}},
    "an embedding of one dimension": {"shapes": {EMBED: (96 * 32,)}},
    "offsets that overlap": {"offsets": {NORM_: 0}},
    "an offset that overflows": {"offsets": {NORM_: 2**64 - 32}},
    "an offset beyond the end": {"offsets": {NORM_: 2**40}},
    "no number of layers": {"without": ("llama.block_count",)},
    "no epsilon": {"without": ("llama.attention.layer_norm_rms_epsilon",)},
    "a text as epsilon": {"keys": {"llama.attention.layer_norm_rms_epsilon": (TEXT, "x")}},
    "layers without end": {"keys": {"llama.block_count": (4, 2**32 - 1)}},
    "a list of heads": {"keys": {"llama.attention.head_count": (LIST, (4, [4, 4]))}},
    "a context below 1": {"keys": {"llama.context_length": (5, -1)}},
    "an architecture of other bytes": {"keys": {"general.architecture": (TEXT, b"\xff")}},
    "an end that is no token": {"keys": {"tokenizer.ggml.eos_token_id": (4, 5000)}},
    "an end that is a text": {"keys": {"tokenizer.ggml.eot_token_id": (TEXT, "x")}},
    "tokens that are numbers": {
        "keys": OF_TOKENIZER | {"tokenizer.ggml.tokens": (LIST, (4, [1] * 96))}
    },
    "a token twice": {"keys": OF_TOKENIZER | {"tokenizer.ggml.tokens": (LIST, (TEXT, ["a"] * 96))}},
    "merges of no tokens": {
        "keys": OF_TOKENIZER | {"tokenizer.ggml.merges": (LIST, (TEXT, ["zz qq"]))}
    },
    "merges of one": {"keys": OF_TOKENIZER | {"tokenizer.ggml.merges": (LIST, (TEXT, ["ab"]))}},
}


@pytest.mark.parametrize("case", GGUF)
def test_a_damaged_gguf_file_is_refused_in_one_line(case, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(gguf(**GGUF[case]))
    assert "\n" not in refused(tmp_path / "model.gguf", tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", (4, 4096)),
        ("attention.causal", (7, False)),
        ("attention.scale", (6, 0.5)),
        ("rope.dimension_count", (4, 4)),
        ("rope.scaling.factor", (6, 8.0)),
        ("expert_gating_func", (4, 2)),
        ("a_key_of_tomorrow", (4, 1)),
    ],
)
def test_no_key_of_a_gguf_file_is_dropped_that_changes_the_model(key, value, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(gguf(keys={f"llama.{key}": value}))
    message = refused(tmp_path / "model.gguf", tmp_path / "run")
    assert f"model.gguf has llama.{key}={value[1]}, which ppctl lacks" in message


def test_keys_of_a_gguf_file_without_effect_are_accepted(tmp_path):
    pytest.importorskip("gguf")
    keys = {"vocab_size": (4, 96), "rope.dimension_count": (4, 8), "attention.causal": (7, True)}
    keys |= {"rope.scaling.finetuned": (7, False), "attention.sliding_window": (4, 0)}
    keys = {f"llama.{key}": value for key, value in keys.items()}
    (tmp_path / "model.gguf").write_bytes(gguf(keys=keys))
    open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("size", [0, 10, 100, 1000, -10])
def test_a_truncated_gguf_file_is_refused_in_one_line(size, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(gguf()[:size])
    assert "model.gguf cannot be read as GGUF: " in refused(
        tmp_path / "model.gguf", tmp_path / "run"
    )


# --- all or nothing -------------------------------------------------------------------------------


def test_a_non_finite_tensor_is_refused_and_leaves_no_directory(tmp_path):
    from safetensors.numpy import save_file

    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    with safe_open(MODEL / "model.safetensors", "numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors[NORM] = tensors[NORM] * np.array(np.nan, tensors[NORM].dtype)
    save_file(tensors, directory / "model.safetensors")
    assert "is not finite" in refused(directory, tmp_path / "run")


def test_an_import_that_was_killed_begins_again(tmp_path):
    out = tmp_path / "run"
    (out / ".part/checkpoints/0").mkdir(parents=True)  # state after kill -9
    (out / ".part/config.yaml").write_text("model:")
    import_model(MODEL, out)
    assert {file.name for file in out.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "recipes",
        "source",
    }
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        import_model(MODEL, out)


KILLED = """
import os, signal, sys
from pathlib import Path
from ppctl.language.model_files import all_or_nothing, check_new

def written(out, names, last=0):
    seen = 0
    def kill(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "shutil.rmtree"):
            seen += str(out) in str(args[0])
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
    if last:
        sys.addaudithook(kill)
    check_new(out)
    with all_or_nothing(out) as part:
        for name in names:
            (part / name).mkdir() if name == "checkpoints" else (part / name).write_text(name)

def files(out):
    return sorted(os.listdir(out)) if out.exists() else []

last, survived = 0, False
while not survived:
    last, out = last + 1, Path(f"out{last}")
    for names in (["adapter_model", "adapter_config.json"], ["a", "checkpoints", "config.yaml"]):
        if (pid := os.fork()) == 0:
            written(out, names, last)
            os._exit(0)
        survived = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if {"adapter_config.json", "config.yaml"} & {*files(out)}:  # readers take it as whole
            assert {*names} <= {*files(out)} <= {*names, ".part"}, (last, files(out))
            break
    else:
        written(out, ["b", "config.json"])  # another request, as the files of the killed ones show
        assert files(out) == ["b", "config.json"], (last, files(out))
print(last)
"""


def test_a_writer_killed_at_any_moment_leaves_no_whole_directory_and_another_begins_anew(tmp_path):
    """A kill between the renames of files refused the same command: "is there already"."""
    environment = os.environ | {"PYTHONPATH": str(Path(ppctl.__file__).parents[1])}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", KILLED], timeout=100, **how)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) > 8  # moments at which a writer was killed


# --- tokenizers and templates ---------------------------------------------------------------------

BPE = {"type": "BPE", "vocab": {"a": 0, "l": 1, "<end>": 2}, "merges": []}
SPLIT = {"type": "Split", "pattern": {"Regex": "(l+l+)+y"}, "behavior": "Isolated", "invert": False}
STRIP = {"type": "Strip", "content": "l", "start": 2**62, "stop": 2**62}
BEFORE = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
FIXED = {"type": "FixedLength", "length": 0}
TOKENIZERS = {
    "empty": "",
    "a list": [1],
    "without end": "[" * 100_000,
    "no model": {"version": "1.0"},
    "ids below 0": {"model": BPE | {"vocab": {"a": -1}}},
    "ids that are texts": {"model": BPE | {"vocab": {"a": "0"}}},
    "merges of no tokens": {"model": BPE | {"merges": ["zz qq"]}},
    "a normalizer of other bytes": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "*"}
    },
    "a start that is missing": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": BEFORE,
            "pair": BEFORE,
            "special_tokens": {},
        }
    },
    "words without unknown ones": {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<end>": 1}, "unk_token": "?"}
    },
    "a pattern without end": {"pre_tokenizer": SPLIT},
    "pieces of no length": {"pre_tokenizer": FIXED},
    "a decoder that strips more": {"decoder": STRIP},
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_damaged_tokenizer_is_refused_in_one_line(case, tmp_path):
    changes = TOKENIZERS[case]
    text = changes
    if not isinstance(changes, str):
        plain = {"version": "1.0", "added_tokens": [], "model": BPE}
        text = json.dumps(plain | changes if isinstance(changes, dict) else changes)
    if case == "no model":
        text = '{"version": "1.0"}'
    (tmp_path / "tokenizer.json").write_text(text)

    def use():
        tokenizer = load_tokenizer(str(tmp_path), "<end>")
        tokenizer.encode(["hello" + "l" * 40])
        tokenizer.decode([1])

    with pytest.raises(DataError, match=r"data.tokenizer=.* fails \(.*\)\. Use another") as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", ["[1]", "[" * 100_000, '{"chat_template": 3}'])
def test_damaged_settings_of_a_tokenizer_are_refused_in_one_line(settings, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": BPE}))
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match="Restore"):
        load_tokenizer(str(tmp_path), "<end>")


LOOP = "{% for a in range(99999) %}"
TEMPLATES = {
    "attributes of Python": "{{ ().__class__.__bases__ }}",
    "attributes by subscript": "{{ ()['__class__']['__mro__'] }}",
    "attributes by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "attributes by filter": "{{ [()]|map(attribute='__class__.__base__')|list }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "another file": "{% include '/etc/passwd' %}",
    "itself": "{% extends 'chat_template.jinja' %}",
    "changes of messages": "{{ messages.append(1) }}",
    "a block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a range without end": "{% for a in range(10**9) %}{% endfor %}",
    "a text without end": "{% set n = 11 %}{{ 'a' * 10**n }}",
    "a list without end": "{% set n = 11 %}{{ [1] * 10**n }}",
    "a width without end": "{{ '%99999999999d' % 1 }}",
    "blocks in blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "brackets in brackets": "{{ " + "(" * 20_000 + " }}",
    "half a letter": r"{{ '\ud800' }}",
    "no tag": "{% evil %}",
}


ENDLESS = {  # loops of Jinja, of Python and of C
    "loops in loops": LOOP * 2 + "{% endfor %}" * 2,
    "a loop in a filter": "{{ 2 in ([1] | slice(10**12)) }}",
    "nested sums": "{% for a in [range(99999)] * 9999 %}{{ a | sum }}{% endfor %}",
    "a macro twice in itself": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a power": "{% set n = 9 %}{{ (10**n)**(10**n) }}",
    "sums of lists": "{{ ([[1]] * 999999) | sum(start=[]) }}",
}


@pytest.mark.parametrize("case", full_except([*ENDLESS], "a loop in a filter", "a power"))
def test_a_template_without_end_is_ended_by_the_clock(case, monkeypatch):
    """Whatever it computes: no count of its steps has to know all loops."""
    monkeypatch.setattr(chat_templates, "CPU_S", 0.3)
    with pytest.raises(DataError, match=r"the chat template fails \(it takes more than 0.3 s\)"):
        render_question(ChatTemplate(ENDLESS[case]), [{"role": "user", "content": "hello"}])
    assert render_question(ChatTemplate("a"), [{"role": "user", "content": "hello"}]) == "a"


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_reaches_no_objects_and_terminates(case):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match=r"the chat template fails \(.*\)\. Correct it") as caught:
        render_question(ChatTemplate(TEMPLATES[case]), messages)
    assert "\n" not in str(caught.value)


def test_a_template_without_end_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x" * 10**6)
    with pytest.raises(DataError, match=r"a chat template of 1,000,000 characters; .* Use another"):
        chat_template(tmp_path, {})
