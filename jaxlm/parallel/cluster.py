"""Rank, number of processes and coordinator, from flags or from a cluster's environment variables.

Known are TPU pods on Kubernetes, JobSet, Open MPI, Slurm, and the PMI of MPICH and its kin. The
cluster detection of `jax.distributed` is not used. It starts JAX, has no public interface that only
detects, and reads variables as they are: a half-set environment is no error, a Slurm batch script
counts as a task, Open MPI 5 needs mpi4py, JobSet the Kubernetes client, and PMI is unknown. Ours
uses no network: on a TPU VM outside of Kubernetes scripts/launch/tpu_vm.sh queries the metadata
server and passes flags.
"""

import dataclasses
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlm.core.errors import CommandError

Environment = Mapping[str, str]

FLAGS = ("--coordinator", "--num_processes", "--process_id")
PORTS = (20_000, 30_000)  # below the ephemeral ports of Linux, so that no client occupies one
MEGASCALE = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """Rank of this process, number of processes, and coordinator; all None for one process."""

    coordinator: str | None = None
    count: int | None = None
    rank: int | None = None
    devices: tuple[int, ...] | None = None  # local GPUs of this process; all by default
    slices: int = 1  # groups of devices with slow links between them, as the cluster reports
    source: str = "one process"  # of these values, in words

    def __post_init__(self) -> None:
        values = (self.coordinator, self.count, self.rank)
        missing = [flag for flag, value in zip(FLAGS, values, strict=True) if value is None]
        if 0 < len(missing) < 3:
            what = f"{' and '.join(missing)} must be given too"
            why = f"multi-process runs need {', '.join(FLAGS[:2])} and {FLAGS[2]}"
            launch = "processes with jaxlm launch, which passes all three"
            raise CommandError(what, where="jaxlm train", why=why, fix=f"start the {launch}")
        if self.count is not None and self.rank is not None and not 0 <= self.rank < self.count:
            numbers = f"from 0 to {self.count - 1}"
            what = f"process id {self.rank} is out of range for {self.count} processes"
            where = "--process_id" if self.source == "flags" else self.source
            why, each = f"process ids are {numbers}", f"give each of the {self.count} processes"
            raise CommandError(
                what, where=where, why=why, fix=f"{each} its own --process_id, {numbers}"
            )

    def as_json(self) -> dict[str, object]:
        """Return the values for environment.json."""
        named = {"source": self.source, "coordinator": self.coordinator}
        return {**named, "processes": self.count or 1, "slices": self.slices}


@dataclasses.dataclass(frozen=True)
class _Detected:
    source: str
    host: str | None  # of rank 0, if the cluster reports it
    job: str  # name of the job, for the port
    count: int
    rank: int
    local: tuple[int, int] = (0, 1)  # rank and count on this host


def process_spec(
    environment: Environment,
    *,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
) -> ProcessSpec:
    """Return the spec of this process: flags that are not None, and the rest from the environment.

    A count of 1 without other flags is one process in any environment. Raises CommandError if a
    cluster's variables are incomplete, or there is no coordinator.
    """
    overrides = (coordinator, count, rank)
    if overrides == (None, 1, None):
        return ProcessSpec(source="one process, by --num_processes=1")
    slices = _number(environment, MEGASCALE[0]) or 1
    by_flags: dict[str, Any] = dict(coordinator=coordinator, count=count, rank=rank)
    if None not in overrides:
        return ProcessSpec(**by_flags, slices=slices, source="flags")
    detected = detect(environment)
    if isinstance(detected, str):
        return ProcessSpec(**by_flags, source=detected)
    if detected.count == 1 and overrides == (None, None, None):
        return ProcessSpec(source=f"{detected.source}, of one process", slices=slices)
    if coordinator is None:
        if detected.host is None:
            what = f"{detected.source} does not report a coordinator for {detected.count} processes"
            why = "no variable names the host of rank 0"
            give, such = "give --coordinator the host of rank 0", port(detected.job)
            raise CommandError(
                what, where="jaxlm train", why=why, fix=f"{give} and a port, such as {such}"
            )
        host = f"[{detected.host}]" if ":" in detected.host else detected.host
        coordinator = f"{host}:{port(detected.job)}"
    flags = [flag for flag, value in zip(FLAGS, overrides, strict=True) if value is not None]
    return ProcessSpec(
        coordinator=coordinator,
        count=detected.count if count is None else count,
        rank=detected.rank if rank is None else rank,
        devices=_devices(environment, *detected.local),
        slices=slices,
        source=", ".join([detected.source, *(f"except {flag}" for flag in flags)]),
    )


def detect(environment: Environment) -> _Detected | str:
    """Return what the environment contains, or why this is one process.

    TPU pods come before JobSet, under which they run too. Open MPI comes before Slurm, where
    `mpirun` starts its daemons as a step whose ranks are not those of the processes. Raises
    CommandError if only some of a cluster's variables are set; names the others.
    """
    for detector in (_tpu, _jobset, _open_mpi, _slurm, _pmi):
        if (detected := detector(environment)) is not None:
            return detected
    if job := environment.get("SLURM_JOB_ID"):
        return f"one process: Slurm job {job}, in which srun did not start this one"
    return "one process: no flags, and no cluster in the environment"


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: `a[1-2]b[07,09],c` gives `a1b07`."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def port(job: str) -> int:
    """Return the coordinator's port: the same on every rank of a job, rarely that of another."""
    low, high = PORTS
    return low + zlib.crc32(job.encode()) % (high - low)


