"""Runs that train an adapter: what they keep, resume, merge, export and refuse."""

import json
import shutil

import numpy as np
import pytest

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.recipes.compare import summary
from jaxlm.recipes.use import adapter, load
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SETTINGS = {"train.steps": 6, "eval.batches": 2}
EXACT = ("--config.optim.weight_decay=0", "--config.model.dropout=0")  # not of the base
ARMS = {
    "lora": ("--config.tune.rank=2",),
    "dora": ("--config.tune.rank=2",),
    "ia3": ("--config.optim.lr=0.03",),
    "bottleneck": ("--config.tune.hidden=4",),
    "prefix": ("--config.tune.length=3", "--config.optim.lr=0.03"),
    "prompt": ("--config.tune.length=3", "--config.tune.text=one two", "--config.optim.lr=0.005"),
}
UNMERGED = ("bottleneck", "prefix", "prompt")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "base")


def words(config, workdir, base, arm="lora", *flags):
    tuned = [f"--config.tune.name={arm}", *ARMS[arm], f"--init_from={base}"]
    return harness.words(config, workdir, *EXACT, *tuned, *flags)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Conversations of ShareGPT's form, which are four rows of 96 tokens."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    pairs = [
        [{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": str(number + 1)}]
        for number in range(13)
    ]
    path.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in pairs))
    return path


@pytest.mark.slow
def test_the_shipped_config_makes_three_epochs_of_a_small_set(base, few, tmp_path, capsys):
    """Smaller batches, then fewer steps, as printed; the same command resumes the same run."""
    run = tmp_path / "run"
    command = ["train", "--config=finetune/lora", f"--init_from={base}", f"--workdir={run}"]
    command += [f"--config.data.train={few}", "--config.data.sequence=96"]
    command += ["--config.eval.every=100%", "--config.checkpoint.every=100%"]
    assert main([*command, "--stop_at=2"]) == 0
    printed = capsys.readouterr().err
    assert (
        "train.epochs = 3: the training set has 4 rows, so train.batch = 1 in place of 16 "
        "and train.steps = 12 in place of 500; --config.train.steps=N" in printed
    )
    assert main([*command, "--quiet"]) == 0
    saved = json.loads((run / "config.json").read_text())["train"]
    assert (saved["batch"], saved["steps"], saved["epochs"]) == (1, 12, 3.0)
    assert ("train", 12) in harness.losses(run)
    capsys.readouterr()
    assert main(command) == 0
    assert "already complete at step 12" in capsys.readouterr().out


def test_a_batch_of_the_command_line_that_is_too_large_is_refused(base, few, tmp_path, capsys):
    command = ["train", "--config=finetune/lora", f"--init_from={base}", f"--workdir={tmp_path}"]
    command += [f"--config.data.train={few}", "--config.data.sequence=96"]
    assert main([*command, "--config.train.batch=5"]) == 65
    assert "--config.train.batch=4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def lora(config, base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lora") / "lora"
    assert main(words(config, workdir, base)) == 0
    return workdir


@pytest.fixture(scope="module", params=ARMS)
def run(request, config, base, lora, tmp_path_factory):
    if request.param == "lora":
        return lora
    workdir = tmp_path_factory.mktemp("tuned") / request.param
    assert main(words(config, workdir, base, request.param)) == 0
    return workdir


def layout(workdir, step=6):
    store = Store(workdir / "checkpoints", CheckpointConfig(), read_only=True)
    return store.layout(step)


