"""`jaxlm quantize`: a run of codes that is used as any other, or nothing."""

import dataclasses
import errno
import gc
import json
import math
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config, disk, faults, tree
from jaxlm.core.errors import DataError
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.data.teacher import StoredTeacher
from jaxlm.evals.tasks import scoring
from jaxlm.generate.sampler import Sampler
from jaxlm.recipes.compare import summary
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load, model_difference, quantize
from jaxlm.recipes.use.quantize import QualityLost, QuantizeOptions
from jaxlm.training.rundir import IMPORTED
from jaxlm.tune.config import Quantized
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SETTINGS = {"train.steps": 6, "eval.batches": 2, "optim.lr": 1e-2, "model.dropout": 0.0}


@pytest.fixture(scope="module", autouse=True)
def briefly_timed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_difference, "TIMED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "run")


def call(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


POLICY = {
    "objective.name": "policy",
    "objective.kl": "loss_k3",
    "objective.reference": "start",
    "data.kind": "prompts",
    "data.train": "prompts.jsonl",
    "reward.functions": "number",
    "rl.samples": 2,
    "rl.max_tokens": 8,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"objective.name": "mtp"},
        {"regularization.qk_clip": 50},
        {"optim.name": "sophia"},
        {"objective.name": "mixture", "objective.weights.mtp": 1},
        POLICY,
    ],
)
def test_codes_of_a_run_of_any_kind_have_a_config_that_is_read(settings):
    """A step of an adapter would not be implemented, and codes have no step."""
    overrides = [(path, str(value)) for path, value in settings.items()]
    run = config.load(Run, None, overrides).value
    quantized = dataclasses.replace(run, tune=Quantized(), precision=PrecisionConfig())
    assert config.from_json(Run, config.to_json(quantized)) == quantized


@pytest.mark.slow
def test_heads_of_a_quantized_run_guess_its_tokens(tmp_path, capsys):
    mtp = harness.write_config(tmp_path, SETTINGS | {"objective.name": "mtp"})
    run, out = harness.trained(mtp, tmp_path / "run"), tmp_path / "codes"
    words = ["quantize", f"--workdir={run}", f"--out={out}", "--scheme=int8", "--allow=loss:50%"]
    assert call(capsys, *words)[0] == 0
    words = ["generate", f"--workdir={out}", "--draft=heads", "--prompt=the", "--max_tokens=4"]
    assert main(words) == 0


@pytest.fixture(scope="module")
def codes(run):
    out = run.parent / "quantized"
    words = ["quantize", f"--workdir={run}", f"--out={out}", "--scheme=int4_zero"]
    words.append("--block=12")  # which divides no width of the model
    assert main([*words, "--allow=loss:50%", "--quiet"]) == 0
    return out


def test_what_is_not_quantized_keeps_its_bits_and_the_run_is_used_as_any(run, codes, capsys):
    before, after = harness.store(run).arrays(6), harness.store(codes).arrays(0)
    before = {path: leaf for path, leaf in before.items() if path.startswith("params/")}
    unchanged = before.keys() & after.keys()
    assert unchanged == {
        path for path in before if "/attention/" not in path and "/mlp/" not in path
    }
    for path in unchanged:
        np.testing.assert_array_equal(before[path], after[path])
    assert {path.rpartition("/")[2] for path in after.keys() - unchanged} == {
        "weight_codes", "weight_scales", "weight_zeros"
    }  # fmt: skip
    assert summary.summarize(codes).status == "quantized"
    table = json.loads((codes / IMPORTED).read_text())
    assert table["after"]["bytes"] == sum(leaf.nbytes for leaf in after.values())
    assert table["after"]["bytes"] < table["before"]["bytes"]
    assert table["kl_999"] >= table["kl_mean"] > 0
    assert len(table["departures"]) <= 20
    for workdir, name in ((run, "before"), (codes, "after")):
        code, answer = call(capsys, "eval", f"--workdir={workdir}")
        assert code == 0
        assert answer["loss_nats"] == pytest.approx(table[name]["loss_nats"], rel=1e-6)
    growth = table["after"]["loss_nats"] / table["before"]["loss_nats"] - 1
    assert table["loss_growth"] == pytest.approx(growth)
    words = ("generate", f"--workdir={codes}", "--prompt=one", "--max_tokens=4")
    code, answer = call(capsys, *words)
    assert code == 0
    assert all(map(math.isfinite, answer["samples"][0]["log_probabilities"]))


