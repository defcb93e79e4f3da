import numpy as np
import pytest

from jaxlm.generate import text_stream

TABLE = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", "é".encode(), b"abcab", b"c"]


@pytest.mark.parametrize(
    "wanted", [[b"ab"], [b"aabab", b"bb"], ["é".encode()], [b"abc", b"b"], [b"a"], [b"cabc", b"ca"]]
)
def test_a_stop_is_found_with_the_token_that_completes_it_and_not_before(wanted):
    table = text_stream.automaton(wanted, TABLE)
    last = table.shape[0] - 1
    rng = np.random.default_rng(0)
    for _ in range(60):
        state, text = 0, b""
        for number in rng.integers(0, len(TABLE), 12):
            state, text = int(table[state, number]), text + TABLE[number]
            assert (state == last) == any(stop in text for stop in wanted), text


@pytest.mark.parametrize(
    ("text", "wanted", "left"),
    [
        (b"one\ntwo\n", [b"\n"], b"one"),
        (b"abcabc", [b"b", b"abc"], b"a"),  # b is complete before abc
        (b"xabc", [b"bc", b"abc"], b"x"),  # both at once: the longer begins earlier
        (b"abc", [b"d"], b"abc"),
        (b"abc", [], b"abc"),
    ],
)
def test_a_text_is_cut_before_the_stop_that_is_complete_first(text, wanted, left):
    assert text_stream.cut(text, wanted) == left


def test_where_a_text_is_cut_does_not_depend_on_its_tokens():
    wanted = [b"ab", b"bca"]
    text = b"caabcab"
    assert text_stream.cut(text, wanted) == b"ca"
    one_by_one = text_stream.automaton(wanted, [bytes([b]) for b in range(256)])
    state, seen = 0, b""
    for byte in text:
        state, seen = one_by_one[state, byte], seen + bytes([byte])
        if state == len(one_by_one) - 1:
            break
    assert text_stream.cut(seen, wanted) == b"ca"
