"""The axes of a mesh that go over hosts: for layouts and plans, with the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from ppctl.schedule.mesh_axes import in_hosts_order


def axes_in(order: str) -> tuple[str, ...]:
    """Return the axes of mesh.order, that which goes over hosts first at the head.

    Those inside a stage come last in any order.

    >>> axes_in("auto"), axes_in("dp-pp-fsdp")
    (('pp', 'dp', 'fsdp', 'cp', 'tp'), ('dp', 'pp', 'fsdp', 'cp', 'tp'))
    """
    outer = in_hosts_order(in_stage=False) if order == "auto" else order.split("-")
    return (*outer, *in_hosts_order(in_stage=True))


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
