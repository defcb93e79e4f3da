"""Real processes of one run, each with several fake devices, against one process."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.data.loader import Loader
from jaxlm.monitor import plots
from jaxlm.parallel import cluster
from jaxlm.training.launch import free_port
from tests import machine
from tests.distributed import trainer
from tests.faults import harness

RANK = [sys.executable, "-m", "tests.distributed.trainer"]
STEPS = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


def words(config, workdir, mesh, *flags):
    axes = (f"--config.mesh.{axis}={size}" for axis, size in ({"data": 1} | mesh).items())
    return [
        *harness.words(config, workdir),
        *("--config.precision.compute=float32", f"--config.train.steps={STEPS}"),
        *("--config.model.kv_heads=4", "--config.model.dropout=0", *axes, *flags),
    ]


def start(processes, devices, command, *, environments=None, log=None):
    """The processes of a run; each writes the rows that it read next to `log`.

    Args:
      processes, devices: number of processes, devices of each.
      command: words of the command line.
      environments: variables by rank.
      log: path of the logs, with the rank appended.
    """
    address = f"127.0.0.1:{free_port()}"
    started = []
    for rank in range(processes):
        flags = [
            f"--coordinator={address}",
            f"--num_processes={processes}",
            f"--process_id={rank}",
        ]
        settings = {"XLA_FLAGS": harness.FLAGS, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        settings |= {"TRAINER_LOG": f"{log}.{rank}.jsonl" if log else ""}
        settings |= environments[rank] if environments else {}
        started.append(
            subprocess.Popen(
                [
                    *RANK,
                    *command,
                    f"--cpu_devices={devices}",
                    *(flags if processes > 1 and not environments else []),
                ],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def end(started, seconds=300):
    """The exit codes and all that was printed."""
    try:
        output = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [process.returncode for process in started], "\n".join(output)


def train(processes, devices, command, code=0, **more):
    """A run that ends with an exit code.

    Gloo gives up after 30 s of waiting for a rank that a busy machine keeps compiling: then again.
    """
    for _ in range(3):
        codes, output = end(start(processes, devices, command, **more))
        if "Gloo context initialization failed: DEADLINE_EXCEEDED" not in output:
            break
    assert codes == [code] * processes, output
    return output


def read(log):
    """The digest of each row of each batch of a run, by step and row, from all of its processes."""
    rows_read = {}
    for path in Path(log).parent.glob(f"{Path(log).name}.*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            for row, digest in enumerate(line["rows"], line["first"]):
                assert rows_read.setdefault((line["step"], row), digest) == digest
    return rows_read


def deviation(ours, theirs):
    """The largest relative difference of two runs' losses."""
    ours, theirs = harness.losses(ours), harness.losses(theirs)
    assert ours.keys() == theirs.keys()
    pairs = [(float.fromhex(ours[key]), float.fromhex(theirs[key])) for key in theirs]
    return max(abs(a / b - 1) for a, b in pairs)


def until(rows, step):
    """The rows of the steps before `step`; the loader reads ahead."""
    earlier = {key: value for key, value in rows.items() if key[0] < step}
    assert {number for number, _ in earlier} == set(range(step))
    return earlier


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """One process with one device, and the rows that it read."""
    folder = tmp_path_factory.mktemp("alone")
    train(1, 1, words(config, folder / "run", {}), log=folder / "log")
    return folder / "run", read(folder / "log")


def check(alone, config, folder, processes, devices, mesh, *flags):
    """Train with several processes as with one: equal losses, and equal rows at each step.

    Args:
      alone: the run of one process, and its rows.
      config: the config of the run.
      folder: parent of the new run and its logs.
      processes, devices: number of processes, devices of each.
      mesh: axis sizes of the mesh.
    """
    output = train(
        processes,
        devices,
        words(config, folder / "run", mesh, *flags),
        log=folder / "log",
    )
    far = deviation(folder / "run", alone[0])
    print(f"{processes} x {devices} {mesh}: {far:.1e}")
    assert far < 1e-5
    assert until(read(folder / "log"), STEPS) == until(alone[1], STEPS)
    return output


def slurm(job):
    """Variables of two tasks of a step on this machine."""
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
    }
    return [step | {"SLURM_PROCID": str(rank)} for rank in range(2)]


