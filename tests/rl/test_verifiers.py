"""Verifiers earn only what is right; attacks, and what cannot be scored, earn nothing."""

import dataclasses

import pytest

from jaxlm.core import config
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.recipes.config import Run
from jaxlm.rl import rewards, verifiers
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.rl.rewards import Rewards, Sample

ATTACKS = ("", "7 + 5 =", "<think></think><answer></answer>", "0123456789", "yes " * 50)


def sample(completion, answer="12", **changed):
    whole = Sample("7 + 5 =", completion, answer, None, 0, "eos_token", 5)
    return whole._replace(**changed)


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact", " 12\n", "12", 1),
        ("exact", "12.0", "12", 0),
        ("number", "so 7 + 5 = 12.00.", "#### 12", 1),
        ("number", "12 or 13", "12", 0),
        ("number", "1" * 5000, "12", 0),
        ("choice", "Because of that,\nthe answer is (B).", "B", 1),
        ("choice", "b", "(B)", 1),
        ("choice", "A B C D", "D", 0),
        ("choice", "the answer is A or B", "B", 0),
        ("json", '{"b": [1, 2.0], "a": true}', '{"a": true, "b": [1.0, 2]}', 1),
        ("json", '{"a": 1, "b": [1, 2]}', '{"a": true, "b": [1, 2]}', 0),
        ("json", "NaN", "NaN", 0),
        ("json", "[" * 100_000, "[]", 0),
        ("json", "9" * 5000, "9", 0),
        ("format", "<think>7 and 5</think>\n<answer>12</answer>", None, 1),
        ("format", "<think> </think><answer>12</answer>", None, 0),
        ("format", "<think>7</think><answer>12</answer> or 13", None, 0),
        ("format", "<think>7</think><think>8</think><answer>12</answer>", None, 0),
    ],
)  # fmt: skip
def test_a_verifier_earns_one_for_what_is_right_and_nothing_else(
    name, completion, answer, expected
):
    assert verifiers.VERIFIERS[name](sample(completion, answer), "") == expected


def test_penalties_grow_with_length_and_are_never_earned():
    shares = [verifiers.length(sample("", tokens=n), "8") for n in (0, 8, 12, 16, 99)]
    assert shares == [0, 0, -0.5, -1, -1]
    assert verifiers.ended(sample("", reason="length"), "") == -1


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_earn_nothing(attack):
    answers = {"choice": "B", "json": '{"a": 12}'}
    for name, verifier in verifiers.VERIFIERS.items():
        reference = answers.get(name, "12")
        assert verifier(sample(attack, reference), "8" if name == "length" else "") == 0, name


def test_the_total_is_the_weighted_sum_and_a_sample_without_a_value_has_none():
    settings = RewardConfig(functions=("number=2", "format:a=0.5", "ended"))
    with Rewards(settings) as scorer:
        right, bad = scorer.score([sample("<a>12</a>", reason="length"), sample("12", "twelve")])
    assert right.total == 2 + 0.5 - 1
    assert right.by_name == {"number": 1, "format:a": 1, "ended": -1}
    assert bad.total is None
    assert bad.by_name == {"number": None, "format:a": 0, "ended": 0}
    assert bad.problem == "number: the answer has no number"
    assert scorer.digest != Rewards(RewardConfig(functions=("number=2",))).digest


def test_a_sum_that_no_number_holds_is_no_score():
    with Rewards(RewardConfig(functions=("ended=1e308", "length:1=1e308"))) as scorer:
        (verdict,) = scorer.score([sample("12", reason="length")])
    assert verdict.total is None
    assert verdict.problem == "the sum of the rewards is -inf"


def test_a_prompt_has_what_its_rewards_compare_with():
    settings = RewardConfig(functions=("ended", "python", "number"))
    programs = dataclasses.replace(settings, functions=("ended", "python"))
    assert settings.unanswered("12", None) == ""
    assert settings.unanswered(None, None) == "python"
    assert settings.unanswered(None, {"tests": "assert True"}) == "number"
    assert programs.unanswered(None, {"tests": "assert True"}) == ""
    assert programs.unanswered(None, {"doctest": ">>> 1"}) == "python"


def test_too_many_samples_without_a_score_end_the_run():
    samples = [sample("12"), *[sample("12", "twelve")] * 7]
    verdicts = Rewards(RewardConfig(functions=("number",))).score(samples)
    missing = rewards.unscored(samples, verdicts)
    rewards.check_scored(missing, len(samples), 7 / 8, where="step 1")
    with pytest.raises(DataError, match="7 of 8 samples have no score") as error:
        rewards.check_scored(missing, len(samples), 0.8, where="step 1")
    assert "number: the answer has no number: '7 + 5 ='" in error.value.why
    assert error.value.fix.startswith("jaxlm reward try --help")


@pytest.mark.parametrize(
    ("value", "why", "fix"),
    [
        ("numbr=1", "there is no reward numbr", "=number=1"),
        ("number=one", "the weight 'one' is no number", "=number=1"),
        ("number=0", "the weight 0 is 0", "=number=1"),
        ("length", "length needs a number of tokens", "=length:256=1"),
        ("format:<a>", "its tags are names", "=format:think/answer=1"),
        ("number:2", "number has no argument", "=number=1"),
        ("number=1,number=2", "number is named twice", "=number=2"),
    ],
)
def test_wrong_rewards_are_refused_with_a_fix(value, why, fix):
    with pytest.raises(ConfigError) as error:
        config.load(Run, None, [("reward.functions", value)])
    assert why in error.value.why
    assert f"--config.reward.functions{fix}" in error.value.fix
