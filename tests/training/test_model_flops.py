"""FLOPs of a model against closed forms."""

from dataclasses import replace

import pytest
from support.job_configs import (
    BATCH_SIZE,
    SEQ_LEN,
    VOCAB_SIZE,
    mlp_config,
    small,
    transformer_config,
)
from support.selection import full

from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.mfu import model_flops


@pytest.mark.parametrize(
    ("activation", "num_kv_heads", "mlp_width"),
    [("swiglu", 2, 48), ("gelu", None, 64), full(("gelu", 1, 32))],
)
def test_flops_of_a_transformer_are_six_a_weight_and_token_plus_attention(
    activation, num_kv_heads, mlp_width
):
    model = small(num_kv_heads=num_kv_heads, mlp_width=mlp_width, activation=activation)
    L, D, T, V, M = 4, 16, SEQ_LEN, VOCAB_SIZE, BATCH_SIZE * SEQ_LEN
    kv_width = D // 4 * (num_kv_heads or 4)
    num_matrices = 3 if activation == "swiglu" else 2
    weights = L * (2 * D * D + 2 * D * kv_width + num_matrices * D * mlp_width) + D * V
    attention = L * 2 * (2 * M * T * D)  # scores and mixture, every position with every position
    for kernel in ("xla", "chunked"):
        found = model_flops(assemble(transformer_config(model=replace(model, attention=kernel))))
        assert found.full == 6 * weights * M + 3 * attention
        assert found.causal == 6 * weights * M + 3 * attention * (T + 1) // (
            2 * T
        )  # token t to t + 1 tokens


def test_flops_of_layers_with_a_window_are_of_fewer_pairs():
    window, T = 3, SEQ_LEN
    found = [
        model_flops(
            assemble(
                transformer_config(
                    model=small(attention="xla", head_dim=8, window=window, window_pattern=p)
                )
            )
        )
        for p in ("F", "WWWF")
    ]
    assert found[0].full == found[1].full
    pairs = T * (T + 1) // 2 - sum(
        min(t + 1, window) for t in range(T)
    )  # left out by three layers of four
    assert (
        found[0].causal - found[1].causal == 12 * BATCH_SIZE * 3 * (4 * 8) * pairs
    )  # heads of a separate width


def test_flops_of_an_mlp_are_six_a_weight_and_row_less_the_gradient_of_the_data():
    L, D, I, O = 4, 16, 5, 3
    inputs = 2 * BATCH_SIZE * I * D  # the data need no gradient
    found = model_flops(assemble(mlp_config()))
    assert found.full == found.causal == 6 * BATCH_SIZE * (L * D * D + D * O) + 2 * inputs
