"""Stored distributions of a teacher: the loss of a student on them, the files, and bad ones."""

import dataclasses
import hashlib
import json
import pickle
import random
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.special

from jaxlm.cli.main import main
from jaxlm.core.errors import DataError
from jaxlm.core.precision import Precision
from jaxlm.data import teacher as stored_teacher
from jaxlm.data.batch import TeacherTop, Tokens
from jaxlm.data.loader import cut_rows
from jaxlm.data.teacher import StoredTeacher, top_name
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import Distill, LossConfig
from jaxlm.objectives.distill import top_of
from jaxlm.recipes.use import teach as recipe
from tests.faults import harness
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")

VOCAB = 64
ALL = 320  # ids of the models of runs
FAMILY = Llama(vocab=VOCAB, width=16, depth=1, heads=2, kv_heads=2, hidden=32)
SETTINGS = {
    "train.steps": 4,
    "data.packing": "concat",
    "checkpoint.every": 2,
    "sample.prompts": (),
    "eval.batches": 2,
}


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32())


@pytest.fixture(scope="module")
def models(blueprint):
    return [draw_params(blueprint, n, std=0.1) for n in (0, 1)]


def rows(shape=(2, 8)):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, shape).astype(np.int32)
    weights = draw.random(shape).astype(np.float32)
    segments = np.ones(shape, np.int32)
    positions = np.arange(shape[1], dtype=np.int32) + 0 * tokens
    fields = tokens, np.roll(tokens, -1, 1), weights, segments, positions
    return Tokens(*fields)


def logits_of(blueprint, params):
    def logits(params, tokens, positions):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions).values)

    return jax.jit(logits)(params, rows().tokens, rows().positions)


def value_and_gradient(blueprint, student, batch, teacher=None, **settings):
    config = Distill(teacher="runs/a", weight=0.7, temperature=2.0, **settings)
    objective = build(config, LossConfig(chunk=4))

    def loss(student):
        taught = None if teacher is None else blueprint.merge(teacher)
        result = objective.loss(blueprint.merge(student), batch, None, taught)
        return result.value, result.metrics

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(student)
    return float(value), {n: float(m.value) for n, m in metrics.items()}, gradient


def taught_rows(blueprint, params, top, temperature=2.0):
    batch = rows()
    return batch._replace(
        teacher=top_of(logits_of(blueprint, params), batch.targets, top, temperature)
    )


def assert_close(one, other, atol):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_with_all_ids_the_loss_and_its_gradient_are_those_of_the_teacher(blueprint, models, kind):
    student, teacher = models
    settings = {"divergence": kind, "beta": 0.25}
    batch = taught_rows(blueprint, teacher, VOCAB)
    value, metrics, gradient = value_and_gradient(blueprint, student, batch, **settings)
    expected = value_and_gradient(blueprint, student, rows(), teacher, **settings)
    assert value == pytest.approx(expected[0], rel=1e-5)
    assert metrics == pytest.approx(expected[1], rel=1e-4)
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) > 1e-3
    assert_close(gradient, expected[2], atol=1e-5)


@pytest.mark.slow
def test_all_ids_that_are_not_stored_are_one_event(blueprint, models):
    student, teacher = models
    batch, top = taught_rows(blueprint, teacher, 4), 4
    _, metrics, _ = value_and_gradient(blueprint, student, batch)
    p, q = (
        scipy.special.softmax(np.asarray(logits_of(blueprint, each), np.float64) / 2.0, -1)
        for each in (teacher, student)
    )
    order = np.argsort(-p, -1)[..., :top]
    p, q = (
        np.concatenate(
            (part := np.take_along_axis(x, order, -1), 1 - part.sum(-1, keepdims=True)), -1
        )
        for x in (p, q)
    )
    weights = np.asarray(batch.weights, np.float64)
    expected = (weights * (p * np.log(p / q)).sum(-1)).sum() / weights.sum()
    assert metrics["teacher_kl_nats"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("top", [4, VOCAB])
def test_a_student_that_is_its_teacher_has_the_entropy_as_its_loss_and_no_gradient(
    blueprint, models, top
):
    """The cross-entropy is the entropy, as the divergence is 0."""
    student = models[0]
    batch = taught_rows(blueprint, student, top, temperature=1.0)
    settings = Distill(teacher="a", weight=1.0)
    objective = build(settings, LossConfig())

    def loss(params):
        return objective.loss(blueprint.merge(params), batch, None).value

    value, gradient = jax.jit(jax.value_and_grad(loss))(student)
    assert abs(float(value)) < 1e-5
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradient)) < 1e-5


