"""Runs of QLoRA: what they keep, read, resume, merge and refuse."""

import json

import jax
import numpy as np
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

RUN = {"train.steps": 6, "eval.batches": 2}
EXACT = ("--config.optim.weight_decay=0", "--config.model.dropout=0")  # not of the base


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), RUN)


@pytest.fixture(scope="module")
def base(settings, tmp_path_factory):
    return harness.trained(settings, tmp_path_factory.mktemp("runs") / "base")


def words(settings, workdir, base, *flags):
    tuned = ("--config.tune.name=qlora", "--config.tune.rank=2", f"--init_from={base}")
    return harness.words(settings, workdir, *EXACT, *tuned, *flags)


@pytest.fixture(scope="module")
def run(settings, base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tuned") / "qlora"
    assert main(words(settings, workdir, base)) == 0
    return workdir


def answer(capsys, *command):
    capsys.readouterr()
    code = main([*map(str, command), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


def store_of(workdir):
    return Store(workdir / "checkpoints", CheckpointConfig(), read_only=True)


def test_a_run_trains_and_keeps_the_adapter_alone(run, base, capsys):
    paths = [path for path in store_of(run).layout(6) if path.startswith("params/")]
    assert paths
    assert all(path.endswith(("lora_a", "lora_b")) for path in paths)
    record = json.loads((run / "base.json").read_text())
    assert (record["run"], record["step"], len(record["sha256"])) == (str(base), 6, 64)
    first, *_, last = (each for each in harness.records(run) if each["split"] == "val")
    assert last["loss_nats"] < first["loss_nats"]
    before = answer(capsys, "eval", f"--workdir={base}")["loss_nats"]
    assert first["loss_nats"] == pytest.approx(before, rel=0.02)
    assert first["loss_nats"] != before
    assert "weights of the base in nf4_double, 4." in (run / "log.txt").read_text()


@pytest.mark.slow
def test_a_base_of_another_dtype_is_cast_when_it_is_read(settings, base, tmp_path):
    flags = ("--config.precision.params=bfloat16", "--config.train.steps=1")
    assert main(words(settings, tmp_path / "run", base, *flags)) == 0
    layout = store_of(tmp_path / "run").layout(1)
    assert {
        dtype.partition("[")[0]
        for path, dtype in layout.items()
        if "lora_" in path and path.startswith("params/")
    } == {"bfloat16"}


@pytest.mark.slow
def test_a_run_is_evaluated_sampled_and_exported_with_its_adapter(run, tmp_path, capsys):
    last = [each for each in harness.records(run) if each["split"] == "val"][-1]
    evaluated = answer(capsys, "eval", f"--workdir={run}")["loss_nats"]
    assert evaluated == pytest.approx(last["loss_nats"], rel=1e-5)
    assert main(["generate", f"--workdir={run}", "--prompt=a", "--max_tokens=3"]) == 0
    assert main(["export", f"--workdir={run}", f"--out={tmp_path / 'hf'}"]) == 0
    peft = answer(capsys, "export", f"--workdir={run}", "--to=peft", f"--out={tmp_path / 'peft'}")
    assert peft["adapter"] == "qlora"
    adapter = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"], adapter["use_dora"]) == ("LORA", 2, False)


@pytest.mark.slow
def test_a_run_that_stops_resumes_to_the_same_bits(settings, base, run, tmp_path):
    parts = tmp_path / "parts"
    assert main(words(settings, parts, base, "--stop_at=2")) == 0
    assert main(words(settings, parts, base)) == 0
    one, other = (store_of(each).arrays(6) for each in (parts, run))
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)
        if path.endswith("lora_b"):
            assert np.abs(leaf).max() > 0


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("onto", [None, "original"])
def test_a_merge_compares_both_bases(run, tmp_path, capsys, onto):
    out = tmp_path / "merged"
    flags = [] if onto is None else [f"--onto={onto}"]
    merged = answer(capsys, "merge", f"--workdir={run}", f"--out={out}", *flags)
    both = merged["onto"]
    assert both["chosen"] == (onto or "dequantized")
    assert {name: merged[name] for name in both["original"]} == both[both["chosen"]]
    dequantized, original = both["dequantized"], both["original"]
    assert 0 < dequantized["mean_nats"] < 5e-3
    assert dequantized["mean_nats"] < original["mean_nats"] < 0.2
    assert all(each["mean_nats"] <= each["largest_nats"] for each in (dequantized, original))
    stored = json.loads((out / "config.json").read_text())
    assert stored["tune"] == {"name": "full"}
    assert stored["precision"]["params"] == ("float32" if onto else "bfloat16")
    kinds = {kind for path, kind in store_of(out).layout(0).items() if path.startswith("params/")}
    assert all(kind.startswith(stored["precision"]["params"]) for kind in kinds)
    losses = [answer(capsys, "eval", f"--workdir={each}")["loss_nats"] for each in (run, out)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_only_a_quantized_base_has_two_to_merge_onto(settings, base, tmp_path, capsys):
    lora = tmp_path / "lora"
    tuned = ("--config.tune.name=lora", "--config.tune.rank=2", f"--init_from={base}")
    assert main(harness.words(settings, lora, *tuned, "--stop_at=2")) == 0
    command = ["merge", f"--workdir={lora}", f"--out={tmp_path / 'out'}", "--onto=original"]
    assert main(command) == 2
    assert "is not quantized" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_one_tensor_is_in_memory_as_it_is_stored(settings, base, tmp_path, monkeypatch):
    """Bytes that are alive at each read are those of the quantized base so far."""
    alive, sizes = [], {}
    restore = Store.restore_leaf

    def counted(self, step, path, abstract):
        alive.append(sum(each.nbytes for each in jax.live_arrays()))
        leaf = restore(self, step, path, abstract)
        sizes[path] = leaf.nbytes
        return leaf

    monkeypatch.setattr(Store, "restore_leaf", counted)
    assert main(words(settings, tmp_path / "run", base, "--stop_at=1")) == 0
    weights = {
        path: size for path, size in sizes.items() if "/attention/" in path or "/mlp/" in path
    }
    rest = sum(sizes.values()) - sum(weights.values())
    grown = alive[-1] - alive[0]
    assert len(weights) == 7
    assert grown < rest + 0.25 * sum(weights.values())


@pytest.mark.slow
def test_check_compares_the_adapter_on_fake_devices(settings):
    flags = ["--config.tune.name=qlora", "--config.tune.rank=2", "--config.mesh.data=2"]
    flags += ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    done = harness.run(["check", f"--config={settings}", *flags])
    assert done[0] == 0, done[1]
