"""PPO, and the scores of a rollout by the program that is trained: resuming, references."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.objectives.policy_config import Ppo
from jaxlm.ops.advantage import gae
from jaxlm.recipes.train.rescoring import corrected, valued
from jaxlm.rl.rollout import DrawnSample, Weighted, as_rows
from tests.faults import harness
from tests.recipes.train.test_rollouts import SETTINGS, prompts, records, train  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_device")

LORA = "--config.tune.name=lora", "--config.tune.rank=2", "--config.tune.at=*/attention/*"
PPO = {"objective.name": "ppo", "rl.updates": 1, "rl.epochs": 2, "rl.samples": 1}


@pytest.fixture(scope="module")
def config(prompts, tmp_path_factory):  # noqa: F811
    settings = SETTINGS | PPO | {"data.train": (str(prompts),)}
    return harness.write_config(tmp_path_factory.mktemp("config"), settings)


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "base"
    assert train(config, workdir) == 0
    return workdir


@pytest.mark.slow
def test_ppo_learns_values_and_resumes_inside_of_an_epoch_to_the_same_bits(config, base, tmp_path):
    steps = [each for each in records(base) if each["split"] == "train"]
    assert [each["step"] for each in steps if "reward" in each] == [1, 3]  # two epochs of each
    assert {"value_loss", "policy_loss", "value_clipped_share"} <= steps[0].keys()
    assert steps[0]["value_mean"] == 0
    assert steps[1]["value_loss"] < steps[0]["value_loss"]  # of the same samples
    assert steps[0]["sampler_gap_high_nats"] < 1e-4 < steps[1]["sampler_gap_nats"]
    assert train(config, tmp_path / "a", "--stop_at=1") == 0
    assert train(config, tmp_path / "a") == 0
    assert records(tmp_path / "a") == records(base)
    assert records(tmp_path / "a", "rollouts.jsonl") == records(base, "rollouts.jsonl")


@pytest.mark.slow
def test_an_adapter_has_a_value_head_and_a_penalty_in_its_rewards(config, base, tmp_path, capsys):
    """The reference is the base; exports and runs without values leave the head out."""
    kl = "--config.objective.kl=reward_k1", "--config.objective.beta=0.5"
    assert train(config, tmp_path / "a", f"--init_from={base}", *LORA, *kl) == 0
    steps = [each for each in records(tmp_path / "a") if each["split"] == "train"]
    distances = [each["kl_nats"] for each in steps if "kl_nats" in each]
    assert distances[0] == pytest.approx(0, abs=1e-9)
    assert distances[1] > 1e-7
    capsys.readouterr()
    assert main(["export", f"--workdir={tmp_path / 'a'}", f"--out={tmp_path / 'out'}"]) == 0
    assert "left out: the value head" in capsys.readouterr().out
    names = (tmp_path / "out/model.safetensors").read_bytes()
    assert b"value/weight" not in names
    other = ["--config.objective.name=policy", "--config.rl.samples=4"]
    assert train(config, tmp_path / "b", f"--init_from={base}", *other) == 0
    assert "left out: the value head" in (tmp_path / "b/log.txt").read_text()


@pytest.mark.slow
def test_a_reference_of_the_start_is_known_to_a_resumed_run(config, base, tmp_path):
    flags = ["--config.objective.kl=loss_k3", "--config.objective.reference=start"]
    assert train(config, tmp_path / "a", *flags, f"--init_from={base}", "--stop_at=2") == 0
    assert json.loads((tmp_path / "a/start.json").read_text())["step"] == 4
    assert train(config, tmp_path / "a", *flags) == 0
    steps = [each for each in records(tmp_path / "a") if each["split"] == "train"]
    assert steps[0]["kl_nats"] == pytest.approx(0, abs=1e-9)
    assert all(each["kl_nats"] > 1e-7 for each in steps[1:])


@pytest.mark.slow
def test_a_correction_without_a_gap_changes_no_loss(config, base, tmp_path):
    """The sampler and the step compute the same probabilities, so that all weights are 1."""
    assert train(config, tmp_path / "a", "--config.rl.correction=tis") == 0
    for one, other in zip(records(tmp_path / "a"), records(base), strict=True):
        assert one["loss_nats"] == pytest.approx(other["loss_nats"], abs=1e-4)
    drawn = [each for each in records(tmp_path / "a") if "reward" in each]
    assert drawn[0]["correction_mean"] == pytest.approx(1, abs=1e-4)
    assert drawn[0]["sampler_gap_high_nats"] < 1e-4
    assert "sampler_gap_nats" not in records(tmp_path / "a")[1]


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_at_its_own_samples(config, base, tmp_path):
    """Half of the answers are those of the data, the same ones after a resume."""
    flags = [
        *("--config.objective.name=distill", f"--config.objective.teacher={base}"),
        *("--config.objective.weight=1", "--config.objective.sampled=0.5", "--config.seed=3"),
        *("--config.objective.divergence=jsd", "--config.rl.epochs=1", "--config.train.steps=12"),
    ]
    assert train(config, tmp_path / "a", *flags) == 0
    steps = [each for each in records(tmp_path / "a") if each["split"] == "train"]
    assert steps[-1]["teacher_kl_nats"] < 0.7 * steps[0]["teacher_kl_nats"]
    samples = records(tmp_path / "a", "rollouts.jsonl")
    is_trained = [each["advantage"] is not None for each in samples]
    assert 0.3 < sum(is_trained) / len(is_trained) < 0.7
    assert sum(is_trained[:8]) / 8 == steps[0]["sampled_share"]
    assert train(config, tmp_path / "b", *flags, "--stop_at=5") == 0
    assert train(config, tmp_path / "b", *flags) == 0
    assert records(tmp_path / "b") == records(tmp_path / "a")


def _rows():
    def sample(ids, reward):
        log_p = np.linspace(-2, -1, ids).astype(np.float32)
        return Weighted(
            np.array([1, 2]), DrawnSample(np.arange(3, 3 + ids), log_p, "length"), reward
        )

    return as_rows([sample(4, 2.0), sample(2, -1.0), sample(3, None)], 8, mean="token")


def test_the_weight_of_a_token_is_its_ratio_to_the_sampler_at_most_the_cap():
    rows = _rows()
    is_drawn = rows.weights > 0
    gap = np.where(is_drawn, np.random.default_rng(0).normal(size=rows.weights.shape), 0)
    out, figures = corrected(rows, rows.rollout.log_p + gap, cap=1.5)
    expected = np.where(is_drawn, np.minimum(np.exp(gap), 1.5), 0)
    np.testing.assert_allclose(out.weights, expected, rtol=1e-6)
    scored = np.where(is_drawn, rows.rollout.log_p + gap, 0)
    np.testing.assert_allclose(out.rollout.log_p, scored, rtol=1e-6)
    np.testing.assert_array_equal(out.rollout.counts, rows.rollout.counts)
    assert figures["sampler_gap_nats"] == pytest.approx(np.abs(gap[is_drawn]).mean())
    assert figures["correction_capped_share"] == (np.exp(gap[is_drawn]) >= 1.5).mean()


def test_rewards_are_of_the_last_token_and_the_penalty_of_each():
    rows, draw = _rows(), np.random.default_rng(0)
    is_drawn = rows.weights > 0
    scores = {name: draw.normal(size=is_drawn.shape) for name in ("log_p", "reference", "value")}
    settings = Ppo(scale="none", beta=0.5, gae_lambda=0.8, gamma=0.9)
    out, _ = valued(rows, scores, settings)
    rewards = np.where(is_drawn, -0.5 * (scores["log_p"] - scores["reference"]), 0)
    rewards[0, 4] += 2.0  # slots 1 to 4 are those of the first sample's four tokens
    rewards[1, 2] -= 1.0
    expected = gae(rewards, scores["value"], is_drawn, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(out.rollout.advantages, expected, rtol=1e-5, atol=1e-6)
    returns = np.where(is_drawn, expected + scores["value"], 0)
    np.testing.assert_allclose(out.rollout.returns, returns, rtol=1e-5, atol=1e-6)
    assert not out.weights[2].any()  # without an advantage, it is not trained on
    whitened, _ = valued(rows, scores, dataclasses.replace(settings, scale="batch"))
    known = whitened.rollout.advantages[is_drawn]
    assert (known.mean(), known.std(ddof=1)) == pytest.approx((0, 1), abs=1e-3)
    np.testing.assert_array_equal(whitened.rollout.returns, out.rollout.returns)
