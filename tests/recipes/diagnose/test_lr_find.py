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
