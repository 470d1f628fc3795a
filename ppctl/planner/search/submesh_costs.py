"""The submeshes of a cluster for `unequal_groups`, with the predicted costs of their stages.

Submeshes are those of Alpa (arXiv 2201.12023, section 5.2): a part of a host, or whole hosts. Each
is divided over dp, fsdp, ep, tp and cp in every way that the model and the batch allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ppctl.executors.model_shapes import tree_bytes
from ppctl.executors.outer_layers import keep
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Step
from ppctl.executors.work.rank_bytes import RankShare, layer_bytes
from ppctl.model.trainable_parameters import trained_part
from ppctl.planner.cost.step_time import op_times, overhead_s
from ppctl.planner.search.device_models import DeviceModel, DeviceModels
from ppctl.planner.search.layout_space import divisors
from ppctl.planner.search.unequal_groups import Submesh
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.costs import costs_of_stages
from ppctl.schedule.mesh_axes import DATA_AXES, STAGE_AXES, MeshSizes
from ppctl.schedule.remat import Remat

ENDS = range(4)  # kind of a stage: 1 if it has the embedding, plus 2 if it has the head
ALL_SIZES = 16  # a host of at most this many devices is cut into any sizes; larger: powers of two


class Label(NamedTuple):
    """The hardware and the axes of a submesh, and the number of its hosts."""

    chip: str
    sizes: MeshSizes
    hosts: int


@dataclass(frozen=True, eq=False)
class Chips:
    """Devices of one kind, next to each other in the order of all devices."""

    name: str
    machine: Machine
    room_bytes: float  # memory of a device
    number: int
    adds: bool  # field of `Step`
    models: DeviceModels
    divisions: tuple[MeshSizes, ...]  # sizes of `STAGE_AXES`

    @property
    def host(self) -> int:
        """Return the number of devices of a host."""
        return min(self.machine.host_devices or self.number, self.number)

    def submeshes(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of devices, numbers of the first device) of all submeshes."""
        host = self.host
        for size in range(1, host + 1):
            if host <= ALL_SIZES or size & (size - 1) == 0:
                starts = range(self.number - size + 1)
                yield size, [start for start in starts if start % host + size <= host]
        for size in range(2 * host, self.number + 1, host):
            yield size, [*range(0, self.number - size + 1, host)]

    def axes(self, size: int, cp: int) -> Iterator[MeshSizes]:
        """Yield the divisions of `size` devices, with tp inside a host."""
        for division in self.divisions:
            data, left = divmod(size, division.num_devices)
            if left or division.cp != cp:
                continue
            for fsdp in divisors(data):
                sizes = replace(division, dp=data // fsdp, fsdp=fsdp)
                over = self.machine.over(sizes.by_axis)
                if all(over[axis.name] == 1 for axis in MESH_AXES if axis.in_one_host):
                    yield sizes


class Costs(NamedTuple):
    """Costs of stages on a submesh: entries for [kind of `ENDS`, number of layers]."""

    seconds: np.ndarray  # seconds of one microbatch, forward and backward
    overhead_s: np.ndarray
    in_flight: np.ndarray  # number of microbatches that fit; 0: none
    hop_s: np.ndarray  # seconds to send an activation to the next stage: one entry


class Option(NamedTuple):
    """A submesh for `number` microbatches."""

    label: Label
    starts: tuple[int, ...]  # numbers of the first device where it may lie
    number: int
    costs: Costs

    def least_s(self, num_layers: int, num_devices: int) -> float:
        """Return a lower bound of a step's seconds if all stages were like the best one here."""
        costs, counts = self.costs, np.arange(1, num_layers + 1)
        each_s = (self.number - 1) * costs.seconds + costs.overhead_s
        each_s = np.where(costs.in_flight > 0, each_s, np.inf)[:, 1:] / counts
        return float(each_s.min()) * self.label.sizes.num_devices * num_layers / num_devices


@dataclass(frozen=True, eq=False)
class SubmeshCosts:
    """Makes the submeshes of a model on chips. All arguments are those of the request."""

    num_layers: int
    batch_size: int
    example_bytes: int
    chips: tuple[Chips, ...]
    gather: str
    unroll: float
    layer_costs: tuple[float, ...] | None = None  # by layer, with mean 1; None: equal layers
    room: float = 1.0  # share of the memory that stages may use, 0..1
    memo: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    @property
    def num_devices(self) -> int:
        return sum(each.number for each in self.chips)

    def options(self, number: int, remat: Remat, cp: int) -> list[Option]:
        """Return the submeshes for `number` microbatches, without those that others surpass.

        Of equally many devices, an axes' size is left out if another is as good on all chips.
        """
        # 1. the places of each number of devices
        first, places = 0, dict[int, list[tuple[Chips, tuple[int, ...]]]]()
        for chips in self.chips:
            for size, starts in chips.submeshes():
                places.setdefault(size, []).append((chips, tuple(first + s for s in starts)))
            first += chips.number

        # 2. their axes, and costs
        found = list[Option]()
        for size, placed in places.items():
            costs = dict[MeshSizes, list[Costs]]()
            for sizes in placed[0][0].axes(size, cp):
                examples, left = divmod(self.batch_size, number * sizes.along(DATA_AXES))
                if not left and examples:
                    how = Microbatch(examples, number, self.example_bytes, remat)
                    costs[sizes] = [self._costs(chips, sizes, how) for chips, _ in placed]
            for sizes in undominated(costs):
                found += [
                    Option(Label(chips.name, sizes, -(-size // chips.host)), starts, number, each)
                    for (chips, starts), each in zip(placed, costs[sizes], strict=True)
                ]
        return found

    def submesh(self, option: Option) -> Submesh:
        """Return the costs of a submesh for [first layer, end of layers]."""
        # 1. the kind of each stage, its number of layers, and their relative cost
        last, (first, end) = self.num_layers, np.ogrid[: self.num_layers + 1, : self.num_layers + 1]
        kind, layers = (first == 0) + 2 * (end == last), np.clip(end - first, 0, last)
        passed = np.concatenate([[0.0], np.cumsum(self.layer_costs or (1.0,) * last)])
        work = np.maximum(passed[None, :] - passed[:, None], 0.0)

        # 2. seconds, and the stages that memory allows
        (label, starts, number, costs), grid = option, np.arange(last + 1)
        of_kinds = [np.interp(work, grid, costs.seconds[each]) for each in ENDS]
        seconds, in_flight = np.choose(kind, of_kinds), costs.in_flight[kind, layers]
        is_possible = (end > first) & (in_flight > 0)
        sends = (first > 0).astype(int) + (end < last)  # activations on, gradients back
        way_s = seconds + sends * costs.hop_s
        # sends delay each microbatch, because no more are in flight than there are stages
        rest_s = (number - 1) * way_s + costs.overhead_s[kind, layers]
        way_s, rest_s = (np.where(is_possible, each, np.inf) for each in (way_s, rest_s))
        most = np.where(in_flight >= number, last, in_flight)
        return Submesh(label, label.sizes.num_devices, starts, way_s, rest_s, most)

    def _costs(self, chips: Chips, sizes: MeshSizes, microbatch: Microbatch) -> Costs:
        division, remat = sizes.only(STAGE_AXES), microbatch.remat
        model, machine = chips.models(division, 0), chips.machine
        layout = PlannedLayout(sizes, 1, 1)
        how = machine, self.gather, self.unroll, chips.adds
        step = Step(model.work, model.params, layout, microbatch, *how)
        over, examples = machine.over(sizes.by_axis), microbatch.examples
        links = tuple(over[axis] for axis in STAGE_AXES)
        gathers = (sizes.fsdp, over["fsdp"]) if self.gather == "layer" else ()
        key = (id(chips), division, examples, remat, links, gathers)
        if key not in self.memo:
            self.memo[key] = self._seconds(step), self._temporaries(step)
        seconds, temporaries = self.memo[key]
        if (key := (id(chips), sizes)) not in self.memo:
            self.memo[key] = self._overhead_s(step, model)
        many = self.num_devices > (machine.host_devices or self.num_devices)
        link = machine.network if many and machine.network is not None else machine.link
        hop_s = np.array([link.hop_s(examples * model.work.x_bytes)])
        in_flight = self._in_flight(step, model, temporaries, self.room * chips.room_bytes)
        return Costs(seconds, self.memo[key], in_flight, hop_s)

    def _seconds(self, step: Step) -> np.ndarray:
        """Return the seconds of a microbatch in a stage, forward and backward."""
        counts, keeps = range(self.num_layers + 1), step.microbatch.remat.keeps_input_only
        found = np.zeros((4, self.num_layers + 1))
        for are_unrolled, numbers in groupby(counts, lambda n: n <= step.unroll):
            most = 1 if are_unrolled else self.num_layers
            times, layers = op_times(step.with_layers(most, most)), [*numbers]

            def sums(*sizes: int, times: Any = times) -> np.ndarray:
                costs = costs_of_stages(times, sizes, keeps_input=keeps)
                each = costs.forward_s, costs.input_grad_s, costs.weight_grad_s
                return np.array(each).sum(0)

            middle = sums(1, *layers, 1)[1:-1]
            embedding = sums(1, 1, 1)[0] - sums(1, 1, 1)[1]
            last = np.array([sums(1, n)[1] for n in layers])
            found[:, layers] = [middle, middle + embedding, last, last + embedding]
        return found

    def _temporaries(self, step: Step) -> np.ndarray:
        of, counts = layer_bytes(step, [RankShare()] * 2).temporaries, range(self.num_layers + 1)
        assert of is not None, "shares of embedding and head are given"
        middle, last = (
            [max(of(kind, n, has_head=has_head) for kind in "FB") for n in counts]
            for has_head in (False, True)
        )
        return np.array([middle, middle, last, last], float)

    def _overhead_s(self, step: Step, model: DeviceModel) -> np.ndarray:
        """Return the per-step overhead; between powers of two of layers it is interpolated."""
        embed, head = self._shares(model)
        counts = sorted({*(2**n for n in range(12) if 2**n < self.num_layers), self.num_layers})
        found = []
        for kind in ENDS:
            ends = [*[embed] * (kind & 1), *[head] * (kind >> 1)]
            size, trained = (
                sum(getattr(share, name) for share in ends)
                for name in ("embed_head", "trained_embed_head")
            )
            whole = model.params.embed_head or 1
            own = tuple((a, n, round(m * size / whole)) for a, n, m in model.params.own)
            frozen = round(size - trained)
            params = replace(
                model.params, embed_head=round(size), frozen_embed_head=frozen, own=own
            )
            of_kind = replace(step, params=params)
            each = [overhead_s(of_kind.with_layers(n, n)) for n in counts]
            found.append(np.interp(np.arange(self.num_layers + 1), counts, each))
        return np.array(found)

    def _in_flight(
        self, step: Step, model: DeviceModel, temporaries: np.ndarray, room_bytes: float
    ) -> np.ndarray:
        """Return the number of microbatches whose activations fit, 0 if none does."""
        examples = step.microbatch.examples * step.microbatch.number
        shares = [
            replace(share, over=step.layout.mesh.fsdp, batch=share.batch * examples)
            for share in self._shares(model)
        ]
        sizes, counts = layer_bytes(step, shares), np.arange(self.num_layers + 1)
        held = [(kind & 1) * sizes.embed + (kind >> 1) * sizes.head for kind in ENDS]
        held = np.array(held)[:, None] + counts * (sizes.layer + sizes.padded) + sizes.rank
        stash = np.maximum(counts * sizes.stash + sizes.stage_stash, 1e-9)
        fitting = np.floor((room_bytes - held - temporaries) / stash)
        return np.clip(fitting, 0, step.microbatch.number).astype(int)

    def _shares(self, model: DeviceModel) -> list[RankShare]:
        """Return the undivided embedding and head, with the batch of one example."""
        if (key := id(model)) not in self.memo:
            counted = model.counted
            embed_head, batch = counted.held["embed_head"], counted.microbatch
            trained = trained_part(embed_head, counted.stack.trains("embed_head"))
            self.memo[key] = [
                RankShare(
                    embed_head=tree_bytes(keep(embed_head, use)),
                    trained_embed_head=tree_bytes(keep(trained, use)),
                    batch=tree_bytes(batch[name]),
                )
                for use, name in zip(counted.outer.uses, ("inputs", "targets"), strict=True)
            ]
        return self.memo[key]


def undominated(options: Mapping[MeshSizes, Sequence[Costs]]) -> Iterator[MeshSizes]:
    """Yield the options that no other one equals or surpasses in each cost of each stage."""
    rows, kept = dict[MeshSizes, np.ndarray](), list[np.ndarray]()
    for sizes, chips in options.items():
        each = [c.ravel() for s, o, n, hop in chips for c in (s, o, -1.0 * n, hop)]
        rows[sizes] = np.concatenate(each)
    for sizes in sorted(rows, key=lambda each: rows[each].sum()):
        if not any((other <= rows[sizes]).all() for other in kept):
            kept.append(rows[sizes])
            yield sizes


def by_axes(options: Sequence[Option]) -> Iterator[list[Option]]:
    """Yield the submeshes of equal axes, placed as equal ranks are: one after the other."""
    alike = dict[MeshSizes, list[Option]]()
    for each in options:
        starts = tuple(s for s in each.starts if s % each.label.sizes.num_devices == 0)
        if starts:
            alike.setdefault(each.label.sizes, []).append(each._replace(starts=starts))
    yield from alike.values()
