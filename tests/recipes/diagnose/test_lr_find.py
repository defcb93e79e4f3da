"""`jaxlm lr-find` by the command line: its files, its refusals, and the quality of its rate."""

import dataclasses
import itertools
import json
import math

import jax
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.data import dataset
from jaxlm.optim.config import Muon
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose.lr_find import Point, scaled, smooth, suggest
from jaxlm.recipes.train.programs import TrainPrograms
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


def find(capsys, config, out, *flags):
    capsys.readouterr()
    code = main(["lr-find", f"--config={config}", f"--out={out}", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def rate_test(config, tmp_path_factory):
    """Rates up to one that no model survives, and the printed answer."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lines = []
        patch.setattr("jaxlm.cli.output.write", lambda _, text: lines.append(text))
        words = f"lr-find --config={config} --workdir={folder}/run --low=1e-6 --high=100 --steps=64"
        assert main(words.split()) == 0
    return folder, "\n".join(lines)


def test_the_curve_the_plot_and_flags_to_paste_and_nothing_else(rate_test):
    folder, output = rate_test
    assert {path.name for path in folder.rglob("*")} == {"lr-find", "lr-find.json", "lr-find.png"}
    assert (folder / "lr-find/lr-find.png").read_bytes().startswith(b"\x89PNG")
    answer = json.loads((folder / "lr-find/lr-find.json").read_text())
    rates = [point["rate"] for point in answer["curve"]]
    assert rates[0] == pytest.approx(1e-6)
    ratio = (100 / 1e-6) ** (1 / 63)
    for before, after in itertools.pairwise(rates):
        assert after / before == pytest.approx(ratio, rel=1e-4), "no warm-up, and no step left out"
    losses = [point["loss_nats"] for point in answer["curve"]]
    assert losses[0] == pytest.approx(math.log(260), rel=0.05), "fresh parameters"
    assert max(losses[:10]) - min(losses[:10]) < 0.2, "at the lowest rates nothing moves"
    assert min(losses) < 0.75 * losses[0], "the updates are applied"
    assert answer["steps"] == len(losses) < 64, "it ends before the last rate"
    assert "smoothed loss was 1.5 times its lowest" in answer["ended"]
    assert 1e-4 < answer["suggested_lr"] < 1
    assert answer["flags"] == [f"--config.optim.lr={answer['suggested_lr']:.2g}"]
    assert output.endswith(f"suggested {answer['flags'][0]}")
    assert "lowest" in output


def test_an_earlier_test_is_not_overwritten(config, rate_test, capsys):
    folder, _ = rate_test
    before = (folder / "lr-find/lr-find.json").read_bytes()
    code, answer = find(capsys, config, folder / "lr-find")
    assert (code, answer["error"]["code"]) == (73, 73)
    assert answer["error"]["fix"] == f"--out={folder / 'lr-find'}-2"
    assert (folder / "lr-find/lr-find.json").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--low=1", "--high=1e-6"], "jaxlm lr-find --help"),
        (["--low=0"], "jaxlm lr-find --help"),
        (["--high=inf"], "jaxlm lr-find --help"),
        (["--high=nan"], "jaxlm lr-find --help"),
        (["--steps=9"], "jaxlm lr-find --help"),
    ],
)
def test_a_range_that_is_none_is_refused(config, tmp_path, capsys, flags, fix):
    code, answer = find(capsys, config, tmp_path / "out", *flags)
    assert code == 2
    assert answer["error"]["where"] in (
        " ".join(flags),
        "--low=0 --high=1",
        "--low=1e-06 --high=inf",
        "--low=1e-06 --high=nan",
        "--low=1 --high=1e-06",
    )
    assert answer["error"]["fix"] == fix
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_said_before_anything_else(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, answer = find(capsys, config, tmp_path / "file/out")
    assert code == 73
    assert "NotADirectoryError" in answer["error"]["why"]


def test_the_suggestion_is_a_third_of_where_a_smooth_curve_is_lowest():
    rates = [10 ** (-6 + 6 * step / 99) for step in range(100)]
    losses = [4 + (math.log10(rate) + 2) ** 2 for rate in rates]
    curve = smooth(list(zip(rates, losses, strict=True)), 100)
    assert suggest(curve) == pytest.approx(1e-2 / 3, rel=0.16), "smoothing does not lag"
    level = [Point(rate, 1.0, 1.0 - 0.01 * (step == 50)) for step, rate in enumerate(rates)]
    assert suggest(level) is None, "what differs between batches is no fall"
    assert suggest([]) is None


def test_both_rates_of_muon_move_together():
    run = Run(optim=Muon(lr=0.02, adam_lr=0.005))
    assert scaled(run, 0.01) == ["--config.optim.lr=0.01", "--config.optim.adam_lr=0.0025"]


@pytest.mark.slow
def test_on_the_quickstart_it_finds_a_rate_within_three_of_the_best_of_a_grid(
    tmp_path, capsys, record_property
):
    """At a reduced size, each rate of the grid for 60 steps on the config's own schedule."""
    small = {"model.width": "64", "model.depth": "2", "data.sequence": "128", "train.steps": "60"}
    small |= {"data.tokenizer": "bytes"}
    words = [f"--config.{name}={value}" for name, value in small.items()]
    code, answer = find(capsys, "configs/quickstart.py", tmp_path / "out", *words)
    assert code == 0
    run = configs.load(Run, "configs/quickstart.py", list(small.items())).value
    mesh = meshes.build(run.mesh)
    data = dataset.open_data(run.data, seed=run.seed)
    model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
    ends = {}
    for rate in (0.002, 0.006, 0.02, 0.06, 0.2):
        share = run.optim.adam_lr / run.optim.lr
        optim = dataclasses.replace(run.optim, lr=rate, adam_lr=rate * share)
        with jax.set_mesh(mesh):
            engine = TrainPrograms(dataclasses.replace(run, optim=optim), data, model)
            state, batches = engine.init_state(), engine.batches(0)
            for _ in range(run.train.steps):
                state, _ = engine.step(state, next(batches))
            (ends[rate],) = (
                v["loss_nats"] for v in engine.evaluate(state.params, limit=8).values()
            )
    best = min(ends, key=lambda rate: ends[rate])
    table = "  ".join(f"{rate}: {loss:.4f}" for rate, loss in ends.items())
    record_property("table", f"suggested {answer['suggested_lr']:.3g}; {table}")
    assert best / 3 <= answer["suggested_lr"] <= best * 3


ANSWERS = {
    "data.kind": "pairs",
    "data.sequence": 48,
    "data.validation": (),
    "train.steps": 2,
    "train.batch": 4,
    "log.every": 1,
    "objective.name": "preference",
    "precision.compute": "float32",
}
TEXTS = ["--config.data.kind=text", "--config.objective.name=causal"]
TEXTS += ["--config.data.train={folder}/*.txt"]
LORA = "--config.tune.name=lora --config.tune.rank=2 --config.optim.weight_decay=0".split()


@pytest.fixture(scope="module")
def models(config, tmp_path_factory):
    """A base, an adapter for it, and the config of a run on pairs."""
    folder = tmp_path_factory.mktemp("models")
    pairs = folder / "pairs.jsonl"
    records = [
        {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n - 3}!"} for n in range(60)
    ]
    pairs.write_text("".join(json.dumps(each) + "\n" for each in records))
    settings = ANSWERS | {"data.train": (str(pairs),)}
    preference = harness.write_config(folder, settings)
    few = [
        "--config.train.steps=2",
        "--config.optim.lr=0.01",
        f"--config.data.train={folder}/*.txt",
    ]
    harness.trained(config, folder / "base", *few)
    harness.trained(config, folder / "other", *few, "--config.seed=1")
    harness.trained(config, folder / "tuned", *few, *LORA, f"--init_from={folder}/base")
    return folder, preference


@pytest.mark.parametrize(
    ("start", "flags"),
    [
        ("base", []),
        pytest.param(
            "base", ["--config.objective.reference={folder}/other"], marks=pytest.mark.slow
        ),
        pytest.param("base", LORA, marks=pytest.mark.slow),
        ("tuned", [*LORA, "--config.objective.reference=adapter_off"]),
        pytest.param("tuned", LORA, marks=pytest.mark.slow),
        (None, ["--config.train.epochs=9"]),
        pytest.param("base", TEXTS, marks=pytest.mark.slow),
    ],
)
def test_it_begins_with_the_weights_and_the_reference_of_a_run(
    models, start, flags, tmp_path, capsys
):
    """The first two losses are those of `jaxlm train` at the same rate, of batches as large."""
    folder, preference = models
    words = [each.format(folder=folder) for each in flags]
    if start is not None:
        words.append(f"--init_from={folder / start}")
    low = 1e-4
    constant = ["--config.schedule.name=constant", "--config.schedule.warmup=0"]
    constant.append(f"--config.optim.lr={low}")
    run = harness.trained(preference, tmp_path / "run", *words, *constant)
    expected = [each["loss_nats"] for each in harness.records(run) if each["split"] == "train"]
    high = ["--high=1", f"--low={low}", "--steps=10"]
    capsys.readouterr()
    words = ["lr-find", f"--config={preference}", f"--out={tmp_path / 'found'}", *words, *high]
    assert main(words) in (0, 1)
    output = capsys.readouterr().out
    assert ("the weights are random: data.kind=pairs" in output) == (start is None)
    answer = json.loads((tmp_path / "found/lr-find.json").read_text())
    losses = [point["loss_nats"] for point in answer["curve"]]
    assert losses[:2] == pytest.approx(expected[:2], rel=2e-6)
    assert losses[0] != losses[1]


def test_rollouts_are_refused_before_data_is_read(tmp_path, capsys):
    code, answer = find(
        capsys, "rl/grpo", tmp_path / "found", "--config.data.train=prompts.jsonl", "--steps=10"
    )
    assert code == 2
    assert "draws no rollouts of the objective policy" in answer["error"]["what"]
