"""Functions of rewards of a run: its copy, another file on resume, and a run from elsewhere."""

import json
import shutil

import pytest

from jaxlm.cli.main import main
from tests.faults import harness
from tests.recipes.train.test_rollouts import SETTINGS, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]  # four runs

FUNCTIONS = ("rewards.py:shape", "rewards.py:noise=1e-12")
SHAPE = "def shape(completion, seed):\n    return len(completion) / 8\n"
SHAPE += "def noise(seed):\n    return seed\n"


def test_a_run_resumes_with_the_functions_of_its_rewards_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(SHAPE)
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    settings = SETTINGS | {"data.train": ("prompts.jsonl",), "rl.updates": 1, "train.steps": 2}
    config = harness.write_config(tmp_path, settings | {"reward.functions": FUNCTIONS})
    run = tmp_path / "run"
    assert train(config, run, "--stop_at=1") == 0
    (copy,) = (run / "own").iterdir()
    assert copy.read_text() == SHAPE
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["reward"] == pytest.approx(records[0]["reward/rewards.py:shape"], abs=0.01)

    (tmp_path / "rewards.py").write_text(SHAPE.replace("8", "4"))
    capsys.readouterr()
    assert train(config, run) == 2
    error = capsys.readouterr().err
    assert f"reward.sources: ('rewards.py={copy.stem.rpartition('-')[2]}',) ->" in error

    (tmp_path / "rewards.py").unlink()
    assert main(["train", f"--workdir={run}", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert f"fix    cp {copy} rewards.py" in error
    shutil.copy(copy, "rewards.py")
    assert main(["train", f"--workdir={run}", "--quiet"]) == 0

    samples = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    seeds = [each["rewards"]["rewards.py:noise"] for each in samples]
    assert len(set(seeds)) == len(samples) == 2 * 8, "each sample of each step has its own seed"

    shutil.rmtree(tmp_path / "cache/own")
    capsys.readouterr()
    assert main(["eval", f"--workdir={run}"]) == 2
    assert "has not run here before" in capsys.readouterr().err
