"""scripts/launch without a cluster: syntax, fields, and runs with simulated commands."""

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from jaxlm.parallel import cluster
from jaxlm.training.launch import free_port
from tests.faults import harness

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts/launch"
SHELL = ("slurm.sbatch", "tpu_vm.sh")

SRUN = f"""#!{sys.executable}
\"\"\"Two tasks on this machine; ends with the highest of their exit codes, as srun does.\"\"\"
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
step = dict(
    SLURM_STEP_ID="0", SLURM_STEP_NODELIST="localhost", SLURM_STEP_NUM_TASKS="2",
    SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_LOCALID="0",
)
environments = [os.environ | step | dict(SLURM_PROCID=str(i)) for i in range(2)]
tasks = [subprocess.Popen(command, env=environment) for environment in environments]
sys.exit(max(task.wait() for task in tasks))
"""


def play(folder, **programs):
    """A PATH on which these programs come first."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def run(script, *words, **env):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *words],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("script", SHELL)
def test_bash_can_read_it(script):
    done = subprocess.run(["bash", "-n", str(LAUNCH / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SHELL)
def test_shellcheck_finds_nothing(script):
    tool = Path(sys.executable).parent / "shellcheck"  # of the test extra
    done = subprocess.run(
        [tool, "--shell=bash", str(LAUNCH / script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_slurm_reads_the_options_before_the_first_command():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in lines
        if line.startswith("#SBATCH")
    )
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < commands[0]
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == "TERM@300"  # to the step, not to the batch shell
    assert options.keys() >= {"requeue", "exclusive", "nodes", "gpus-per-node", "time"}


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, 0, 0), (2, 0, 0), (75, 0, 1), (69, 3, 1), (79, 0, 0), (75, 100, 0)],
)
def test_a_slurm_job_is_queued_again_where_that_helps(tmp_path, code, restarts, requeued):
    path = play(
        tmp_path,
        srun=f"#!/bin/sh\nexit {code}\n",
        scontrol=f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n',
    )
    done = run(
        "slurm.sbatch", "--config=a", PATH=path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(restarts)
    )
    assert done.returncode == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * requeued


@pytest.mark.slow
def test_two_tasks_of_a_slurm_job_train_together(tmp_path):
    config = harness.write_config(tmp_path)
    (tmp_path / "bin").mkdir()
    job = str(free_port())
    workdir = tmp_path / "run"
    done = run(
        "slurm.sbatch",
        f"--config={config}",
        f"--workdir={workdir}",
        *("--cpu_devices=2", "--config.train.steps=3", "--config.mesh.fsdp=4"),
        "--config.mesh.data=1",
        PATH=play(tmp_path / "bin", srun=SRUN),
        PYTHON=sys.executable,
        SLURM_JOB_ID=job,
        XLA_FLAGS=harness.FLAGS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([key for key in harness.losses(workdir) if key[0] == "train"]) == 3
    output = (workdir / "log.txt").read_text()
    assert f"2: Slurm job {job}, step 0" in output
    assert "4 x cpu, mesh fsdp=4" in output


METADATA = """#!/bin/sh
case "$*" in
  *agent-worker-number) echo 1 ;;
  *worker-network-endpoints) echo "{endpoints}" ;;
  *) exit 22 ;;