def evaluated(capsys, workdir):
    capsys.readouterr()
    assert main(["eval", f"--workdir={workdir}", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["loss_nats"]


@pytest.mark.few(1)
def test_a_checkpoint_has_the_adapter_alone_and_names_its_base(run, base):
    before = {path for path in layout(base) if path.startswith("params/")}
    after = {path for path in layout(run) if path.startswith("params/")}
    assert after
    assert not before & after
    record = json.loads((run / "base.json").read_text())
    assert (record["run"], record["step"], len(record["sha256"])) == (str(base), 6, 64)
    leaves = arrays(run, 6).values()
    numbers = sum(each.size for each in leaves)
    files = (run / "checkpoints/6").rglob("*")
    written = sum(each.stat().st_size for each in files if each.is_file())
    assert written < 12 * numbers + 10_000 * len(leaves) + 100_000, "two moments, names, digests"


@pytest.mark.few(1)
def test_training_lowers_the_loss_from_that_of_the_base(run, base, capsys):
    records = harness.records(run)
    first, *_ = (each for each in records if each["split"] == "val")
    assert first["step"] == 0
    if run.name not in ("prefix", "prompt"):  # these change the model from the start
        assert first["loss_nats"] == pytest.approx(evaluated(capsys, base), rel=1e-6)
    *_, last = (each for each in records if each["split"] == "val")
    assert last["loss_nats"] < first["loss_nats"]


def flops_per_token(run):
    line = next(each for each in harness.records(run) if each.get("flops_per_second"))
    return line["flops_per_second"] / line["tokens_per_second"]


def test_the_logged_flops_are_without_gradients_of_frozen_weights(base, lora):
    assert 0.6 < flops_per_token(lora) / flops_per_token(base) < 0.8


@pytest.mark.slow
@pytest.mark.few(1)
def test_a_run_is_evaluated_continued_and_exported_with_its_adapter(run, tmp_path, capsys):
    last = [each for each in harness.records(run) if each["split"] == "val"][-1]
    assert evaluated(capsys, run) == pytest.approx(last["loss_nats"], rel=1e-5)
    assert main(["generate", f"--workdir={run}", "--prompt=a", "--max_tokens=3"]) == 0
    code = main(["export", f"--workdir={run}", f"--out={tmp_path / 'hf'}"])
    if run.name in UNMERGED:
        assert code == 2
        assert "merged" in capsys.readouterr().err
        return
    assert code == 0
    imported = tmp_path / "again"
    assert main(["import", f"--from={tmp_path / 'hf'}", f"--workdir={imported}"]) == 0
    text = f"--text={config_text(run)}"
    capsys.readouterr()
    losses = []
    for workdir in (run, imported):
        assert main(["eval", f"--workdir={workdir}", text, "--sequence=32", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss_nats"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def config_text(run):
    return json.loads((run / "config.json").read_text())["data"]["train"][0]


@pytest.mark.few(1)
def test_a_merged_run_needs_no_adapter(run, tmp_path, capsys):
    code = main(["merge", f"--workdir={run}", f"--out={tmp_path / 'merged'}", "--json"])
    printed = capsys.readouterr()
    if run.name in UNMERGED:
        assert code == 2
        assert f"a {run.name} cannot be merged" in printed.err
        return
    assert code == 0
    answer = json.loads(printed.out)
    assert answer["tokens"] > 0
    assert answer["mean_nats"] <= answer["largest_nats"] < 1e-4
    merged = tmp_path / "merged"
    assert json.loads((merged / "config.json").read_text())["tune"] == {"name": "full"}
    assert evaluated(capsys, merged) == pytest.approx(evaluated(capsys, run), rel=1e-5)
    assert summary.summarize(merged).status == "merged"
    assert main(["merge", f"--workdir={merged}", f"--out={tmp_path / 'x'}"]) == 2
    assert "has no adapter" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lora", "prompt"])
def test_a_run_that_stops_resumes_to_the_same_bits(config, base, lora, arm, tmp_path):
    parts = tmp_path / "parts"
    if arm != "lora":
        lora = tmp_path / arm
        assert main(words(config, lora, base, arm)) == 0
    assert main(words(config, parts, base, arm, "--stop_at=2")) == 0
    resumed = harness.words(config, parts, *EXACT, f"--config.tune.name={arm}", *ARMS[arm])
    assert main(resumed) == 0  # base.json names the base

    def losses(workdir):
        return [float(r["loss_nats"]).hex() for r in harness.records(workdir)]

    assert losses(parts) == losses(lora)
    stores = [
        Store(each / "checkpoints", CheckpointConfig(), read_only=True) for each in (parts, lora)
    ]
    one, other = (each.arrays(6) for each in stores)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)
        if path.endswith("lora_b"):
            assert np.abs(leaf).max() > 0


@pytest.fixture(scope="module")
def pissa(config, base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pissa") / "pissa"
    flags = ("--config.tune.init=pissa", "--config.tune.dropout=0.1", "--config.train.steps=2")
    assert main(words(config, workdir, base, "lora", *flags)) == 0
    return workdir


@pytest.mark.slow
def test_pissa_begins_at_the_loss_of_its_base_and_keeps_the_first_values(pissa, base, capsys):
    first, *_, last = (each for each in harness.records(pissa) if each["split"] == "val")
    assert first["loss_nats"] == pytest.approx(evaluated(capsys, base), rel=1e-6)
    assert last["loss_nats"] < first["loss_nats"]
    assert evaluated(capsys, pissa) == pytest.approx(last["loss_nats"], rel=1e-5)
    begun, after = arrays(pissa, 0), arrays(pissa, 2)
    for path, leaf in after.items():
        if path.endswith("0"):
            np.testing.assert_array_equal(leaf, begun[path], err_msg=path)
            np.testing.assert_array_equal(leaf, begun[path[:-1]], err_msg=path)
        else:
            assert np.abs(leaf - begun[path]).max() > 0
    moments = [path for path in layout(pissa, 2) if path.startswith("opt_state/")]
    assert any("lora_a" in path for path in moments)
    assert not any(path.endswith(("lora_a0", "lora_b0")) for path in moments)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["rank", pytest.param("root", marks=pytest.mark.slow)])
def test_an_exported_pissa_is_a_lora_of_twice_the_rank(config, pissa, base, tmp_path, scale):
    run = pissa
    if scale == "root":
        run = tmp_path / "run"
        flags = ("--config.tune.init=pissa", "--config.tune.scale=root", "--config.train.steps=1")
        assert main(words(config, run, base, "lora", *flags)) == 0
    peft = tmp_path / "peft"
    assert main(["export", f"--workdir={run}", "--to=peft", f"--out={peft}"]) == 0
    settings = json.loads((peft / "adapter_config.json").read_text())
    assert (settings["r"], settings["init_lora_weights"]) == (4, True)
    expected = tree.leaves(load.load_run(run).params)
    opened = load.load_run(base, adapter=adapter.reader(str(peft), print))
    for path, leaf in tree.leaves(opened.params).items():
        np.testing.assert_allclose(leaf, expected[path], atol=1e-6, err_msg=path)


def arrays(workdir, step):
    store = Store(workdir / "checkpoints", CheckpointConfig(), read_only=True)
    leaves = store.arrays(step)
    return {path: leaf for path, leaf in leaves.items() if path.startswith("params/")}


@pytest.mark.slow
def test_a_run_trains_on_from_the_adapter_of_another(config, base, lora, tmp_path):
    run = tmp_path / "run"
    assert main(words(config, run, lora, "lora", "--config.tune.b_lr=2", "--stop_at=1")) == 0
    record = json.loads((run / "base.json").read_text())
    assert (record["run"], record["step"]) == (str(base), 6)
    assert (record["adapter"]["run"], record["adapter"]["step"]) == (str(lora), 6)
    begun, before = arrays(run, 0), arrays(lora, 6)
    assert begun.keys() == before.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, begun[path], err_msg=path)


@pytest.mark.slow
def test_a_run_that_trains_on_resumes_with_its_own_weights(config, lora, tmp_path):
    run = tmp_path / "run"
    assert main(words(config, run, lora, "lora", "--stop_at=2")) == 0
    record, expected = (run / "base.json").read_text(), harness.losses(run)
    for name in ("checkpoints", "metrics.jsonl"):  # as if killed before the first checkpoint
        (run / name).rename(tmp_path / name)
    assert main(["train", f"--workdir={run}", "--stop_at=2"]) == 0
    assert harness.losses(run) == expected
    assert main(words(config, run, lora, "lora", "--stop_at=4")) == 0
    assert main(["train", f"--workdir={run}"]) == 0
    assert (run / "base.json").read_text() == record
    first, *_, last = (each for each in harness.records(run) if each["split"] == "val")
    *_, earlier = (each for each in harness.records(lora) if each["split"] == "val")
    assert first["loss_nats"] == pytest.approx(earlier["loss_nats"], rel=1e-6)
    assert last["loss_nats"] < first["loss_nats"]


@pytest.mark.slow
def test_leaves_can_be_trained_whole_and_b_faster(config, base, tmp_path):
    run = tmp_path / "run"
    flags = ("--config.tune.also=*norm/scale", "--config.tune.b_lr=16")
    assert main(words(config, run, base, "lora", *flags)) == 0
    paths = [path for path in layout(run) if path.startswith("params/")]
    assert any(path.endswith("norm/scale") for path in paths)
    assert not any(path.endswith(("/weight", "/table")) for path in paths)


@pytest.mark.slow
def test_the_new_place_of_a_base_is_recorded(config, base, tmp_path, capsys):
    old, new, run = (tmp_path / name for name in ("old", "new", "run"))
    shutil.copytree(base, old)
    flags = (f"--config.data.tokenizer={old / 'tokenizer'}", "--config.train.steps=1")
    assert main(words(config, run, old, "lora", *flags)) == 0
    old.rename(new)
    assert main(["eval", f"--workdir={run}"]) == 66
    printed = capsys.readouterr().err
    assert "the adapter's base is gone" in printed
    assert f"jaxlm train --workdir={run} --init_from=" in printed
    for place, code in ((f"{new}@4", 65), (new, 0), (new, 0)):
        assert main(["train", f"--workdir={run}", f"--init_from={place}"]) == code
        recorded = json.loads((run / "base.json").read_text())["run"]
        assert recorded == str(old if code else new)
    assert main(["eval", f"--workdir={run}"]) == 0
    assert f"{old / 'tokenizer'} does not exist here" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_resumes_on_a_base_that_moved(config, base, tmp_path):
    old, new, run = (tmp_path / name for name in ("old", "new", "run"))
    shutil.copytree(base, old)
    tokenizer = f"--config.data.tokenizer={old / 'tokenizer'}"
    assert main(words(config, run, old, "lora", tokenizer, "--stop_at=2")) == 0
    old.rename(new)
    assert main(["train", f"--workdir={run}"]) == 66
    assert main(words(config, run, new, "lora", tokenizer)) == 0
    assert json.loads((run / "base.json").read_text())["run"] == str(new)
    assert ("train", 6) in harness.losses(run)


def test_a_base_that_changed_is_refused(config, base, lora, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    flags = ("--config.train.steps=7", "--allow_change=train.steps")
    assert main(words(config, run, f"{base}@4", "lora", *flags)) == 65
    assert "changed since the run began" in capsys.readouterr().err


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("--config.tune.name=lora",), 2, "needs the weights of a model"),
        (("--config.tune.name=lora", "--init_from=BASE", "--config.tune.at=*/q/*"), 2, "no linear"),
        (("--config.tune.name=lora", "--init_from=BASE", "--config.tune.also=x"), 2, "'x'"),
        (("--config.tune.name=full", "--init_from=LORA"), 2, "jaxlm merge"),
        (("--config.tune.name=lora", "--init_from=LORA"), 2, "--config.tune.rank=2"),
        (("--config.tune.name=ia3", "--init_from=LORA"), 2, "--config.tune.name=lora"),
        (("--config.tune.name=qlora", "--config.tune.init=pissa"), 2, "--config.tune.init=kaiming"),
        (
            ("--config.tune.name=lora", "--init_from=BASE", "--config.optim.name=sophia"),
            2,
            "--config.optim.name=adamw",
        ),
        (
            ("--config.tune.name=lora", "--init_from=BASE", "--config.regularization.qk_clip=9"),
            2,
            "--config.regularization.qk_clip=None",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(config, base, lora, tmp_path, capsys, flags, code, text):
    flags = [flag.replace("BASE", str(base)).replace("LORA", str(lora)) for flag in flags]
    assert main(harness.words(config, tmp_path / "run", *flags)) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run/config.json").exists()


@pytest.mark.slow
def test_a_config_without_a_model_begins_with_that_of_a_folder(base, tmp_path, capsys):
    """The whole command of a new user: a folder of transformers, a text, a run directory."""
    folder, run = tmp_path / "hf", tmp_path / "run"
    assert main(["export", f"--workdir={base}", f"--out={folder}"]) == 0
    (tmp_path / "config.json").write_text(json.dumps({"tune": {"name": "lora", "rank": 2}}))
    command = [
        *("train", f"--config={tmp_path / 'config.json'}", f"--init_from={folder}"),
        *(f"--config.data.train={config_text(base)}", f"--workdir={run}"),
        *("--config.train.steps=2", "--config.train.batch=4", "--config.data.sequence=32"),
        *("--config.sample.prompts=()", "--config.eval.batches=1"),
    ]
    assert main([*command, "--config.data.train=gone.txt"]) == 66
    assert not (tmp_path / "run-base").exists(), "nothing was imported for data that is not there"
    assert main(["data", "peek", *command[1:]]) == 0
    assert f"tokenizer: that of {tmp_path / 'run-base'}" in capsys.readouterr().out
    assert main(command) == 0
    assert "importing" not in capsys.readouterr().err, "the model was imported to look at the data"
    model = json.loads((run / "config.json").read_text())["model"]
    assert (model["family"], model["width"], model["depth"]) == ("llama", 32, 2)
    assert json.loads((run / "base.json").read_text())["run"] == str(tmp_path / "run-base")
    assert "model: that of" in (run / "log.txt").read_text()
    assert main([*command, "--config.train.steps=3", "--allow_change=train.steps,schedule"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    ["lora", *(pytest.param(arm, marks=pytest.mark.slow) for arm in UNMERGED)],
)
def test_check_compares_an_adapter_on_fake_devices(config, arm):
    flags = [f"--config.tune.name={arm}", *ARMS[arm], "--config.mesh.data=2"]
    flags += ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    done = harness.run(["check", f"--config={config}", *flags])
    assert done[0] == 0, done[1]
