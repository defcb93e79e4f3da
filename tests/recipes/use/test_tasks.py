"""`jaxlm eval --tasks` through the front door: scores, results on disk, and resuming."""

import dataclasses
import errno
import functools
import json
import math
import random
import shutil
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError, Diverged
from jaxlm.core.precision import Precision
from jaxlm.evals.tasks import answers as task_answers
from jaxlm.evals.tasks import config, packing, scoring
from jaxlm.evals.tasks.requests import ScoringRequest
from jaxlm.generate import continuer
from jaxlm.generate.engine import Engine
from jaxlm.models.build import Blueprint
from jaxlm.models.families.t5 import T5
from jaxlm.monitor import host_machine, sinks
from jaxlm.objectives.config import Masked
from jaxlm.recipes.train.task_scores import affordable
from jaxlm.recipes.use import load, tasks
from jaxlm.recipes.use.tasks import ModelRows, PreparedTask, ScoredModel, TaskSettings, Tokenizers
from jaxlm.training.lock import Lock
from tests.faults import harness
from tests.mutation import mutate

TASKS = {
    "choice": 'context = "{{ a }}"\nchoices = ["{{ b }}", "{{ c }}"]\nanswer = "0"',
    "answer": 'context = "{{ a }}"\nanswer = "{{ b }}"\nmax_tokens = 5\nstop = ["e"]\nsamples = 2',
    "pair": 'good = "{{ a }} {{ b }}"\nbad = "{{ a }} {{ c }}"\nsubset = "{{ kind }}"',
    "text": 'text = "{{ a }} {{ a }} {{ b }}"\ngroup = "{{ kind }}"',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    words = "one two three four five six seven".split()
    lines = [
        {"a": " ".join(draw.choices(words, k=3)), "b": f"{n} b", "c": f"c {n}", "kind": f"k{n % 3}"}
        for n in range(23)
    ]
    (folder / "items.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for kind, text in TASKS.items():
        (folder / f"{kind}.toml").write_text(f'kind = "{kind}"\nitems = "items.jsonl"\n{text}\n')
    return folder


@pytest.fixture(scope="module")
def trained(folder, one_device, without_plots):
    # The bytes have fewer ids than the vocabulary: the rest is padding.
    settings = {"train.steps": 2, "model.dropout": 0.0, "model.vocab": 320, "optim.lr": 1e-2}
    config = harness.write_config(folder, settings)
    assert main(harness.words(config, folder / "run")) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def call(capsys, run, *words):
    capsys.readouterr()
    code = main(["eval", f"--workdir={run}", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def prepared(opened, path, **settings):
    settings, tokenizers = TaskSettings(**settings), Tokenizers(opened.tokenizer)
    rows = ModelRows(64, opened.model.mesh, opened.model.blueprint.config)
    return PreparedTask(config.read(path), settings, tokenizers, rows)


def samples(result):
    with open(f"{result['folder']}/samples.jsonl", "rb") as file:
        return file.read()


def test_scores_are_those_of_the_evaluation_step_and_the_same_command_resumes(folder, run, capsys):
    kinds = ("choice", "pair", "text")
    names = ",".join(str(folder / f"{kind}.toml") for kind in kinds)
    words = [f"--tasks={names}", "--sequence=64", "--shots=0"]
    code, answer = call(capsys, run, *words)
    assert code == 0
    assert sorted(answer["tasks"]) == sorted(kinds)
    # A text as an item has the nats per byte of the same text as a validation set.
    text = answer["tasks"]["text"]
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    documents = [{"text": f"{each['a']} {each['a']} {each['b']}"} for each in lines]
    (run / "same.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    _, losses = call(capsys, run, f"--text={run / 'same.jsonl'}", "--sequence=2048")
    assert text["metrics"]["bits_per_byte"]["mean"] == pytest.approx(
        losses["bits_per_byte_text"], rel=1e-6
    )
    stored = json.loads((Path(text["folder"]) / "task.json").read_text())
    assert stored["path"] == str(folder / "text.toml")
    assert (text["groups"], text["items"]) == (3, 23)
    assert set(answer["tasks"]["pair"]["subsets"]) == {"k0", "k1", "k2"}
    choice = answer["tasks"]["choice"]
    assert set(choice["metrics"]) == {
        "accuracy",
        "accuracy_bytes",
        "accuracy_tokens",
        "accuracy_pmi",
    }
    assert choice["metrics"]["accuracy"]["chance"] == 0.5
    whole = samples(choice)
    with open(f"{choice['folder']}/samples.jsonl", "wb") as file:
        file.write(whole[: len(whole) // 2])  # a torn line
    assert call(capsys, run, *words) == (0, answer)
    assert samples(choice) == whole
    assert main(["eval", f"--workdir={run}", *words]) == 0
    printed = capsys.readouterr().out
    assert "pair" in printed
    assert "k2" in printed
    assert "accuracy_pmi" in printed


def test_the_engine_writes_answers_and_passes_write_the_same_on_two_devices(
    folder, run, capsys, monkeypatch
):
    """Rows of a pass wait for the longest: 69 answers of up to 16 tokens would take 80 steps."""
    task = folder / "stopped.toml"
    text = TASKS["answer"].replace("max_tokens = 5", "max_tokens = 16")
    text = text.replace('["e"]', json.dumps([*"abcdefghijklmnopqrstuvwxyz "]))
    text += f'\ntemperature = 9.0\npreamble = "{"a " * 40}"'
    task.write_text(f'kind = "answer"\nitems = "items.jsonl"\n{text}\n')
    engines = []

    def built(*arguments, **options):
        engines.append(Engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(continuer, "Engine", built)
    words = [f"--tasks={task}", "--sequence=128", "--batch=64"]
    code, answer = call(capsys, run, *words)
    assert code == 0
    (engine,) = engines
    counters, whole = engine.counters, samples(answer["tasks"]["stopped"])
    assert (engine.rows, counters.passes < 60, counters.compiles <= 8) == (16, True, True)
    assert counters.cached_tokens > counters.prompt_tokens  # the preamble is read once
    with open(f"{answer['tasks']['stopped']['folder']}/samples.jsonl", "r+b") as file:
        file.truncate(len(whole) // 2)
    assert call(capsys, run, *words) == (0, answer)
    assert (len(engines), samples(answer["tasks"]["stopped"])) == (2, whole)
    shutil.rmtree(run / "evals")
    chosen = jax.local_devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: chosen)
    monkeypatch.setattr(jax, "device_count", lambda *_: 2)
    assert call(capsys, run, *words) == (0, answer)
    assert (len(engines), samples(answer["tasks"]["stopped"])) == (2, whole)


def test_answers_beyond_the_memory_are_refused_with_a_limit_that_fits(
    folder, run, capsys, monkeypatch
):
    monkeypatch.setattr(continuer, "PREFIX_BYTES", 0)
    monkeypatch.setattr(host_machine, "physical_bytes", lambda: 5 * 2**20)
    made = ConfigError("made", where="", why="", fix="")
    monkeypatch.setattr(continuer, "Engine", mock.Mock(side_effect=made))
    task = folder / "long.toml"
    text = TASKS["answer"].replace("max_tokens = 5", "max_tokens = 900")
    task.write_text(f'kind = "answer"\nitems = "items.jsonl"\n{text}\n')
    words = [f"--tasks={task}", "--sequence=1024"]
    code, answer = call(capsys, run, *words)
    error = answer["error"]
    assert (code, error["where"]) == (71, "checked before anything is compiled")
    assert error["what"].startswith("16 texts of ")
    (fix,) = error["fix"].splitlines()
    limit, _, place = fix.partition("    # in ")
    assert (limit.partition(" = ")[0], place) == ("max_tokens", str(task))
    task.write_text(task.read_text().replace("max_tokens = 900", limit))
    code, answer = call(capsys, run, *words)
    assert (code, answer["error"]["what"]) == (2, "made")


@pytest.mark.slow  # each of the programs is compiled
def test_answers_are_those_of_generate(folder, run, capsys):
    words = [f"--tasks={folder / 'answer.toml'}", "--sequence=64"]
    _, answer = call(capsys, run, *words)
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in samples(answer["tasks"]["answer"]).splitlines()]
    prompts = [f"--prompt={lines[n]['a']}" for n in (0, 22)]
    words_of_generate = [*prompts, "--temperature=0", "--max_tokens=5", "--stop=e", "--json"]
    assert main(["generate", f"--workdir={run}", *words_of_generate]) == 0
    generated = json.loads(capsys.readouterr().out)["samples"]
    fields = ("ids", "text", "finish_reason")
    assert [[answers[n][name] for name in fields] for n in (0, 22)] == [
        [each[name] for name in fields] for each in generated
    ]
    for number in (0, 22):
        drawn = [each["text"] for each in answers[number]["drawn"]]
        assert set(answers[number]["metrics"]) == {"exact_match", "pass_at_1", "pass_at_2"}
        for sample, text in enumerate(drawn):
            seed = task_answers.seed_of(0, answers[number]["id"], sample)
            words_of_generate = [prompts[number > 0], "--max_tokens=5", "--stop=e", "--json"]
            flags = ["--temperature=1", f"--seed={seed}"]
            assert main(["generate", f"--workdir={run}", *words_of_generate, *flags]) == 0
            (generated,) = json.loads(capsys.readouterr().out)["samples"]
            assert text == generated["text"]


@pytest.mark.parametrize("kernel", ["blockwise", pytest.param("reference", marks=pytest.mark.slow)])
def test_choices_that_share_a_prefix_have_the_scores_of_each_alone(folder, trained, kernel):
    opened = load.load_run(trained, sequence=64)
    blueprint = opened.model.blueprint
    attention = functools.partial(dataclasses.replace, kernel=kernel)
    blueprint = Blueprint(
        blueprint.config.map_blocks(
            lambda block: dataclasses.replace(block, attention=attention(block.attention))
        ),
        Precision.of(opened.run.precision),
    )
    task = prepared(opened, folder / "choice.toml", shots=1)
    assert task.is_shared
    asked = [each.requests for each in task.prompter.questions(list(task.scored_items()))]
    asked += [
        [ScoringRequest((1, 9, 9, 5), 3, False), ScoringRequest((1, 9, 9, 7), 3, False)]
    ]  # one token each
    with jax.set_mesh(opened.model.mesh):
        alone, shared = (
            scoring.Scorer(
                blueprint.merge, opened.model.mesh, opened.tokenizer.pad, is_shared=each
            ).nats(opened.params, asked, task.shape)
            for each in (False, True)
        )
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-6)
    assert max(map(len, shared)) == 2


def compare_with_logits(folder, trained):
    """Compare scores of packed items with the logits of each choice alone, in float64."""
    opened = load.load_run(trained, sequence=64)
    blueprint = opened.model.blueprint
    task = prepared(opened, folder / "choice.toml")
    assert opened.tokenizer.size < blueprint.config.vocab == 320
    asked = [each.requests for each in task.prompter.questions(list(task.scored_items()))[:6]]
    logits_of = jax.jit(lambda params, ids: blueprint.merge(params)(ids))
    with jax.set_mesh(opened.model.mesh):
        (scorer,) = tasks.scorers([task], blueprint)
        scored = scorer.nats(opened.params, asked, task.shape)
        for each, nats in zip(asked, scored, strict=True):
            rows = np.zeros((len(each), 64), np.int32)
            for row, request in zip(rows, each, strict=True):
                row[: len(request.ids)] = request.ids
            logits = np.asarray(logits_of(opened.params, rows), np.float64)
            for row, request, score in zip(logits, each, nats, strict=True):
                total = 0.0
                for place in range(request.begin, len(request.ids)):
                    z = row[place - 1]
                    total += math.log(np.exp(z - z.max()).sum()) + z.max() - z[request.ids[place]]
                assert score == pytest.approx(total, abs=1e-4)


def test_scores_are_those_of_the_logits_over_the_padded_vocabulary(folder, trained):
    compare_with_logits(folder, trained)


def test_logits_are_those_of_scored_tokens_alone(folder, trained, monkeypatch):
    opened = load.load_run(trained, sequence=64)
    task = prepared(opened, folder / "choice.toml")
    asked = [each.requests for each in task.prompter.questions(list(task.scored_items()))]
    traced = []

    def recorded(step):
        def run(*arguments):
            traced.append(str(jax.make_jaxpr(step)(*arguments)))
            return step(*arguments)

        return run

    with jax.set_mesh(opened.model.mesh):
        (scorer,) = tasks.scorers([task], opened.model.blueprint)
        monkeypatch.setattr(scorer, "_step", recorded(scorer._step))
        scorer.nats(opened.params, asked[:4], packing.RowShape(64, 24))
    assert "64,320]" not in traced[0]  # of all slots
    assert "24,320]" in traced[0]


# Name: the object, its function, the text that changes, and the text of the fault.
MUTANTS = {
    "a slot of the choice early": (
        *(packing, "_group", "first + n - common", "first + n - common - 1"),
    ),
    "positions after the context begin at 0": (
        *(packing, "batch_of", "start = before if number else 0", "start = 0"),
    ),
    "choices do not see their context": (
        *(packing, "batch_of", "prefix = segment + 1", "prefix = 0"),
    ),
    "choices see the context of another item": (
        *(packing, "batch_of", "prefix = segment + 1", "prefix = 1"),
    ),
    "targets of the first item of a row": (
        *(packing, "batch_of", "slots[row, here] = first + places", "slots[row, here] = places"),
    ),
    "sums of the first item of a row": (packing, "sums", "nll[first + n]", "nll[n]"),
    "scores of the items in another order": (
        *(scoring.Scorer, "nats", "in range(len(prefix_groups)) for", "in reversed(range("
          "len(prefix_groups))) for"),
    ),
    "the target is the token that is read": (
        *(packing, "_group", "request.ids[request.begin :]", "request.ids[request.begin - 1 : -1]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_of_the_rows_is_caught(name, folder, trained, monkeypatch):
    mutate(monkeypatch, *MUTANTS[name])
    with pytest.raises(AssertionError):
        compare_with_logits(folder, trained)


@pytest.mark.slow
def test_the_batch_of_the_command_changes_no_byte(folder, run, capsys):
    written = []
    for batch in (1, 7, 64):
        words = [f"--tasks={folder / 'choice.toml'}", "--sequence=64", f"--batch={batch}"]
        code, answer = call(capsys, run, *words)
        assert code == 0
        written.append(samples(answer["tasks"]["choice"]))
        shutil.rmtree(answer["tasks"]["choice"]["folder"])
    assert written[0] == written[1] == written[2]


def test_samples_do_not_depend_on_devices_or_batches_or_on_where_the_command_was_killed(
    folder, trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(tasks.scoring, "BLOCK_TOKENS", 300)
    monkeypatch.setattr(tasks.scoring, "PASS_TOKENS", 128)

    def opened_on(devices):
        chosen = jax.local_devices()[:devices]
        monkeypatch.setattr(jax, "devices", lambda *_: chosen)
        monkeypatch.setattr(jax, "device_count", lambda *_: devices)
        opened = load.load_run(trained, sequence=64)
        task = prepared(opened, folder / "choice.toml", shots=1)
        assert opened.model.mesh.size == devices
        return opened, task, ScoredModel(params=opened.params, precision={}, step=2, digest="d")

    def scored(opened, task, model, workdir, batch=None):
        with jax.set_mesh(opened.model.mesh):
            (scorer,) = tasks.scorers([task], opened.model.blueprint, batch)
            return tasks.run_task(task, scorer, model, workdir)["folder"]

    on_four, on_one = opened_on(4), opened_on(1)
    assert len(on_one[1].blocks) > 3
    left = scored(*on_one, tmp_path)
    with open(f"{left}/samples.jsonl", "r+b") as file:
        whole = file.read()
        for share in (0.9, 0.5, 0.01):
            file.truncate(int(share * len(whole)))
            assert scored(*on_one, tmp_path) == left
            file.seek(0)
            assert file.read() == whole
    digests = []
    for opened, _, _ in (on_four, on_one):
        with jax.set_mesh(opened.model.mesh):
            digests.append(tasks.scoring.weights_digest(opened.params))
    assert digests[0] == digests[1]
    for place, batch in ((on_four, None), (on_four, 7), (on_one, 1), (on_one, 7), (on_one, 64)):
        folder_of = scored(*place, tmp_path / f"{place[0].model.mesh.size}.{batch}", batch)
        with open(f"{folder_of}/samples.jsonl", "rb") as file:
            assert file.read() == whole


@pytest.mark.slow  # the command is started 32 times
@pytest.mark.timeout(3600)
def test_v31_a_task_killed_at_30_random_points_ends_with_the_same_bytes(
    folder, run, tmp_path, capsys
):
    draw, lines = random.Random(0), (folder / "items.jsonl").read_text().splitlines()
    (tmp_path / "items.jsonl").write_text("".join(f"{line}\n" for line in lines * 300))
    shutil.copy(folder / "choice.toml", tmp_path)
    words = ["eval", f"--workdir={run}", f"--tasks={tmp_path / 'choice.toml'}", "--sequence=64"]
    assert harness.run(words)[0] == 0
    (expected,) = (run / "evals").glob("*/samples.jsonl")
    whole = expected.read_bytes()
    assert len(whole.splitlines()) == 23 * 300
    shutil.rmtree(run / "evals")
    sizes, begun = [0], 0
    for _ in range(30):
        process = harness.start(words)
        try:
            # The kill is at a random point after the process wrote more, or before it did.
            has_waited = draw.random() < 0.5
            while has_waited and process.poll() is None:
                if (expected.stat().st_size if expected.exists() else 0) > sizes[-1]:
                    break
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.3 if has_waited else 5))
            begun += process.poll() is None
        finally:
            process.kill()
            process.communicate()
        sizes.append(expected.stat().st_size if expected.exists() else 0)
        assert not expected.exists() or whole.startswith(expected.read_bytes())
        if sizes[-1] == len(whole):  # it was finished: cut it anywhere
            with open(expected, "r+b") as file:
                sizes.append(draw.randrange(len(whole)))
                file.truncate(sizes[-1])
    assert begun > 20
    assert harness.run(words)[0] == 0
    assert expected.read_bytes() == whole


def test_the_items_of_a_pass_in_training_follow_from_its_work():
    assert affordable(20_000, 25.0) == 800
    assert affordable(20_000, 2000.0) == affordable(20_000, 0.0) == 100


@pytest.mark.slow
def test_a_task_in_training_has_the_samples_of_the_command_on_that_step(folder, tmp_path, capsys):
    file, written = (str(folder / f"{kind}.toml") for kind in ("choice", "answer"))
    settings = {
        "train.steps": 2,
        "data.sequence": 96,
        "eval.tasks": (file, written),
        "eval.tasks_shots": 1,
        "eval.tasks_limit": 7,
        "eval.tasks_form": "letters",
        "eval.tasks_every": "50%",
        "checkpoint.every": 1,
    }
    (tmp_path / "texts").mkdir()
    short = harness.write_config(tmp_path / "texts", settings | {"data.sequence": 32})
    capsys.readouterr()
    words = harness.words(short, tmp_path / "short")
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fix"] == "--config.data.sequence=84"
    run = tmp_path / "run"
    assert main(harness.words(harness.write_config(tmp_path / "texts", settings), run)) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = [each for each in records if each["split"] == "tasks"]
    assert [each["step"] for each in scored] == [1, 2]
    assert all(each["seconds"] > 0 for each in scored)
    items = "choice 7 of 23 items, answer 7 of 23 items; passes 2, about"
    assert items in (run / "log.txt").read_text()
    before = {path: path.read_bytes() for path in (run / "evals").glob("*/*.jsonl")}
    assert len(before) == 4
    for path in before:
        path.unlink()
    for record in scored:
        files = f"--tasks={file},{written}"
        words = [files, f"--step={record['step']}", "--shots=1", "--form=letters"]
        _, answer = call(capsys, run, *words, "--limit=7")
        accuracy = answer["tasks"]["choice"]["metrics"]["accuracy"]
        names = {"mean": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
        assert {each: record[f"task.choice.{name}"] for each, name in names.items()} == {
            each: accuracy[each] for each in names
        }
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pair", "answer"])
def test_a_score_that_is_not_finite_is_counted_and_named(kind, folder, trained, tmp_path):
    opened = load.load_run(trained, sequence=64)
    task = prepared(opened, folder / f"{kind}.toml")
    params = jax.tree.map(lambda leaf: leaf * np.float32(math.nan), opened.params)
    model = ScoredModel(params=params, precision={}, step=2, digest="d")
    with jax.set_mesh(opened.model.mesh), pytest.raises(Diverged) as error:
        (scorer,) = tasks.scorers([task], opened.model.blueprint)
        tasks.run_task(task, scorer, model, tmp_path)
    assert "gives 23 items" in error.value.what
    assert error.value.code == 79


@pytest.mark.slow
def test_an_item_that_is_too_long_is_refused_or_skipped(folder, run, capsys, tmp_path):
    long = {"a": "a" * 100, "b": "b", "c": "c", "kind": "k"}
    (tmp_path / "items.jsonl").write_text(
        (folder / "items.jsonl").read_text() + json.dumps(long) + "\n"
    )
    shutil.copy(folder / "choice.toml", tmp_path)
    words = [f"--tasks={tmp_path / 'choice.toml'}", "--sequence=64"]
    code, answer = call(capsys, run, *words)
    assert code == 2
    assert "1 of 24 items" in answer["error"]["what"]
    code, answer = call(capsys, run, *words, "--too_long=skip")
    assert (code, answer["tasks"]["choice"]["left_out"]) == (0, {"too long": 1})
    assert answer["tasks"]["choice"]["items"] == 23


def test_a_full_disk_is_named_and_the_command_continues_later(folder, run, capsys, monkeypatch):
    words = [f"--tasks={folder / 'pair.toml'}", "--sequence=64"]
    _, answer = call(capsys, run, *words)
    whole = samples(answer["tasks"]["pair"])
    shutil.rmtree(run / "evals")

    class Full:
        """A file on a disk with room for 100 bytes."""

        def __init__(self, file):
            self._file, self._room = file, 100

        def write(self, data):
            if not self._room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._room -= (written := self._file.write(data[: self._room]))
            return written

        def __getattr__(self, name):
            return getattr(self._file, name)

    real = sinks.AppendFile.__init__

    def opened(self, path, **options):
        real(self, path, **options)
        self._file = Full(self._file)

    with monkeypatch.context() as patch:
        patch.setattr(sinks.AppendFile, "__init__", opened)
        code, failed = call(capsys, run, *words)
    assert (code, failed["error"]["where"][-13:]) == (74, "samples.jsonl")
    (torn,) = (run / "evals").glob("*/samples.jsonl")
    assert torn.read_bytes() == whole[:100]
    code, answer = call(capsys, run, *words)
    assert (code, samples(answer["tasks"]["pair"])) == (0, whole)


@pytest.mark.slow
def test_another_version_of_a_task_has_a_folder_of_its_own(folder, run, capsys, tmp_path):
    folders = []
    for version in (1, 2, 1):
        text = (
            (folder / "pair.toml").read_text().replace("items.jsonl", str(folder / "items.jsonl"))
        )
        (tmp_path / "pair.toml").write_text(f"version = {version}\n{text}")
        _, answer = call(capsys, run, f"--tasks={tmp_path / 'pair.toml'}", "--sequence=64")
        folders.append(answer["tasks"]["pair"]["folder"])
    assert folders[0] == folders[2] != folders[1]


@pytest.mark.parametrize("change", [{"objective": Masked()}, {"model": T5()}])
def test_models_that_do_not_predict_each_token_are_refused(trained, change, monkeypatch):
    run = dataclasses.replace(load.read_config(trained), **change)
    monkeypatch.setattr(load, "read_config", lambda _: run)
    with pytest.raises(ConfigError, match="cannot be scored on tasks") as error:
        tasks.check_causal(trained)
    assert f"{run.model.family} does not predict each token" in error.value.why


@pytest.mark.slow
def test_two_processes_do_not_score_one_task(folder, run, capsys):
    words = [f"--tasks={folder / 'pair.toml'}", "--sequence=64", "--limit=4"]
    _, answer = call(capsys, run, *words)
    assert answer["tasks"]["pair"]["items"] == 4
    lock = Lock(tasks.Path(answer["tasks"]["pair"]["folder"]) / "lock")
    lock.acquire()
    assert call(capsys, run, *words)[0] == 77
    lock.release()
    assert call(capsys, run, *words)[0] == 0
