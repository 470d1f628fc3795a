"""The experts of a transformer: sizes, router, balance, and how tokens reach them."""

from dataclasses import dataclass, field
from typing import Annotated

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import DESCRIPTION, Count, FromOne, Natural, NotNegative, Positive
from ppctl.errors import ConfigError

SCORES = ("softmax", "softmax_chosen", "sigmoid")
GroupScore = Annotated[str, checks.one_of("max", "top2")]
DISPATCHES = ("gather", "alltoall")
NumExperts = Annotated[int, checks.up_to(4096, "the router scores each token for all")]
PRODUCTS = ("auto", "scan", "triton", "ragged_dot")


@dataclass(unsafe_hash=True)
class Experts:
    """A mixture of experts in place of the MLP: each token is computed by the experts it chooses.

    The router's settings cover Mixtral, Qwen2- and Qwen3-MoE, OLMoE, GLM-4.5, DeepSeek-V2 and -V3.
    Like `Architecture`, it is hashed by its values.
    """

    # experts of a layer (a token chooses top_k); None: layers have an MLP
    num_experts: NumExperts | None = None
    top_k: Count = 2  # experts of a token
    width: Count | None = None  # hidden width of an expert; None: model.mlp_width
    # weights of experts: softmax over all | softmax_chosen (over the chosen) | sigmoid
    score: Annotated[str, checks.one_of(*SCORES)] = field(default="softmax", metadata=DESCRIPTION)
    # divide a token's weights by their sum
    normalize: bool = field(default=True, metadata=DESCRIPTION)
    scale: Positive = field(default=1.0, metadata=DESCRIPTION)  # factor of the experts' weights
    # add a bias to the scores for choosing experts, not to weights; only bias_update changes it
    choice_bias: bool = field(default=False, metadata=DESCRIPTION)
    # groups of experts, of equal size
    num_groups: Count = field(default=1, metadata=DESCRIPTION)
    # groups per token; its experts are in these groups
    top_groups: Count = field(default=1, metadata=DESCRIPTION)
    # score of a group: its best expert's (max) | the sum of its two best experts' (top2)
    group_score: GroupScore = field(default="max", metadata=DESCRIPTION)
    # hidden width of a shared expert, applied to all tokens; None: no shared expert
    shared_width: Count | None = field(default=None, metadata=DESCRIPTION)
    # multiply the shared expert's output by sigmoid(x w)
    shared_gate: bool = field(default=False, metadata=DESCRIPTION)
    # first layers with an MLP instead of experts
    first_dense: Natural = field(default=0, metadata=DESCRIPTION)
    # every period-th layer has experts, counted from 1
    period: Count = field(default=1, metadata=DESCRIPTION)
    balance_loss: NotNegative = 0.0  # weight of each sequence's balance loss (DeepSeek-V3)
    z_loss: NotNegative = 0.0  # weight of the squared log-sum of router logits (ST-MoE)
    bias_update: NotNegative = 0.0  # step of the choice bias towards less loaded experts
    # tokens reach experts on other devices by gather (all_gather, psum_scatter) | alltoall
    dispatch: Annotated[str, checks.one_of(*DISPATCHES)] = "gather"
    # limit of a device's rows, as a multiple (from 1) of its even share; further rows are dropped;
    # None: no limit
    capacity: FromOne | None = None
    # products of experts: auto (by device) | scan (CPU) | triton (NVIDIA GPUs) | ragged_dot (TPU)
    kernel: Annotated[str, checks.one_of(*PRODUCTS)] = "auto"

    @property
    def number(self) -> int:
        """The number of experts of a layer with experts."""
        assert self.num_experts is not None, "a layer with experts states their number"
        return self.num_experts

    def has_experts(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts.

        >>> Experts(num_experts=4, first_dense=1).has_experts(3)
        (False, True, True)
        """
        first = num_layers if self.num_experts is None else self.first_dense
        return tuple(l >= first and (l + 1) % self.period == 0 for l in range(num_layers))

    def check(self, num_layers: int) -> None:
        """Raise ConfigError for settings that contradict each other."""
        experts, key = self.num_experts, "model.moe"
        # 1. settings without experts
        if experts is None:
            usual = vars(Experts())
            unused = next((name for name in usual if getattr(self, name) != usual[name]), None)
            if unused is not None:
                raise ConfigError(
                    f"{key}.{unused}={getattr(self, unused)} is not used: {key}.num_experts=null, "
                    f"so that no layer has experts. Set {key}.num_experts."
                )
            return
        # 2. the choice of experts
        if self.top_k > experts:
            raise ConfigError(
                f"{key}.top_k={self.top_k} is more than {key}.num_experts={experts}: a token "
                f"chooses different experts. Use {key}.top_k={experts} at most."
            )
        per_group, left = divmod(experts, self.num_groups)
        if left or self.top_groups > self.num_groups:
            raise ConfigError(
                f"{key}.num_groups={self.num_groups} with {key}.top_groups={self.top_groups} do "
                f"not fit {key}.num_experts={experts}: groups are equal in size. Use a "
                f"divisor of {experts}, and {key}.top_groups of at most that."
            )
        if per_group * self.top_groups < self.top_k or (
            self.group_score == "top2" and per_group < 2
        ):
            raise ConfigError(
                f"{key}.top_groups={self.top_groups} groups of {per_group} experts are too small "
                f"for {key}.top_k={self.top_k} and {key}.group_score={self.group_score}. Use "
                f"fewer {key}.num_groups."
            )
        # 3. settings that need another setting
        needs = (
            (self.bias_update > 0 and not self.choice_bias, "bias_update", "choice_bias=true"),
            (self.shared_gate and self.shared_width is None, "shared_gate", "shared_width"),
        )
        for is_missing, name, other in needs:
            if is_missing:
                raise ConfigError(
                    f"{key}.{name}={getattr(self, name)} needs {key}.{other}. Set it, or leave "
                    f"{key}.{name} out."
                )
        if not any(self.has_experts(num_layers)):
            raise ConfigError(
                f"{key}.first_dense={self.first_dense} and {key}.period={self.period} leave no "
                f"layer of model.num_layers={num_layers} with experts. Use smaller ones."
            )

    def check_frozen(self) -> None:
        """Raise ConfigError for settings that need a parameter which optim.train=lora freezes."""
        for name in ("bias_update", "capacity"):
            value = getattr(self, name)
            if value:
                raise ConfigError(
                    f"model.moe.{name}={value} counts tokens in a parameter of the router, but "
                    "with optim.train=lora only adapters change. Leave it out, or use "
                    "optim.train=all."
                )
