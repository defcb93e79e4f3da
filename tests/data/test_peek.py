"""What is shown is what is trained on."""

import numpy as np

from jaxlm.data import peek
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import SPECIALS, Bytes


def _batch(text: str, trained: slice) -> Tokens:
    ids = np.array([[Bytes.before[0], *Bytes().encode(text), Bytes.eos]])
    weights = np.zeros(ids[:, 1:].shape, np.float32)
    weights[0, trained] = 1
    ones = np.ones_like(ids[:, 1:])
    return Tokens(
        tokens=ids[:, :-1], targets=ids[:, 1:], weights=weights, segments=ones, positions=ones
    )


def test_only_targets_with_a_weight_are_marked() -> None:
    assert peek.rendered(_batch("ask:answer", slice(4, None)), Bytes(), 0, ("[", "]")) == [
        "<|bos|>ask:[answer<|eos|>]"
    ]


def test_a_character_of_several_tokens_is_whole_and_control_characters_are_spelt() -> None:
    assert peek.rendered(_batch("\u6f22\x1b[31m\n", slice(None)), Bytes(), 0, ("[", "]")) == [
        "<|bos|>[\u6f22\\x1b[31m\n<|eos|>]"
    ]


def test_special_tokens_are_shown_by_name() -> None:
    assert peek.spelt([SPECIALS.index("<|mask|>")], Bytes()) == "<|mask|>"
