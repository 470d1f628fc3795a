"""Environment variables that the processes of a run need to find each other, and their faults."""

from collections.abc import Mapping

SLURM = "JOB_ID STEP_NODELIST NTASKS PROCID LOCALID"
OPEN_MPI = "MCA_orte_hnp_uri COMM_WORLD_SIZE COMM_WORLD_RANK COMM_WORLD_LOCAL_RANK"
# variables that JAX's cluster detection needs, by the command that sets them
SET_BY = {
    "srun": [f"SLURM_{name}" for name in SLURM.split()],
    "mpirun of Open MPI 4": [f"OMPI_{name}" for name in OPEN_MPI.split()],
}
NUMBERS = ("NTASKS", "ID", "SIZE", "RANK")  # endings of variables whose values are numbers
# variables of gRPC, which connects processes: it uses the first that is set
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXY = ("no_grpc_proxy", "no_proxy")


def cluster_fault(environ: Mapping[str, str]) -> str | None:
    """Return the fault of cluster variables (not a number, some missing) in words, else None.

    >>> cluster_fault({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    'SLURM_STEP_NODELIST and SLURM_LOCALID, which srun sets, are missing'
    """
    for command, names in SET_BY.items():
        for name in (each for each in names if each in environ and each.endswith(NUMBERS)):
            if not environ[name].isdecimal():
                return f"{name}={environ[name]!r}, which {command} sets, is not a number"
        missing = [name for name in names if name not in environ]
        if 0 < len(missing) < len(names):
            plural = "are" if len(missing) > 1 else "is"
            return f"{' and '.join(missing)}, which {command} sets, {plural} missing"
    return None


def proxy_fault(coordinator: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the remedy if gRPC would reach process 0 through a proxy, else None.

    >>> proxy_fault("node1:80", {"http_proxy": "http://proxy:3128", "no_proxy": "node2"})
    'http_proxy is set: add node1 to no_proxy'
    """
    proxy = next((name for name in PROXIES if environ.get(name)), None)
    host = "the address of process 0" if coordinator is None else coordinator.rpartition(":")[0]
    name = next((name for name in NO_PROXY if name in environ), NO_PROXY[-1])
    exempt = [entry.strip() for entry in environ.get(name, "").split(",")]
    if proxy is None or any(entry and host.endswith(entry) for entry in exempt):
        return None
    return f"{proxy} is set: add {host} to {name}"


def without_proxy(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes gRPC reach a host without a proxy.

    >>> without_proxy("127.0.0.1", {"no_proxy": "node2"})
    {'no_grpc_proxy': 'node2,127.0.0.1'}
    """
    before = [environ[name] for name in NO_PROXY if name in environ][:1]
    return {NO_PROXY[0]: ",".join(filter(None, [*before, host]))}
