"""Partitions: the layers of each stage. Standard library only.

Each middle stage has at least one layer. The first stage, which embeds, and the last, which
computes the loss, may have none.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from numbers import Integral

from ppctl.errors import ConfigError, setting
from ppctl.schedule.engine_traits import rank_sums

Partition = tuple[range, ...]
LETTERS = "E embedding, t layer, L loss, | next stage"  # legend of Megatron-LM's layout text
MAX_LETTERS = 100_000  # maximum letters of an expanded layout text; more is a typing error

_TERM = re.compile(r"\((?P<group>[^()]+)\)\*(?P<times>\d+)|(?P<letter>[EtmL|])(\*(?P<repeat>\d+))?")


def least_layers(num_stages: int) -> list[int]:
    """Return the minimum number of layers of each stage.

    >>> least_layers(4)
    [0, 1, 1, 0]
    """
    return [min(1, s, num_stages - 1 - s) for s in range(num_stages)]


def _layers(number: int) -> str:
    return setting("model.num_layers", number)


def uniform(num_layers: int, num_stages: int) -> Partition:
    """Return contiguous layers for each stage; sizes differ by at most 1, larger ones first.

    >>> [len(layers) for layers in uniform(10, 4)]
    [3, 3, 2, 2]
    """
    if num_layers < num_stages:
        by_hand, inner = "", num_stages - 2
        if 0 < inner <= num_layers:
            layers = [0, *map(len, uniform(num_layers, inner)), 0]
            settings = f"explicit partition.layers={layers}".replace(", ", ",")
            by_hand = f", or {setting('partition', settings, f'partition={layers}')}"
        raise ConfigError(
            f"{_layers(num_layers)} is less than the number of stages, pp*num_chunks = "
            f"{num_stages}: a stage would be empty. Use {_layers(num_stages)} or more, fewer ranks "
            f"or chunks{by_hand}."
        )
    size, extra = divmod(num_layers, num_stages)
    return _of_sizes([size + (s < extra) for s in range(num_stages)])


def stage_costs(
    partition: Partition, *, embed: float, head: float, layers: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return the cost of each stage, in layers; embed and head add to the first and the last.

    layers: the cost of each layer relative to their mean; None: 1.

    >>> stage_costs(uniform(4, 2), embed=0.0, head=1.5)
    (2.0, 3.5)
    """
    costs = [float(len(n)) if layers is None else sum(layers[l] for l in n) for n in partition]
    costs[0] += embed
    costs[-1] += head
    return tuple(costs)


def balanced(num_layers: int, rank_of: Sequence[int], *, embed: float, head: float) -> Partition:
    """Return contiguous layers for each stage that minimize the largest of `stage_costs`.

    rank_of: the rank of each stage. Ties: the least largest sum over a rank's stages, then costs as
    equal as possible, then larger stages first, or last if ranks hold several. The largest cost is
    minimal. Proof, and distance from the fastest partition: docs/derivations.md, "Balanced
    partitions of equal layers".

    >>> [len(layers) for layers in balanced(10, (0, 1, 2, 3), embed=0.0, head=1.6)]
    [3, 3, 3, 1]
    """
    num_stages, least = len(rank_of), least_layers(len(rank_of))
    if num_layers < sum(least):
        raise ConfigError(
            f"{_layers(num_layers)} is less than the number of stages between the first and the "
            f"last, pp*num_chunks-2 = {sum(least)}: stage {num_layers + 1} would be empty. Use "
            f"{_layers(sum(least))} or more, fewer ranks or fewer chunks."
        )
    # 1. maximum number of layers of each stage, then of each rank, under the least largest cost
    ends = stage_costs((range(0),) * num_stages, embed=embed, head=head)
    most = _most(num_layers, ends, least, [num_layers] * num_stages)
    rank_ends, rank_sizes = rank_sums(ends, rank_of), rank_sums(least, rank_of)
    rank_most = _most(num_layers, rank_ends, rank_sizes, rank_sums(most, rank_of))
    # 2. give each further layer to the cheapest stage with room
    sizes, direction = list(least), 1 if len(rank_most) == num_stages else -1
    for _ in range(num_layers - sum(least)):
        has_room = [rank_sizes[rank] < rank_most[rank] for rank in rank_of]
        options = (s for s in range(num_stages) if sizes[s] < most[s] and has_room[s])
        stage = min(options, key=lambda s: (sizes[s] + ends[s], direction * s))
        sizes[stage] += 1
        rank_sizes[rank_of[stage]] += 1
    return _of_sizes(sizes)


