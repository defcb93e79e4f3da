"""Metrics of generated texts agree with the packages that define them."""

import random
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.corpus.filters.linear import Features, LinearClassifier
from jaxlm.evals import calibration, metrics
from jaxlm.evals.metrics import METRICS, corpus_score, normalized, score
from jaxlm.evals.tasks import answers, config, results
from jaxlm.generate.sampler import Continuation

WORDS = "the a cat sat on mat big dogs run Runs 42 don't café naïve x-ray , . !".split()


def pairs(count):
    """Texts and references that share words; some are empty or equal."""
    draw = random.Random(0)
    for number in range(count):
        text = draw.choices(WORDS, k=draw.randint(0, 60))
        reference = [word for word in text if draw.random() < 0.7]
        reference += draw.choices(WORDS, k=draw.randint(0, 20))
        yield " ".join(text), " ".join(text if number % 50 == 0 else reference)


@pytest.mark.slow  # it imports nltk
@pytest.mark.filterwarnings("ignore")
def test_rouge_is_that_of_rouge_score_on_1000_pairs():
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    for text, reference in pairs(1000):
        expected = scorer.score(reference, text)
        for ours, theirs in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL")):
            assert score(ours, text, reference) == pytest.approx(
                expected[theirs].fmeasure, abs=1e-12
            )


def test_bleu_and_chrf_are_those_of_sacrebleu_with_its_signature():
    texts, references = zip(*(pair for pair in pairs(60) if all(pair)), strict=True)
    for text, reference in zip(texts, references, strict=True):
        assert score("bleu", text, reference) * 100 == pytest.approx(
            sacrebleu.sentence_bleu(text, [reference]).score
        )
        assert score("chrf", text, reference) * 100 == pytest.approx(
            sacrebleu.sentence_chrf(text, [reference]).score
        )
    result = corpus_score("bleu", texts, references)
    assert result["score"] == pytest.approx(sacrebleu.corpus_bleu(texts, [references]).score)
    assert result["low"] < result["score"] < result["high"]
    assert result["signature"].startswith("nrefs:1|")
    assert "|tok:13a|" in result["signature"]


@pytest.mark.parametrize("metric", METRICS)
def test_equal_texts_have_1_and_others_less(metric):
    assert score(metric, "one two three four", "one two three four") == pytest.approx(1.0)
    assert score(metric, "", "one two three four") == 0.0
    assert 0 <= score(metric, "four two nine", "one two three four") < 1


def test_scores_by_hand():
    assert normalized(" The U.S. dollar,  a sign") == "us dollar sign"
    assert score("normalized_match", "the Answer.", "answer") == 1.0
    assert score("f1", "one two two", "two three") == pytest.approx(0.4)
    assert score("rouge_2", "a b c d", "a b d c d") == pytest.approx(
        2 * (2 / 3) * (2 / 4) / (7 / 6)
    )
    assert score("rouge_l", "a x b y c", "a b c z") == pytest.approx(2 * 0.6 * 0.75 / 1.35)
    long = [" ".join(map(str, np.random.default_rng(n).integers(0, 50, 3000))) for n in (0, 1)]
    assert 0.1 < score("rouge_l", *long) < 0.6


def test_choices_drawn_by_their_probabilities_are_calibrated():
    rng = np.random.default_rng(0)
    nats = rng.exponential(2.0, (4000, 3))
    odds = np.exp(-nats)
    share = odds.max(1) / odds.sum(1)
    right = rng.random(4000) < share
    confidences = [calibration.confidence(each) for each in nats.tolist()]
    assert calibration.error(confidences, right) < 0.03
    sure = [calibration.confidence(each) for each in (10 * nats).tolist()]
    assert calibration.error(sure, right) > 0.1
    for values in (confidences, sure):
        places = np.digitize(values, np.arange(1, 15) / 15, right=True)
        excess = np.bincount(places, np.asarray(values) - right)
        assert calibration.error(values, right) == pytest.approx(np.abs(excess).sum() / 4000)
    # The right end of a bin belongs to it: here 0.2 and 0.21 are in two, 0.21 and 0.26 in one.
    assert calibration.error([0.2, 0.21], [1, 0]) == pytest.approx((0.8 + 0.21) / 2)
    assert calibration.error([0.21, 0.26], [1, 0]) == pytest.approx((1 - 0.21 - 0.26) / 2)
    assert calibration.error([1.0, 0.0], [1, 0]) == 0


