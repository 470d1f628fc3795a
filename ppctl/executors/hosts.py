"""Which axes of a mesh go over hosts. Standard library only: meshes are laid out by it, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

# From the slowest links to the fastest: what a pipeline hands on between ranks is small, so pp goes over hosts first;
# sums of gradients over dp come once a step; parameters gathered over fsdp are the most.
AUTO_ORDER = "pp-dp-fsdp"
INSIDE = ("cp", "tp")  # what they send goes with every layer of every microbatch: they come last, whatever the order


def axes_in(order: str) -> tuple[str, ...]:
    """Return the axes of mesh.order, that which goes over hosts first at the head.

    >>> axes_in("auto"), axes_in("dp-pp-fsdp")
    (('pp', 'dp', 'fsdp', 'cp', 'tp'), ('dp', 'pp', 'fsdp', 'cp', 'tp'))
    """
    return (*(AUTO_ORDER if order == "auto" else order).split("-"), *INSIDE)


def over_hosts(sizes: Mapping[str, int], order: str, num_hosts: int) -> dict[str, int]:
    """Return over how many hosts each axis goes, each as far as it can before the next one does.

    Where every host has as many devices and all take part, the product of these numbers is `num_hosts`.

    >>> over_hosts({"dp": 2, "pp": 4, "fsdp": 8}, "auto", num_hosts=8)
    {'pp': 4, 'dp': 2, 'fsdp': 1, 'cp': 1, 'tp': 1}
    """
    over, left = {}, num_hosts
    for axis in axes_in(order):
        over[axis] = gcd(sizes.get(axis, 1), left)
        left //= over[axis]
    return over
