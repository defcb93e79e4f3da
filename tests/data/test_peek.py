"""Text marked by `data peek` is the text that is trained on."""

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
    assert peek.render_segments(_batch("ask:answer", slice(4, None)), Bytes(), 0, ("[", "]")) == [
        "<|bos|>ask:[answer<|eos|>]"
    ]


def test_the_example_of_a_row_shows_its_first_trained_tokens() -> None:
    asked, long = "ask:\u00abanswer\u00bb", "q" * 400
    assert peek.example(asked) == asked
    assert peek.example("a\n\u00abb\u00bb") == "a\\n\u00abb\u00bb"
    shown = peek.example(f"begin{long}user:\u00ab{long}\u00bb")
    assert shown.startswith("begin")
    assert "... q" in shown
    assert "user:\u00abqqq" in shown
    assert shown.endswith("qqq ...")
    assert len(shown) <= peek.EXAMPLE + len(" ...")
    assert len(peek.example(long)) == peek.EXAMPLE + len(" ...")


def test_a_character_of_several_tokens_is_whole_and_control_characters_are_spelt() -> None:
    assert peek.render_segments(
        _batch("\u6f22\x1b[31m\n", slice(None)), Bytes(), 0, ("[", "]")
    ) == ["<|bos|>[\u6f22\\x1b[31m\n<|eos|>]"]


def test_what_is_read_both_ways_is_marked_too() -> None:
    batch = _batch("ask:answer", slice(4, None))
    reach = np.maximum(np.arange(11)[None], 4)
    assert peek.render_segments(batch._replace(visible_until=reach), Bytes(), 0, ("[", "]")) == [
        "\u2039<|bos|>ask:\u203a[answer<|eos|>]"
    ]


def test_hidden_tokens_are_shown_with_what_is_predicted_in_their_place() -> None:
    batch = _batch("word", slice(1, 3))
    tokens = np.where(batch.weights > 0, SPECIALS.index("<|mask|>"), batch.tokens)
    hidden = batch._replace(tokens=tokens, targets=batch.tokens, visible_until=np.full((1, 5), 4))
    assert peek.render_segments(hidden, Bytes(), 0, ("[", "]")) == [
        "\u2039<|bos|><|mask|>\u203a[w]\u2039<|mask|>\u203a[o]\u2039rd\u203a"
    ]


def test_special_tokens_are_shown_by_name() -> None:
    assert peek.token_text([SPECIALS.index("<|mask|>")], Bytes()) == "<|mask|>"
