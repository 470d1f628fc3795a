"""Mesh axes by role, sizes of meshes and their texts, and checks of sizes that axes divide."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, make_dataclass
from itertools import groupby
from math import gcd, lcm, prod
from typing import Any, Self

from ppctl.errors import ConfigError, setting
from ppctl.schedule.axis_table import MESH_AXES, Divided


def axes_dividing(*parts: Divided) -> tuple[str, ...]:
    """Return the names of the axes that divide any of `parts`.

    >>> axes_dividing("batch"), axes_dividing("weights", "experts")
    (('dp', 'fsdp', 'ep'), ('ep', 'tp'))
    """
    return tuple(axis.name for axis in MESH_AXES if set(parts) & set(axis.divides))


AXES = tuple(axis.name for axis in MESH_AXES)
DATA_AXES = axes_dividing("batch")
RANK_AXES = tuple(name for name in AXES if name not in axes_dividing("stages"))
STAGE_AXES = tuple(axis.name for axis in MESH_AXES if axis.in_stage)
SHARD_AXES = axes_dividing("weights", "experts")  # axes that a model's sharding may name
TEXT_AXES = tuple(axis.name for axis in MESH_AXES if axis.in_mesh_text)
# axes with copies of most parameters: gradients are summed over them
COPY_AXES = tuple(name for name in RANK_AXES if name not in axes_dividing("parameters", "weights"))


def in_hosts_order(*, in_stage: bool) -> tuple[str, ...]:
    """Return the axes inside a stage, or the others, from the slowest links to the fastest.

    >>> in_hosts_order(in_stage=False), in_hosts_order(in_stage=True)
    (('pp', 'dp', 'fsdp'), ('ep', 'cp', 'tp'))
    """
    axes = (axis for axis in MESH_AXES if axis.in_stage == in_stage)
    return tuple(axis.name for axis in sorted(axes, key=lambda axis: axis.hosts_place))


def axes_record(
    axes: Collection[str] = AXES,
    kind: Any = int,
    default: Any = 1,
    about: str = "{about}",
    *,
    is_frozen: bool = False,
) -> Any:
    """Return a base dataclass with a field for each of these axes.

    kind, default: type and default of each field. about: help text, a format string that may use
    the fields of `Axis`.
    """
    fields = [
        (axis.name, kind, field(default=default, metadata={"about": about.format(**vars(axis))}))
        for axis in MESH_AXES
        if axis.name in axes
    ]
    return make_dataclass("AxesRecord", fields, frozen=is_frozen)


class MeshSizes(axes_record(is_frozen=True)):
    """The number of devices along each axis."""

    @classmethod
    def of(cls, sizes: Mapping[str, Any]) -> Self:
        """Return the sizes in a mapping. Other keys are ignored; missing axes have size 1.

        >>> MeshSizes.of({"pp": 4, "order": "auto"})
        MeshSizes(dp=1, pp=4, fsdp=1, ep=1, tp=1, cp=1)
        """
        return cls(**{name: size for name, size in sizes.items() if name in AXES})

    @property
    def by_axis(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in AXES}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.by_axis.values())

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    def along(self, axes: Iterable[str]) -> int:
        """Return the number of devices along `axes` together.

        >>> MeshSizes(2, 4, 2).along(DATA_AXES)
        4
        """
        return prod(getattr(self, name) for name in axes)

    def only(self, axes: Iterable[str]) -> Self:
        """Return these sizes along `axes`, and 1 along all others."""
        return MeshSizes(**{name: getattr(self, name) for name in axes})

    def shown(self, axes: Iterable[str] = AXES) -> dict[str, int]:
        """Return the sizes by axis; axes inside a stage are left out if 1.

        >>> MeshSizes(2, 4).shown(), MeshSizes(2, 4, tp=2).shown(DATA_AXES)
        ({'dp': 2, 'pp': 4, 'fsdp': 1}, {'dp': 2, 'fsdp': 1})
        """
        return shown_sizes({name: getattr(self, name) for name in axes})


def data_size(ranks: Iterable[MeshSizes]) -> int:
    """Return the least number of examples that the data axes of each rank divide.

    >>> data_size([MeshSizes(dp=2, tp=2), MeshSizes(fsdp=3)])
    6
    """
    return lcm(*(sizes.along(DATA_AXES) for sizes in ranks))


def rank_sizes(entries: Sequence[Mapping[str, Any]]) -> tuple[MeshSizes, ...]:
    """Return the sizes of each rank from the entries of mesh.ranks. ConfigError for wrong numbers.

    >>> [sizes.tp for sizes in rank_sizes([{"tp": 4}, {"ranks": "1-2", "tp": 2}])]
    [4, 2, 2]
    """
    found: list[MeshSizes] = []
    for number, entry in enumerate(entries):
        stated = entry.get("ranks") or str(len(found))
        first, _, last = stated.partition("-")
        is_range = first.isdigit() and (last or first).isdigit()
        if not is_range or int(first) != len(found) or int(last or first) < int(first):
            what = f"mesh.ranks[{number}].ranks={stated} is not the next ranks"
            raise ConfigError(f"{what}. Write {len(found)}-LAST, or leave it out for one rank.")
        found += [MeshSizes.of(entry)] * (int(last or first) - int(first) + 1)
    return tuple(found)


def equal_runs(ranks: Sequence[MeshSizes]) -> list[tuple[str, MeshSizes]]:
    """Return (numbers, sizes) of each run of ranks of equal sizes.

    >>> [numbers for numbers, _ in equal_runs([MeshSizes(tp=2), MeshSizes(), MeshSizes()])]
    ['0', '1-2']
    """
    found, first = list[tuple[str, MeshSizes]](), 0
    for sizes, run in groupby(ranks):
        last = first + len([*run]) - 1
        found.append((f"{first}" if first == last else f"{first}-{last}", sizes))
        first = last + 1
    return found


def ranks_text(ranks: Sequence[MeshSizes]) -> str:
    """Return the sizes of each rank as typed after `mesh.ranks=`.

    >>> ranks_text([MeshSizes(fsdp=4), MeshSizes(tp=2), MeshSizes(tp=2)])
    '[{fsdp:4},{ranks:1-2,tp:2}]'
    """
    texts = list[str]()
    for numbers, sizes in equal_runs(ranks):
        axes = {name: n for name, n in sizes.by_axis.items() if n > 1}
        entry = ({"ranks": numbers} if "-" in numbers else {}) | (axes or {"dp": 1})
        texts.append(",".join(f"{name}:{n}" for name, n in entry.items()))
    return f"[{{{'},{'.join(texts)}}}]"


def shown_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in the order of AXES; axes inside a stage are left out if 1."""
    return {
        name: sizes[name]
        for name in AXES
        if name in sizes and (name not in STAGE_AXES or sizes[name] != 1)
    }


