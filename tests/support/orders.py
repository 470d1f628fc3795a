"""Every order of a rank's tasks, for brute force."""

from ppctl.schedule.ir import Task


def orders_of(stage, num_microbatches, cap):
    """Every order of a rank's F, I and W within `cap` activations."""
    found = []

    def extend(order, at, live):
        if len(order) == 3 * num_microbatches:
            found.append(tuple(order))
        for m, done in enumerate(at):
            if done < 3 and not (done == 0 and live == cap):
                step = [*at]
                step[m] += 1
                extend(
                    [*order, Task(stage, "FIW"[done], m)], step, live + (done == 0) - (done == 2)
                )

    extend([], [0] * num_microbatches, 0)
    return found
