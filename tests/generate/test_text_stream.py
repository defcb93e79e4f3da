import itertools

import numpy as np
import pytest

from jaxlm.generate import text_stream
from jaxlm.generate.text_stream import TextStream

TEXT = "naïve 猫 😀 en\nEND or E\n not ENDED".encode()


def pieces(parts, stops):
    stream = TextStream(stops)
    last = len(parts) - 1
    return [stream.push(part, is_ended=number == last) for number, part in enumerate(parts)]


@pytest.mark.parametrize(
    "stops",
    [[], [b"ENDED"], [b"\nEND", b"not"], ["😀".encode()], [b"\xf0\x9f\x98"], [b"E\n n", b" o"]],
)
def test_pieces_joined_are_the_whole_text_however_its_bytes_come(stops):
    whole = text_stream.cut_at_stop(TEXT, stops).decode("utf-8", "replace")
    end = next((n for n in range(len(TEXT) + 1) if any(s in TEXT[:n] for s in stops)), len(TEXT))
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted({0, end, *rng.integers(0, end, 9).tolist()})
        split = pieces([TEXT[a:b] for a, b in itertools.pairwise(cuts)], stops)
        assert "".join(split) == whole
        assert "\ufffd" not in "".join(split[:-1])


def test_what_may_be_a_stop_waits_until_it_is_none():
    assert pieces([b"ab\nEN", b"C", b"\nE", b"ND"], [b"\nEND"]) == ["ab", "\nENC", "", ""]


def test_a_character_is_given_once_it_is_whole_and_one_that_is_cut_at_the_end_is_replaced():
    cat = "猫".encode()
    assert pieces([cat[:1], cat[1:2], cat[2:] + cat[:2], b""], []) == ["", "", "猫", "\ufffd"]


TABLE = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", "é".encode(), b"abcab", b"c"]


@pytest.mark.parametrize(
    "stops", [[b"ab"], [b"aabab", b"bb"], ["é".encode()], [b"abc", b"b"], [b"a"], [b"cabc", b"ca"]]
)
def test_a_stop_is_found_with_the_token_that_completes_it_and_not_before(stops):
    table = text_stream.stop_automaton(stops, TABLE)
    last = table.shape[0] - 1
    rng = np.random.default_rng(0)
    for _ in range(60):
        state, text = 0, b""
        for number in rng.integers(0, len(TABLE), 12):
            state, text = int(table[state, number]), text + TABLE[number]
            assert (state == last) == any(stop in text for stop in stops), text


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        (b"one\ntwo\n", [b"\n"], b"one"),
        (b"abcabc", [b"b", b"abc"], b"a"),  # b is complete before abc
        (b"xabc", [b"bc", b"abc"], b"x"),  # both at once: the longer begins earlier
        (b"abc", [b"d"], b"abc"),
        (b"abc", [], b"abc"),
    ],
)
def test_a_text_is_cut_before_the_stop_that_is_complete_first(text, stops, left):
    assert text_stream.cut_at_stop(text, stops) == left


def test_where_a_text_is_cut_does_not_depend_on_its_tokens():
    stops = [b"ab", b"bca"]
    text = b"caabcab"
    assert text_stream.cut_at_stop(text, stops) == b"ca"
    one_by_one = text_stream.stop_automaton(stops, [bytes([b]) for b in range(256)])
    state, seen = 0, b""
    for byte in text:
        state, seen = one_by_one[state, byte], seen + bytes([byte])
        if state == len(one_by_one) - 1:
            break
    assert text_stream.cut_at_stop(seen, stops) == b"ca"
