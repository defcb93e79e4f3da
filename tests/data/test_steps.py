"""Answers with labels of steps: each label is in the slot of the last token of its step."""

import numpy as np
import pytest

from jaxlm.core.errors import DataError
from jaxlm.data import conversations
from jaxlm.data.conversations import Rejected
from tests.data.test_preferred import ASKED, opened, parsed

RECORD = {"prompt": "1+1+1=", "steps": ["1+1=2", "2+1=4"], "labels": [True, False]}


def ends(batch, tokenizer):
    """Each labeled step of the first row: the text up to its slot, and the label."""
    tokens, labels = batch.tokens[0], batch.steps[0]
    for slot in np.flatnonzero(labels):
        text = tokens[: slot + 1][batch.segments[0, : slot + 1] == batch.segments[0, slot]]
        yield b"".join(tokenizer.table[each] for each in text).decode(), labels[slot]


@pytest.mark.parametrize("prompt", ["1+1+1=", [{**ASKED, "content": "1+1+1="}]])
def test_a_label_is_where_its_step_ends(tmp_path, prompt):
    data = opened(tmp_path, [RECORD | {"prompt": prompt}], kind="steps", sequence=96)
    batch = next(data.train.evaluation(batch=1))
    (one, right), (two, wrong) = ends(batch, data.tokenizer)
    assert (right, wrong) == (1, -1)
    assert one.endswith("1+1=2")
    assert two.endswith("1+1=2\n2+1=4")
    assert batch.answers is None
    np.testing.assert_array_equal(batch.weights, np.abs(batch.steps))
    figures = data.train.shards.manifest.figures
    assert (figures["right"], figures["wrong"], figures["trained_tokens"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"steps": ["a", " "]}, conversations.EMPTY_TURN),
        ({"steps": [], "labels": []}, conversations.EMPTY_TURN),
        ({"labels": [True]}, conversations.BAD_LABEL),
        ({"labels": [True, "no"]}, conversations.BAD_LABEL),
        ({"steps": "a", "labels": [True]}, conversations.OTHER_FORM),
        ({"steps": None}, conversations.NO_FIELD),
    ],
)
def test_steps_that_cannot_be_used_have_a_reason(record, reason):
    with pytest.raises(Rejected) as error:
        parsed(RECORD | record, "steps")
    assert error.value.reason == reason


def test_trl_names_steps_completions_and_labels_of_one_kind_are_refused(tmp_path):
    record = {"prompt": "q", "completions": ["a", "b"], "labels": [True, True]}
    assert parsed(record, "steps").side == 1
    with pytest.raises(DataError, match="labels of all steps are equal"):
        opened(tmp_path, [record], kind="steps")