def _tpu(environment: Environment) -> _Detected | None:
    pod = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    is_multislice = any(map(environment.get, MEGASCALE))
    if not _has_all("a TPU pod", environment, pod + MEGASCALE if is_multislice else pod):
        return None
    hosts = [host.strip() for host in environment[pod[1]].split(",")]
    worker = _number(environment, pod[0])
    source, slices, number, main = f"TPU pod, worker {worker} of {len(hosts)}", 1, 0, hosts[0]
    if is_multislice:
        slices, number = (_number(environment, name) for name in MEGASCALE[:2])
        main = environment[MEGASCALE[2]].partition(":")[0]
    if slices > 1:
        source += f" in slice {number} of {slices}"
    return _Detected(source, main, main, len(hosts) * slices, number * len(hosts) + worker)


def _jobset(environment: Environment) -> _Detected | None:
    """Read the names by which scripts/launch/jobset.yaml and xpk pass a pod's annotations."""
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")
    if not _has_all("a Kubernetes JobSet", environment, names):
        return None
    group = ("JOB_INDEX", "REPLICATED_JOB_REPLICAS")
    job, jobs = 0, 1
    if environment.get(group[1]) or (environment.get(group[0]) or "0") != "0":
        _has_all("a JobSet of several jobs", environment, group)
        job, jobs = _numbers(environment, group)
    name, (pod, pods) = environment[names[0]], _numbers(environment, names[2:])
    host, source = f"{name}-{environment[names[1]]}-0-0.{name}", f"JobSet {name}, pod {pod}"
    return _Detected(f"{source} of job {job}", host, name, jobs * pods, job * pods + pod)


def _open_mpi(environment: Environment) -> _Detected | None:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not _has_all("Open MPI", environment, names):
        return None
    # The host of mpirun, which also runs rank 0 unless another host was requested.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")  # up to Open MPI 4
    space = environment.get("PMIX_NAMESPACE", "")  # from 5 on: prterun-HOST-PID@1
    address = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    host = (address[1] or address[2]) if address else None
    if host is None and (named := re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", space)):
        host = named[1]
    count, rank = _numbers(environment, names)
    local = _local(environment, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _Detected("Open MPI", host, uri.partition(".")[0] or space, count, rank, local)


def _slurm(environment: Environment) -> _Detected | None:
    """Read a step, started by `srun`. A batch script has the job's variables but is one process."""
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    if not any(map(environment.get, names[:2])):
        return None
    by_mpi = [environment.get(name) for name in ("PMI_SIZE", "PMI_RANK")]
    if all(by_mpi) and by_mpi != [environment.get(name) for name in names[1:3]]:
        return None  # mpiexec started this process, and srun only the daemon that did so
    _has_all("a Slurm step", environment, names)
    job = f"{environment[names[3]]}.{environment.get('SLURM_STEP_ID', '0')}"
    on_hosts = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 2(x3),1
    most = max(map(int, re.findall(r"\d+", on_hosts)), default=1)
    count, rank, local = _numbers(environment, (*names[1:3], "SLURM_LOCALID"))
    source, host = f"Slurm job {job.replace('.', ', step ', 1)}", first_host(environment[names[0]])
    return _Detected(source, host, job, count, rank, (local, most))


def _pmi(environment: Environment) -> _Detected | None:
    names = ("PMI_SIZE", "PMI_RANK")
    if not _has_all("PMI", environment, names):
        return None
    count, rank = _numbers(environment, names)
    local = _local(environment, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _Detected("PMI (mpiexec)", None, f"pmi {count}", count, rank, local)


def _has_all(cluster: str, environment: Environment, names: tuple[str, ...]) -> bool:
    """Return whether all variables of a cluster are set; raise CommandError if only some are."""
    missing = [name for name in names if not environment.get(name)]
    present = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    if missing and present:
        unset, verb = " and ".join(missing), "are" if missing[1:] else "is"
        what = f"the variables of {cluster} are incomplete: {unset} {verb} not set"
        why = f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set"
        raise _in_environment(what, why, f"{unset} as the cluster numbers its processes")
    return not missing


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name) or "0"
    if not re.fullmatch(r"\d{1,9}", text):
        what, fix = f"{name}={text!r} is not a number", f"{name} to the cluster's number"
        why = "the cluster sets this variable to a number of processes"
        raise _in_environment(what, why, fix)
    return int(text)


def _numbers(environment: Environment, names: Iterable[str]) -> Iterator[int]:
    return (_number(environment, name) for name in names)


def _in_environment(what: str, why: str, setting: str) -> CommandError:
    fix = "--num_processes=1    # if this is the only process\nif there are several: set "
    return CommandError(what, where="the environment", why=why, fix=fix + setting)


def _local(environment: Environment, rank: str, count: str) -> tuple[int, int]:
    return _number(environment, rank), max(_number(environment, count), 1)


def _devices(environment: Environment, rank: int, count: int) -> tuple[int, ...] | None:
    """Return one GPU for each process of a host, unless the cluster has assigned it already."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    is_assigned = visible is not None and "," not in visible
    return None if count == 1 or is_assigned else (rank,)
