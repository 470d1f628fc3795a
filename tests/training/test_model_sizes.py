"""The sizes of models that people know, `conf/model`: as many parameters as were published."""

import jax
import pytest
import yaml

import ppctl
from ppctl.config.config_dirs import ROOT

PUBLISHED = {  # parameters, as the models' pages state them, embeddings once where they are tied
    "gemma2_27b": 27_227_128_320,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "gemma3_270m": 268_098_176,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3p2_1b": 1_235_814_400,
    "llama3p2_3b": 3_212_749_824,
    "mistral_7b": 7_248_023_552,
    "mistral_7b_v0p1": 7_241_732_096,
    "qwen2p5_0p5b": 494_032_768,
    "qwen2p5_1p5b": 1_543_714_304,
    "qwen2p5_7b": 7_615_616_512,
    "qwen3_0p6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen1p5_moe_a2p7b": 14_315_784_192,
    "qwen2_57b_a14b": 57_408_658_944,
    # without the layer for multi-token prediction, which has a separate embedding and head
    "glm4p5_air": 110_468_824_832 - 3_616_573_568,
    "glm4p5_355b": 358_337_791_296 - 5_539_962_272,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1p7b": 1_711_376_384,
}
FEW = {"gemma3_1b", "llama3_8b", "qwen2p5_0p5b", "mixtral_8x7b", "olmoe_1b_7b", "glm4p5_air"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in PUBLISHED]
)
def test_a_model_has_the_parameters_that_were_published(name):
    settings = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())
    sizes = {
        key: value for key, value in settings.items() if key not in ("defaults", "name", "seq_len")
    }
    stack = ppctl.transformer(**sizes)
    shapes = stack.param_shapes
    assert sum(jax.tree.leaves(stack.counts(shapes))) == PUBLISHED[name]