def test_while_texts_are_written_no_other_copy_of_a_model_is_in_memory(run, tmp_path, monkeypatch):
    seen, parts, write, wait = [], [], Sampler.write_prepared, jax.block_until_ready

    def size(arrays):
        return sum(each.nbytes for each in arrays if not each.is_deleted())

    def watched(sampler, ready, on_text=None):
        gc.collect(1)  # of what is new: all that a worker holds takes seconds
        seen.append(size(jax.live_arrays()) - size(jax.tree.leaves(ready)))
        return write(sampler, ready, on_text)

    def counted(arrays):
        parts.append(isinstance(arrays, list))
        return wait(arrays)

    monkeypatch.setattr(Sampler, "write_prepared", watched)
    monkeypatch.setattr("jaxlm.recipes.use.model_difference.TIMED_SECONDS", 0)
    monkeypatch.setattr("jaxlm.generate.consume.jax.block_until_ready", counted)
    gc.collect()
    others, out = size(jax.live_arrays()), tmp_path / "out"
    words = ["quantize", f"--workdir={run}", f"--out={out}", "--scheme=nf4", "--allow=loss:50%"]
    assert main([*words, "--quiet"]) == 0
    table = json.loads((out / IMPORTED).read_text())
    assert sum(parts) > 2  # copies of the first model
    assert len(seen) >= 8  # each model writes once, and is timed three times at least
    assert max(seen) - others < table["after"]["bytes"] + 0.1 * table["before"]["bytes"]


@pytest.mark.slow
def test_tasks_that_change_where_the_loss_hardly_does_are_refused(run, tmp_path, capsys):
    draw, letters = random.Random(1), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    lines = [
        dict(
            zip("abc", ("".join(draw.choices(letters, k=3)), *draw.sample(letters, 2)), strict=True)
        )
        for _ in range(1000)
    ]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "next.toml").write_text(
        'kind = "choice"\nitems = "items.jsonl"\ncontext = "{{ a }}"\n'
        'choices = ["{{ b }}", "{{ c }}"]\nanswer = "0"\n'
    )
    out = tmp_path / "out"
    words = ["quantize", f"--workdir={run}", f"--out={out}", "--scheme=int4"]
    words += [
        "--at=*/attention/*,*/mlp/*,embedding/*",
        f"--tasks={tmp_path}/next.toml",
        "--allow=loss:2%,flips:0%",
    ]
    code, answer = call(capsys, *words)
    assert (code, out.exists()) == (1, False)
    assert "of the items of next" in answer["error"]["what"]
    assert answer["error"]["fix"].startswith("--allow=loss:2%,flips:")
    code, answer = call(capsys, *words[:-1], answer["error"]["fix"])
    assert code == 0
    task = answer["tasks"]["next"]
    assert task["flips"] == (task["rises"] + task["falls"]) / 1000 == len(task["changed"]) / 1000
    assert answer["loss_growth"] < 0.02
    assert json.loads(next(out.glob("evals/next.*/results.json")).read_text())["items"] == 1000
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_results_of_codes_that_were_refused_are_not_those_of_the_run(
    run, tmp_path, capsys, monkeypatch
):
    """The folder of the unfinished run keeps them, as the same command may follow."""
    (tmp_path / "items.jsonl").write_text(json.dumps({"a": "x", "b": "y"}) + "\n")
    (tmp_path / "one.toml").write_text(
        'kind = "choice"\nitems = "items.jsonl"\ncontext = "{{ a }}"\n'
        'choices = ["{{ a }}", "{{ b }}"]\nanswer = "0"\n'
    )
    out = tmp_path / "out"
    words = ["quantize", f"--workdir={run}", f"--out={out}", f"--tasks={tmp_path}/one.toml"]

    def refused(*_):
        raise QualityLost("too much", where="", why="", fix="")

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "_check", refused)
        assert call(capsys, *words, "--scheme=int4")[0] == 1
    assert len([*(tmp_path / "out.partial").glob("*/evals/one.*")]) == 1
    assert call(capsys, *words, "--scheme=nf4", "--allow=loss:50%")[0] == 0
    (folder,) = out.glob("evals/*")
    opened = load.load_run(out)
    weights = json.loads((folder / "task.json").read_text())["weights"]
    assert weights == scoring.weights_digest(opened.params)


