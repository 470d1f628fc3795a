"""The axes of a mesh that go over hosts: for layouts and plans, with the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

# From the slowest links to the fastest. Ranks exchange little, so pp goes over hosts first; dp sums
# gradients once a step; fsdp gathers parameters, the most bytes.
AUTO_ORDER = "pp-dp-fsdp"
INSIDE = ("cp", "tp")  # axes that send in every layer of every microbatch: last in any order


def axes_in(order: str) -> tuple[str, ...]:
    """Return the axes of mesh.order, that which goes over hosts first at the head.

    >>> axes_in("auto"), axes_in("dp-pp-fsdp")
    (('pp', 'dp', 'fsdp', 'cp', 'tp'), ('dp', 'pp', 'fsdp', 'cp', 'tp'))
    """
    return (*(AUTO_ORDER if order == "auto" else order).split("-"), *INSIDE)


def over_hosts(sizes: Mapping[str, int], order: str, num_hosts: int) -> dict[str, int]:
    """Return the number of hosts of each axis; each goes as far as it can before the next.

    The product is `num_hosts` if hosts have equally many devices and all take part.

    >>> over_hosts({"dp": 2, "pp": 4, "fsdp": 8}, "auto", num_hosts=8)
    {'pp': 4, 'dp': 2, 'fsdp': 1, 'cp': 1, 'tp': 1}
    """
    over, left = {}, num_hosts
    for axis in axes_in(order):
        over[axis] = gcd(sizes.get(axis, 1), left)
        left //= over[axis]
    return over
