"""Metrics of a step's balance of experts, for each layer, from the number of tokens by expert."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ppctl.model.experts.expert_layer import CHOICE_BIAS, DROPPED

LOAD, ENTROPY, LOST = "expert_load", "expert_entropy_nats", "expert_dropped_tokens"


def balance(counts: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return {metric: values by layer}; the value of a layer without experts is None.

    counts: a step's counts by the name of the reported parameter: "router/bias" [layers, E
    experts]; with a capacity also "router/dropped" [layers, 1].
    expert_load: tokens of the most loaded expert over the mean; 1 is even. expert_entropy_nats:
    -sum p ln p of the experts' shares p of tokens; ln E is even. expert_dropped_tokens: tokens
    dropped by the capacity; a token counts once for each expert that dropped it.

    >>> balance({"router/bias": [[3, 1], [0, 0]]})
    {'expert_load': [1.5, None], 'expert_entropy_nats': [0.5623, None]}
    """
    counts_LE = np.asarray(counts[CHOICE_BIAS], float)
    has_experts = counts_LE.sum(1) > 0

    def of_layers(values_L: np.ndarray) -> list[float | None]:
        pairs = zip(values_L.tolist(), has_experts.tolist(), strict=True)
        return [round(value, 4) if has else None for value, has in pairs]

    shares_LE = counts_LE / np.maximum(counts_LE.sum(1, keepdims=True), 1)
    logs_LE = np.log(np.where(shares_LE > 0, shares_LE, 1))
    numbers = {LOAD: of_layers(shares_LE.max(1) * shares_LE.shape[1])}
    numbers[ENTROPY] = of_layers(-(shares_LE * logs_LE).sum(1))
    dropped_L1 = counts.get("/".join(DROPPED))
    if dropped_L1 is not None:
        numbers[LOST] = of_layers(np.asarray(dropped_L1, float)[:, 0])
    return numbers