def test_the_limits_that_are_exceeded_are_in_the_fix():
    table = {"before": {"loss_nats": 1.0}, "after": {"loss_nats": 1.05}}
    flips = {"flips": 0.0312, "rises": 1, "falls": 2, "items": 96}
    answer = {"loss_growth": 0.05, "tasks": {"a": flips, "b": flips | {"flips": None}}, **table}
    options = QuantizeOptions(workdir=Path("a"), out=Path("b"), scheme="int4")

    def fix(**allowed):
        with pytest.raises(QualityLost) as error:
            quantize._check(answer, allowed, options)
        return error.value.fix

    assert fix(loss=0.01, flips=0.5) == "--allow=loss:5%,flips:50%"
    assert fix(loss=0.01, flips=0.01) == "--allow=loss:5%,flips:3.2%"
    answer["loss_growth"] = math.nan
    assert fix(loss=0.01, flips=0.01).startswith("use an earlier")


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("quantize --workdir={q} --out={o} --scheme=int8", "the run is quantized"),
        ("quantize --workdir={r} --out={q} --scheme=int8", "already contains a run"),
        ("quantize --workdir={r} --out={o} --scheme=int8 --allow=1%", "the limit is no growth"),
        ("quantize --workdir={r} --out={o} --scheme=int8 --allow=flips:1%", "flips needs tasks"),
        ("quantize --workdir={r} --out={o} --scheme=int8 --at=*/x", "matches no linear layer"),
        ("quantize --workdir={r} --out={o} --scheme=int4 --method=gptq", "gptq needs a text"),
        ("quantize --workdir={r} --out={o} --scheme=int8 --method=awq", "awq searches integers"),
        ("quantize --workdir={r} --out={o} --scheme=int8 --calibration=train", "reads no text"),
        (
            "quantize --workdir={r} --out={o} --scheme=int4 --method=awq --calibration={t}/*.txt",
            "the calibration text is in a set that is reported",
        ),
        ("plan --config={q}/config.json", "quantized weights cannot be trained"),
        ("average --workdir={q} --steps=0 --with={r} --out={o}", "an average of quantized"),
        (
            "quantize --workdir={r} --out={o} --scheme=int4 --method=gptq --calibration={e}",
            "the data contains no document",
        ),
        ("export --workdir={r} --out={o}.gguf", "a GGUF cannot hold this tokenizer"),
        ("train --config={c} --workdir={o} --init_from={q}", "is quantized"),
        ("train --config={c} --workdir={q}", "cannot resume from an imported model"),
        ("prune --workdir={q} --out={o} --keep=0", "layers are kept of plain weights"),
        ("merge --workdir={q} --out={o}", "the run has no adapter"),
    ],
)
def test_what_cannot_be_done_is_refused(run, codes, words, what, tmp_path, capsys):
    places = {"q": codes, "r": run, "o": tmp_path / "out", "c": run / "config.json"}
    places["e"] = tmp_path / "empty.txt"
    places["e"].write_text("")
    places["t"] = json.loads((run / "config.json").read_text())["data"]["train"][0].rpartition("/")[
        0
    ]
    words = words.format_map(places).split()
    code, answer = call(capsys, *words)
    assert code in (2, 65)
    assert what in answer["error"]["what"]
    if words[0] in ("quantize", "export"):
        assert not list(tmp_path.glob("out*"))
    if words[0] in ("train", "prune") or "the run is quantized" in what:
        assert str(run) in answer["error"]["fix"]  # the run that was rounded


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(run, value, tmp_path):
    opened = load.load_run(run)
    path = "stack/0/mlp/down/weight"
    params = tree.map_with_path(
        lambda place, leaf: leaf.at[1, 3, 5].set(value) if place == path else leaf, opened.params
    )
    options = QuantizeOptions(workdir=run, out=tmp_path / "out", scheme="int8")
    with pytest.raises(DataError, match="cannot be quantized") as error:
        quantize._rounded(dataclasses.replace(opened, params=params), options, {}, print)
    assert error.value.where == path


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a layer", "answers", "the checkpoint"])
def test_on_a_full_disk_nothing_is_a_run_and_the_command_continues(
    run, place, tmp_path, capsys, monkeypatch
):
    (tmp_path / "items.jsonl").write_text(json.dumps({"a": "x", "b": "y"}) + "\n")
    (tmp_path / "one.toml").write_text(
        'kind = "choice"\nitems = "items.jsonl"\ncontext = "{{ a }}"\n'
        'choices = ["{{ a }}", "{{ b }}"]\nanswer = "0"\n'
    )
    out = tmp_path / "out"
    words = ["quantize", f"--workdir={run}", f"--out={out}", "--scheme=int4", "--method=gptq"]
    words += ["--block=16", "--calibration=train", "--calibration_tokens=256"]
    words += ["--allow=loss:50%", f"--tasks={tmp_path}/one.toml"]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if place == "a layer":
            patch.setattr(np, "savez", full)
        elif place == "answers":
            rename = disk.rename
            patch.setattr(disk, "rename", lambda a, b: (full if out in b.parents else rename)(a, b))
        else:
            patch.setattr(faults, "_faults", faults.parse("save.digest:enospc"))
        code, answer = call(capsys, *words)
    assert code == (73 if place == "a layer" else 74)
    assert not (out / "config.json").exists()
    assert str(tmp_path) in answer["error"]["where"]
    assert place != "answers" or f"{out}/evals/" in answer["error"]["where"]
    assert call(capsys, *words)[0] == 0
    assert list(out.glob("evals/one.*/results.json"))


