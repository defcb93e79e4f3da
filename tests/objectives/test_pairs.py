"""Rows of an encoder and a decoder: nothing is lost or mixed up, and all stays in its row."""

from collections import Counter

import numpy as np
import pytest

from jaxlm.data.batch import START, Tokens
from jaxlm.data.corrupt.pairs import EncoderDecoderRows, cut_suffix, fit_spans
from jaxlm.data.corrupt.rows import RowKey
from jaxlm.data.corrupt.spans import DEFAULT_EDGES
from jaxlm.data.tokenizer import SPECIALS, Bytes
from jaxlm.objectives.build import build
from jaxlm.objectives.config import UL2, Causal, LossConfig, Mixture, Span

SEQUENCE = 96
ARMS = {"span": Span(), "ul2": UL2()}
ROWS = 60  # each of seven denoisers gets some of them
EOS = Bytes.eos
SENTINELS = {Bytes.specials[name] for name in SPECIALS if "sentinel" in name}


@pytest.fixture(params=ARMS)
def arm(request):
    return ARMS[request.param]


def prepared(arm, tokenizer, sequence):
    return build(arm, LossConfig(), "encoder-decoder").prepare(tokenizer, sequence)


def pairs(arm, tokenizer=None, sequence=SEQUENCE):
    reading = prepared(arm, tokenizer or Bytes(), sequence)
    assert reading.evaluations == {"": reading.train}
    assert isinstance(reading.train, EncoderDecoderRows)
    return reading.train


def row(sizes, ends, seed=0, length=SEQUENCE):
    """A packed row of documents of these sizes; complete ones end with the end of text."""
    draw = np.random.default_rng(seed)
    tokens, targets, segments, positions = (np.zeros(length, np.int32) for _ in range(4))
    at, whole = 0, []
    for number, (size, is_end) in enumerate(zip(sizes, ends, strict=True), 1):
        ids = draw.integers(len(SPECIALS), Bytes().size, size + 1).astype(np.int32)
        ids[-1] = EOS if is_end else ids[-1]
        here = slice(at, at + size)
        tokens[here], targets[here], segments[here] = ids[:-1], ids[1:], number
        positions[here] = np.arange(size)
        whole.append(ids.tolist())
        at += size
    weights = (segments > 0).astype(np.float32)
    return Tokens(tokens, targets, weights, segments, positions), whole


def joined(read, written):
    """The text restored: each sentinel is replaced by the output after it.

    Without sentinels the parts follow one another.
    """
    if not SENTINELS.intersection(read):
        assert read[-1] == EOS
        return read[:-1] + written
    spans, segments = {}, []
    for i in written[:-1]:
        if i in SENTINELS:
            last = spans[i] = []
        else:
            last.append(i)
    for i in read:
        segments += spans.pop(i) if i in SENTINELS else [i]
    assert not spans
    return segments


def test_what_is_read_and_written_is_the_text_and_the_decoder_is_one_behind(arm):
    change, kinds = pairs(arm), Counter()
    for seed in range(ROWS):
        packed, whole = row((40, 9, 25, 14), (True, False, True, False), seed)
        out = change(packed, RowKey(0, 0, seed))
        assert out.source.shape == out.source_segments.shape == (SEQUENCE,)
        assert out.tokens.shape == (arm.target_length(SEQUENCE),)
        predicted = 0
        for number, ids in enumerate(whole, 1):
            read = out.source[out.source_segments == number].tolist()
            slots = out.segments == number
            written, fed = out.targets[slots].tolist(), out.tokens[slots].tolist()
            text = ids if ids[-1] == EOS else ids[:-1]
            if not written:
                assert read == text
                continue
            predicted += 1
            has_spans = bool(SENTINELS.intersection(read))
            kinds[has_spans] += 1
            # After spans there is an end wherever they come from; after the end of a piece, where
            # the document ends.
            assert (written[-1] == EOS) == (has_spans or ids[-1] == EOS)
            assert fed == [START, *written[:-1]]
            assert joined(read, written) == text
            assert out.positions[slots].tolist() == list(range(len(written)))
        assert predicted >= 2
        np.testing.assert_array_equal(out.weights, out.segments > 0)
        assert not out.source[out.source_segments == 0].any()
        changed = change(packed, RowKey(0, 0, seed))
        assert all(
            a is b is None or np.array_equal(a, b) for a, b in zip(out, changed, strict=True)
        )
    assert set(kinds) == ({True, False} if isinstance(arm, UL2) else {True})


