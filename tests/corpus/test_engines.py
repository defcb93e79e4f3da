"""The engine ray: its units on a stand-in for Ray, and on a real cluster of two nodes."""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from jaxlm.cli import data
from jaxlm.cli.main import main
from jaxlm.core.errors import DataError, InputMissing, NotWritable, PeerLost
from jaxlm.corpus import engines
from tests.corpus.recipes import RECIPE, prose, run, tree, write_lines

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--config.source=in/*.jsonl",
    "--config.stages=normalize,length,gopher,repetition,pii",
    "--config.dedup=exact,near,spans",
    "--config.unit_bytes=4000",
]


class Died(Exception):
    pass


class StandIn:
    """The part of Ray that the engine calls, in one process; units end in their order."""

    exceptions = SimpleNamespace(RayTaskError=ModuleNotFoundError, RayError=Died)

    def __init__(self, deaths=(), without_jaxlm=None):
        self.deaths, self.without_jaxlm = list(deaths), without_jaxlm
        self.begun, self.most = [], 0

    def remote(self, **options):
        assert options == {"num_cpus": 1, "max_retries": 0}
        return lambda function: SimpleNamespace(remote=lambda *words: self._begin(function, words))

    def _begin(self, function, words):
        self.begun.append(words[1])
        return len(self.begun) - 1, function, words

    def wait(self, running, num_returns):
        self.most = max(self.most, len(running))
        return running[:num_returns], running[num_returns:]

    def get(self, reference):
        _, function, words = reference
        if words[1] in self.deaths:
            self.deaths.remove(words[1])
            raise Died
        if words[1] == self.without_jaxlm:
            raise ModuleNotFoundError("No module named 'jaxlm'")
        return function(*words)


class Opens:
    """A task that fails at one unit."""

    def __init__(self, full=None):
        self.full = full

    def __call__(self):
        return self._task

    def _task(self, number):
        if number == self.full:
            raise OSError(28, "No space left on device", "units/00002.json")
        return {"clean": 1.0}


def numbers(ray, opens=None, units=range(6), workers=2):
    return [number for number, _ in engines.run_on_ray(opens or Opens(), units, workers, ray)]


def test_units_are_done_once_and_never_more_at_a_time_than_asked_for():
    ray = StandIn()
    assert numbers(ray) == list(range(6))
    assert ray.begun == list(range(6))
    assert ray.most == 2


def test_a_unit_whose_process_died_is_done_again_and_one_that_kills_two_is_named_at_the_end():
    ray = StandIn(deaths=[1, 4])
    assert sorted(numbers(ray)) == list(range(6))
    done = []
    with pytest.raises(PeerLost) as caught:
        for number, _ in engines.run_on_ray(Opens(), range(6), 2, StandIn(deaths=[3, 3])):
            done.append(number)
    assert sorted(done) == [0, 1, 2, 4, 5]
    assert caught.value.where == "unit 3, Died"


def test_a_full_disk_ends_it_when_what_was_begun_is_done():
    ray, done = StandIn(), []
    with pytest.raises(NotWritable) as caught:
        for number, _ in engines.run_on_ray(Opens(full=2), range(6), 2, ray):
            done.append(number)
    assert done == [0, 1, 3]
    assert caught.value.where == "units/00002.json"


def test_a_machine_without_jaxlm_is_said_when_what_was_begun_is_done():
    done = []
    with pytest.raises(InputMissing) as caught:
        for number, _ in engines.run_on_ray(Opens(), range(6), 2, StandIn(without_jaxlm=2)):
            done.append(number)
    assert done == [0, 1, 3]
    assert "No module named 'jaxlm'" in caught.value.why
    assert "on every machine" in caught.value.fix


def test_the_command_line_offers_every_engine():
    parser = argparse.ArgumentParser()
    data.add_engine(parser)
    for name in get_args(engines.EngineName):
        assert parser.parse_args(["--out=out", f"--engine={name}"]).engine == name
    with pytest.raises(SystemExit):
        parser.parse_args(["--out=out", "--engine=slurm"])


def test_a_machine_with_other_versions_or_without_the_folder_is_refused():
    theirs = tuple(engines.versions())
    here = os.getcwd()
    assert engines._task_if_equal(Opens(), here, theirs)(0) == {"clean": 1.0}
    with pytest.raises(DataError) as caught:
        engines._task_if_equal(Opens(), here, ("python 2.7", *theirs[1:]))
    assert "python 2.7" in caught.value.why
    assert f"python {sys.version.split()[0]}" in caught.value.why
    with pytest.raises(InputMissing) as missing:
        engines._task_if_equal(Opens(), "/nowhere/at/all", theirs)
    assert missing.value.where == f"{socket.gethostname()}: /nowhere/at/all"


def test_without_ray_it_says_what_to_install(here, capsys, monkeypatch):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, "ray", None)
    error = run(capsys, "--config.source=in/*.jsonl", "--engine=ray", code=66)["error"]
    assert error["fix"] == f"{sys.executable} -m pip install 'jaxlm[ray]'"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_a_cluster_that_does_not_answer_is_said_at_once(here, capsys, monkeypatch, address):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = run(capsys, "--config.source=in/*.jsonl", "--engine=ray", code=66)["error"]
    assert error["where"] == f"RAY_ADDRESS = {address}"
    assert error["fix"].startswith("ray start --head")


def test_a_server_that_is_no_cluster_is_not_replaced_by_this_machine(here, capsys, monkeypatch):
    def init(address, **_):
        assert address == "auto", "a cluster of this machine alone was begun"
        raise ConnectionError("no answer in time")

    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        error = run(capsys, "--config.source=in/*.jsonl", "--engine=ray", code=66)["error"]
    assert error["why"] == "no answer in time"


@pytest.fixture
def crawl(here):
    """Six files with duplicates of all kinds within and across them."""
    for number in range(6):
        rows = [{"text": prose(number * 3 + n)} for n in range(6)]
        rows += [{"text": "too short"}, {"text": prose(500, words=240) + f"\nLine {number}."}]
        write_lines(here / f"in/{number}.jsonl", rows)
    (here / "recipe.py").write_text(RECIPE)
    return here


@pytest.fixture
def nodes(monkeypatch):
    """Start a cluster of two nodes of one core each here; faults strike in all their work."""
    from ray.cluster_utils import Cluster

    begun = []

    def start(faults=""):
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("JAXLM_FAULTS", faults)
        head = {"num_cpus": 1, "include_dashboard": False}
        begun.append(Cluster(initialize_head=True, head_node_args=head))
        second = begun[-1].add_node(num_cpus=1)
        monkeypatch.delenv("JAXLM_FAULTS")
        return begun[-1], second

    yield start
    for each in begun:
        each.shutdown()
    shutil.rmtree(Path(tempfile.gettempdir()) / "ray")  # the place of these tests alone


def begin(cluster, out, action=("run", "--config=recipe.py", *SETTINGS)):
    command = ["data", *action, "--engine=ray", "--workers=2", f"--out={out}"]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxlm", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_two_nodes_write_the_bytes_of_one_process_and_go_on_where_they_were_stopped(
    crawl, capsys, nodes
):
    run(capsys, *SETTINGS)
    alone = tree(Path("out"))
    assert any(b"near" in line for line in alone["clusters.jsonl"].splitlines())
    healthy, _ = nodes()
    running = begin(healthy, "together")
    output = running.communicate()[0]
    assert running.returncode == 0, output
    assert "ray: 2 machines, 2 cores" in output
    assert tree(Path("together")) == alone
    mixing = ["mix", "--config.sources=web=out", "--config.tokenizer=bytes"]
    mixing += ["--config.unit_bytes=5000", "--config.held_out=0.2"]
    assert main(["data", *mixing, "--out=mixed"]) == 0
    running = begin(healthy, "mixed together", mixing)
    output = running.communicate()[0]
    assert running.returncode == 0, output
    assert tree(Path("mixed together")) == tree(Path("mixed"))
    broken, _ = nodes(faults="prepare.clean:sigkill@1")
    running = begin(broken, "killed")
    output = running.communicate()[0]
    assert running.returncode == 69, output
    assert "unit 1, WorkerCrashedError" in output
    names = {path.name for path in Path("killed/unfinished").iterdir()}
    assert {"00000", "00002", "00003", "00004", "00005"} <= names
    running = begin(healthy, "killed")
    assert "resuming: 5 of 6 units are cleaned" in running.communicate()[0]
    assert tree(Path("killed")) == alone


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_is_lost_on_the_way_loses_nothing(crawl, capsys, nodes):
    run(capsys, *SETTINGS)
    cluster, second = nodes(faults="prepare.clean:sleep=2")
    running = begin(cluster, "together")
    while not Path("together/unfinished/00001").exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.05)
    cluster.remove_node(second, allow_graceful=False)
    output = running.communicate()[0]
    assert running.returncode == 0, output
    assert tree(Path("together")) == tree(Path("out"))