@pytest.mark.slow
def test_layers_of_other_weights_are_not_taken_over(tmp_path, capsys, monkeypatch):
    """The layers of a search that wrote no run are kept, and the average has others."""
    settings = SETTINGS | {"average.name": "ema", "average.decay": 0.5}
    config = harness.write_config(tmp_path, settings)
    run = harness.trained(config, tmp_path / "run")

    def quantized(name, *flags):
        words = ["quantize", f"--workdir={run}", f"--out={tmp_path / name}", "--scheme=int4"]
        words += ["--method=gptq", "--block=16", "--calibration=train", "--calibration_tokens=256"]
        return call(capsys, *words, *flags)[0]

    def refused(*_):
        raise QualityLost("too much", where="", why="", fix="")

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "_check", refused)
        assert quantized("one") == 1
    average = "--weights=ema", "--allow=loss:50%"
    assert quantized("one", *average) == quantized("other", *average) == 0
    one, other = (harness.store(tmp_path / name).arrays(0) for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(leaf, other[path]) for path, leaf in one.items())


def test_codes_teach_and_the_rows_have_their_loss(run, codes, tmp_path, capsys):
    texts = Path(json.loads((run / "config.json").read_text())["data"]["train"][0]).parent
    text, other = sorted(texts.glob("*.txt"))[:2]
    code, measured = call(capsys, "eval", f"--workdir={codes}", f"--text={text}")
    assert code == 0
    words = ["teach", f"--workdir={codes}", f"--config={run}/config.json", "--top=4"]
    words += [f"--config.data.train={text}", f"--config.data.validation={other}"]
    out = tmp_path / "taught"
    assert call(capsys, *words, f"--out={out}")[0] == 0
    (file,) = out.glob("*/top-*.bin")
    losses = np.fromfile(file, StoredTeacher.open(out).dtype)["nll"].astype(np.float64)
    assert losses[losses > 0].mean() == pytest.approx(measured["loss_nats"], rel=1e-3)