def test_two_tasks_of_a_slurm_step_compute_together(tmp_path):
    """Two devices each: a step adds up four ones."""
    job = str(free_port())  # so that the port is another's next time
    command = [sys.executable, "-m", "tests.distributed.worker", f"--workdir={tmp_path}"]
    started = [
        subprocess.Popen(
            [*command, "--steps=3"],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in slurm(job)
    ]
    codes, output = end(started)
    assert codes == [0, 0], output
    assert output.count("total 12.0") == 2
    assert {f"process {rank}, Slurm job {job}, step 0" for rank in range(2)} <= set(
        output.splitlines()
    )


@pytest.mark.slow
def test_two_processes_of_a_slurm_step_train_as_one_does(config, tmp_path, monkeypatch):
    """With the environment alone, and fsdp across the processes; against one with other axes."""
    single, double = tmp_path / "one", tmp_path / "two"
    flags = (
        *("--config.train.steps=2", "--config.checkpoint.every=100", "--config.model.depth=1"),
        "--config.data.validation=",
    )
    job = str(free_port())
    train(
        *(2, 2, words(config, double, {"fsdp": 4}, *flags)),
        environments=slurm(job),
        log=tmp_path / "b",
    )
    monkeypatch.setattr(Loader, "batches", trainer.recorded)
    monkeypatch.setattr(plots, "draw", lambda path: None)
    monkeypatch.setenv("TRAINER_LOG", f"{tmp_path}/a.0.jsonl")
    assert main(words(config, single, {"data": 8}, *flags)) == 0
    assert deviation(double, single) < 1e-5
    assert until(read(tmp_path / "b"), 2) == until(read(tmp_path / "a"), 2)
    facts = json.loads((double / "environment.json").read_text())["cluster"]
    assert facts == {
        "source": f"Slurm job {job}, step 0",
        "coordinator": f"127.0.0.1:{cluster.port(f'{job}.0')}",
        "processes": 2,
        "slices": 1,
    }
    assert f"2: Slurm job {job}, step 0" in (double / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mesh"),
    [
        (2, {"fsdp": 4}),
        (2, {"data": 2, "tensor": 2}),
        (2, {"tensor": 4}),
        (2, {"pipe": 2, "fsdp": 2}),
        (2, {"context": 4}),
        (2, {"fsdp": 2, "context": 2}),
        (4, {"data": 4, "fsdp": 2}),
        (4, {"fsdp": 2, "tensor": 4}),
        (4, {"pipe": 2, "context": 2, "tensor": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "x".join(value),
)
def test_processes_train_as_one_does(alone, config, tmp_path, processes, mesh):
    check(alone, config, tmp_path, processes, 2, mesh)


@pytest.mark.slow
def test_experts_over_processes_train_as_on_one_device(config, tmp_path):
    """One expert on each of two devices of two processes."""
    family = (
        *("--config.model.family=mixtral", "--config.model.experts=4", "--config.model.depth=1"),
        *("--config.checkpoint.every=100", "--config.data.validation="),
    )
    single, double = tmp_path / "one", tmp_path / "two"
    train(1, 1, words(config, single / "run", {}, *family), log=single / "log")
    alone = single / "run", read(single / "log")
    check(alone, config, double, 2, 2, {"expert": 4}, *family)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lora", "qlora"])
def test_an_adapter_over_processes_trains_as_on_one_device(config, tmp_path, arm):
    """Each process reads its part of the base; the adapter after the last step is the same too."""
    small = ("--config.model.depth=1", "--config.checkpoint.every=100", "--config.data.validation=")
    base, single, double = (tmp_path / name for name in ("base", "one", "two"))
    train(1, 1, words(config, base, {}, *small))
    tuned = (f"--config.tune.name={arm}", "--config.tune.rank=2", f"--init_from={base}", *small)
    train(1, 1, words(config, single / "run", {}, *tuned), log=single / "log")
    alone = single / "run", read(single / "log")
    check(alone, config, double, 2, 2, {"fsdp": 2, "tensor": 2}, *tuned)
    one, two = (harness.store(each / "run").arrays(STEPS) for each in (single, double))
    adapter = [path for path in one if path.startswith("params/")]
    assert {path.rpartition("/")[2] for path in adapter} == {"lora_a", "lora_b"}
    for path in adapter:
        difference = abs(one[path] - two[path]).max()
        assert difference < 1e-3 * abs(one[path]).max(), path


@pytest.mark.slow
def test_a_checkpoint_of_four_processes_goes_on_with_two_and_then_with_one(alone, config, tmp_path):
    """A restore that saves again at once saves the same bits."""
    run = tmp_path / "run"
    train(4, 2, words(config, run, {"fsdp": 4, "tensor": 2}, "--stop_at=2"))
    written = {path.name for path in (run / "checkpoints/2").rglob("ocdbt.process_*")}
    assert written == {f"ocdbt.process_{process}" for process in range(4)}
    digests = {
        path: hashlib.sha256(leaf.tobytes()).hexdigest()
        for path, leaf in harness.store(run).arrays(2).items()
    }
    for processes, mesh in ((2, {"data": 2, "fsdp": 2}), (1, {"tensor": 2})):
        log = tmp_path / f"restored{processes}"
        copy = tmp_path / f"copy{processes}"
        shutil.copytree(run, copy)
        train(processes, 2, words(config, copy, mesh, "--stop_at=3"), log=log)
        held = [json.loads(path.read_text()) for path in tmp_path.glob(f"{log.name}.*.state")]
        assert len(held) == processes
        assert all(state == digests for state in held)
    train(2, 2, words(config, run, {"data": 2, "fsdp": 2}, "--stop_at=3"))
    train(1, 2, words(config, run, {"tensor": 2}))
    assert deviation(run, alone[0]) < 1e-5


@pytest.mark.slow
def test_a_mixture_in_stages_reads_the_same_rows_with_other_numbers_of_processes(config, tmp_path):
    """Two processes up to a step inside of each stage, one process from there.

    The rows and their records are equal.
    """
    folder = Path(config).parent
    settings = {
        "data.train": ",".join(f"s{n}={folder}/0{n}*.txt" for n in range(3)),
        "data.mixture.name": "weights",
        "data.mixture.weights": "s0=0.5@0..0.2@4,s1=0.3@0..0.6@4,s2=0.2",
        "data.validation": "tail:20%",
        "train.batch_warmup": "4@2",
        "data.sequence_warmup": "16@3",
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(1, 2, words(config, whole, {"data": 2}, *flags), log=tmp_path / "unbroken")
    for processes, step in ((2, 1), (1, 3), (2, STEPS)):
        command = words(config, parts, {"data": 2}, *flags, f"--stop_at={step}")
        train(processes, 2 // processes, command, log=tmp_path / "resumed")
    assert until(read(tmp_path / "resumed"), STEPS) == until(read(tmp_path / "unbroken"), STEPS)
    notes = [
        {r["step"]: {k: v for k, v in r.items() if k.startswith("sources/") or k == "tokens"}}
        for run in (whole, parts)
        for r in harness.records(run)
        if r["split"] == "train"
    ]
    assert notes[:STEPS] == notes[STEPS:]
    print(f"largest difference of a loss: {deviation(parts, whole):.1e}")
    assert harness.losses(parts) == harness.losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("difference", ["config", "code", "option"])
def test_ranks_that_differ_refuse_each_other_within_ten_seconds(config, tmp_path, difference):
    """Counted from their start; a machine with more to do than it has cores may take longer."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "jaxlm", other / "jaxlm", ignore=shutil.ignore_patterns("__pycache__"))
    if difference == "code":
        with open(other / "jaxlm/core/tree.py", "a") as file:
            file.write("# another\n")
    rates = ("0.1", "0.2" if difference == "config" else "0.1")
    flags = ((), ("--stop_at=2",) if difference == "option" else ())
    address = f"127.0.0.1:{free_port()}"
    begun = time.monotonic()
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxlm"),
                *words(config, tmp_path / "run", {"data": 2}, f"--config.optim.lr={rates[rank]}"),
                *("--cpu_devices=1", f"--coordinator={address}"),
                *("--num_processes=2", f"--process_id={rank}", *flags[rank]),
            ],
            cwd=(ROOT, other)[rank],
            env=os.environ | {"XLA_FLAGS": harness.FLAGS, "PYTHONPATH": str((ROOT, other)[rank])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    codes, output = end(started)
    took = time.monotonic() - begun
    print(f"refused {took:.1f} s after the start")
    assert codes == [2, 2], output
    line = {
        "config": "optim.lr: 0.1 on rank 0, 0.2 on rank 1",
        "code": "code of jaxlm/core: ",
        "option": "--stop_at: None on rank 0, 2 on rank 1",
    }[difference]
    assert output.count(line) == output.count("1 difference from rank 0") == 2
    machine.require_clock(took, 10)
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_batch_that_processes_cannot_share_is_refused_with_the_nearest(
    config, tmp_path, processes
):
    devices = 2 * processes
    codes, output = end(
        start(
            *(processes, 2),
            words(config, tmp_path / "run", {"data": devices}, "--config.train.batch=10"),
        )
    )
    assert codes == [2] * processes
    assert f"batch = 10 does not divide by {devices}" in output
    assert re.search(f"--config.train.batch=({'8|12' if processes == 2 else '6|12'})\\b", output)
    assert not (tmp_path / "run/config.json").exists()
