"""`ppctl tune tune.groups=unequal`: the fastest stages on submeshes of unequal sizes.

Next to them the fastest of equal ranks, found in the same way: both are 1F1B with the layers cut
freely, so their ratio is the gain of unequal ranks alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from ppctl.planner.search.submesh_costs import Option, SubmeshCosts, by_axes
from ppctl.planner.search.layout_space import divisors
from ppctl.planner.search.unequal_groups import Stages, fastest_stages
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.schedule.remat import Remat


@dataclass(frozen=True)
class GroupLayout:
    """Stages on submeshes, with their microbatches and remat."""

    stages: Stages
    num_microbatches: int
    remat: Remat

    @property
    def seconds(self) -> float:
        return self.stages.seconds

    @property
    def ranks(self) -> tuple[MeshSizes, ...]:
        return tuple(stage.submesh.label.sizes for stage in self.stages.stages)

    @property
    def chips(self) -> tuple[str, ...]:
        """Return the hardware of each rank."""
        return tuple(stage.submesh.label.chip for stage in self.stages.stages)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(stage.end_layer - stage.first_layer for stage in self.stages.stages)


def fastest_groups(
    costs: SubmeshCosts,
    remats: Sequence[Remat],
    cps: Sequence[int],
    watch: Callable[[], None] = lambda: None,
) -> tuple[GroupLayout | None, GroupLayout | None]:
    """Return the fastest layout of equal ranks, and of any ranks; None if none fits.

    watch: called often; may raise to end the search.
    """
    sizes = costs.num_layers, costs.num_devices
    sets = list[tuple[Remat, list[Option]]]()
    for number, remat, cp in product(divisors(costs.batch_size), remats, cps):
        watch()
        if options := costs.options(number, remat, cp):
            sets.append((remat, options))

    def fastest(sets: Sequence[tuple[Remat, list[Option]]], best_s: float) -> GroupLayout | None:
        """Return the fastest layout from one of the sets of submeshes below best_s."""
        least = [(min(each.least_s(*sizes) for each in options), i) for i, (_, options) in enumerate(sets)]
        best = None
        for least_s, i in sorted(least):
            watch()
            remat, options = sets[i]
            if costs.layer_costs is None and least_s >= best_s:
                break
            submeshes = [costs.submesh(each) for each in options]
            stages = fastest_stages(*sizes, submeshes, best_s)
            if stages is not None:
                best, best_s = GroupLayout(stages, options[0].number, remat), stages.seconds
        return best

    alike = [(remat, each) for remat, options in sets for each in by_axes(options)]
    equal = fastest(alike, inf)
    # equal ranks are among the unequal ones, which are at least as fast
    unequal = fastest(sets, inf if equal is None else equal.seconds)
    return equal, unequal or equal
