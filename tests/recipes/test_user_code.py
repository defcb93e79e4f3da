"""Parts of a user by dotted path: an objective, an optimizer and a family in own files."""

import dataclasses
import hashlib
import json
import linecache
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

import jaxlm
from jaxlm.cli.docs import page
from jaxlm.cli.main import main
from jaxlm.core import config as configs
from jaxlm.core import notebook_code
from jaxlm.core.errors import ConfigError
from jaxlm.recipes.config import Run
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

MINE = re.search(r"```python\n(# mine\.py\n.*?)```", page("python").read_text(), re.DOTALL)[1]
TALL = """

from jaxlm.models.families.llama import Llama


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tall(Llama):
    more: int = setting(0, "further layers", low=0)

    def build(self):
        return dataclasses.replace(super().build(), depth=self.depth + self.more)
"""
OWN = {
    "objective.name": "mine.py:Focal",
    "objective.gamma": 0.0,
    "optim.name": "mine.py:Signum",
    "optim.lr": 1e-3,
    "model.family": "mine.py:Tall",
    "model.more": 1,
    "model.depth": 1,
}
SHIPPED = {
    "objective.name": "causal",
    "optim.name": "lion",
    "optim.b1": 0.9,
    "optim.b2": 0.9,
    "optim.weight_decay": 0.1,
    "optim.lr": 1e-3,
    "model.depth": 2,
}
SMALL = {
    "data.validation": ("20%",),
    "model.max_positions": 2048,
    "model.dropout": 0.0,
    "train.steps": 3,
    "checkpoint.every": 1,
}
SCRAP = """
import dataclasses
from jaxlm.core.config import setting
from jaxlm.objectives.facts import ObjectiveFacts

@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(ObjectiveFacts):
    gamma: {kind} = {default}
    def build(self, loss, architecture): ...

class Other: pass

@dataclasses.dataclass(frozen=True)
class Lacking(ObjectiveFacts):
    pass

class Open(Part):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE + TALL)
    return tmp_path


@pytest.fixture
def train(folder):
    config = harness.write_config(folder)

    def train(workdir, settings, **options):
        return jaxlm.train(
            config, workdir=workdir, settings=SMALL | settings, quiet=True, **options
        )

    return train


@pytest.mark.slow
def test_parts_of_a_user_train_as_the_shipped_ones_that_compute_the_same(train):
    train("own", OWN)
    train("shipped", SHIPPED)
    losses, shipped = (
        [r["loss_nats"] for r in harness.records(Path(run))] for run in ("own", "shipped")
    )
    assert losses == shipped
    saved = json.loads(Path("own/config.json").read_text())
    sources = {saved[name]["source"] for name in ("objective", "optim", "model")}
    assert len(sources) == 1
    assert [path.name for path in Path("own/own").iterdir()] == [f"mine-{sources.pop()}.py"]
    assert configs.to_json(jaxlm.load("own").config) == saved


def test_a_changed_file_is_found_at_resume_and_a_run_is_read_with_its_own(train, folder, capsys):
    settings = {"objective.name": "mine.py:Focal", "objective.gamma": 1.0}
    assert train("run", settings, stop_at=1).step == 1
    expected = jaxlm.load("run").evaluate()["loss_nats"]
    file = folder / "mine.py"
    original = file.read_text()
    file.write_text(original.replace("(1 - jnp.exp", "(2 - jnp.exp"))
    resume = ["train", "--workdir=run", "--quiet"]
    assert main(resume) == ConfigError.code
    printed = capsys.readouterr().err
    assert "objective.source: " in printed
    assert "--allow_change=objective.source" in printed
    assert jaxlm.load("run").evaluate()["loss_nats"] == expected
    file.unlink()
    assert jaxlm.load("run").evaluate()["loss_nats"] == expected, "from the copy in the cache"
    assert main(resume) == ConfigError.code
    fix = re.search(r"fix +(cp run/own/mine-\w+\.py mine\.py)", capsys.readouterr().err)[1]
    assert fix
    file.write_text(f"{original}\n# another file, whose program is in the compile cache\n")
    assert main([*resume, "--stop_at=2", "--allow_change=objective.source"]) == 0


def test_a_run_directory_from_elsewhere_runs_no_code(folder, capsys):
    """It runs no file that its config names, although it exists, and no file without a digest."""
    overrides = [("objective.name", "mine.py:Focal")]
    saved = configs.to_json(configs.load(Run, None, overrides).value)
    shutil.rmtree(folder / "cache/own")
    foreign = folder / "mine.py"
    foreign.write_text("raise SystemExit('this code has run')\n")
    saved["objective"]["source"] = hashlib.sha256(foreign.read_bytes()).hexdigest()[:16]
    (folder / "run").mkdir()
    file = folder / "run/config.json"
    for words in (["eval", "--workdir=run"], ["train", "--workdir=run"]):
        file.write_text(json.dumps(saved))
        (folder / "run/checkpoints").mkdir(exist_ok=True)
        assert main(words) == ConfigError.code
        printed = capsys.readouterr().err
        assert "the code of the config has not run here before" in printed
        assert "if you trust it" in printed
        file.write_text(json.dumps(saved | {"objective": {"name": "mine.py:Focal"}}))
        assert main(words) == ConfigError.code
        assert "names code without its digest" in capsys.readouterr().err


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.py:Part", "there is no file none.py"),
        ("no.module:Part", "there is no module no.module"),
        ("scrap.py:Prat", "has no class Prat"),
        ("scrap.py:Other", "no subclass of"),
        ("scrap.py:Lacking", "it has no build"),
        ("scrap.py:Open", "no frozen dataclass"),
        ("broken.py:Part", "ZeroDivisionError"),
        ("scrap.py", "must be one of causal"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_with_a_fix(folder, name, words):
    (folder / "scrap.py").write_text(SCRAP.format(kind="float", default="2.0"))
    (folder / "broken.py").write_text("import jaxlm\n1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(Run, None, [("objective.name", name)])
    assert words in str(caught.value)
    assert caught.value.fix


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "default", "words"),
    [
        ("dict", "dataclasses.field(default_factory=dict)", "of the type <class 'dict'>"),
        ("float", "'two'", "the default 'two'"),
        ("Missing", "1", "'Missing' is not defined"),
        ("float", "2.0\n    items: int = 3", "no setting can have the name items"),
    ],
)
def test_settings_of_a_type_that_no_config_has_are_refused(folder, kind, default, words):
    text = SCRAP.format(kind=kind, default=default)
    (folder / "scrap.py").write_text(f"from __future__ import annotations\n{text}")
    with pytest.raises(ConfigError) as caught:
        configs.load(Run, None, [("objective.name", "scrap.py:Part")])
    assert words in str(caught.value)


def test_settings_of_a_part_are_checked_and_described_as_others(folder):
    draft = configs.new(Run)
    draft.objective.name = "mine.py:Focal"
    draft.objective.gamma = 3
    overrides = [("objective.name", "mine.py:Focal"), ("objective.gamma", "3")]
    loaded = configs.load(Run, None, overrides)
    assert configs.from_json(Run, draft.to_dict()) == loaded.value
    explained = configs.explain(Run, loaded, "objective.gamma")
    assert (explained.value, explained.range, explained.default) == (3.0, ">= 0", 2.0)
    with pytest.raises(ConfigError, match="objective.gamma = -1"):
        configs.load(Run, None, [*overrides, ("objective.gamma", "-1")])
    with pytest.raises(ConfigError, match="gama"):
        configs.load(Run, None, [*overrides, ("objective.gama", "1")])


@pytest.mark.slow
def test_a_class_of_a_notebooks_cell_is_a_part_with_a_file_in_the_cache(train, folder, monkeypatch):
    """Imports of other cells are in it, and what the cell does besides is not done again."""
    head, _, classes = MINE.partition("\n\n\n")
    cell = classes + "\nresult = train(Focal)\nPOWER = 2\n"
    main_module = types.ModuleType("__main__")
    main_module.In = ["", f"%pip install x\n{head}\nimport unused", cell]
    monkeypatch.setitem(sys.modules, "__main__", main_module)
    linecache.cache["<cell>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell>")
    exec(head, main_module.__dict__)
    exec(compile(classes, "<cell>", "exec"), main_module.__dict__)
    settings = {"objective.name": main_module.Focal, "objective.gamma": 1.0}
    assert train("run", settings, stop_at=1).step == 1
    assert jaxlm.load("run").config.objective.gamma == 1.0
    (copy,) = Path("run/own").iterdir()
    text = copy.read_text()
    assert "import jax.numpy as jnp" in text
    assert "POWER = 2" in text
    assert "unused" not in text
    assert "result" not in text
    assert train("run", settings, stop_at=2).step == 2


def test_a_class_of_a_module_is_named_by_its_file_and_one_without_source_is_refused(
    folder, monkeypatch
):
    mine = types.ModuleType("mine")
    mine.__file__ = str(folder / "mine.py")
    monkeypatch.setitem(sys.modules, "mine", mine)
    exec(MINE, mine.__dict__)
    assert notebook_code.named(mine.Focal) == "mine.py:Focal"
    assert notebook_code.named(Run) == "jaxlm.recipes.config:Run"
    lost = dataclasses.make_dataclass("Lost", [])
    lost.__module__ = "__main__"
    with pytest.raises(ConfigError, match="source of Lost is not known"):
        notebook_code.named(lost)
