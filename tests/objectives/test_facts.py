"""Facts of an objective agree with each other, for every shipped objective."""

import dataclasses
import typing

import pytest

from jaxlm.objectives import config
from jaxlm.objectives.config import Causal, Distill, Mixture, Weights
from jaxlm.objectives.facts import ObjectiveFacts

OBJECTIVES = typing.get_args(config.Objective)


def test_the_union_has_every_objective_once():
    names = [objective().name for objective in OBJECTIVES]
    assert len(set(names)) == len(names) == 15
    assert all(issubclass(objective, ObjectiveFacts) for objective in OBJECTIVES)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each().name)
def test_the_facts_of_an_objective_agree(objective):
    facts = objective()
    is_judged = facts.compares_answers or facts.samples_answers
    assert not (facts.sums_over_rows and is_judged), "answers of one prompt are in several rows"
    assert not (facts.keeps_rows and facts.bidirectional)
    assert facts.prompts != "both ways" or facts.bidirectional
    assert facts.block_positions is None or facts.bidirectional
    assert not facts.labels_steps or facts.has_reward_head
    assert not facts.has_reward_head or (facts.compares_answers and facts.prompts == "none")
    assert not facts.has_value_head or facts.samples_answers
    assert not facts.marks_mtp_rows or facts.mtp_settings is not None
    if "encoder-decoder" in facts.architectures:
        assert 0 < facts.target_length(256) <= 512
    else:
        with pytest.raises(ValueError, match="no pairs"):
            facts.target_length(256)


def test_an_objective_of_a_file_promises_nothing():
    facts = ObjectiveFacts()
    assert not any((facts.keeps_rows, facts.evaluated_as_causal, facts.sums_over_rows))
    assert facts.architectures == ("decoder",)


def test_facts_of_settings_follow_them():
    only = dict.fromkeys((field.name for field in dataclasses.fields(Weights)), 0.0)
    causal = Mixture(weights=Weights(**only | {"causal": 1.0}))
    assert not causal.bidirectional
    assert causal.prompts == "left to right"
    assert causal.mtp_settings is None
    both = Mixture(weights=Weights(**only | {"prefix": 1.0, "masked": 1.0}))
    assert both.bidirectional
    assert both.prompts == "both ways"
    assert Mixture(weights=Weights(**only | {"masked": 1.0})).prompts == "none"
    assert Mixture(weights=Weights(**only | {"mtp": 2.0})).marks_mtp_rows
    assert Causal(document_mask=False).sums_over_rows
    assert Distill(teacher="a", sampled=0.5).samples_answers
    assert not Distill(teacher="a").sums_over_rows
    assert Distill(stored="a").sums_over_rows
