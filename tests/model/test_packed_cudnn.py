"""cuDNN's attention of packed documents, which no GPU has run yet: what it is told, as JAX's own call tells it."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cuda_plugin import needs_cuda_plugin

from ppctl import config
from ppctl.data.packing import most_documents, pack
from ppctl.errors import ConfigError
from ppctl.model.attention import kernel_named
from ppctl.model.cudnn_attention import CALLS, document_places
from ppctl.model.scoring import PLAIN
from ppctl.training.job import assemble

B, T, N, H, MOST = 3, 16, 4, 64, 5
JAX_OWN = "jax._src.cudnn.fused_attention_stablehlo"  # private: for comparison alone


def drawn(seed, most=MOST):
    """Numbers of documents [B, T]: from one document in a sequence to `most`."""
    draw = np.random.default_rng(seed)
    is_first = np.zeros((B, T), np.int32)
    for row, number in zip(is_first, (1, most, int(draw.integers(1, most + 1))), strict=True):
        row[[0, *(1 + draw.choice(T - 1, number - 1, replace=False))]] = 1
    return is_first.cumsum(1)


@pytest.mark.parametrize("seed", range(3))
def test_all_documents_are_told_in_order_with_their_lengths_and_places(seed):
    documents, lengths, starts = drawn(seed), [], []
    for number, row in enumerate(documents):
        for document in range(1, row.max() + 1):
            places = np.flatnonzero(row == document)
            lengths.append(len(places))
            starts.append(number * T + places[0])
    found = document_places(jnp.asarray(documents), MOST, N * H, 2 * H)
    assert [each.shape for each in found] == [(B, MOST), (B, MOST), (B, MOST + 1), (B, MOST + 1)]
    for each, stride in zip(found[2:], (N * H, 2 * H), strict=True):
        assert each.ravel().tolist() == [stride * s for s in starts + [B * T] * (B * (MOST + 1) - len(starts))]
    for each in found[:2]:
        assert each.ravel().tolist() == lengths + [0] * (B * MOST - len(lengths))


def test_no_token_is_left_out_and_starts_fit_into_32_bits():
    lengths, *_ = document_places(jnp.asarray([[0, 0, 1, 2, 3, 4, 5]]), 3, 1, 1)
    assert lengths.tolist() == [[3, 1, 3]]
    assert document_places(jnp.ones((B, T), int), 1, N * H, N * H) == ()
    with pytest.raises(ConfigError, match=r"4 sequences of 65536 tokens and 8192 numbers .* Use smaller microbatches"):
        jax.eval_shape(lambda d: document_places(d, 2, 8192, 1024), jax.ShapeDtypeStruct((4, 65536), jnp.int32))


@pytest.mark.parametrize("seq_len", [9, 12, 30])
def test_a_packed_data_set_knows_how_many_documents_a_sequence_has(seq_len):
    packing = pack(np.cumsum([4, 2, 7, 3, 11, 2, 2, 5]), seq_len)
    rows = [packing.lengths[a:b] for a, b in zip(packing.bounds, packing.bounds[1:], strict=False)]
    assert most_documents(packing, seq_len) == max(len(row) + (sum(row) < seq_len) for row in rows)


def there_and_back(attention):
    def run(q, k, v, g, *documents):
        mixed, pull = jax.vjp(lambda q, k, v: attention(q, k, v, *documents), q, k, v)
        return mixed, pull(g)

    return run


def calls_of(function, *shapes):
    """What stands in the lowered program of each of cuDNN's calls: its name, config, layouts and types."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in re.findall(r"@(__cudnn\$fmha\w+)\(.*?\) (\{.*\}) : (.*)", text):
        name, attributes, types = line
        config_text = re.search(r'backend_config = "(.*?)"[,}]', attributes)[1]
        rest = attributes.replace(config_text, "").split("operand_layouts")[1]
        found.append(
            (name, json.loads(re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), config_text)), rest, types)
        )
    assert [name for name, *_ in found] == [*CALLS]
    return found


@pytest.mark.full
def test_the_calls_are_those_of_jax(monkeypatch):
    fused = pytest.importorskip(JAX_OWN)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)

    def theirs(q, k, v, lengths=None, starts=None):
        how = {"scale": H**-0.5, "mask_type": fused.MaskType.CAUSAL}
        return fused.dot_product_attention(q, k, v, None, None, lengths, lengths, starts, starts, **how)

    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    whole, lengths, starts = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (T, MOST, MOST + 1))
    ours = there_and_back(kernel_named("cudnn", PLAIN, MOST))
    assert calls_of(ours, q, q, q, q, whole) == calls_of(there_and_back(theirs), q, q, q, q, lengths, starts)
    alone = calls_of(there_and_back(kernel_named("cudnn")), q, q, q, q)
    assert alone == calls_of(there_and_back(theirs), q, q, q, q)  # of one document
    for documents in map(drawn, range(3)):
        number = documents.max(1)
        first = [np.flatnonzero(np.diff(row, prepend=0)) for row in documents]
        own = [np.diff([*places, T]) for places in first]
        fill = lambda rows, size: np.stack([np.pad(r, (0, size - len(r)), constant_values=-1) for r in rows])  # noqa: E731
        assert number.max() == MOST
        given = [jnp.asarray(a, jnp.int32) for a in (fill(own, MOST), fill(first, MOST + 1))]
        array = jnp.zeros((B, T, N, H), jnp.bfloat16)
        expected = fused._fix_seqlen_offsets(given[0], given[0], given[1], given[1], array, array)
        for a, b in zip(document_places(jnp.asarray(documents), MOST, N * H, N * H), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_queries_that_share_keys_are_told_of_the_keys_own_places():
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, 2))
    whole = jax.ShapeDtypeStruct((B, T), jnp.int32)
    (_, config_of, _, types), _ = calls_of(there_and_back(kernel_named("cudnn", PLAIN, MOST)), q, k, k, q, whole)
    assert config_of["cudnn_fmha_backend_config"]["max_seg_per_batch"] == MOST
    assert f"tensor<{B * MOST}x{N}x{T}xf32>" in types


@pytest.mark.full
@needs_cuda_plugin
def test_a_step_is_compiled_for_gpus(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join("word " * (1 + i % 9) for i in range(400)))
    request = config.Config(
        model=config.Transformer(num_layers=2, d_model=128, num_heads=2, seq_len=128, attention="cudnn"),
        mesh=config.Mesh(1, 2, 1),
        schedule=config.Schedule("zb_h1", 2),
        executor=config.Mpmd(),
        data=config.Text(
            path=str(tmp_path / "text.txt"), document="paragraph", packing=True, batch_size=2, cache_dir=str(tmp_path)
        ),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology="h100:1x2"),
    )
    job = assemble(request)
    programs = job.pipe.engine.programs(lambda entries: {e for e in entries if e.task is not None}).programs
    found = {task.name: tuple(task.hlo.count(f'custom_call_target="{call}"') for call in CALLS) for task in programs}
    assert found["fwd of stage 0"] == (1, 0)
    assert found["bwd_i of stage 0"] == (0, 1)
    assert f'"max_seg_per_batch":{job.data.most_documents}' in programs[0].hlo.replace(" ", "")
