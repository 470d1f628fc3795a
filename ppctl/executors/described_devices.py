"""Described devices: TPUs and NVIDIA GPUs to compile for although they are not attached.

Source: jax.experimental.topologies. XLA's plugin for CUDA takes a description of the GPU as text
and needs no driver. Without the device it times no kernels, and accepts arrays that are too large
for the device's memory.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from ppctl.errors import ConfigError
from ppctl.executors.compiler_options import add_to_xla_flags
from ppctl.executors.device_mesh import check_hosts, laid_out, mesh_of
from ppctl.schedule.mesh_axes import MeshSizes, product_text

# environment variables; for each unset one libtpu queries a metadata server and warns
AWAY_FROM_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
AWAY_FROM_GPU = "--xla_gpu_autotune_level=0"  # autotuning would time kernels on a device
CUDA_VERSION = "12.8.0"  # version of driver, runtime and toolkit on a described GPU
CUDA_PLUGINS = ("xla_cuda12", "xla_cuda13")


@dataclass(frozen=True)
class GpuTarget:
    """The description of an NVIDIA GPU for XLA's compiler."""

    name: str  # name in a topology, such as "h100" in "h100:2x8"
    device_kind: str  # name in jax.Device.device_kind
    memory_bytes_per_s: float
    capability: str  # compute capability, such as "9.0"
    cores: int  # streaming multiprocessors
    fp32_per_core: int  # float32 lanes of a streaming multiprocessor
    clock_ghz: float
    memory_bytes: int  # device memory that CUDA reports
    l2_bytes: int
    shared_bytes_per_core: int  # shared memory of a streaming multiprocessor


def described_mesh(
    sizes: MeshSizes,
    topology: str,
    gpu: GpuTarget | None,
    gpu_names: Sequence[str] = (),
    order: str = "auto",
) -> Mesh:
    """Return a mesh of all devices of a topology: "v5e:4x4" (TPUs), "h100:2x8" (hosts x GPUs).

    gpu: the GPU that the topology names; None: TPUs. gpu_names: known GPUs, for messages. order: as
    in `laid_out`. Raises ConfigError if the compiler is missing or does not know the topology, if
    mesh and topology have different numbers of devices, or if an axis such as tp would span hosts.
    """
    devices = _tpus(topology, gpu_names) if gpu is None else _gpus(topology, gpu)
    check_size(sizes, topology, len(devices))
    if gpu is not None:
        check_hosts(sizes, order, len(devices), int(topology.split("x")[-1]))
    return mesh_of(laid_out(devices, sizes, order))


def check_size(sizes: MeshSizes, topology: str, number: int) -> None:
    """Raise ConfigError unless a mesh of these sizes has the `number` devices of a topology."""
    if sizes.num_devices != number:
        raise ConfigError(
            f"mesh {product_text(sizes.shown())}, but plan.topology={topology} has {number} "
            f"devices. Use a mesh of {number}, such as mesh={number}x1, or another topology."
        )


def check_gpu_shape(topology: str, gpu_name: str) -> None:
    """Raise ConfigError unless a topology of GPUs has the form hosts x GPUs per host."""
    if topology.count("x") - topology.partition(":")[0].count("x") != 1:
        raise ConfigError(
            f"plan.topology={topology} names GPUs, but not as hosts x GPUs per host. Write it "
            f"like {gpu_name}:2x8."
        )


def is_described(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh are only described: programs compile but cannot run."""
    return not mesh.devices.flat[0].client.local_devices()


def _tpus(topology: str, gpu_names: Sequence[str]) -> list[Any]:
    for name, value in AWAY_FROM_TPU.items():
        os.environ.setdefault(name, value)
    if find_spec("libtpu") is None:
        raise ConfigError(
            f"plan.topology={topology} needs libtpu, which holds the compiler for TPUs. Install "
            "ppctl[tpu]; a TPU is not needed. Or predict only, which takes no compiler: "
            f"plan.compile=false. GPUs: {', '.join(gpu_names)}."
        )
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"plan.topology={topology} is unknown to libtpu: {reason}. Use one such as v5e:4x4; "
            f"GPUs are {', '.join(gpu_names)}."
        ) from error


def _gpus(topology: str, gpu: GpuTarget) -> list[Any]:
    check_gpu_shape(topology, gpu.name)
    if not has_plugin():
        raise ConfigError(
            f"plan.topology={topology} needs XLA's plugin for CUDA, which holds the compiler for "
            "GPUs. Install ppctl[cuda12] or ppctl[cuda13]; neither a GPU nor a driver is needed. "
            "Or predict only, which takes no compiler: plan.compile=false."
        )
    add_to_xla_flags(AWAY_FROM_GPU)
    shape, target = topology.partition(":")[2], target_config(gpu)
    options = {"topology": f"1x{shape}", "target_config": target}
    return topologies.get_topology_desc(platform="cuda", **options).devices


def has_plugin() -> bool:
    """Return whether XLA's plugin for CUDA is installed."""
    names = (f"jax_plugins.{name}" for name in CUDA_PLUGINS)
    return find_spec("jax_plugins") is not None and any(map(find_spec, names))


def target_config(gpu: GpuTarget) -> str:
    """Return the text of a GPU's GpuTargetConfigProto, for XLA's compiler.

    The constants hold for all NVIDIA GPUs from the A100 on. Without the versions of driver and
    runtime, XLA compiles products of 8-bit floats to slower products of bfloat16, without a word.
    Source: the CUDA C++ programming guide, compute capabilities; xla/backends/gpu/target_config of
    XLA.
    """
    # the GPU's numbers first, then the constants
    major, minor = gpu.capability.split(".")
    features = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.fp32_per_core}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes}
          memory_bandwidth: {round(gpu.memory_bytes_per_s)}
          l2_cache_size: {gpu.l2_bytes}
          shared_memory_per_core: {gpu.shared_bytes_per_core}
          shared_memory_per_block_optin: {gpu.shared_bytes_per_core - 1024}
          shared_memory_per_block: 49152
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          driver_version: "{CUDA_VERSION}"
          runtime_version: "{CUDA_VERSION}"
          compile_time_toolkit_version: "{CUDA_VERSION}"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{gpu.device_kind}"
    """