def test_a_comparison_has_the_loss_before_and_after(run, codes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a page
    table = json.loads((codes / IMPORTED).read_text())
    code, answer = call(capsys, "compare", run, codes)
    assert code == 0
    before, after = (table[name]["loss_nats"] for name in ("before", "after"))
    notes = " ".join(answer["notes"])
    assert f"int4_zero by rtn changed the loss from {before:.4f} to {after:.4f} nats" in notes
    assert "of different sets" not in notes  # codes were not trained, and have no curve


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["--scheme=nf4_double", "--scheme=int4 --block=16 --method=gptq --calibration=train"],
)
def test_the_bytes_do_not_depend_on_the_devices(run, flags, tmp_path):
    outs = []
    for count in (1, 4):
        outs.append(tmp_path / str(count))
        words = ["quantize", f"--workdir={run}", f"--out={outs[-1]}", *flags.split()]
        command = [sys.executable, "-m", "jaxlm", *words, "--allow=loss:50%"]
        subprocess.run([*command, f"--cpu_devices={count}"], check=True, env=os.environ)
    one, four = (harness.store(out).arrays(0) for out in outs)
    assert one.keys() == four.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, four[path])


@pytest.mark.slow
def test_experts_and_a_tied_table_are_quantized_to_the_same_bytes_on_any_devices(tmp_path, capsys):
    """GPTQ, as its layers read the rounded table; then the run is used as any other."""
    settings = SETTINGS | {"train.steps": 2, "model.tied": True}
    config = harness.write_config(tmp_path, settings)
    file = Path(config)
    file.write_text(
        file.read_text().replace(
            "    c.model.width", '    c.model.family = "mixtral"\n    c.model.width', 1
        )
    )
    workdir = tmp_path / "run"
    assert main(harness.words(config, workdir, "--config.model.experts=4")) == 0
    outs = []
    for count in (1, 4):
        outs.append(tmp_path / str(count))
        words = ["quantize", f"--workdir={workdir}", f"--out={outs[-1]}", "--scheme=int4"]
        words += ["--block=16", "--method=gptq", "--calibration=train", "--allow=loss:50%"]
        words += ["--at=*/attention/*,*/mlp/*,embedding/*", f"--cpu_devices={count}"]
        done = subprocess.run(
            [sys.executable, "-m", "jaxlm", *words], check=True, env=os.environ, text=True,
            capture_output=True,
        )  # fmt: skip
        assert "rounded to nearest, as they are outside of the layers: embedding/table" in (
            done.stdout + done.stderr
        )
    one, four = (harness.store(out).arrays(0) for out in outs)
    assert one.keys() == four.keys()
    assert {"params/embedding/table_codes", "params/stack/0/mlp/up/weight_codes"} <= one.keys()
    assert "params/stack/0/mlp/router/weight" in one
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, four[path])
    table = json.loads((outs[0] / IMPORTED).read_text())
    code, answer = call(capsys, "eval", f"--workdir={outs[0]}")
    assert code == 0
    assert answer["loss_nats"] == pytest.approx(table["after"]["loss_nats"], rel=1e-6)
    assert call(capsys, "generate", f"--workdir={outs[0]}", "--prompt=a", "--max_tokens=4")[0] == 0
    code, answer = call(capsys, "export", f"--workdir={outs[0]}", f"--out={tmp_path}/folder")
    assert code == 2
    assert "is a table" in answer["error"]["why"]
    # A GGUF has no tokenizer of bytes, and a folder no codes of a table.
    words = ("export", f"--workdir={outs[0]}", f"--out={tmp_path}/m.gguf")
    code, answer = call(capsys, *words)
    assert (code, answer["error"]["what"]) == (2, "a GGUF cannot hold this tokenizer")
    fix = shlex.split(answer["error"]["fix"])
    assert fix[0] == "jaxlm"
    assert call(capsys, *fix[1:])[0] == 0
    assert (tmp_path / "m/config.json").exists()