def axes_text(sizes: Mapping[str, Any]) -> str:
    """Return the axes with their sizes as text; axes inside a stage are left out if 1.

    >>> axes_text({"dp": 2, "pp": 4, "fsdp": 1, "tp": 2, "cp": 1})
    'dp=2 pp=4 fsdp=1 tp=2'
    """
    if sizes.get("ranks"):
        runs = equal_runs(rank_sizes(sizes["ranks"]))
        each = (
            f"rank{'s' if '-' in n else ''} {n}: {axes_text(of.shown(RANK_AXES))}" for n, of in runs
        )
        return ", ".join(each)
    return " ".join(f"{name}={size}" for name, size in shown_sizes(sizes).items())


def mesh_text(sizes: Mapping[str, Any]) -> str:
    """Return the sizes as typed after `mesh=`: by position, then other axes by name.

    >>> mesh_text({"dp": 2, "pp": 4, "fsdp": 1}), mesh_text({"dp": 2, "pp": 4, "fsdp": 1, "tp": 2})
    ('2x4', '2x4x1x1x2')
    """
    if sizes.get("ranks"):
        return ranks_text(rank_sizes(sizes["ranks"]))
    named = [f"mesh.{name}={n}" for name, n in shown_sizes(sizes).items() if name not in TEXT_AXES]
    return " ".join(["x".join(map(str, positional(sizes))), *named])


def positional(sizes: Mapping[str, Any]) -> list[Any]:
    """Return the sizes of `mesh=AxBxC`, at least two, without trailing 1s."""
    placed = [sizes.get(name, 1) for name in TEXT_AXES]
    used = max((i for i, size in enumerate(placed) if size != 1 or i < 2), default=0)
    return placed[: used + 1]


def product_text(factors: Mapping[str, int]) -> str:
    """Return a product of named factors as text: names, sizes, result.

    >>> product_text({"dp": 2, "pp": 4})
    'dp*pp = 2*4 = 8'
    """
    texts = dict.fromkeys(["*".join(map(str, factors.values())), str(prod(factors.values()))])
    return " = ".join(["*".join(factors), *texts])


def check_batch(batch_size: int, num_microbatches: int, ranks: Sequence[MeshSizes]) -> None:
    """Raise ConfigError for a batch that microbatches and the data axes of ranks do not divide."""
    factors = {setting("schedule.num_microbatches"): num_microbatches}
    if len(set(ranks)) == 1:
        sizes = ranks[0].shown(DATA_AXES)
        factors |= {setting(f"mesh.{axis}"): size for axis, size in sizes.items()}
    else:
        each = sorted({sizes.along(DATA_AXES) for sizes in ranks})
        product = "*".join(DATA_AXES)
        factors[f"lcm({', '.join(map(str, each))}), of {product} of the ranks,"] = data_size(ranks)
    number, left = divmod(batch_size, pieces := prod(factors.values()))
    if left or not number:
        fitting = " or ".join(str(n * pieces) for n in (number, number + 1) if n)
        raise ConfigError(
            f"{setting('data.batch_size', batch_size, f'batch size {batch_size}')} is not a "
            f"multiple of {product_text(factors)}. Use "
            f"{setting('data.batch_size', fitting, fitting)}, or fewer microbatches."
        )