esac
"""


@pytest.mark.parametrize(
    ("endpoints", "flags"),
    [
        ("u:u:10.0.0.1,u:u:10.0.0.2", "--coordinator=10.0.0.1:28476 --num_processes=2"),
        ("t-0,t-1,t-2", "--coordinator=t-0:28476 --num_processes=3"),
    ],
)
def test_a_tpu_host_asks_which_it_is(tmp_path, endpoints, flags):
    path = play(
        tmp_path,
        curl=METADATA.format(endpoints=endpoints),
        python='#!/bin/sh\nprintf "%s\\n" "$*"\n',
    )
    done = run("tpu_vm.sh", "--on-host", "--config=a", PATH=path, PYTHON=str(tmp_path / "python"))
    assert done.stdout == f"-m jaxlm train --config=a {flags} --process_id=1\n"


def test_a_tpu_vm_of_one_host_needs_no_address(tmp_path):
    path = play(tmp_path, curl=METADATA.format(endpoints="t-0"), python='#!/bin/sh\necho "$@"\n')
    done = run("tpu_vm.sh", "--on-host", "--config=a", PATH=path, PYTHON=str(tmp_path / "python"))
    assert done.stdout == "-m jaxlm train --num_processes=1 --config=a\n"


def test_every_tpu_host_gets_the_same_words(tmp_path):
    path = play(tmp_path, gcloud='#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    done = run("tpu_vm.sh", "pod", "us-a", "--config=a", "--workdir=/a b", PATH=path)
    *words, command = done.stdout.splitlines()
    assert words == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=us-a", "--worker=all"]
    assert command.startswith("--command=cd jaxlm && ")
    assert command.endswith(r"--on-host --config=a --workdir=/a\ b")
    assert run("tpu_vm.sh", "pod").returncode == 2


def job_of(jobset):
    """The Job that JobSet makes of its template, under a name, as its controller does."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
    return made | replicated["template"]


def test_the_job_of_the_jobset_has_the_schema_of_kubernetes():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    kubernetes_validate.validate(job_of(jobset), kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("resources:", "resource:"),
        ("image:", "imge:"),
        ("args:", "arg:"),
        ("claimName:", "claim:"),
        ("mountPath:", "path:"),
        ("restartPolicy: Never", "restartPolicy: [Never]"),
        ("terminationGracePeriodSeconds: 300", "terminationGracePeriodSeconds: long"),
        ('value: "8"', "value: 8"),
        ("backoffLimit: 0", "backoffLimits: 0"),
        ("fieldPath: metadata", "path: metadata"),
    ],
)
def test_a_misspelt_job_is_refused_by_the_schema(right, wrong):
    text = (LAUNCH / "jobset.yaml").read_text()
    assert right in text
    job = job_of(yaml.safe_load(text.replace(right, wrong)))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_jobset_has_the_fields_that_jobset_knows():
    """Fields of jobset.x-k8s.io/v1alpha2, around the Job."""
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert jobset.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobset["spec"]
    assert spec.keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    policy = spec["failurePolicy"]
    assert policy.keys() == {"maxRestarts", "rules"}
    assert policy["maxRestarts"] > 0
    (rule,) = policy["rules"]
    assert rule.keys() == {"name", "action", "onJobFailureReasons"}
    assert rule["name"].isalnum()
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    (replicated,) = spec["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"}
    assert replicated["template"].keys() == {"spec"}
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    (container,) = pod["containers"]
    (failure,) = job["podFailurePolicy"]["rules"]
    assert failure["action"] == "FailJob"
    exits = failure["onExitCodes"]
    assert exits["containerName"] == container["name"]
    assert exits["operator"] == "In"
    assert not {0, 69, 74, 75, 76} & set(exits["values"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    longest = f"{jobset['metadata']['name']}-{replicated['name']}-0-{job['completions'] - 1}"
    assert len(longest) < 58  # a host name of 63 letters, with what JobSet appends


def test_the_pods_of_the_jobset_find_each_other():
    """With the values that Kubernetes would put in place of the annotations."""
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    annotations = {
        "jobset-name": jobset["metadata"]["name"],
        "replicatedjob-name": replicated["name"],
        "job-index": "0",
        "replicatedjob-replicas": str(replicated["replicas"]),
    }
    ranks, meeting = set(), set()
    for pod in range(job["completions"]):
        environment = {"JOB_COMPLETION_INDEX": str(pod)}
        for entry in container["env"]:
            where = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            key = where.removeprefix("metadata.annotations['jobset.sigs.k8s.io/").rstrip("]'")
            environment[entry["name"]] = annotations[key] if where else entry["value"]
        place = cluster.process_spec(environment)
        assert place.count == job["completions"]
        ranks.add(place.rank)
        meeting.add(place.coordinator)
    assert ranks == set(range(job["completions"]))
    (address,) = meeting
    assert address.startswith("llama-8b-workers-0-0.llama-8b:")
    assert container["command"][1:] == ["-m", "jaxlm", "train"]
