"""Device meshes: attached devices laid out along the axes of `schedule.axis_table`."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from ppctl.errors import ConfigError, setting
from ppctl.launch import join_processes
from ppctl.schedule.axis_table import MESH_AXES
from ppctl.schedule.mesh_axes import AXES, MeshSizes, in_hosts_order, product_text


def on_cpu() -> str:
    """Return the text, for messages, of the setting that makes JAX start on the CPU."""
    return setting("run.platform", "cpu", "JAX_PLATFORMS=cpu")


def processes(mesh: Mesh) -> list[int]:
    """Return the process index of each device."""
    return [device.process_index for device in mesh.devices.flat]


def is_mine(mesh: Mesh) -> bool:
    """Return whether this process has a device of a mesh."""
    return jax.process_index() in processes(mesh)


def make_mesh(sizes: MeshSizes, order: str = "auto") -> Mesh:
    """Return a mesh of the first attached devices; several processes must use all their devices.

    order: as in `laid_out`. Raises ConfigError if there are too few devices, several processes have
    more devices than the mesh, hosts have different numbers of devices, an axis such as tp would
    span hosts, or JAX cannot start.
    """
    devices = taken(sizes.num_devices, f"mesh {product_text(sizes.shown())}")
    return mesh_of(laid_out(devices, sizes, order))


def taken(need: int, request: str) -> list[Any]:
    """Return the first `need` attached devices; request: their use, for messages. See `make_mesh`.

    Raises ConfigError.
    """
    devices = all_devices()
    kind, num_processes = devices[0].platform, jax.process_count()
    fitting = setting("mesh", f"1x{len(devices)}", f"ppctl.mesh(pp={len(devices)})")
    if num_processes > 1 and need != len(devices):
        raise ConfigError(
            f"{request} needs {need} devices, but {num_processes} processes have {len(devices)} "
            f"({kind}), and none may be left out. Use a mesh of {len(devices)}, such as "
            f"{fitting}, or another number of processes."
        )
    if need > len(devices):
        late = "call ppctl.mesh before JAX makes arrays, such as those of a Flax module"
        simulated = late if kind == "cpu" else f"{on_cpu()}, which simulates devices"
        raise ConfigError(
            f"{request} needs {need} devices, but there are {len(devices)} ({kind}). Use a "
            f"smaller mesh, such as {fitting}, or {simulated}."
        )
    return devices[:need]


def repeated_mesh(sizes: MeshSizes) -> Mesh:
    """Return a mesh that repeats one device, to compute shapes or run programs of one device."""
    devices = np.empty(sizes.shape, object)
    devices[:] = all_devices()[0]
    return mesh_of(devices)


def mesh_of(devices: np.ndarray) -> Mesh:
    """Return the mesh of an array of devices with the axes `AXES`."""
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def in_order(devices: Sequence[Any], rank: MeshSizes) -> np.ndarray:
    """Return the devices of a rank as an array with its axes, also of hosts that it shares.

    ConfigError as `laid_out`, or if an axis such as tp would span hosts.
    """
    counts = {len(group) for group in hosts_of(devices)}
    if len(counts) == 1:
        return laid_out(devices, rank)
    inner = {axis.name: rank.by_axis[axis.name] for axis in MESH_AXES if axis.in_one_host}
    if _kind(devices) != "processes" and any(number % prod(inner.values()) for number in counts):
        parts, axes = sorted(counts), product_text({k: n for k, n in inner.items() if n > 1})
        raise ConfigError(
            f"A rank would take {' and '.join(map(str, parts))} devices of {_kind(devices)}, but "
            f"{axes} devices must be in one. Use other sizes in {setting('mesh.ranks')}."
        )
    return _within(devices, rank.shape)


def laid_out(devices: Sequence[Any], mesh: MeshSizes, order: str = "auto") -> np.ndarray:
    """Return the devices as an array with the axes and sizes of a mesh.

    order: the axes, joined by "-", from the slowest links to the fastest; axes inside a stage come
    last. The first axis spans as many hosts (TPU slices) as its size allows, then the next. "auto":
    pp-dp-fsdp over several hosts; inside one host, the given order of GPUs, whose links are alike,
    and JAX's layout of TPUs.
    Raises ConfigError if hosts have different numbers of devices, or tp would span hosts.
    """
    groups, sizes, shape = hosts_of(devices), mesh.by_axis, mesh.shape
    if len(groups) == 1 and order == "auto":
        return _within(devices, shape)
    counts = sorted({len(group) for group in groups})
    if len(counts) > 1:
        raise ConfigError(
            f"{len(groups)} {_kind(devices)} of {counts[0]} to {counts[-1]} devices cannot form a "
            f"mesh of {shape}. Use the same number of devices on each, or run one process."
        )
    over = over_hosts(sizes, order, len(groups))
    axes = axes_in(order)
    if _kind(devices) != "processes":
        check_one_host(sizes, over, _kind(devices), counts[0])
    inner = [sizes[axis] // over[axis] for axis in axes]
    blocks = np.stack([_within(group, inner) for group in groups])
    # from [hosts along each axis..., devices in a host along each axis...]
    # to [hosts along dp, devices in a host along dp, hosts along pp, ...]
    whole = blocks.reshape([over[axis] for axis in axes] + inner)
    places = [place for axis in AXES for place in (axes.index(axis), len(axes) + axes.index(axis))]
    return whole.transpose(places).reshape(shape)


def axes_in(order: str) -> tuple[str, ...]:
    """Return the axes of mesh.order, from the slowest links to the fastest.

    Axes inside a stage come last in any order.

    >>> axes_in("auto"), axes_in("dp-pp-fsdp")
    (('pp', 'dp', 'fsdp', 'ep', 'cp', 'tp'), ('dp', 'pp', 'fsdp', 'ep', 'cp', 'tp'))
    """
    outer = in_hosts_order(in_stage=False) if order == "auto" else order.split("-")
    return (*outer, *in_hosts_order(in_stage=True))


def over_hosts(sizes: Mapping[str, int], order: str, num_hosts: int) -> dict[str, int]:
    """Return the number of hosts that each axis spans: the most possible, axis by axis.

    The product is `num_hosts` if all hosts have the same number of devices and all take part.

    >>> over_hosts({"dp": 2, "pp": 4, "fsdp": 8}, "auto", num_hosts=8)
    {'pp': 4, 'dp': 2, 'fsdp': 1, 'ep': 1, 'cp': 1, 'tp': 1}
    """
    over, left = {}, num_hosts
    for axis in axes_in(order):
        over[axis] = gcd(sizes.get(axis, 1), left)
        left //= over[axis]
    return over


def check_one_host(
    sizes: Mapping[str, int], over: Mapping[str, int], kind: str, of_each: int
) -> None:
    """Raise ConfigError if an axis such as tp spans hosts or slices of `of_each` devices.

    sizes: size of each axis. over: number of hosts or slices that it spans. kind: "hosts" or
    "slices", for messages.
    """
    for axis in MESH_AXES:
        name, number = axis.name, over[axis.name]
        if axis.in_one_host and number > 1:
            raise ConfigError(
                f"{setting(f'mesh.{name}', sizes[name])} would go over {number} {kind} of {of_each}"
                f" devices: {name} sends in every layer, and needs the links inside one. Use "
                f"{setting(f'mesh.{name}', sizes[name] // number)}, and more ranks "
                f"({setting('mesh.pp')})."
            )


def check_hosts(sizes: MeshSizes, order: str, number: int, of_each: int) -> None:
    """Raise ConfigError like `check_one_host`, for `number` devices, `of_each` on each host."""
    if number % of_each == 0:
        over = over_hosts(sizes.by_axis, order, number // of_each)
        check_one_host(sizes.by_axis, over, "hosts", of_each)


def hosts_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Return the groups of devices that fast links join: slices, or processes of one slice.

    JAX gives each GPU host a separate slice. Described GPUs are one slice, with one process for
    each host.
    """
    found: dict[int, list[Any]] = defaultdict(list)
    has_slices = _kind(devices) != "processes"
    for device in devices:
        found[_slice(device) if has_slices else device.process_index].append(device)
    return [found[key] for key in sorted(found)]


