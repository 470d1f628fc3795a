"""Placements of stages on ranks, and rank programs in the notation of the papers."""

from collections import Counter

from ppctl.schedule.ir import Task


def loop(num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Return each stage's rank in a loop: stage s on rank s mod p (arXiv 2104.04473, section 2.2).

    >>> loop(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % num_ranks for s in range(num_ranks * num_chunks))


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """Return each stage's rank in a V: stage s on rank min(s, 2p-1-s) (arXiv 2405.15362).

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return waves(num_ranks, 1)


def waves(num_ranks: int, num_waves: int) -> tuple[int, ...]:
    """Return each stage's rank in num_waves waves down the ranks and back up (arXiv 2308.15762).

    >>> waves(2, 2)
    (0, 1, 1, 0, 0, 1, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks))) * num_waves


class RankProgram:
    """Builder of a rank's program in a V placement, where each rank has two stages.

    down, up: index of the rank's stage on the way down the ranks, and on the way back up.

    >>> program = RankProgram(down=0, up=3)
    >>> program.add(2, "F down")
    >>> program.add(1, "F up", "I up")
    >>> [str(task) for task in program.tasks]
    ['0F0', '0F1', '3F0', '3I0']
    """

    def __init__(self, down: int, up: int) -> None:
        self.stage = {"down": down, "up": up}
        self.count: Counter[str] = Counter()  # tasks by kind and way; a B counts as an I and a W
        self.pending: list[str] = []  # way of each I without its W so far, oldest first
        self.tasks: list[Task] = []

    def add(self, times: int, *steps: str) -> None:
        """Append `steps`, such as "F down", `times` times; each step takes its next microbatch.

        A step is a kind and a way. "W" without a way is the weight gradient of the oldest I whose W
        has not been added.
        """
        for _ in range(times):
            for step in steps:
                kind, _, way = step.partition(" ")
                way = way or self.pending[0]
                if kind == "I":
                    self.pending.append(way)
                if kind == "W":
                    self.pending.remove(way)
                counted = ("I", "W") if kind == "B" else (kind,)
                microbatch = self.count[f"{counted[0]} {way}"]
                self.tasks.append(Task(self.stage[way], kind, microbatch))  # type: ignore[arg-type]
                self.count.update(f"{one} {way}" for one in counted)
