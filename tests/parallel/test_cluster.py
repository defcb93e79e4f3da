import pytest

from jaxlm.core.errors import CommandError
from jaxlm.parallel import cluster
from jaxlm.parallel.cluster import ProcessSpec, process_spec

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JOBSET = {
    "JOBSET_NAME": "llama",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_COMPLETION_INDEX": "3",
    "PROCESSES_IN_JOB": "4",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.t, t-1.t"}
MEGASCALE = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "slice-0-0.slice:8080",
}
KNOWN = {  # variables: host of rank 0, processes, this one's rank
    "slurm": (SLURM, "gpu007", 4, 2),
    "open mpi 4": (OPEN_MPI, "10.96.0.1", 8, 5),
    "open mpi 5": (
        OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-node-07-123@1"},
        "node-07",
        8,
        5,
    ),
    "jobset": (JOBSET, "llama-workers-0-0.llama", 4, 3),
    "jobset of two jobs": (
        JOBSET | {"JOB_INDEX": "1", "REPLICATED_JOB_REPLICAS": "2"},
        "llama-workers-0-0.llama",
        8,
        7,
    ),
    "tpu": (TPU, "t-0.t", 2, 1),
    "tpu slices": (TPU | MEGASCALE, "slice-0-0.slice", 4, 3),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_cluster_is_known_by_its_variables(name):
    environment, host, count, rank = KNOWN[name]
    spec = process_spec(environment)
    assert spec.coordinator.rpartition(":")[0] == host
    assert (spec.count, spec.rank) == (count, rank)
    assert process_spec(environment) == spec
    assert cluster.PORTS[0] <= int(spec.coordinator.rpartition(":")[2]) < cluster.PORTS[1]


@pytest.mark.parametrize("name", KNOWN)
def test_every_rank_computes_the_same_address(name):
    environment, *_ = KNOWN[name]
    ranks = {
        "SLURM_PROCID": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "JOB_COMPLETION_INDEX": "0",
        "TPU_WORKER_ID": "0",
        "MEGASCALE_SLICE_ID": "0",
    }
    first = {key: ranks.get(key, value) for key, value in environment.items()}
    assert process_spec(first).coordinator == process_spec(environment).coordinator
    assert process_spec(first).rank in (0, 4)  # the second job of a JobSet begins at 4


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({k: v for k, v in SLURM.items() if k != gone}, gone)
        for gone in ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    ]
    + [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "1"}, "PMI_SIZE"),
        ({"JOBSET_NAME": "a", "JOB_COMPLETION_INDEX": "0"}, "REPLICATED_JOB_NAME and PROCESSES"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOBSET_NAME"),
        (JOBSET | {"JOB_INDEX": "1"}, "REPLICATED_JOB_REPLICAS"),
        ({"TPU_WORKER_ID": "0"}, "TPU_WORKER_HOSTNAMES"),
        (TPU | {"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID"),
        (MEGASCALE, "TPU_WORKER_ID"),
    ],
)
def test_half_an_environment_is_an_error_that_names_the_other_half(environment, missing):
    with pytest.raises(CommandError) as caught:
        process_spec(environment)
    assert missing in caught.value.what
    assert process_spec(environment, coordinator="a:1", count=2, rank=1).source == "flags"
    assert process_spec(environment, count=1).count is None


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(CommandError, match=name):
        process_spec(SLURM | {name: "two"})


def test_a_rank_past_the_last_is_refused_in_the_clusters_name():
    with pytest.raises(CommandError) as caught:
        process_spec(SLURM | {"SLURM_PROCID": "4"})
    assert "Slurm job 4242" in caught.value.where


def test_flags_win_one_by_one():
    spec = process_spec(SLURM, coordinator="10.0.0.1:1", rank=0)
    assert (spec.coordinator, spec.count, spec.rank) == ("10.0.0.1:1", 4, 0)
    assert spec.source == "Slurm job 4242, step 1, except --coordinator, except --process_id"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
    ],
)
def test_a_process_alone_is_alone_and_says_why(environment):
    spec = process_spec(environment)
    assert spec == ProcessSpec(source=spec.source)
    assert "one process" in spec.source


def test_mpi_in_a_slurm_job_goes_by_its_own_ranks():
    assert process_spec(SLURM | OPEN_MPI).rank == 5
    spec = process_spec(SLURM | {"PMI_SIZE": "8", "PMI_RANK": "6"}, coordinator="n:1")
    assert (spec.rank, spec.count) == (6, 8)
    assert process_spec(SLURM | {"PMI_SIZE": "4", "PMI_RANK": "2"}) == process_spec(SLURM)


def test_who_does_not_say_where_to_meet_is_asked():
    with pytest.raises(CommandError) as caught:
        process_spec({"PMI_SIZE": "2", "PMI_RANK": "0"})
    assert "--coordinator the host of rank 0" in caught.value.fix
    assert process_spec({"PMI_SIZE": "2", "PMI_RANK": "0"}, coordinator="a:1").count == 2


def test_slices_are_recorded_whoever_tells_the_rank():
    assert process_spec(TPU | MEGASCALE).slices == 2
    assert process_spec(TPU | MEGASCALE, coordinator="a:1", count=4, rank=0).slices == 2
    assert process_spec(TPU).as_json() == {
        "source": "TPU pod, worker 1 of 2",
        "coordinator": process_spec(TPU).coordinator,
        "processes": 2,
        "slices": 1,
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[001,007-015]", "node001"),
        ("rack[1-2]n[07-09].local,c", "rack1n07.local"),
        ("a-b[9]c", "a-b9c"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert cluster.first_host(nodes) == first


def test_each_of_several_processes_on_a_host_has_a_gpu_of_its_own():
    four = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    assert process_spec(SLURM).devices is None
    assert process_spec(four).devices == (1,)
    assert process_spec(four | {"CUDA_VISIBLE_DEVICES": "0,1"}).devices == (1,)
    assert process_spec(four | {"CUDA_VISIBLE_DEVICES": "3"}).devices is None
    assert process_spec(OPEN_MPI).devices == (1,)


def test_jobs_hardly_share_a_port():
    ports = {cluster.port(f"{job}.0") for job in range(1000, 1100)}
    assert len(ports) > 95
