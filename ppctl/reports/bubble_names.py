"""Names of the three bubbles of a run (ideal, predicted, measured) for texts, tables and pages.

A bubble is the idle share, 0..1, of the ranks while tasks run; ABOUT explains all three.
"""

EQUAL = "equal stages and fixed costs of F, I and W"
ABOUT = (
    "Bubble: the idle share of the ranks while tasks run. Ideal: the schedule simulated on its "
    f"executor, with {EQUAL}; predicted: simulated with the planner's seconds, as "
    "the step time; measured: in a step (run.timeline=true)."
)


def bubble_text(
    ideal: float | None, predicted: float | None = None, measured: float | None = None
) -> str:
    """Return the known bubbles with their names; "" if all are None.

    >>> bubble_text(0.025, 0.203)
    '2.5% ideal, 20.3% predicted'
    >>> bubble_text(0.273, 0.232).partition(" (")[2]
    'predicted below ideal, which assumes equal stages and fixed costs of F, I and W)'
    """
    named = (("ideal", ideal), ("predicted", predicted), ("measured", measured))
    text = ", ".join(f"{value:.1%} {name}" for name, value in named if value is not None)
    is_below = ideal is not None and predicted is not None and round(ideal - predicted, 3) > 0
    return text + f" (predicted below ideal, which assumes {EQUAL})" * is_below


def shared_cores_text(num_devices: int, num_cores: int | None) -> str | None:
    """Return the reason why no bubble can be measured if devices outnumber cores, else None.

    num_cores: cores that simulated devices share; None: real devices.

    >>> shared_cores_text(4, 2).partition(":")[0]
    '4 simulated devices share 2 cores'
    """
    if num_cores is None or num_devices <= num_cores:
        return None
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    return (
        f"{num_devices} simulated devices share {cores}: ranks also wait for a core, so this "
        "machine cannot show the schedule's bubble"
    )
