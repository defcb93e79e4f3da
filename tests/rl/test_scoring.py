"""Scores belong to their samples if these end in another order; pass@k is without bias."""

import itertools
import types

import jax
import numpy as np
import pytest

from jaxlm.data.loader import EVALUATION_SEED, shuffled
from jaxlm.data.tokenizer import Bytes
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.rl.rewards import Rewards
from jaxlm.rl.rollout import DrawnSample, root_key, row_keys
from jaxlm.rl.scoring import PromptScorer, Samplers

TOKENIZER = Bytes()
PROMPTS, SAMPLES = 5, 3


class FakeShards:
    """Prompts whose answers are their numbers."""

    documents, source = PROMPTS, "prompts"
    prompts = tuple(
        types.SimpleNamespace(text=f"{n}=", answer=str(n), info={"n": n}, is_plain=True)
        for n in range(PROMPTS)
    )

    def lengths(self, start, stop):
        return np.full(stop - start, 2)

    def read(self, document, start, length):
        return np.array(TOKENIZER.encode(f"{document}="))


LOADER = types.SimpleNamespace(shards=FakeShards())


class FakeSampler:
    """Draws the text of a function of (prompt, place among its samples); the last ones end first.

    A text that ends with `;` has an end token, and what is in brackets was not drawn.
    """

    def __init__(self, text_of):
        self._text_of, self.keys = text_of, None

    def draw(self, params, prompts, keys, *, follow=None, deliver):
        self.keys = jax.random.key_data(keys)
        numbers = [int(TOKENIZER.decode(prompt[:1])) for prompt in prompts]
        counts = {n: itertools.count() for n in numbers}
        drawn = [self._drawn(self._text_of(n, next(counts[n]))) for n in numbers]
        for place in reversed(range(len(drawn))):
            if follow is not None:
                follow([(place, drawn[place])])
            deliver(place, drawn[place])
        return drawn

    def _drawn(self, text):
        ids = [TOKENIZER.eos if x == ";" else TOKENIZER.encode(x)[0] for x in text]
        mask = np.array([letter not in "[]0" for letter in text])
        is_ended = text.endswith(";")
        log_p = np.zeros(len(ids), np.float32)
        return DrawnSample(np.array(ids), log_p, "eos_token" if is_ended else "length", mask)


class FakeTurns:
    """Notes the turns that ended, and ends every sample."""

    def __init__(self):
        self.ended = []

    def following(self, ended):
        self.ended += ended
        return [None] * len(ended)


def scorer_of(drawing, greedy, *functions, turns=None):
    rewards = Rewards(RewardConfig(functions=functions))
    return PromptScorer(Samplers(drawing, greedy), TOKENIZER, rewards, turns)


def test_each_sample_has_its_own_score_and_seed_though_others_end_before():
    """Rewards see the text of the last turn without its end token, and the tokens drawn."""
    texts = {(3, 0): "3;", (3, 1): "9;", (1, 0): "1[000]1;", (1, 1): "1"}
    drawing = FakeSampler(lambda n, place: texts[n, place])
    keys = row_keys(root_key(0), 0, 2, 2)
    scorer = scorer_of(drawing, None, "exact", "ended=0.5")
    out = scorer.score(None, LOADER, [3, 1], 2, keys, where="step 1")
    assert out.documents == [3, 3, 1, 1]
    assert [each.completion for each in out.samples] == ["3", "9", "1", "1"]
    assert [each.tokens for each in out.samples] == [2, 2, 3, 1]
    assert [each.reason == "length" for each in out.samples] == [False, False, False, True]
    assert [each.answer for each in out.samples] == ["3", "3", "1", "1"]
    assert [each.prompt for each in out.samples] == ["3=", "3=", "1=", "1="]
    assert len({each.seed for each in out.samples}) == 4
    assert out.rewards.tolist() == [1.0, 0.0, 1.0, 0.5]
    assert [each.by_name["ended"] for each in out.verdicts] == [0, 0, 0, -1]
    assert out.texts == ["3", "9", "1[000]1", "1"]  # of all turns
    assert out.has_passed.tolist() == [True, False, True, True]  # by the first reward
    figures = out.figures()
    assert (figures["reward"], figures["ended_share"], figures["sample_tokens"]) == (0.625, 0.75, 2)


def test_a_tool_reads_the_last_turn_and_has_the_room_that_the_row_leaves():
    drawing, turns = FakeSampler(lambda n, place: "4[000]41;"), FakeTurns()
    scorer = scorer_of(drawing, None, "exact", turns=turns)
    scorer.score(None, LOADER, [2], 1, row_keys(root_key(0), 0, 1, 1), where="step 1")
    (ended,) = turns.ended
    assert (ended.sample.completion, ended.sample.answer) == ("41", "2")
    assert (ended.tokens, ended.turns) == (2 + 9, 2)  # with the prompt, and the text between


def test_an_evaluation_has_the_share_of_prompts_that_k_samples_pass():
    """Prompts have 0, 1, 2, 3 and 0 right samples of 3, and two have a right greedy sample."""
    passed = (0, 1, 2, 3, 0)
    drawing = FakeSampler(lambda n, place: f"{n if place < passed[n] else 9};")
    greedy = FakeSampler(lambda n, place: f"{n if n > 2 else 9};")
    scorer = scorer_of(drawing, greedy, "exact=2", "ended")
    figures = scorer.evaluate(None, LOADER, None, samples=SAMPLES, seed=7)
    assert figures["prompts"] == PROMPTS
    assert figures["pass_1"] == pytest.approx(6 / 15)
    assert figures["pass_3"] == pytest.approx(3 / 5)
    assert figures["greedy_pass"] == pytest.approx(2 / 5)
    assert figures["greedy_reward"] == pytest.approx(4 / 5)
    assert figures["loss_nats"] == -figures["reward"] == pytest.approx(-12 / 15)
    first = drawing.keys
    training = jax.random.key_data(row_keys(root_key(7), 0, PROMPTS, SAMPLES))
    assert not (first[:, None] == training[None]).all(-1).any()
    scorer.evaluate(None, LOADER, None, samples=SAMPLES, seed=7)
    np.testing.assert_array_equal(drawing.keys, first)  # the same ones at each evaluation
    some = scorer.evaluate(None, LOADER, 2, samples=SAMPLES, seed=7)
    chosen = [shuffled(n, PROMPTS, EVALUATION_SEED) for n in range(2)]
    assert some["pass_1"] == pytest.approx(sum(passed[n] for n in chosen) / 6)
