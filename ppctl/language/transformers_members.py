"""Language models of `transformers` that ppctl supports: keys and defaults of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = {  # setting: key of config.json
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
CAPS = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
# synonymous keys of config.json: a model with experts may state any of them
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NUM_SHARED = "n_shared_experts"  # experts, each as wide as a routed one; ppctl fuses them
FRACTION = "partial_rotary_factor"


@dataclass(frozen=True)
class Member:
    """A model_type of `transformers`: its family in ppctl, and the defaults of its config.json.

    windows: the layers that sliding_window applies to: all; upper (from max_window_layers on);
    pattern (all but every n-th); None: no layer.
    switches: the keys of config.json that turn on QKV biases, and norms of queries and keys; a key
    of None: this type never has them. (): `family` decides both.
    experts: keys of config.json, by setting of model.moe. of_experts: settings of model.moe that
    all models of this type share.
    """

    architecture: str
    family: str  # model.family
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    activation: str = "hidden_act"  # key of config.json
    windows: str | None = None
    pattern: int = 1  # default n of windows=pattern
    caps: tuple[str, ...] = ()  # names in CAPS
    has_local_theta: bool = False
    has_fraction: bool = False
    switches: tuple[str | None, ...] = ()
    experts: Mapping[str, str] = field(default_factory=dict[str, str])
    of_experts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def specific(self) -> set[str]:
        """The keys of SPECIFIC that this model reads."""
        keys = {CAPS[name] for name in self.caps} | {key for key in self.switches if key}
        keys |= {FRACTION} if self.has_fraction else set()
        if not self.experts:
            return keys | {"use_sliding_window"}
        shared = {NUM_SHARED} if NUM_SHARED in self.defaults else set()
        return keys | shared | {*self.experts.values(), *NUM_EXPERTS}


ALL = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
PLAIN = ALL | {"tie_word_embeddings": False, "hidden_act": "silu"}
SLIDING = {"sliding_window": 4096}
QWEN = PLAIN | SLIDING | {"max_window_layers": 28}
GEMMAS = ALL | SLIDING | {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}
GEMMAS |= {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
MIXTURE = {"num_experts": "num_experts", "top_k": "num_experts_per_tok"}
QWEN_MIXTURE = MIXTURE | {"normalize": "norm_topk_prob", "width": "moe_intermediate_size"}
QWEN_MIXTURE |= {"period": "decoder_sparse_step"}
QWENS = PLAIN | {"norm_topk_prob": False, "decoder_sparse_step": 1}
MEMBERS = {
    "llama": Member("LlamaForCausalLM", "llama", PLAIN),  # Llama 2 and 3, SmolLM 2
    "mistral": Member("MistralForCausalLM", "llama", PLAIN | SLIDING, windows="all"),
    "qwen2": Member("Qwen2ForCausalLM", "qwen2", QWEN, windows="upper"),  # Qwen 2 and 2.5
    "qwen3": Member("Qwen3ForCausalLM", "qwen3", QWEN | {"head_dim": 128}, windows="upper"),
    "gemma2": Member(
        "Gemma2ForCausalLM",
        "gemma2",
        GEMMAS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation="hidden_activation",
        windows="pattern",
        pattern=2,
        caps=tuple(CAPS),
    ),
    "gemma3_text": Member(
        "Gemma3ForCausalLM",
        "gemma3",
        GEMMAS | {"rope_theta": 1e6},
        activation="hidden_activation",
        windows="pattern",
        pattern=6,
        caps=("query_pre_attn_scalar", "logit_softcap"),
        has_local_theta=True,
    ),
    "mixtral": Member(
        "MixtralForCausalLM",
        "llama",
        PLAIN | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows="all",
        experts=MIXTURE | {"num_experts": "num_local_experts"},
    ),
    "olmoe": Member(
        "OlmoeForCausalLM",
        "olmoe",
        PLAIN | {"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        experts=MIXTURE | {"normalize": "norm_topk_prob"},
    ),
    "qwen2_moe": Member(  # Qwen 1.5 and 2
        "Qwen2MoeForCausalLM",
        "qwen2",
        QWENS | {"qkv_bias": True},
        switches=("qkv_bias", None),
        experts=QWEN_MIXTURE | {"shared_width": "shared_expert_intermediate_size"},
        of_experts={"shared_gate": True},
    ),
    "qwen3_moe": Member("Qwen3MoeForCausalLM", "qwen3", QWENS, experts=QWEN_MIXTURE),
    "glm4_moe": Member(  # GLM 4.5
        "Glm4MoeForCausalLM",
        "glm4p5",
        PLAIN | {"rms_norm_eps": 1e-5, NUM_SHARED: 1, "norm_topk_prob": True},
        has_fraction=True,
        switches=("attention_bias", "use_qk_norm"),
        experts={
            "num_experts": "n_routed_experts",
            "top_k": "num_experts_per_tok",
            "width": "moe_intermediate_size",
            "normalize": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "num_groups": "n_group",
            "top_groups": "topk_group",
            "first_dense": "first_k_dense_replace",
        },
        of_experts={"score": "sigmoid", "choice_bias": True, "group_score": "top2"},
    ),
}
SPECIFIC = {key for member in MEMBERS.values() for key in member.specific} | {*CAPS.values()}
