"""User errors are reported in four parts, within five seconds, before anything compiles."""

import json
import os
import shlex

import pytest

from tests import forked
from tests.faults import harness

CONFIG = """
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg=""):
    c = config.new(Run)
    c.data.train = ("{folder}/texts/*.txt",)
    c.data.validation = ("20%",)
    c.data.tokenizer = "bytes"
    c.model.width, c.model.depth, c.model.heads, c.model.kv_heads = 32, 1, 4, 2
    c.train.steps = 1
    return c
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name in ("texts", "latin", "empty", "records"):
        (folder / name).mkdir()
    for number in range(20):
        (folder / f"texts/{number}.txt").write_text(f"document {number} " * 20)
    (folder / "latin/a.txt").write_bytes("caf\u00e9".encode("latin1"))
    (folder / "latin/b.txt").write_text("text " * 20)
    (folder / "empty/a.txt").write_text("")
    records = ['{"text": "fine"}\n'] * 1500
    records[5] = '{"body": "not under text"}\n'
    (folder / "records/a.jsonl").write_text("".join(records))
    with open(folder / "huge.txt", "wb") as file:
        file.truncate(2**38)  # of zeros, which take no room
    (folder / "file").write_text("")
    (folder / "c.py").write_text(CONFIG.format(folder=folder))
    return folder


CASES = {
    "missing data": (
        ["--config.data.train={p}/none/*.txt"],
        66,
        ["no file matches", "none/*.txt", "fix    ls /"],
    ),
    "empty data": (["--config.data.train={p}/empty/*.txt"], 65, ["empty"]),
    "not UTF-8": (
        ["--config.data.train={p}/latin/*.txt"],
        65,
        ["not UTF-8", "latin/a.txt", "byte 3"],
    ),
    "not UTF-8, and much data after it": (
        ["--config.data.train={p}/latin/a.txt,{p}/huge.txt"],
        65,
        ["not UTF-8", "latin/a.txt", "byte 3"],
    ),
    "no text in one record": (
        ["--config.data.train={p}/records/*.jsonl"],
        65,
        ["line 6", "--config.data.max_dropped=0.01"],
    ),
    "weights of another mixture, which keep their proportions": (
        [
            "--config.data.train=aa={p}/texts/*.txt,bb={p}/huge.txt",
            "--config.data.mixture.weights=aa=1,bb=3",
        ],
        2,
        ["--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.25,bb=0.75"],
    ),
    "misspelt setting": (["--config.optim.lrr=1e-3"], 2, ["--config.optim.lr=0.001"]),
    "wrong type": (["--config.train.batch=many"], 2, ["train.batch", "many"]),
    "batch": (["--config.train.batch=9", "--cpu_devices=4"], 2, ["--config.train.batch=8"]),
    "batch of much data": (
        ["--config.data.train={p}/huge.txt", "--config.train.batch=9", "--cpu_devices=4"],
        2,
        ["--config.train.batch=8"],
    ),
    "batch of evaluations": (
        ["--config.eval.batch=6", "--config.train.batch=6", "--cpu_devices=4"],
        2,
        [
            "eval.batch = 6 does not divide by 4",
            "4 or 8 would",
            "--config.train.batch=4 --config.eval.batch=4",
        ],
    ),
    "micro-batches": (
        ["--config.train.batch=12", "--config.train.microbatches=5"],
        2,
        ["--config.train.microbatches=4", "--config.train.microbatches=6"],
    ),
    "half a cluster": (
        ["--cpu_devices=1"],
        2,
        ["SLURM_STEP_NODELIST", "--num_processes=1"],
    ),
    "heads": (
        ["--config.train.batch=8", "--cpu_devices=8", "--config.mesh.tensor=8"],
        2,
        [
            "kv_heads = 2 does not divide by 8",
            "--config.mesh.tensor=2",
        ],
    ),
    "experts": (
        [
            *("--cpu_devices=4", "--config.mesh.expert=4", "--config.mesh.data=1"),
            *("--config.model.family=mixtral", "--config.model.experts=6"),
        ],
        2,
        ["experts = 6 does not divide by 4", "--config.model.experts=4"],
    ),
    "sequence": (
        ["--cpu_devices=4", "--config.mesh.context=4", "--config.data.sequence=30"],
        2,
        ["sequence = 30 does not divide by 4", "28 or 32 would", "--config.data.sequence=28"],
    ),
    "layers": (
        ["--cpu_devices=2", "--config.mesh.pipe=2", "--config.model.depth=3"],
        2,
        ["depth = 3 does not divide by 2", "2 or 4 would", "--config.model.depth=2"],
    ),
    "mesh": (
        ["--cpu_devices=4", "--config.mesh.tensor=3"],
        2,
        ["needs a multiple of 3", "--config.mesh."],
    ),
    "schedule": (
        ["--config.schedule.warmup=5000", "--config.train.steps=100"],
        2,
        ["but the schedule ends at step", "--config.schedule.warmup=2%"],
    ),
    "group": (
        ["--config.optim.lr_scale=('nothing/*=0.5',)", "--config.train.batch=8"],
        2,
        ["matches no parameter", '--config.optim.lr_scale="()"'],
    ),
    "groups": (
        ["--config.optim.lr_scale=('embedding/*=0.5','embed*=0.1')", "--config.train.batch=8"],
        2,
        ["contain embedding/table", "--config.optim.lr_scale=\"('embedding/*=0.5',)\""],
    ),
    "source": (
        [
            "--config.data.train=a={p}/texts/*[0-4].txt,b={p}/texts/*[5-9].txt",
            "--config.data.mixture.name=weights",
            "--config.data.mixture.weights=a=0.5,c=0.5",
        ],
        2,
        ["'c=0.5' names no source; there is a, b", "--config.data.mixture.weights=a=0.5"],
    ),
    "weights": (
        [
            "--config.data.train=a={p}/texts/*[0-4].txt,b={p}/texts/*[5-9].txt",
            "--config.data.mixture.name=weights",
            "--config.data.mixture.weights=a=0.5,b=0.7",
        ],
        2,
        ["1.2", "--config.data.mixture.weights="],
    ),
    "arm": (
        ["--config.data.mixture.weights=a=0.5,b=0.5"],
        2,
        ["weights would have it", "fix    --config.data.mixture.name=weights"],
    ),
    "workdir": (["--workdir={p}/file/run"], 73, ["cannot be written"]),
    "no config file": (["--config={p}/none.py"], 66, ["none.py"]),
}
AFTER_DATA = ("group", "groups")  # the model's parameters are known once its vocabulary is
ENVIRONMENTS = {"half a cluster": {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2"}}


@pytest.mark.few(6)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_seconds_and_harms_nothing(case, place, tmp_path):
    flags, code, output = CASES[case]
    flags = [flag.format(p=place) for flag in flags]
    words = ["train", f"--config={place}/c.py", f"--workdir={tmp_path}/run", *flags]
    refuse(words, tmp_path, code, output, **ENVIRONMENTS.get(case, {}))
    assert files(tmp_path / "run") <= {"lock", "exit.json", "log.txt", "warnings.jsonl"}
    if case not in AFTER_DATA:
        assert files(tmp_path / "cache") == set(), "no tokenizer, no shards"


@pytest.mark.slow  # each is a run
@pytest.mark.parametrize("case", ["schedule", "group", "groups", "source", "weights"])
def test_with_the_fix_that_is_shown_the_same_command_trains(case, place, tmp_path):
    flags, code, _ = CASES[case]
    short = ["--config.data.sequence=32", "--config.train.batch=4"]
    short += ["--config.data.validation=tail:20%"]
    words = ["train", f"--config={place}/c.py", f"--workdir={tmp_path}/run", *short]
    words += [flag.format(p=place) for flag in flags] + ["--stop_at=1"]
    refused = start([*words, "--json"], tmp_path)
    assert refused.returncode == code
    for number, fix in enumerate(json.loads(refused.stdout)["error"]["fix"].splitlines()):
        repeated = [*words, *shlex.split(fix), f"--workdir={tmp_path}/{number}"]
        done = start(repeated, tmp_path)
        assert done.returncode == 0, (fix, done.stderr)
        assert harness.records(tmp_path / str(number))[0]["loss_nats"] > 0


def files(folder):
    """The names of all files in a folder, and in those of it; none where it is not there."""
    return {path.name for path in folder.rglob("*") if path.is_file()}


def start(words, folder, **environment):
    """A finished process, which found nothing compiled before."""
    variables = os.environ | {
        "XLA_FLAGS": harness.FLAGS,
        "JAXLM_CACHE": str(folder / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
    }
    return forked.run(words, variables | environment)


def refuse(words, folder, code, output, **environment):
    """Run a wrong command line: it ends soon, with a code and four parts, and compiles nothing."""
    compiled = files(folder / "xla")
    with harness.timing() as took:
        done = start(words, folder, **environment)
    assert files(folder / "xla") == compiled, "every program that is compiled is kept there"
    assert "compiling" not in done.stderr
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) <= 8, done.stderr
    assert [
        part
        for part in ("where", "why", "fix")
        if not any(line.strip().startswith(part) for line in lines)
    ] == []
    for words_said in output:
        assert words_said in done.stderr
    took.require(5)


@pytest.mark.slow  # the run that is there before
def test_the_workdir_of_another_config_is_refused_in_seconds_and_stays_as_it_was(place, tmp_path):
    words = ["train", f"--config={place}/c.py", f"--workdir={tmp_path}/run", "--quiet"]
    done = start([*words, "--config.data.sequence=32", "--config.train.batch=8"], tmp_path)
    assert done.returncode == 0, done.stderr
    before = harness.tree(tmp_path / "run")
    output = ["data.sequence: 32 -> 64", "train.batch: 8 -> 4", "fix    --workdir=runs/another"]
    flags = ["--config.data.sequence=64", "--config.train.batch=4"]
    refuse([*words, *flags], tmp_path, 2, [*output, "--allow_change=data.sequence,train.batch\n"])
    assert harness.tree(tmp_path / "run") == before
