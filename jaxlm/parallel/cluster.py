"""Which process of a run this is: what the flags say, else what the environment of a cluster says.

Known are the TPU pods of Kubernetes, JobSet, Open MPI, Slurm, and the PMI of MPICH and its kin. Nothing here asks the
network: the metadata server of a TPU VM, which alone knows its pod outside of Kubernetes, is asked by
scripts/launch/tpu_vm.sh, which passes the answer as flags.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping

from jaxlm.core.errors import CommandError

Environment = Mapping[str, str]

FLAGS = ("--coordinator", "--num_processes", "--process_id")
# Below the ports that Linux hands out to clients, so that none of those stands in the way.
PORTS = (20_000, 30_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """Which process of a run this is, and where they meet. None for all three is a run of one process."""

    coordinator: str | None = None
    count: int | None = None
    rank: int | None = None
    devices: tuple[int, ...] | None = (
        None  # of this host's GPUs, those of this process; None is all
    )
    slices: int = 1  # groups of devices with slow wires between them, as the cluster tells
    told: str = "one process"  # by whom, in words

    def __post_init__(self) -> None:
        told = (self.coordinator, self.count, self.rank)
        missing = [flag for flag, value in zip(FLAGS, told, strict=True) if value is None]
        if 0 < len(missing) < 3:
            raise CommandError(
                f"{' and '.join(missing)} must be given too",
                where="jaxlm train",
                why="a process of several needs to know where they meet, how many they are and which it is",
                fix="start the processes with jaxlm launch, which gives all three",
            )
        if self.count is not None and self.rank is not None and not 0 <= self.rank < self.count:
            raise CommandError(
                f"there is no process {self.rank} of {self.count}",
                where="--process_id" if self.told == "flags" else self.told,
                why=f"they are numbered from 0 to {self.count - 1}",
                fix=f"give each of the {self.count} processes its own --process_id, from 0 to {self.count - 1}",
            )

    def as_json(self) -> dict[str, object]:
        """For environment.json."""
        return {
            "told": self.told,
            "coordinator": self.coordinator,
            "processes": self.count or 1,
            "slices": self.slices,
        }


@dataclasses.dataclass(frozen=True)
class _Detected:
    told: str
    host: str | None  # of rank 0, where the cluster says it
    job: str  # its name, for the port
    count: int
    rank: int
    local: tuple[int, int] = (0, 1)  # rank and count among those on this host


def process_spec(
    environment: Environment,
    *,
    coordinator: str | None = None,
    count: int | None = None,
    rank: int | None = None,
) -> ProcessSpec:
    """The place of this process: each flag that is given, and from the environment what no flag says.

    A count of 1 without the other flags is a process alone, whatever the environment says.

    Raises:
      CommandError: where the environment of a cluster is only half there, or nobody says where the processes meet.
    """
    given = (coordinator, count, rank)
    if count == 1 and (coordinator, rank) == (None, None):
        return ProcessSpec(told="one process, as --num_processes=1 says")
    slices = _number(environment, "MEGASCALE_NUM_SLICES") or 1
    if None not in given:
        return ProcessSpec(
            coordinator=coordinator, count=count, rank=rank, slices=slices, told="flags"
        )
    found = detect(environment)
    if isinstance(found, str):
        return ProcessSpec(coordinator=coordinator, count=count, rank=rank, told=found)
    if found.count == 1 and given == (None, None, None):
        return ProcessSpec(told=f"{found.told}, of one process", slices=slices)
    if coordinator is None:
        if found.host is None:
            raise CommandError(
                f"{found.told} does not say where its {found.count} processes meet",
                where="jaxlm train",
                why="no variable names the host of rank 0",
                fix=f"give --coordinator the host of rank 0 and a port, such as {port(found.job)}",
            )
        host = f"[{found.host}]" if ":" in found.host else found.host
        coordinator = f"{host}:{port(found.job)}"
    over = [flag for flag, value in zip(FLAGS, given, strict=True) if value is not None]
    return ProcessSpec(
        coordinator=coordinator,
        count=found.count if count is None else count,
        rank=found.rank if rank is None else rank,
        devices=_devices(environment, *found.local),
        slices=slices,
        told=", ".join([found.told, *(f"but for {flag}" for flag in over)]),
    )


def detect(environment: Environment) -> _Detected | str:
    """What the environment says, or in words why this is a process alone.

    TPU pods come first, as they run under JobSet too; Open MPI before Slurm, under which `mpirun` starts its daemons as
    a step of their own, whose ranks are not those of the processes.

    Raises:
      CommandError: where some of a cluster's variables are set and others are not; names those.
    """
    for find in (_tpu, _jobset, _open_mpi, _slurm, _pmi):
        if (found := find(environment)) is not None:
            return found
    if environment.get("SLURM_JOB_ID"):
        job = environment["SLURM_JOB_ID"]
        return f"one process: Slurm job {job}, in which srun did not start this one"
    return "one process: no flags, and no cluster in the environment"


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it: `a[1-2]b[07,09],c` gives `a1b07`."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else "")


def port(job: str) -> int:
    """The port on which rank 0 of a job listens: the same on every rank, and hardly that of another job."""
    low, high = PORTS
    return low + zlib.crc32(job.encode()) % (high - low)


def _tpu(environment: Environment) -> _Detected | None:
    own = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
    across = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
    is_multislice = any(environment.get(name) for name in across)
    if not is_multislice and not any(environment.get(name) for name in own):
        return None
    _need("a TPU pod", environment, own + across if is_multislice else own)
    hosts = [host.strip() for host in environment["TPU_WORKER_HOSTNAMES"].split(",")]
    slices = _number(environment, across[0]) if is_multislice else 1
    number = _number(environment, across[1]) if is_multislice else 0
    main = environment[across[2]].partition(":")[0] if is_multislice else hosts[0]
    worker = _number(environment, own[0])
    told = f"TPU pod, worker {worker} of {len(hosts)}"
    return _Detected(
        f"{told} in slice {number} of {slices}" if slices > 1 else told,
        main,
        main,
        len(hosts) * slices,
        number * len(hosts) + worker,
    )


def _jobset(environment: Environment) -> _Detected | None:
    """The names are those with which scripts/launch/jobset.yaml and xpk pass a pod's annotations on."""
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB")
    if not any(environment.get(name) for name in names):
        return None
    _need("a Kubernetes JobSet", environment, names)
    group = ("JOB_INDEX", "REPLICATED_JOB_REPLICAS")
    jobs, job = 1, 0
    if environment.get(group[1]) or environment.get(group[0], "0") != "0":
        _need("a JobSet of several jobs", environment, group)
        job, jobs = (_number(environment, name) for name in group)
    name, replicated = environment[names[0]], environment[names[1]]
    pods, pod = _number(environment, names[3]), _number(environment, names[2])
    return _Detected(
        f"JobSet {name}, pod {pod} of job {job}",
        f"{name}-{replicated}-0-0.{name}",
        name,
        jobs * pods,
        job * pods + pod,
    )