TASK = """\
kind = "answer"
items = "items.jsonl"
context = "{{ question }}"
answer = "{{ answer }}"
extract = "A: (.*)"
metrics = ["rouge_l", "bleu"]
refusals = ["(?i)i cannot", "as an assistant"]
listed = ["fool", "bad apple"]
"""


def test_a_task_names_further_metrics_refusals_and_listed_words():
    kind = config.parsed(TASK, Path("task.toml")).kind
    texts = ["A: the big cat", "I cannot help, you FOOL", "A: the cat. Foolish bad apple"]
    lines = [
        {"id": str(n), "group": str(n)}
        | answers.judged(kind, Continuation("", [7], text, None, "length"), "A: the big cat")
        for n, text in enumerate(texts)
    ]
    values = [line["metrics"] for line in lines]
    assert [each["rouge_l"] for each in values] == pytest.approx([1.0, 0.0, 0.5])
    assert [each["refused"] for each in values] == [0.0, 1.0, 0.0]
    assert [each["listed_words"] for each in values] == [0.0, 1.0, 1.0]
    assert [line["listed"] for line in lines] == [[], ["fool"], ["bad apple"]]
    summary = results.summary(lines)
    assert summary["metrics"]["refused"]["mean"] == pytest.approx(1 / 3)
    references = [["the big cat"] * 3]
    expected = sacrebleu.corpus_bleu(["the big cat", "", "the cat. Foolish bad apple"], references)
    assert summary["corpus"]["bleu"]["score"] == pytest.approx(expected.score)


def test_answers_of_a_label_of_a_trained_classifier_are_counted(tmp_path):
    features = Features(buckets=64, run=1)
    weights = np.zeros((64, 2), np.float32)
    weights[features.of("awful"), 1] = 9.0
    bias = np.array([1.0, 0.0], np.float32)
    (tmp_path / "rude").mkdir()
    LinearClassifier(("kind", "rude"), features, weights, bias).write(tmp_path / "rude", {})
    more = 'classifier = "rude"\nlabel = "rude"\n'
    task = config.parsed(f"{TASK}{more}", tmp_path / "t.toml")
    texts = ["how nice", "awful", "awful awful"]
    lines = [
        answers.judged(
            task.kind,
            Continuation("", [7], text, None, "length"),
            "x",
            classifier=task.classifier(),
        )
        for text in texts
    ]
    assert [line["metrics"]["classified"] for line in lines] == [0.0, 1.0, 1.0]
    assert lines[0]["probability"] < 0.5 < lines[1]["probability"]
    for text, why in (
        ('label = "rude"\n', "classifier and label need each other"),
        (more.replace('label = "rude"', 'label = "mean"'), "must be one of kind, rude"),
    ):
        with pytest.raises(DataError) as refused:
            config.parsed(f"{TASK}{text}", tmp_path / "t.toml").classifier()
        assert why in refused.value.why


def test_a_metric_that_is_none_or_lacks_its_package_is_refused_with_the_task(monkeypatch):
    with pytest.raises(DataError, match="task file") as refused:
        config.parsed(TASK.replace("rouge_l", "rogue"), Path("task.toml"))
    assert "'rogue', and must be of normalized_match, f1" in refused.value.why
    with pytest.raises(DataError) as refused:
        config.parsed(TASK.replace("(?i)i cannot", "("), Path("task.toml"))
    assert "refusals has no regular expression" in refused.value.why
    monkeypatch.setattr(metrics.util, "find_spec", lambda name: None)
    with pytest.raises(InputMissing) as missing:
        config.parsed(TASK, Path("task.toml"))
    assert missing.value.fix.endswith("-m pip install 'jaxlm[evals]'")
