"""What stands in each layer of a network that was cut into layers, as a plan lists it."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.planner.cost.step_prediction import LayerPart
from ppctl.training.pipeline.pipeline import Pipeline

MOST_LAYERS = 24
MOST_PARAMS = 4
MOST_OPERATIONS = 6
COLUMNS = ("layer", "stage", "FLOPs", "parameters", "operations")
TITLE = "what stands in each layer; FLOPs of its matrix products over the mean layer's"


def network_layers(pipe: Pipeline) -> tuple[LayerPart, ...]:
    """Return the contents of a network's embedding, layers and head; () of other models."""
    contents, costs, last = pipe.stack.contents, pipe.relative_costs, len(pipe.partition) - 1
    if not contents:
        return ()
    stages = [0, *(stage for stage, layers in enumerate(pipe.partition) for _ in layers), last]
    of_all = [costs.embed, *costs.layers, costs.head]
    return tuple(
        LayerPart(held.name, stage, cost, held.params, held.operations)
        for held, stage, cost in zip(contents, stages, of_all, strict=True)
    )


def layer_rows(layers: Sequence[LayerPart]) -> list[tuple[str, ...]]:
    """Return table rows for COLUMNS: of more than MOST_LAYERS the first ones, and the head."""
    cut = layers if len(layers) <= MOST_LAYERS else [*layers[: MOST_LAYERS - 1], layers[-1]]
    return [
        (part.name, str(part.stage), f"{part.cost:.2f}", params_text(part), operations_text(part))
        for part in cut
    ]


def params_text(part: LayerPart) -> str:
    """Return the parameters of a layer with their shapes, the first few of them.

    >>> params_text(LayerPart("0", 0, 1.0, {"conv/w": (3, 3, 16), "scale": ()}, {}))
    'conv/w [3, 3, 16], scale []'
    """
    return _few([f"{name} {list(shape)}" for name, shape in part.params.items()], MOST_PARAMS)


def operations_text(part: LayerPart) -> str:
    """Return the operations of a layer, each once, the first few of them.

    >>> operations_text(LayerPart("0", 0, 1.0, {}, {"dot_general": 2, "tanh": 1}))
    '2 dot_general, tanh'
    """
    counts = part.operations.items()
    texts = [name if count == 1 else f"{count} {name}" for name, count in counts]
    return _few(texts, MOST_OPERATIONS)


def _few(items: Sequence[str], most: int) -> str:
    left = len(items) - most
    return ", ".join([*items[:most], *([f"{left} more"] if left > 0 else [])]) or "none"
