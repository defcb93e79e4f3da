"""Runs that learn from pairs: the reference, its cache, resuming, figures and layouts."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy

from jaxlm.cli.main import main
from jaxlm.core import config as config_files
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import load
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "data.kind": "pairs",
    "data.tokenizer": "bytes",
    "data.sequence": 48,
    "data.validation": ("20%",),
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.hidden": 32,
    "model.dropout": 0.0,
    "train.steps": 4,
    "train.batch": 4,
    "log.every": 1,
    "eval.every": 2,
    "checkpoint.every": 2,
    "sample.prompts": (),
    "objective.name": "preference",
    "precision.compute": "float32",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [
        {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n - 3}!"} for n in range(60)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture(scope="module")
def config(pairs, tmp_path_factory):
    settings = SETTINGS | {"data.train": (str(pairs),)}
    return harness.write_config(tmp_path_factory.mktemp("config"), settings)


def train(config, workdir, *flags):
    return main(harness.words(config, workdir, *flags))


def train_records(workdir, split="train"):
    return [each for each in harness.records(workdir) if each["split"] == split]


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "base"
    assert train(config, workdir) == 0
    return workdir


def test_a_run_begins_at_ln_2_and_logs_the_figures_of_both_sides(base):
    first, *_, last = train_records(base)
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss_nats"] < first["loss_nats"]
    figures = {"chosen_nats", "rejected_nats", "kl_nats", "chosen_tokens", "rejected_tokens"}
    assert figures <= first.keys()
    held_out = train_records(base, "val")
    assert figures | {"margin", "preference_accuracy"} <= held_out[-1].keys()
    assert held_out[-1]["loss_nats"] < math.log(2)
    log = (base / "log.txt").read_text()
    assert "reference" in log
    assert "answers scored" in log
    (command,) = [line for line in log.splitlines() if "jaxlm generate" in line]
    assert "--chat" not in command  # the pairs are texts


@pytest.mark.slow
def test_an_evaluation_has_the_figures_of_the_training(base, capsys):
    assert main(["eval", f"--workdir={base}", "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    logged = train_records(base, "val")[-1]
    for name in ("loss_nats", "margin", "preference_accuracy", "chosen_nats", "kl_nats"):
        assert sets["val"][name] == pytest.approx(logged[name], rel=1e-5), name
    assert main(["eval", f"--workdir={base}"]) == 0
    output = capsys.readouterr().out
    assert "preferred" in output
    assert "caution" not in output


@pytest.mark.slow
def test_an_evaluation_of_changed_pairs_is_not_that_of_the_run(base, pairs, capsys):
    before = pairs.read_text()
    pairs.write_text(before.replace("!", "?"))
    try:
        assert main(["eval", f"--workdir={base}"]) == 0
    finally:
        pairs.write_text(before)
    output = capsys.readouterr().out
    assert "caution: val is not the set of the training" in output
    assert "no figures of preferences" in output
    assert "preferred" not in output


@pytest.mark.slow
def test_a_mixture_of_pairs_begins_at_ln_2_and_resumes_to_the_same_bits(pairs, tmp_path):
    lines = pairs.read_text().splitlines(keepends=True)
    for name, part in (("x", lines[:40]), ("y", lines[40:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    sources = tuple(f"{name}={tmp_path}/{name}.jsonl" for name in "xy")
    config = harness.write_config(tmp_path, SETTINGS | {"data.train": sources})
    assert train(config, tmp_path / "whole") == 0
    first, *_ = train_records(tmp_path / "whole")
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert train(config, tmp_path / "stopped", "--stop_at=2") == 0
    assert train(config, tmp_path / "stopped") == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def scores_of(workdir, name):
    return safetensors.numpy.load_file(workdir / "reference.safetensors")[name]


def losses(workdir):
    return [float(each["loss_nats"]).hex() for each in harness.records(workdir)]


@pytest.mark.slow
def test_a_run_that_stops_resumes_to_the_same_bits_without_cache_and_reference(
    config, base, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    flags = (f"--config.objective.reference={tmp_path}/other",)
    other = tmp_path / "other"
    other.symlink_to(base)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(config, whole, *flags) == 0
    assert train(config, parts, *flags, "--stop_at=2") == 0
    for path in (tmp_path / "cache/references").iterdir():
        path.unlink()
    assert train(config, parts, *flags) == 0
    assert losses(whole) == losses(parts)
    assert "scored before the run began" in (parts / "log.txt").read_text()


@pytest.mark.slow
def test_a_quantized_reference_gives_the_scores_of_its_dequantized_weights(config, base, tmp_path):
    """Its scores differ from those of the run that was rounded, so that it is not taken for it."""
    codes, text = tmp_path / "codes", tmp_path / "text.txt"
    text.write_text("1+1=2 and 2+1=3, " * 100)
    words = ["quantize", f"--workdir={base}", f"--out={codes}", "--scheme=int4", "--block=8"]
    assert main([*words, f"--text={text}", "--allow=loss:100%", "--quiet"]) == 0
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    for workdir, reference in ((exact, base), (rounded, codes)):
        flag = f"--config.objective.reference={reference}"
        assert train(config, workdir, flag, "--stop_at=1") == 0
    before, after = scores_of(exact, "train"), scores_of(rounded, "train")
    assert 0 < np.abs(before - after).max() < 0.1 * np.abs(before).max()
    first, *_ = train_records(rounded)
    assert first["loss_nats"] != pytest.approx(train_records(exact)[0]["loss_nats"], abs=1e-7)


@pytest.mark.slow
def test_a_pass_that_was_interrupted_reads_the_other_rows_alone(
    config, base, tmp_path, monkeypatch
):
    from jaxlm.recipes.train import reference

    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    assert train(config, tmp_path / "whole", "--stop_at=1") == 0
    (file,) = (
        path
        for path in (tmp_path / "cache/references").iterdir()
        if path.stat().st_size == 4 * len(scores_of(base, "train")) + 32
    )
    scores = reference._unsealed(file, len(scores_of(base, "train")))
    partial = scores.copy()
    partial[::2] = np.nan
    file.with_suffix(".partial").write_bytes(reference._sealed(partial))
    file.write_bytes(file.read_bytes()[:-1])  # a file that was cut is made again
    assert train(config, tmp_path / "again", "--stop_at=1") == 0
    np.testing.assert_array_equal(scores_of(tmp_path / "again", "train"), scores)
    assert not file.with_suffix(".partial").exists()


@pytest.mark.slow
def test_a_cached_pass_is_read_by_another_run(config, base, tmp_path):
    flags = ("--config.data.prefetch=1", "--config.train.steps=1")
    assert train(config, tmp_path / "again", *flags) == 0
    assert "answers scored from the cache" in (tmp_path / "again/log.txt").read_text()
    for name in ("train", "val"):
        scores = scores_of(base, name)
        assert np.isfinite(scores).all()
        np.testing.assert_array_equal(scores, scores_of(tmp_path / "again", name))


def test_a_file_of_scores_that_was_cut_or_changed_is_not_read(tmp_path):
    from jaxlm.recipes.train import reference

    scores, file = np.arange(5, dtype=np.float32), tmp_path / "scores"
    content = reference._sealed(scores)
    for damaged in (content[:-1], content[4:], b"", b"\1" + content[1:]):
        file.write_bytes(damaged)
        assert reference._unsealed(file, 5) is None
    file.write_bytes(content)
    np.testing.assert_array_equal(reference._unsealed(file, 5), scores)
    assert reference._unsealed(file, 4) is None


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--config.objective.reference=none"], 2, "--config.objective.reference=start"),
        (["--config.objective.reference=adapter_off"], 2, "--config.objective.reference=start"),
        (["--config.objective.name=causal"], 2, "--config.objective.name=preference"),
        (["--config.data.kind=chat"], 2, "--config.data.kind=pairs"),
        (["--config.data.kind=labeled"], 2, "--config.objective.loss=kto"),
        (["--config.objective.loss=ipo", "--config.objective.smoothing=0.1"], 2, "loss=dpo"),
        (["--config.objective.loss=orpo", "--config.objective.length=sum"], 2, "length=auto"),
        (["--config.loss.z_loss=0.1"], 2, "--config.loss.z_loss=0"),
        (["--config.optim.name=sophia"], 2, "--config.optim.name=adamw"),
        (["--config.objective.reference=missing"], 66, "there is no config.json"),
        (["--config.data.validation=PAIRS"], 65, "--config.data.validation=5%"),
    ],
)
def test_each_unusable_input_names_its_fix(config, pairs, tmp_path, capfd, flags, code, text):
    copied = tmp_path / "copied.jsonl"
    copied.write_text(pairs.read_text() + "\n")
    flags = [flag.replace("PAIRS", str(copied)) for flag in flags]
    assert train(config, tmp_path / "run", *flags) == code
    assert text in capfd.readouterr().err


def test_a_reference_of_another_tokenizer_is_refused(config, base, tmp_path, capfd):
    other = tmp_path / "other"
    other.symlink_to(base)  # not the start, whose name would be the same as that of the run
    records = [
        {"prompt": f"{n**5}", "chosen": f"{n**7}", "rejected": f"{n**6}!"} for n in range(2, 99)
    ]
    text = "".join(json.dumps(each) + "\n" for each in records)
    (tmp_path / "pairs.jsonl").write_text(text)
    flags = [f"--config.objective.reference={other}", "--config.data.tokenizer=bpe:512"]
    flags += [f"--config.data.train={tmp_path}/pairs.jsonl"]
    assert train(config, tmp_path / "run", *flags) == 2
    assert f"--config.data.tokenizer={other}/tokenizer" in capfd.readouterr().err
    assert not harness.records(tmp_path / "run")


@pytest.mark.slow
def test_microbatches_agree(config, base, tmp_path):
    first = train_records(base)[0]
    for count in (2, 4):
        workdir = tmp_path / str(count)
        flags = ("--config.train.steps=1", f"--config.train.microbatches={count}")
        assert train(config, workdir, *flags) == 0
        record = train_records(workdir)[0]
        for name in ("loss_nats", "chosen_nats", "rejected_nats", "grad_norm"):
            assert record[name] == pytest.approx(first[name], rel=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("data=2", "fsdp=2"), ("context=2", "fsdp=2")])
def test_meshes_agree(config, base, tmp_path, mesh):
    flags = ["--cpu_devices=4", *(f"--config.mesh.{axis}" for axis in mesh)]
    code, text = harness.run(harness.words(config, tmp_path / "run", *flags))
    assert code == 0, text
    for one, other in zip(train_records(tmp_path / "run"), train_records(base), strict=True):
        for name in ("loss_nats", "chosen_nats", "rejected_nats", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-6), name


@pytest.mark.slow
def test_an_adapter_is_compared_with_its_start(config, base, tmp_path):
    lora = ("--config.tune.name=lora", "--config.tune.rank=2", "--config.tune.dropout=0")
    flags = (*lora, f"--init_from={base}")
    live, cached = tmp_path / "live", tmp_path / "cached"
    assert train(config, live, *flags, "--config.objective.reference=adapter_off") == 0
    assert train(config, cached, *flags) == 0
    for one, two in zip(train_records(live), train_records(cached), strict=True):
        for name in ("loss_nats", "margin", "kl_nats"):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=2e-6)
    for one, two in zip(train_records(live, "val"), train_records(cached, "val"), strict=True):
        assert one["loss_nats"] == pytest.approx(two["loss_nats"], rel=1e-5)
    first = train_records(live)[0]
    assert first["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    merged = tmp_path / "merged"
    assert main(["merge", f"--workdir={live}", f"--out={merged}"]) == 0
    assert main(["eval", f"--workdir={merged}"]) == 0


def test_a_run_whose_adapter_is_merged_has_no_base_to_be_compared_with():
    settings = {"objective.name": "preference", "objective.reference": "adapter_off"}
    settings |= {"data.kind": "pairs", "data.train": "pairs.jsonl", "tune.name": "lora"}
    run = config_files.load(Run, None, [*settings.items()]).value
    merged = load._merged(run)
    assert config_files.from_json(Run, config_files.to_json(merged)) == merged


@pytest.mark.slow
def test_an_adapter_that_is_continued_is_its_own_reference(config, base, tmp_path, capfd):
    lora = ("--config.tune.name=lora", "--config.tune.rank=2", "--config.tune.dropout=0")
    first, off, cached, parts = (tmp_path / name for name in ("first", "off", "cached", "parts"))
    assert train(config, first, *lora, f"--init_from={base}") == 0
    continued = (*lora, f"--init_from={first}")
    live = (*continued, "--config.objective.reference=adapter_off")
    assert train(config, off, *live) == 0
    assert train(config, cached, *continued) == 0
    for split in ("train", "val"):
        for one, two in zip(train_records(off, split), train_records(cached, split), strict=True):
            assert one["loss_nats"] == pytest.approx(two["loss_nats"], rel=1e-4)
    begin = train_records(off)[0]
    assert begin["loss_nats"] == pytest.approx(math.log(2), abs=1e-6)
    assert f"adapter of step 4 of {first}, frozen" in (off / "log.txt").read_text()
    assert train(config, parts, *live, "--stop_at=2") == 0
    first.rename(tmp_path / "moved")
    assert train(config, parts, *lora, live[-1]) == 65
    assert "the adapter that the run began with is gone" in capfd.readouterr().err
    (tmp_path / "moved").rename(first)
    assert train(config, parts, *lora, live[-1]) == 0
    assert losses(parts) == losses(off)
    capfd.readouterr()
    assert main(["replay", f"--workdir={off}", "--step=3", "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["is_as_logged"]


@pytest.mark.slow
def test_labels_train_by_kto_and_orpo_has_no_reference(config, pairs, tmp_path):
    labeled = tmp_path / "labeled.jsonl"
    rows = map(json.loads, pairs.read_text().splitlines())
    labeled.write_text(
        "".join(
            json.dumps({"prompt": row["prompt"], "completion": row[name], "label": label}) + "\n"
            for row in rows
            for name, label in (("chosen", True), ("rejected", False))
        )
    )
    flags = ("--config.objective.loss=kto", "--config.data.kind=labeled")
    kto, orpo = tmp_path / "kto", tmp_path / "orpo"
    assert train(config, kto, *flags, f"--config.data.train={labeled}") == 0
    first, *_, last = train_records(kto)
    assert first["loss_nats"] == pytest.approx(0.5, abs=1e-6)
    assert last["chosen_reward"] > last["rejected_reward"]
    assert train(config, orpo, "--config.objective.loss=orpo") == 0
    assert "kl_nats" not in train_records(orpo)[0]
    assert not (orpo / "reference.safetensors").exists()


def test_answers_that_become_unlikelier_are_warned_of_once():
    from jaxlm.monitor.metric_warnings import UnlikelierAnswerWarning

    lines: list[str] = []
    records = [{"split": "train", "chosen_nats": 2.0}]
    alarm = UnlikelierAnswerWarning(lambda text, **_: lines.append(text), records)
    for step, nats in enumerate([2.1, 2.3, 2.5, 2.6, 3.0, 3.0], 2):
        alarm.check(step, {"chosen_nats": nats})
    assert len(lines) == 1
    assert "step 5: chosen answers have 2.47 nats a token, and had 2 at the start" in lines[0]
    assert "--config.objective.nll=0.2 " in lines[0]
    alarm = UnlikelierAnswerWarning(lambda text, **_: lines.append(text), records, nll=0.2)
    for step in range(2, 6):
        alarm.check(step, {"chosen_nats": 3.0})
    assert "--config.objective.nll=0.4 " in lines[-1], "the run has 0.2"