def test_a_row_full_of_short_documents_fits_and_some_of_them_are_only_read(arm):
    sizes = [3] * (SEQUENCE // 3)
    packed, whole = row(sizes, [True] * len(sizes))
    change, numbers, least = pairs(arm), set(range(1, len(sizes) + 1)), len(sizes)
    for seed in range(ROWS):
        out = change(packed, RowKey(0, 0, seed))
        assert (out.source_segments > 0).sum() >= SEQUENCE - len(sizes)
        assert set(out.source_segments.tolist()) - {0} == numbers
        written = set(out.segments.tolist()) - {0}
        least = min(least, len(written))
        for number in written:
            read = out.source[out.source_segments == number].tolist()
            text = joined(read, out.targets[out.segments == number].tolist())
            assert text in (whole[number - 1], whole[number - 1][:-1])
    assert 0 < least < len(numbers)


def test_a_piece_that_could_not_be_read_is_left_out(arm):
    packed, _ = row((30, 20), (True, True))
    weights = np.where(packed.segments == 1, 0, packed.weights)
    out = pairs(arm)(packed._replace(weights=weights), RowKey(0, 0, 0))
    assert (out.source_segments > 0).sum() <= 21
    assert (out.segments > 0).any()


def test_cuts_fit_in_what_is_free_and_are_the_rates_where_all_is():
    assert fit_spans(100, 0.15, 3.0, 1000) == (15, 5)
    for free in range(30):
        cut, count = fit_spans(100, 0.15, 3.0, free)
        assert (cut, count) == (0, 0) or count <= cut < free - count
    assert fit_spans(1, 0.15, 3.0, 1000) == (0, 0)
    # As in T5: 512 slots are read and 114 written, here with room for the ends of some more
    # documents.
    assert 114 <= Span().target_length(568) - 568 // 64 <= 114 + 8


# Ids that are cut out of 512, and in how many spans, from the rates and means of arXiv:2205.05131,
# section 3.1.2 and table 1.
DENOISERS = {
    "R": {(77, 26), (77, 10)},
    "X": {(256, 85), (256, 32), (77, 1), (256, 4)},
    "S": {(128, 0)},
}


def test_each_of_seven_denoisers_is_drawn_as_often_with_its_rate_and_its_mean():
    sequence, rows = 512, 1400
    change = pairs(UL2(), sequence=sequence)
    packed, _ = row((sequence,), (False,), length=sequence)
    counts = Counter()
    for number in range(rows):
        written = change(packed, RowKey(0, 0, number)).targets.tolist()
        spans = sum(i in SENTINELS for i in written)
        counts[sum(i >= len(SPECIALS) for i in written), spans] += 1
    assert set(counts) == set.union(*DENOISERS.values())
    share = 1 / len(counts)
    bound = 4 * np.sqrt(rows * share * (1 - share))
    assert all(abs(count - share * rows) < bound for count in counts.values())
    # The row is as long as what the hungriest denoiser writes, with its end and those of a few
    # documents more.
    assert UL2().target_length(sequence) == -(-(256 + 85 + 1 + sequence // 64) // 8) * 8


def test_the_end_of_a_text_fits_in_what_is_free_and_is_a_quarter_where_all_is():
    draw = np.random.default_rng(0)
    begun = np.array([DEFAULT_EDGES.begin, *range(50, 90)], np.int32)
    for ids in (begun, np.append(begun, EOS).astype(np.int32)):
        ends = int(ids[-1] == EOS)
        for free in range(20):
            read, written = cut_suffix(ids, free, draw, share=0.25, edges=DEFAULT_EDGES)
            room = free - ends
            assert len(written) == (min(10, room) + ends if room > 0 else 0)
            text = [*read[:-1], *written] if len(written) else read.tolist()
            assert text == ids.tolist()
            assert len(written) == 0 or read[-1] == EOS
    for short in ([50], [50, EOS], [DEFAULT_EDGES.begin, 50, EOS]):
        read, written = cut_suffix(
            np.array(short, np.int32), 9, draw, share=0.25, edges=DEFAULT_EDGES
        )
        assert (read.tolist(), len(written)) == (short, 0)


class OfT5(Bytes):
    """The tokenizer of an imported T5: an end of its own, and sentinels from the last id down."""

    before, after, eos, pad = (), (41,), 41, 41
    specials = reserved = {"</s>": 41} | {f"<extra_id_{i}>": 295 - i for i in range(3)}


def test_the_sentinels_and_the_end_are_those_of_the_tokenizer():
    """Ids that are edges or sentinels of ours are text there; sentinels repeat if they run out."""
    change = pairs(Span(rate=0.5, mean=2), OfT5())
    ids = np.array([1, 2, 8, 9, *range(50, 58), 2, 41], np.int32)
    (pair,) = change.change([ids], change.length, RowKey(0, 0, 0))
    of_t5 = set(OfT5.specials.values()) - {41}
    assert [i for i in pair.source if i in of_t5] == [i for i in pair.target if i in of_t5]
    assert [i for i in pair.source if i in of_t5][:3] == [295, 294, 293]
    assert pair.target[-1] == pair.source[-1] == 41
    assert sorted({*pair.source, *pair.target} - of_t5) == sorted(set(ids.tolist()))
    denoised = pairs(UL2(), OfT5())
    changes = [denoised.change([ids], denoised.length, RowKey(0, 0, row))[0] for row in range(ROWS)]
    assert {295 in pair.source for pair in changes} == {True, False}
    assert all(pair.source[-1] == pair.target[-1] == 41 for pair in changes)


@pytest.mark.parametrize("arm", [Causal(), Mixture()])
def test_an_objective_that_makes_no_pairs_is_refused(arm):
    with pytest.raises(ValueError, match=f"{arm.name} makes no pairs"):
        prepared(arm, Bytes(), SEQUENCE)