def check_unequal(
    ranks: Sequence[MeshSizes], executor: str, vocab: str, *, dispatches_tasks: bool
) -> None:
    """Raise ConfigError if ranks of unequal sizes cannot form a pipeline.

    executor, vocab: names, for messages and rules. dispatches_tasks: as in `EngineTraits`.
    """
    if len(set(ranks)) == 1:
        return
    sizes, equal = setting("mesh.ranks", ranks_text(ranks)), "or ranks of equal sizes"
    if not dispatches_tasks:
        raise ConfigError(
            f"executor={executor} is one program for equal ranks, but {sizes} has ranks of other "
            f"sizes. Use executor=mpmd, {equal}."
        )
    if len({each.cp for each in ranks}) > 1:
        raise ConfigError(
            f"{sizes} has ranks of other cp, but a device keeps its pieces of the sequences from "
            "rank to rank. Use the same cp on all ranks."
        )
    if vocab == "parallel":
        raise ConfigError(
            f"{setting('schedule.vocab', vocab)} divides embedding and head into equal parts, but "
            f"{sizes} has ranks of other sizes. Use {setting('schedule.vocab', 'whole')}, {equal}."
        )


def check_widths(tp: int, num_heads: int, num_kv_heads: int, hidden: Mapping[str, int]) -> None:
    """Raise ConfigError if tp does not divide heads or MLP widths. hidden: the widths, by name."""
    widths = {setting("model.num_heads"): num_heads, **hidden}
    for name, size in widths.items():
        if size % tp:
            divisors = (n for n in range(2, tp) if all(w % n == 0 for w in widths.values()))
            fitting = ", ".join(map(str, divisors))
            raise ConfigError(
                f"{name}={size} is not a multiple of {setting('mesh.tp', tp)}: each device "
                "holds whole heads and equally many columns. Use "
                f"{setting('mesh.tp', fitting or 1)}, or other sizes of the model."
            )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"{setting('model.num_kv_heads', num_kv_heads)} and {setting('mesh.tp', tp)}: devices "
            f"would share heads unevenly. Use a {setting('mesh.tp')} that divides the heads, or a "
            "multiple of them."
        )


def check_experts(num_experts: int | None, ep: int, tp: int, *, divides_rows: bool) -> None:
    """Raise ConfigError for experts that ep and tp do not divide.

    num_experts: None for a model without experts. divides_rows: whether rows of activations are
    sharded along tp.
    """
    if num_experts is None:
        if ep > 1:
            raise ConfigError(
                f"{setting('mesh.ep', ep)} divides experts, and the model has no experts. Use "
                f"{setting('mesh.dp')} for replicas, or set {setting('model.moe.num_experts')}."
            )
        return
    if num_experts % (ep * tp):
        sizes = {"mesh.ep": ep, "mesh.tp": tp}
        factors = {setting(name): size for name, size in sizes.items() if size > 1}
        fitting = [n for n in range(1, ep + 1) if num_experts % (n * tp) == 0]
        name, size = ("mesh.ep", fitting[-1]) if fitting else ("mesh.tp", gcd(num_experts, tp))
        raise ConfigError(
            f"{setting('model.moe.num_experts', num_experts)} is not a multiple of "
            f"{product_text(factors)}: each device holds equally many experts. Use "
            f"{setting(name, size)}, or another number of experts."
        )
    if tp > 1 and not divides_rows:
        raise ConfigError(
            f"experts with {setting('mesh.tp', tp)} need the rows of tokens sharded, but "
            f"{setting('executor.sequence_parallel', 'false')} keeps them whole. Use "
            f"{setting('executor.sequence_parallel', 'true')}, or {setting('mesh.tp', 1)}."
        )


def check_sequences(cp: int, num_tokens: int) -> None:
    """Raise ConfigError for sequences too short for cp, which divides each into 2*cp pieces."""
    if cp > 1 and num_tokens < 2 * cp:
        raise ConfigError(
            f"a sequence's {num_tokens} tokens are fewer than the 2*{setting('mesh.cp')} = 2*{cp} "
            f"= {2 * cp} pieces that {setting('mesh.cp', cp)} divides it into. Use "
            f"{setting('mesh.cp', max(1, num_tokens // 2))} at most, or longer sequences."
        )