def test_rows_that_are_cut_keep_their_distributions():
    ids = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    top = TeacherTop(ids, ids + 0.5, ids[..., 0], ids[..., 1])
    batch = jax.tree.map(np.asarray, rows())._replace(teacher=top)
    cut = cut_rows(batch, 4).teacher
    assert cut.ids.shape == (4, 4, 3)
    np.testing.assert_array_equal(cut.ids.reshape(2, 8, 3), ids)
    np.testing.assert_array_equal(cut.nll[1], ids[0, 4:, 1])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
    """A teacher, in `teacher`, and all its distributions, in `stored`."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(harness.words(config, folder / "teacher")) == 0
    assert main(teaching(config, folder / "teacher", folder / "stored", f"--top={ALL}")) == 0
    return folder


def teaching(config, workdir, out, *flags):
    return ["teach", f"--workdir={workdir}", f"--config={config}", f"--out={out}", *flags]


def from_stored(folder, *flags):
    return ["--config.objective.name=distill", f"--config.objective.stored={folder}", *flags]


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def train_records(workdir):
    return [r for r in harness.records(workdir) if r["split"] == "train"]


@pytest.mark.slow
def test_a_student_of_stored_distributions_has_the_losses_of_one_with_the_teacher(
    config, runs, tmp_path
):
    online = ["--config.objective.name=distill", f"--config.objective.teacher={runs / 'teacher'}"]
    assert main(harness.words(config, tmp_path / "online", *online)) == 0
    shutil.move(runs / "teacher", runs / "away")  # it is not needed
    try:
        words = harness.words(config, tmp_path / "run", *from_stored(runs / "stored"))
        assert main(words) == 0
    finally:
        shutil.move(runs / "away", runs / "teacher")
    for one, other in zip(
        train_records(tmp_path / "run"), train_records(tmp_path / "online"), strict=True
    ):
        for name in ("loss_nats", "teacher_kl_nats", "teacher_nats"):
            assert one[name] == pytest.approx(other[name], rel=2e-3), (one["step"], name)
    log = (tmp_path / "run/log.txt").read_text()
    assert f"distill; the {ALL} likeliest ids of step 4 of {runs / 'teacher'}; evaluated" in log


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2 fsdp=2", "fsdp=2 tensor=2", "context=2 data=2"])
def test_a_student_on_four_devices_has_the_losses_of_one_device(config, runs, tmp_path, mesh):
    """The processes have four fake devices; the losses differ by the order of sums alone."""
    words = [*from_stored(runs / "stored"), "--config.precision.compute=float32"]
    whole = harness.words(config, tmp_path / "one", *words)
    assert harness.run(whole)[0] == 0
    sizes = dict(each.split("=") for each in mesh.split())
    axes = [f"--config.mesh.{axis}={sizes.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")]
    axes += [f"--config.mesh.context={sizes.get('context', 1)}", "--cpu_devices=4"]
    code, output = harness.run(harness.words(config, tmp_path / "four", *words, *axes), is_new=True)
    assert code == 0, output
    one, four = (train_records(tmp_path / name) for name in ("one", "four"))
    assert len(one) == len(four) == SETTINGS["train.steps"]
    for alone, other in zip(one, four, strict=True):
        for name in ("loss_nats", "teacher_kl_nats", "teacher_nats", "grad_norm"):
            assert other[name] == pytest.approx(alone[name], rel=1e-5), (alone["step"], name)


@pytest.mark.slow
def test_a_student_that_stops_resumes_to_the_same_bits(config, runs, tmp_path):
    flags = from_stored(runs / "stored")
    assert main(harness.words(config, tmp_path / "whole", *flags)) == 0
    assert main(harness.words(config, tmp_path / "parts", *flags, "--stop_at=2")) == 0
    assert main(harness.words(config, tmp_path / "parts", *flags)) == 0
    assert harness.losses(tmp_path / "whole") == harness.losses(tmp_path / "parts")


@pytest.mark.slow
def test_rows_of_another_length_than_the_teacher_saw_are_a_caution(config, runs, tmp_path):
    saw = StoredTeacher.open(runs / "stored").facts.sequence
    flags = from_stored(runs / "stored", f"--config.data.sequence={saw // 2}", "--stop_at=1")
    assert main(harness.words(config, tmp_path / "run", *flags)) == 0
    assert f"--config.data.sequence={saw}\n" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.slow
def test_other_distributions_are_refused_when_the_run_resumes(config, runs, tmp_path, capsys):
    folder = tmp_path / "stored"
    shutil.copytree(runs / "stored", folder)
    words = harness.words(config, tmp_path / "run", *from_stored(folder))
    assert main([*words, "--stop_at=2"]) == 0
    shutil.rmtree(folder)
    assert main(teaching(config, runs / "teacher", folder, "--top=8", "--step=2")) == 0
    assert main(words) == 2
    assert "allow_change=data" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mixture_of_sources_in_another_order_reads_the_rows_of_its_tokens(
    config, runs, tmp_path, capsys
):
    """Rows belong to tokens: another seed, length or mixture of the same text reads the same."""
    texts = re.search(r'\("(.*)/\*\.txt"', Path(config).read_text())[1]
    one, other, *_ = sorted(path.name for path in Path(texts).glob("*.txt"))
    shares = [f"--config.data.train=a={texts}/{one},b={texts}/{other}"]
    shares += ["--config.data.mixture.name=weights", "--config.data.mixture.weights=a=0.25,b=0.75"]
    shares += ["--config.data.validation=tail:10%"]
    assert (
        main(teaching(config, runs / "teacher", tmp_path / "mixed", f"--top={ALL}", *shares)) == 0
    )
    flags = [*from_stored(tmp_path / "mixed"), *shares, "--config.seed=5"]
    assert main(harness.words(config, tmp_path / "run", *flags)) == 0
    online = ["--config.objective.name=distill", f"--config.objective.teacher={runs / 'teacher'}"]
    flags = [*online, *shares, "--config.seed=5"]
    assert main(harness.words(config, tmp_path / "online", *flags)) == 0
    for one, other in zip(
        train_records(tmp_path / "run"), train_records(tmp_path / "online"), strict=True
    ):
        assert one["teacher_nats"] == pytest.approx(other["teacher_nats"], rel=5e-2)


class Killed(BaseException):
    """The end of a process, as a signal would be: no handler of errors sees it."""


@pytest.mark.few(1)
@pytest.mark.parametrize("writes", [1, 0, 3, 7, 20])
def test_a_pass_that_is_killed_continues_to_the_same_bytes(
    config, runs, tmp_path, monkeypatch, capsys, writes
):
    """The command that follows trains on the same data, with the settings of the command line."""
    monkeypatch.setattr(recipe, "SAVE_SECONDS", 0.0)
    write, count = stored_teacher.RowWriter.write, iter(range(10**6))

    def dying(self, number, first, values):
        if next(count) == writes:
            write(self, number, first, values[: len(values) // 2])  # torn
            raise Killed
        write(self, number, first, values)

    settings = ["--config.model.dropout=0.0", "--config.objective.name=causal"]
    words = teaching(config, runs / "teacher", tmp_path / "stored", f"--top={ALL}", *settings)
    with monkeypatch.context() as patch:
        patch.setattr(stored_teacher.RowWriter, "write", dying)
        with pytest.raises(Killed):
            main(words)
    assert not (tmp_path / "stored").exists()
    capsys.readouterr()
    assert main(words) == 0
    assert contents(tmp_path / "stored") == contents(runs / "stored")
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("next  ")]
    assert settings[0] in line
    assert re.findall(r"objective\.name=(\w+)", line) == ["distill"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "done"),
    [
        ("teach.row:sigkill@3", 0),  # in the middle of the first batch
        (f"teach.row:sleep={recipe.SAVE_SECONDS + 0.5}@12,teach.row:sigkill@21", 2),
        ("teach.finish:sigkill", None),  # all rows, before the folder has its name
    ],
)
def test_a_process_that_sigkill_ends_leaves_no_rows_to_read_and_continues_to_the_same_bytes(
    config, runs, tmp_path, faults, done
):
    out, partial = tmp_path / "stored", tmp_path / "stored.partial"
    words = teaching(config, runs / "teacher", out, f"--top={ALL}")
    code, output = harness.run(words, faults)
    assert code == -signal.SIGKILL, output
    assert not out.exists()
    record = json.loads((partial / recipe.PROGRESS).read_text())["done"]
    if done is not None:
        assert sum(record.values()) == done
        whole = {name: data for name, data in contents(runs / "stored").items() if "top" in name}
        assert any(contents(partial)[name] != data for name, data in whole.items())
        for folder in (out, partial):  # neither name has a teacher to read
            words_of_run = harness.words(config, tmp_path / "run", *from_stored(folder))
            code, output = harness.run(words_of_run)
            assert code == 66, output
            assert stored_teacher.NAME in output
            assert not (tmp_path / "run/config.json").exists()
    code, output = harness.run(words)
    assert code == 0, output
    assert f"continuing {partial}" in output
    assert contents(out) == contents(runs / "stored")
    assert not partial.exists()


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_stores_the_same_bytes(config, runs, tmp_path):
    """Each life is ended from outside, at another instant, while it writes rows."""
    out, partial, draw = tmp_path / "stored", tmp_path / "stored.partial", random.Random(3)
    words = teaching(config, runs / "teacher", out, f"--top={ALL}")
    kills = 0
    for _ in range(4):
        process = harness.start(words, "teach.row:sleep=0.1")
        while process.poll() is None and not any(partial.glob("*/top-*")):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 2.0))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert not out.exists()
    assert kills == 4
    assert harness.run(words)[0] == 0
    assert contents(out) == contents(runs / "stored")


def test_a_finished_folder_is_not_written_again(config, runs, capsys):
    before = contents(runs / "stored")
    capsys.readouterr()
    words = teaching(config, runs / "teacher", runs / "stored", f"--top={ALL}", "--json")
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == answer["tokens"] * (4 * ALL + 4)
    assert contents(runs / "stored") == before


def test_by_default_a_token_has_at_most_300_bytes():
    for vocab in (2**16, 2**17, 300_000):
        each = stored_teacher.Facts(
            run="a",
            step=1,
            weights="",
            tokenizer="",
            vocab=vocab,
            top=stored_teacher.most_ids(vocab),
            temperature=1.0,
            sequence=1,
            passes={},
        )
        assert 150 < each.dtype.itemsize <= 300


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--config.data.tokenizer=bpe:300"], "data.tokenizer"),
        (["--config.model.vocab=1024"], "--config.model.vocab="),
        (["--config.objective.temperature=2"], "--config.objective.temperature=1"),
        (["--config.data.train=OTHER"], "has not read the training data"),
        (["--config.objective.teacher=runs/a"], "--config.objective.teacher="),
    ],
)
def test_distributions_that_do_not_fit_are_refused(config, runs, tmp_path, capsys, flags, text):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"another text of {number} " * 100)
    flags = [flag.replace("OTHER", f"{tmp_path}/*.txt") for flag in flags]
    words = harness.words(config, tmp_path / "run", *from_stored(runs / "stored"), *flags)
    assert main(words) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run/config.json").exists()


def sealed(folder, change):
    """Change the first rows of a folder, and all digests, as another program would write them."""
    opened = StoredTeacher.open(folder)
    (name, shards), *_ = opened.sets.items()
    path = folder / name / top_name(0)
    values = np.frombuffer(path.read_bytes(), opened.dtype).copy()
    change(values)
    path.write_bytes(values.tobytes())
    writer = stored_teacher.BlockWriter(folder / "scratch")
    writer.write(values)
    writer.close()
    checks = writer.checks.tobytes()
    (folder / name / stored_teacher.checks_name(0)).write_bytes(checks)
    digests = {"sha256": writer.sha256, "checks": hashlib.sha256(checks).hexdigest()}
    stored_teacher.write_facts(folder, opened.facts, opened.sets | {name: [shards[0] | digests]})


def past_the_end(values):
    values["ids"][:, 3] = 60_000


def heavy(values):
    values["log_p"][:] = -1.0


def not_a_number(values):
    values["tail"][:] = np.nan


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (past_the_end, "id 60000, past the end"),
        (heavy, "has the mass 117."),
        (not_a_number, "mass nan"),
    ],
)
def test_rows_that_are_no_distributions_are_refused(config, runs, tmp_path, capsys, change, text):
    folder = tmp_path / "stored"
    shutil.copytree(runs / "stored", folder)
    sealed(folder, change)
    assert main(harness.words(config, tmp_path / "run", *from_stored(folder))) == 65
    assert text in capsys.readouterr().err


def test_a_worker_process_reads_the_same_rows(runs):
    opened = StoredTeacher.open(runs / "stored")
    copy = pickle.loads(pickle.dumps(opened))
    assert (copy.facts, copy.sets, copy.digest) == (opened.facts, opened.sets, opened.digest)


def test_damaged_files_are_refused(runs, tmp_path):
    folder = tmp_path / "stored"
    shutil.copytree(runs / "stored", folder)
    opened = StoredTeacher.open(folder)
    (name, _), *_ = opened.sets.items()
    path = folder / name / top_name(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="lists"):
        StoredTeacher.open(folder)
    path.write_bytes(whole)
    facts = json.loads((folder / stored_teacher.NAME).read_text())
    facts["facts"]["vocab"] += 1
    (folder / stored_teacher.NAME).write_text(json.dumps(facts))
    with pytest.raises(DataError, match="digest"):
        StoredTeacher.open(folder)


def test_a_changed_byte_is_refused(config, runs, tmp_path, capsys):
    folder = tmp_path / "stored"
    shutil.copytree(runs / "stored", folder)
    for path in folder.glob(f"*/{top_name(0)}"):
        content = bytearray(path.read_bytes())
        content[:: len(content) // 97] = bytes(len(content[:: len(content) // 97]))
        content[5000::4096] = bytes(255 - each for each in content[5000::4096])
        path.write_bytes(content)
    assert main(harness.words(config, tmp_path / "run", *from_stored(folder))) == 65
    assert "CRC-32" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ("deleted", 66, "there is no config.json"),
        ("replaced", 2, "its weights is"),
        ("precision", 2, "its precision is"),
        ("top", 2, "its top is"),
    ],
)
def test_a_pass_is_not_continued_with_another_teacher(
    config, runs, tmp_path, capsys, monkeypatch, change, code, text
):
    teacher, out = tmp_path / "teacher", tmp_path / "stored"
    shutil.copytree(runs / "teacher", teacher)

    def dying(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stored_teacher.RowWriter, "write", dying)
        with pytest.raises(Killed):
            main(teaching(config, teacher, out))
    words = teaching(config, teacher, out)
    if change == "deleted":
        shutil.rmtree(teacher)
    elif change == "replaced":
        words.append("--step=2")
        monkeypatch.setattr(
            recipe,
            "_facts",
            lambda *args, was=recipe._facts, **more: dataclasses.replace(
                was(*args, **more), step=4
            ),
        )
    elif change == "precision":
        file = teacher / "config.json"
        file.write_text(file.read_text().replace('"moments": "float32"', '"moments": "bfloat16"'))
    else:
        words.append("--top=5")
    before = contents(tmp_path / "stored.partial")
    capsys.readouterr()
    assert main(words) == code
    assert text in capsys.readouterr().err
    assert contents(tmp_path / "stored.partial") == before


@pytest.mark.few(1)
def test_a_pass_is_not_continued_on_other_text(config, runs, tmp_path, capsys, monkeypatch):
    """Finished batches are counted by loader: rows of another text would never be written."""
    texts = re.search(r'\("(.*)/\*\.txt"', Path(config).read_text())[1]
    words = teaching(config, runs / "teacher", tmp_path / "stored", f"--top={ALL}")

    def killed(folder, facts, sets):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(stored_teacher, "write_facts", killed)
        with pytest.raises(Killed):
            main(words)
    before = contents(tmp_path / "stored.partial")
    capsys.readouterr()
    assert main([*words, f"--config.data.train={texts}/0[0-3]*.txt"]) == 2
    assert "begun on other text" in capsys.readouterr().err
    assert contents(tmp_path / "stored.partial") == before
    assert main(words) == 0
    assert contents(tmp_path / "stored") == contents(runs / "stored")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("flags", "text"),
    [(["--top=0"], "--top=64"), (["--top=100000"], "--top=64")],
)
def test_a_number_of_ids_is_checked(config, runs, tmp_path, capsys, flags, text):
    assert main(teaching(config, runs / "teacher", tmp_path / "out", *flags)) == 2
    assert text in capsys.readouterr().err


def test_a_full_disk_is_refused_before_the_pass(config, runs, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(recipe.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(teaching(config, runs / "teacher", tmp_path / "out")) == 73
    assert "1000 B" in capsys.readouterr().err
