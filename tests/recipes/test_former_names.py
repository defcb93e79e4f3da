"""Settings that were renamed are read by their former names for one release.

`run_before_renames.tar.xz` is a run of 6 steps made by the commit before the renames (a7ddce9): a
DeepSeek-V3-style model trained with SOAP on generated text.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.core.problems import RenamedSetting
from jaxlm.corpus.config import Recipe
from jaxlm.monitor.sinks import read
from jaxlm.recipes.config import Run
from tests.faults import harness

ARCHIVE = Path(__file__).parent / "run_before_renames.tar.xz"
FORMER = {
    ("llama", "model.context", "64"): ("model.max_positions", 64),
    ("neox", "model.rope_share", "0.5"): ("model.rotary_fraction", 0.5),
    ("phi3", "model.context", "64"): ("model.max_positions", 64),
    ("gemma2", "model.attention_cap", "40"): ("model.attention_softcap", 40.0),
    ("gemma2", "model.logit_cap", "None"): ("model.logit_softcap", None),
    ("mixtral", "model.context", "64"): ("model.max_positions", 64),
    ("qwen3_moe", "model.normalised", "false"): ("model.normalize_top_k", False),
    ("deepseek_v3", "model.pairs", "halves"): ("model.interleaved", False),
    ("llama", "regularisation.embedding_noise", "5"): ("regularization.embedding_noise", 5.0),
    ("llama", "guard.reach", "7"): ("guard.rewind_steps", 7),
}


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.slow
def test_a_run_of_before_the_renames_is_evaluated_and_resumed(earlier, capsys):
    assert json.loads((earlier / "config.json").read_text())["model"]["pairs"] == "halves"
    assert main(["eval", "--workdir=run", "--json"]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["sets"].values()
    records = [each for each in read(earlier / "metrics.jsonl", {}) if each["split"] == "val"]
    assert scores["loss_nats"] == pytest.approx(records[-1]["loss_nats"], rel=1e-6)

    words = ["train", "--config=run", "--workdir=run", "--config.train.steps=8", "--cpu_devices=1"]
    code, output = harness.run([*words, "--allow_change=train.steps"])
    assert code == 0, output
    assert json.loads((earlier / "exit.json").read_text())["step"] == 8
    written = json.loads((earlier / "config.json").read_text())
    assert (written["model"]["interleaved"], written["guard"]["rewind_steps"]) == (False, 2)
    assert written["optim"]["max_dim"] == 64
    assert "regularisation" not in written


@pytest.mark.few(3)
@pytest.mark.parametrize("former", FORMER, ids=lambda former: former[1])
def test_a_flag_with_a_former_name_sets_the_setting_and_warns(former):
    family, path, text = former
    new, value = FORMER[former]
    with pytest.warns(RenamedSetting, match=f"{path} is now named {new}"):
        loaded = config.load(Run, None, [("model.family", family), (path, text)])
    assert config.flatten(loaded.value)[new] == value


def test_a_distance_of_t5_may_have_its_former_name():
    overrides = [("model.family", "t5"), ("objective.name", "span"), ("model.farthest", "64")]
    with pytest.warns(RenamedSetting, match="model.max_distance"):
        loaded = config.load(Run, None, overrides)
    assert loaded.value.model.max_distance == 64


def test_a_config_file_may_use_former_names(tmp_path):
    (tmp_path / "c.py").write_text(
        "from jaxlm.core import config\n"
        "from jaxlm.recipes.config import Run\n"
        "def get_config():\n"
        "    c = config.new(Run)\n"
        "    c.model.context = 64\n"
        "    c.regularisation.layer_drop = 0.1\n"
        "    c.data.sequence = c.model.context\n"
        "    return c\n"
    )
    with pytest.warns(RenamedSetting, match="now named"):
        run = config.load(Run, str(tmp_path / "c.py")).value
    assert (run.model.max_positions, run.data.sequence) == (64, 64)
    assert run.regularization.layer_drop == 0.1


def test_a_stage_of_a_corpus_may_have_its_former_name():
    loaded = config.load(Recipe, None, [("stages", "normalise,length")])
    assert loaded.value.stages == ("normalize", "length")
    assert config.from_json(Recipe, {"stages": ["normalise"]}).stages == ("normalize",)


def test_both_names_at_once_are_an_error():
    with pytest.raises(ConfigError, match="context"):
        config.from_json(Run, {"model": {"context": 64, "max_positions": 32}})


def test_the_command_line_prints_the_new_name():
    words = ["config", "show", "--config.model.context=64", "--json"]
    command = [sys.executable, "-m", "jaxlm", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(
        "caution: the setting model.context is now named model.max_positions; "
    )
    assert json.loads(done.stdout)["config"]["model"]["max_positions"] == 64
