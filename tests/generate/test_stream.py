import itertools

import numpy as np
import pytest

from jaxlm.generate import text_stream
from jaxlm.generate.text_stream import Stream

TEXT = "naïve 猫 😀 en\nEND or E\n not ENDED".encode()


def pieces(parts, wanted):
    stream = Stream(wanted)
    last = len(parts) - 1
    return [stream.push(part, is_ended=number == last) for number, part in enumerate(parts)]


@pytest.mark.parametrize(
    "wanted",
    [[], [b"ENDED"], [b"\nEND", b"not"], ["😀".encode()], [b"\xf0\x9f\x98"], [b"E\n n", b" o"]],
)
def test_pieces_joined_are_the_whole_text_however_its_bytes_come(wanted):
    whole = text_stream.cut(TEXT, wanted).decode("utf-8", "replace")
    end = next((n for n in range(len(TEXT) + 1) if any(s in TEXT[:n] for s in wanted)), len(TEXT))
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted({0, end, *rng.integers(0, end, 9).tolist()})
        given = pieces([TEXT[a:b] for a, b in itertools.pairwise(cuts)], wanted)
        assert "".join(given) == whole
        assert "\ufffd" not in "".join(given[:-1])


def test_what_may_be_a_stop_waits_until_it_is_none():
    assert pieces([b"ab\nEN", b"C", b"\nE", b"ND"], [b"\nEND"]) == ["ab", "\nENC", "", ""]


def test_a_character_is_given_once_it_is_whole_and_one_that_is_cut_at_the_end_is_replaced():
    cat = "猫".encode()
    assert pieces([cat[:1], cat[1:2], cat[2:] + cat[:2], b""], []) == ["", "", "猫", "\ufffd"]