def _most(
    num_layers: int, ends: Sequence[float], least: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Return the maximum size of each part under the least cap that lets the parts hold num_layers.

    The cap is on a part's size plus its fixed cost in `ends`, in layers. least, most: minimum and
    maximum size of each part.
    """

    def under(cap: float) -> list[int]:
        return [min(limit, _layers_under(cap, end)) for limit, end in zip(most, ends, strict=True)]

    def has_room(cap: float) -> bool:
        sizes = under(cap)
        return sum(sizes) >= num_layers and all(
            n >= low for n, low in zip(sizes, least, strict=True)
        )

    caps = sorted({n + end for end in set(ends) for n in range(num_layers + 1)})
    return under(caps[bisect_left(caps, True, key=has_room)])


def _layers_under(cap: float, end: float) -> int:
    """Return the largest n with n + end <= cap in float arithmetic; negative if end > cap."""
    n = math.floor(cap - end) + 1
    while n + end > cap:
        n -= 1
    return n


def explicit(num_layers: int, num_stages: int, layers: Sequence[int] | str) -> Partition:
    """Return the partition in `layers`: a number for each stage, or Megatron-LM's layout text.

    In the text, | separates stages, E is the embedding, t a layer, L the loss; x*n repeats a
    letter, (...)*n a group; commas and blanks are ignored. Source: Megatron-LM,
    --pipeline-model-parallel-layout. ConfigError, with the stage, for a wrong number of layers, an
    empty middle stage, or a misplaced E or L.

    >>> [len(stage) for stage in explicit(16, 8, "Et*3|(tt|)*6,tL")]
    [3, 2, 2, 2, 2, 2, 2, 1]
    """
    # 1. the part of `layers` for each stage, a text or a number
    given = layers if isinstance(layers, str) else list(layers)
    shown = setting("partition.layers", given, f"partition={given}")
    stages = _written_out(layers, shown).split("|") if isinstance(layers, str) else layers
    last = num_stages - 1
    if len(stages) != num_stages:
        raise ConfigError(
            f"{shown} is for {len(stages)} stages, but pp*num_chunks = {num_stages}. Give a number "
            f"(in text, a part between |) for each stage, or change {setting('mesh.pp')} or "
            f"{setting('schedule.num_chunks')}."
        )
    # 2. the number of layers of each stage
    counts = [_count(n, s, last, shown) if isinstance(n, str) else n for s, n in enumerate(stages)]
    for s, n in enumerate(counts):
        if not isinstance(n, Integral):
            raise ConfigError(f"{shown}: stage {s} has {n} layers, which is not a whole number.")
    for s, n in enumerate(counts):
        if n < min(1, s, last - s):
            raise ConfigError(
                f"{shown}: stage {s} has {n} layers. Give it 1 or more: only the first stage (0), "
                f"which embeds, and the last ({last}), which computes the loss, can do without."
            )
    if sum(counts) != num_layers:
        spelled = f"{'+'.join(map(str, counts))} = {sum(counts)} layers"
        raise ConfigError(
            f"{shown} has {spelled} in stages 0 to {last}, but {_layers(num_layers)}. Use "
            f"{_layers(sum(counts))}, or give the stages {num_layers}."
        )
    return _of_sizes(counts)


def layout_text(sizes: Sequence[int]) -> str:
    """Return the shortest Megatron-LM layout text of these sizes; `explicit` reads it.

    >>> layout_text([3, 2, 2, 2, 2, 2, 2, 1]), layout_text([4])
    ('Et*3|(tt|)*6tL', 'Et*4L')
    """
    layers = [min(f"t*{n}", "t" * n, key=len) for n in sizes]
    first, last = f"E{layers[0]}", f"{layers[-1]}L"
    if len(layers) == 1:
        return f"{first}L"
    middle = ""
    for layer, alike in groupby(layers[1:-1]):
        number = len(list(alike))
        middle += min(f"{layer}|" * number, f"({layer}|)*{number}", key=len)
    return f"{first}|{middle}{last}"


def stages_text(sizes: Sequence[int], vocab_parts: int = 0) -> str:
    """Return the stages' sizes as text: one number if equal, else Megatron-LM's layout text.

    vocab_parts: number of vocabulary parts. 0: the vocabulary is whole; else E and L are left out.

    >>> stages_text([4, 4]), stages_text([3, 2, 1])
    ('2 of 4 layers each', 'Et*3|tt|tL (E embedding, t layer, L loss, | next stage)')
    >>> stages_text([3, 2, 1], vocab_parts=3)
    't*3|tt|t (t layer, | next stage)'
    """
    if len(set(sizes)) == 1:
        many = f"{sizes[0]} layer" + "s" * (sizes[0] != 1)
        return f"{len(sizes)} of {many} each" if len(sizes) > 1 else f"1 of {many}"
    text = layout_text(sizes)
    return f"{text[1:-1]} (t layer, | next stage)" if vocab_parts else f"{text} ({LETTERS})"


def ranks_text(rank_of: Sequence[int]) -> str:
    """Return the rank of each stage as text, with consecutive ranks, up or down, as a range.

    >>> ranks_text([0, 1, 2, 3, 0, 1, 2, 3]), ranks_text([0, 1, 2, 2, 1, 0]), ranks_text([0])
    ('0-3 0-3', '0-2 2-0', '0')
    """
    runs: list[list[int]] = []
    for rank in rank_of:
        run = runs[-1] if runs else []
        step = rank - run[-1] if run else 0
        if abs(step) == 1 and (len(run) == 1 or step == run[-1] - run[-2]):
            run.append(rank)
        else:
            runs.append([rank])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _written_out(text: str, shown: str) -> str:
    """Return a layout text with repetitions expanded, without commas and blanks."""
    text, at, written = re.sub(r"[,\s]", "", text), 0, ""
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None:
            raise ConfigError(
                f"{shown} cannot be read from {text[at:]!r} on. Write E, t and L for embedding, "
                "layer and loss, | between stages, x*n for n times a letter, (...)*n for a group "
                "without groups in it: Et*3|(tt|)*6,tL; or a list of the layers of each stage: "
                "[3,2,2,3]."
            )
        once = term["letter"] or _written_out(term["group"], shown)
        times = int(term["repeat"] or term["times"] or 1)
        if len(written) + len(once) * times > MAX_LETTERS:
            what = f"{term[0]} makes it more than {MAX_LETTERS:,} letters"
            raise ConfigError(f"{shown}: {what}. Use a smaller number.")
        written += once * times
        at = term.end()
    return written


def _count(stage: str, s: int, last: int, shown: str) -> int:
    """Return the number of layers in a stage's text. ConfigError for misplaced or other letters."""
    starts, ends = "E" * (s == 0), "L" * (s == last)
    if re.fullmatch(f"{starts}t*{ends}", stage) is None:
        needs = ["start with E (embedding)"] * (s == 0) + ["end with L (loss)"] * (s == last)
        which = "the first" if s == 0 else "the last" if s == last else "a middle"
        must = " and ".join(needs) or "hold neither E nor L"
        raise ConfigError(
            f"{shown}: stage {s} is {stage!r}, but {which} stage must {must}, and all other "
            f"letters must be t (a layer). Write it {starts}{'t' * stage.count('t')}{ends}."
        )
    return stage.count("t")


def partition_of(bounds: Iterable[int]) -> Partition:
    """Return the partition with these bounds: the first layer of each stage, then the end.

    >>> partition_of([0, 3, 4])
    (range(0, 3), range(3, 4))
    """
    return tuple(range(low, high) for low, high in pairwise(bounds))


def _of_sizes(sizes: Sequence[int]) -> Partition:
    return partition_of(accumulate(sizes, initial=0))