def hosts_text(mesh: Mesh, *, has_axes: bool = True) -> str | None:
    """Return the hosts and the axes that span them: "2 hosts: pp over 2"; None for one host."""
    devices = mesh.devices
    groups = len(hosts_of(list(devices.flat)))
    if groups == 1:
        return None
    if not has_axes:
        return f"{groups} {_kind(list(devices.flat))}"
    over = {}
    for k, axis in enumerate(mesh.axis_names):
        line = np.moveaxis(devices, k, 0).reshape(devices.shape[k], -1)[:, 0]
        over[axis] = len(hosts_of(list(line)))
    axes = ", ".join(f"{axis} over {number}" for axis, number in over.items() if number > 1)
    return f"{groups} {_kind(list(devices.flat))}: {axes}"


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _kind(devices: Sequence[Any]) -> str:
    """Return the noun for the groups of `hosts_of`: slices, hosts or processes."""
    if devices[0].platform == "tpu":
        return "slices"
    return "hosts" if len({_slice(device) for device in devices}) > 1 else "processes"


def _within(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Return the devices of a host or slice as an array; JAX lays out a torus of TPUs."""
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)
    found = np.empty(len(devices), object)
    found[:] = devices
    return found.reshape(shape)


def all_devices(backend: str | None = None) -> list[Any]:
    """Start JAX and return the devices of all processes. Raises ConfigError if JAX cannot start.

    backend: "cpu", or None for the first of JAX's platforms. Extra devices for exchanges between
    processes are left out.
    """
    try:
        return join_processes.of_mesh(jax.devices(backend))
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin for the platform
        platforms: str = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue] made at run time
        reason = str(error).split("\n")[0] or "no such devices, or no JAX plugin for them"
        is_variable = os.environ.get("JAX_PLATFORMS") == platforms
        raise ConfigError(
            f"JAX cannot start on {platforms}: {reason}. "
            f"Use {'JAX_PLATFORMS=cpu' if is_variable else on_cpu()}, or install "
            "ppctl[cuda12], ppctl[cuda13] or ppctl[tpu]."
        ) from error