def _open_mpi(environment: Environment) -> _Detected | None:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not any(environment.get(name) for name in names):
        return None
    _need("Open MPI", environment, names)
    # Where mpirun runs, which is where rank 0 runs unless somebody asked for another host.
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")  # up to Open MPI 4
    space = environment.get("PMIX_NAMESPACE", "")  # from 5 on: prterun-HOST-PID@1
    at = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    host = (at[1] or at[2]) if at else None
    if host is None and (named := re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", space)):
        host = named[1]
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _Detected(
        "Open MPI",
        host,
        uri.partition(".")[0] or space,
        _number(environment, names[0]),
        _number(environment, names[1]),
        _local(environment, *local),
    )


def _slurm(environment: Environment) -> _Detected | None:
    """A step, which `srun` starts. A batch script has Slurm's job about it too, but is one process."""
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    if not any(environment.get(name) for name in names[:2]):
        return None
    by_mpi = [environment.get(name) for name in ("PMI_SIZE", "PMI_RANK")]
    if all(by_mpi) and by_mpi != [environment.get(name) for name in names[1:3]]:
        return None  # mpiexec started this process, and srun only the daemon that did so
    _need("a Slurm step", environment, names)
    job, step = environment[names[3]], environment.get("SLURM_STEP_ID", "0")
    on_hosts = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # 2(x3),1
    return _Detected(
        f"Slurm job {job}, step {step}",
        first_host(environment[names[0]]),
        f"{job}.{step}",
        _number(environment, names[1]),
        _number(environment, names[2]),
        (
            _number(environment, "SLURM_LOCALID"),
            max(map(int, re.findall(r"\d+", on_hosts)), default=1),
        ),
    )


def _pmi(environment: Environment) -> _Detected | None:
    names = ("PMI_SIZE", "PMI_RANK")
    if not any(environment.get(name) for name in names):
        return None
    _need("PMI", environment, names)
    count, rank = (_number(environment, name) for name in names)
    local = _local(environment, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _Detected("PMI (mpiexec)", None, f"pmi {count}", count, rank, local)


def _need(cluster: str, environment: Environment, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        there = [f"{name}={environment[name]}" for name in names if environment.get(name)]
        raise CommandError(
            f"this looks like {cluster}, but {' and '.join(missing)} {'are' if missing[1:] else 'is'} not set",
            where="the environment",
            why=f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} set",
            fix=f"--num_processes=1    # if this process is alone\nof several: set {' and '.join(missing)} as the cluster numbers its processes",
        )


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name) or "0"
    if not re.fullmatch(r"\d{1,9}", text):
        raise CommandError(
            f"{name}={text!r} is no number",
            where="the environment",
            why="it is set by a cluster, and counts processes",
            fix=f"--num_processes=1    # if this process is alone\nof several: set {name} to the number that the cluster gave",
        )
    return int(text)


def _local(environment: Environment, rank: str, count: str) -> tuple[int, int]:
    return _number(environment, rank), max(_number(environment, count), 1)


def _devices(environment: Environment, rank: int, count: int) -> tuple[int, ...] | None:
    """One GPU for each of several processes on a host, unless the cluster has given each its own already."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    is_own = visible is not None and "," not in visible
    return None if count == 1 or is_own else (rank,)
