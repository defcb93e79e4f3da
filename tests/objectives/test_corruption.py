"""Rows of every objective: one table of objectives, the same laws for all."""

import argparse
import dataclasses
import inspect
import itertools
import re
import typing
from collections import Counter

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.corrupt import spans
from jaxlm.data.corrupt.rows import RowKey, count_of_share
from jaxlm.data.tokenizer import SPECIALS, Bytes, Tokenizer
from jaxlm.data.train_tokenizer import train
from jaxlm.objectives import config as settings
from jaxlm.objectives.build import build
from jaxlm.objectives.config import (
    FIM,
    MTP,
    UL2,
    Blank,
    Causal,
    Distill,
    LossConfig,
    Masked,
    Mixture,
    Objective,
    Prefix,
    Span,
    Weights,
)
from jaxlm.objectives.policy_config import Policy, Ppo
from jaxlm.objectives.preference_config import Preference, Process, Reward
from tests.objectives.reading import (
    BLANK,
    END,
    MARKS,
    SENTINEL,
    START,
    Pairs,
    documents,
    filled,
    loader_of,
    restored,
    segments,
    shards_of,
)

ALL = Weights(causal=1, prefix=1, masked=1, span=1, ul2=1, fim=1, blank=1, mtp=1)
ARMS = {
    "causal": Causal(),
    "mtp": MTP(),
    "prefix": Prefix(),
    "masked": Masked(),
    "masked words": Masked(unit="word", masking="static"),
    "span": Span(),
    "many spans": Span(rate=0.5, mean=2),
    "ul2": UL2(),
    "blank": Blank(rate=0.3),
    "fim by tokens": FIM(level="token"),
    "fim by characters": FIM(rate=1.0),
    "mixture": Mixture(weights=ALL),
    "distill": Distill(teacher="runs/a"),
}
# Whose laws are in test_pairs, but for those of every stream of rows.
PAIRED = {f"{arm.name} in pairs": arm for arm in (Span(), UL2())}
BATCH, SEQUENCE = 8, 96


def test_every_objective_is_in_the_table():
    others = {Preference, Reward, Process, Policy, Ppo}  # they read answers, not rows of text
    assert {type(arm) for arm in ARMS.values()} | others == set(typing.get_args(Objective))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return shards_of(tmp_path_factory.mktemp("shards"))


@pytest.fixture(params=ARMS)
def arm(request):
    return ARMS[request.param]


@pytest.fixture
def loader(shards, tmp_path, arm):
    return loader_of(shards, tmp_path, read_by(arm).train)


@pytest.fixture(params=[*ARMS, *PAIRED])
def stream(request, shards, tmp_path):
    """An objective, and rows that are read by it."""
    arm = (ARMS | PAIRED)[request.param]
    read = read_by(arm, is_paired=request.param in PAIRED)
    return arm, loader_of(shards, tmp_path, read.train)


def read_by(arm, tokenizer=None, sequence=SEQUENCE, *, is_paired=False):
    architecture = "encoder-decoder" if is_paired else "decoder"
    return build(arm, LossConfig(), architecture).prepare(tokenizer or Bytes(), sequence)


def everything(loader):
    """Each row of the plan as it is in the first epoch, with its number."""
    return enumerate(loader.evaluation(batch=1))


def are_same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_id_is_lost_and_none_crosses_the_border_of_a_document(loader, arm):
    for row, batch in everything(loader):
        for whole, (slots, tokens, targets, weights, _) in zip(
            documents(loader, row), segments(batch, 0), strict=True
        ):
            if START in tokens and BLANK in tokens:
                assert filled(tokens, targets, weights, batch.positions[0, slots]) == whole
                continue
            in_place = np.where(weights > 0, targets, tokens).tolist() == whole[:-1]
            if isinstance(arm, Masked) or (isinstance(arm, Mixture) and in_place):
                assert in_place
            else:
                assert restored(tokens, targets, weights) == whole


def test_what_is_predicted_is_not_seen(loader, arm):
    """A trained slot does not see its target, if that is in the next slot.

    Masked tokens have a test of their own.
    """
    for _, batch in everything(loader):
        assert (batch.visible_until is not None) == arm.bidirectional
        padding = batch.segments[0] == 0
        assert not batch.weights[0][padding].any()
        for slots, tokens, targets, weights, reach in segments(batch, 0):
            assert (reach >= slots).all()
            assert (reach <= slots[-1]).all()
            if np.array_equal(tokens[1:], targets[:-1]):
                assert (reach == slots)[weights > 0].all()
                if not arm.bidirectional:
                    assert weights.all()
            else:
                assert (tokens == targets)[weights == 0].all()
                if START in tokens:
                    assert (reach == slots)[weights > 0].all()
                    assert (reach[weights == 0] < slots[weights > 0][0]).all()


def test_tokens_of_a_blank_have_its_position_and_one_inside(shards, tmp_path):
    loader = loader_of(shards, tmp_path, read_by(Blank(rate=0.3)).train)
    checked, orders = 0, set()
    for _, batch in everything(loader):
        for slots, tokens, targets, weights, _ in segments(batch, 0):
            positions, inner = batch.positions[0, slots], batch.block_positions[0, slots]
            if START not in tokens:
                assert not inner.any()
                continue
            text = weights == 0
            assert not inner[text].any()
            np.testing.assert_array_equal(positions[text], np.arange(text.sum()))
            starts = np.flatnonzero(tokens == START)
            blanks = np.flatnonzero(tokens == BLANK).tolist()
            assert sorted(positions[starts]) == blanks
            orders.add(positions[starts].tolist() == blanks)
            for start, stop in itertools.pairwise([*starts, len(tokens)]):
                checked += 1
                np.testing.assert_array_equal(inner[start:stop], np.arange(1, stop - start + 1))
                assert set(positions[start:stop]) == {positions[start]}
                assert targets[stop - 1] == END
    assert checked > 20
    assert orders == {True, False}, "spans come in any order"


@pytest.mark.few(5)
def test_any_number_of_hosts_reads_the_same_rows(stream):
    _, loader = stream
    for step in (3, loader.plan.rows // BATCH):  # the second crosses an epoch's edge
        whole = loader.at(step, batch=BATCH, rows=slice(0, BATCH))
        halves = [loader.at(step, batch=BATCH, rows=rows) for rows in (slice(0, 4), slice(4, 8))]
        assert are_same(whole, jax.tree.map(lambda *x: np.concatenate(x), *halves))


@pytest.mark.parametrize("arm", [ARMS["mixture"]])
def test_a_stream_begun_anywhere_goes_on_as_if_never_stopped(loader):
    whole = itertools.islice(loader.batches(3, batch=BATCH), 4)
    late = itertools.islice(loader.batches(5, batch=BATCH), 2)
    for one, other in zip(itertools.islice(whole, 2, 4), late, strict=True):
        assert are_same(one, other)


@pytest.mark.few(5)
def test_each_epoch_draws_anew_unless_all_is_fixed(stream):
    arm, loader = stream
    rows = loader.plan.rows
    first, second = (
        {_text(loader.at(n, batch=1, rows=slice(0, 1))) for n in range(e * rows, (e + 1) * rows)}
        for e in range(2)
    )
    is_fixed = arm.keeps_rows or getattr(arm, "masking", "") == "static"
    assert (first == second) == is_fixed
    evaluated = [_text(batch) for _, batch in everything(loader)]
    assert evaluated == [_text(batch) for _, batch in everything(loader)]


def _text(batch):
    return b"".join(np.asarray(field).tobytes() for field in jax.tree.leaves(batch))


def bounded(count, total, share):
    """Return True if a count is within four deviations of independent draws."""
    return abs(count - share * total) <= 4 * np.sqrt(total * share * (1 - share)) + 1


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return shards_of(tmp_path_factory.mktemp("many"), count=600)


def test_masked_tokens_have_their_rates(many, tmp_path):
    rates = []
    for _, batch in everything(loader_of(many, tmp_path, read_by(Masked()).train)):
        known = (batch.segments > 0) & (batch.targets >= len(SPECIALS))
        assert not batch.weights[~known].any(), "special tokens and padding are never drawn"
        rates.append(np.stack([x[known] for x in (batch.tokens, batch.targets, batch.weights)]))
    tokens, targets, weights = np.concatenate(rates, axis=1)
    drawn = weights > 0
    assert bounded(drawn.sum(), len(drawn), 0.15)
    is_mask = tokens[drawn] == SPECIALS.index("<|mask|>")
    is_random = ~is_mask & (tokens[drawn] != targets[drawn])
    assert bounded(is_mask.sum(), drawn.sum(), 0.8)
    assert bounded(is_random.sum(), drawn.sum(), 0.1 * 255 / 256)
    assert (tokens[drawn][is_random] >= len(SPECIALS)).all()
    assert len(set(tokens[drawn][is_random])) > 150


def test_whole_words_are_masked_whole(many, tmp_path):
    sizes = []
    words = Masked(unit="word", hidden=1.0, random=0.0)
    for _, batch in everything(loader_of(many, tmp_path, read_by(words).train)):
        for _, _, targets, weights, _ in segments(batch, 0):
            text = bytes(max(0, i - len(SPECIALS)) for i in targets.tolist())
            start = 0
            for end in [*(i for i, byte in enumerate(text) if byte in b" \0"), len(text)]:
                assert len(set(weights[start:end])) <= 1, text[start:end]
                sizes += [weights[start] > 0] if end > start else []
                start = end + 1
    assert bounded(sum(sizes), len(sizes), 0.15)


@pytest.mark.parametrize("arm", [Span(), Span(rate=0.5, mean=2)], ids=["few", "many"])
def test_spans_have_their_rate_and_length_and_find_room(many, tmp_path, arm):
    cut = spans = total = whole = pieces = 0
    loader = loader_of(many, tmp_path, read_by(arm).train)
    for row, batch in everything(loader):
        for known, (_, _, targets, weights, _) in zip(
            documents(loader, row), segments(batch, 0), strict=True
        ):
            pieces += 1
            written = targets[weights > 0].tolist()
            count = sum(SENTINEL <= i < len(SPECIALS) for i in written)
            if not count:
                continue
            text = sum(i >= len(SPECIALS) for i in known)
            assert len(written) - count - 1 == min(max(round(arm.rate * text), 1), text - 1)
            whole, spans, total = whole + 1, spans + count, total + text
            cut += len(written) - count - 1
    assert cut / total == pytest.approx(arm.rate, rel=0.05)
    assert cut / spans == pytest.approx(arm.mean, rel=0.15)
    assert whole > 0.8 * pieces


@pytest.mark.parametrize("arm", [Blank(), Blank(rate=0.5, mean=6)], ids=["few", "many"])
def test_blanks_have_their_rate_and_length(many, tmp_path, arm):
    cut = blanked = total = 0
    for _, batch in everything(loader_of(many, tmp_path, read_by(arm).train)):
        for _, tokens, _, weights, _ in segments(batch, 0):
            count = int((tokens == START).sum())
            if count:
                written = int((weights > 0).sum()) - count  # each ends with a mark
                blanked, cut = blanked + count, cut + written
                total += written + int((tokens >= len(SPECIALS))[weights == 0].sum())
    assert cut / total == pytest.approx(arm.rate, rel=0.1)
    assert cut / blanked == pytest.approx(arm.mean, rel=0.15)


def test_a_prefix_ends_anywhere_in_its_document(many, tmp_path):
    ends = []
    for _, batch in everything(loader_of(many, tmp_path, read_by(Prefix()).train)):
        for _, tokens, _, weights, _ in segments(batch, 0):
            if len(tokens) > 20:
                ends.append(np.flatnonzero(weights)[0] / len(tokens))
    assert len(ends) > 100
    quarters = np.quantile(ends, (0.25, 0.5, 0.75))
    np.testing.assert_allclose(quarters, (0.25, 0.5, 0.75), atol=0.1)


def test_documents_are_rearranged_at_their_rate_in_both_orders(many, tmp_path):
    arm = FIM(rate=0.3, spm=0.25, level="token")
    rates = []
    for _, batch in everything(loader_of(many, tmp_path, read_by(arm).train, sequence=192)):
        for _, tokens, targets, _, _ in segments(batch, 0):
            ids = [*tokens.tolist(), int(targets[-1])]
            place = [ids.index(mark) if mark in ids else None for mark in MARKS]
            assert place.count(None) in (0, 3), "all marks or none"
            rates.append(place)
    changed = [place for place in rates if place[0] is not None]
    # Rows of more than two documents may lack the room for all that are drawn.
    assert 0.2 * len(rates) < len(changed)
    assert bounded(len(changed), len(rates), 0.3) or len(changed) < 0.3 * len(rates)
    assert bounded(sum(suffix == prefix + 1 for prefix, _, suffix in changed), len(changed), 0.25)


def test_cut_within_tokens_the_parts_are_encoded_as_prompts_will_be(tmp_path):
    tokenizer = Pairs()
    shards = shards_of(tmp_path, tokenizer)
    loader = loader_of(shards, tmp_path, read_by(FIM(rate=1.0), tokenizer).train)
    split = rearranged = 0
    for row, batch in everything(loader):
        for whole, (_, tokens, targets, weights, _) in zip(
            documents(loader, row), segments(batch, 0), strict=True
        ):
            ids = [*tokens.tolist(), int(targets[-1])]
            restored_ids = restored(tokens, targets, weights)
            text = b"".join(map(tokenizer.table.__getitem__, whole))
            assert b"".join(map(tokenizer.table.__getitem__, restored_ids)) == text
            if MARKS[0] not in ids or not is_text(text):
                continue
            rearranged, split = rearranged + 1, split + (restored_ids != whole)
            ids = [i for i in ids if i not in (Tokenizer.before[0], Tokenizer.eos)]
            prefix, middle, suffix = (ids.index(mark) for mark in MARKS)
            parts = [ids[suffix + 1 : middle]]
            if suffix != prefix + 1:
                parts += [ids[prefix + 1 : suffix], ids[middle + 1 :]]
            for part in parts:
                assert tokenizer.encode(tokenizer.decode(part)) == part
    assert split > rearranged / 4, "cuts fell within tokens"


def is_text(content):
    """Return True if no character is cut at the ends."""
    return content.decode(errors="replace").encode() == content


def test_a_mixture_draws_rows_by_weight_and_is_evaluated_part_by_part(many, tmp_path):
    arm = Mixture(weights=Weights(causal=0, fim=1, masked=3))
    read = read_by(arm)
    masked = total = 0
    for _, batch in everything(loader_of(many, tmp_path, read.train)):
        total += 1
        masked += any(not np.array_equal(s[1][1:], s[2][:-1]) for s in segments(batch, 0))
    assert bounded(masked, total, 0.75)
    assert list(read.evaluations) == ["", ".causal"]
    assert read.evaluations[".causal"] is None
    assert read.evaluations[""].bidirectional


def test_rows_of_a_mixture_predict_further_tokens_where_mtp_was_drawn(many, tmp_path):
    arm = Mixture(weights=Weights(causal=2, fim=0, masked=1, mtp=1))
    read = read_by(arm)
    further = total = 0
    for _, batch in everything(loader_of(many, tmp_path, read.train)):
        is_used = batch.segments[0] > 0
        total += 1
        assert set(batch.predicts_ahead[0, ~is_used]) <= {0.0}
        (factor,) = set(batch.predicts_ahead[0, is_used])
        if factor:
            further += factor
            assert (batch.weights[0] == is_used).all()
            assert (batch.visible_until[0] == np.arange(SEQUENCE)).all()
    assert bounded(further, total, 0.25)
    assert list(read.evaluations) == ["", ".masked"], "mtp is evaluated as causal"


def test_what_is_evaluated_is_said_for_every_objective():
    messages = {name: read_by(arm).evaluations for name, arm in ARMS.items()}
    as_causal = {name for name, each in messages.items() if None in each.values()}
    assert as_causal == {
        *("causal", "mtp", "distill", "fim by tokens", "fim by characters", "mixture")
    }
    assert list(messages["mixture"]) == ["", ".prefix", ".masked", ".span", ".ul2", ".blank"]


def test_ul2_in_one_row_draws_each_of_its_seven_denoisers():
    """By the predicted ids and their spans, which differ between all of them."""
    length, read = 400, read_by(UL2(), sequence=1024).train
    ids = np.arange(length, dtype=np.int32) % 200 + len(SPECIALS)
    named = {
        (count_of_share(length, rate), max(1, round(count_of_share(length, rate) / mean))): (
            rate,
            mean,
        )
        for rate, mean in settings.UL2_SPANS
    }
    named[count_of_share(length, settings.UL2_SUFFIX), 0] = "the end"
    counts = Counter()
    for row in range(700):
        (piece,) = read.change([ids], read.reserved_slots, RowKey(0, 0, row))
        cut = int((piece.weights > 0)[piece.targets >= len(SPECIALS)].sum())
        marks = np.isin(piece.tokens, spans.sentinel_ids(Bytes())).sum()
        counts[named[cut, int(marks) // 2]] += 1
    assert counts.keys() == {*settings.UL2_SPANS, "the end"}
    assert all(bounded(count, 700, 1 / 7) for count in counts.values()), counts


@pytest.mark.parametrize("kind", ["unigram:400", "bpe:400", "wordpiece:400", "sentencepiece:400"])
def test_whole_words_of_a_trained_tokenizer_are_masked_whole(kind):
    source = inspect.getsource(argparse)
    tokenizer = train(kind, iter(source.splitlines()))
    words = re.findall("[a-z]{2,}", source)[:400]
    ids = np.array([*tokenizer.encode(" ".join(words)), *tokenizer.after], np.int32)
    assert len(ids) > 1.3 * len(words), "most words are of one id"
    change = read_by(Masked(unit="word", hidden=1.0, random=0.0), tokenizer, 4096).train.change
    whole = 0
    for row in range(20):
        (piece,) = change([ids], 0, RowKey(0, 0, row))
        shown = b""
        for number, is_hidden in zip(piece.targets.tolist(), piece.weights > 0, strict=True):
            entry = tokenizer.table[number]
            shown += re.sub(rb"[^ ]", b"*", entry) if is_hidden else entry
        seen = shown.decode().split()
        assert [len(word) for word in seen] == [len(word) for word in words]
        hidden = {word for word in seen if "*" in word}
        assert all(set(word) == {"*"} for word in hidden), hidden
        whole += sum("*" in word for word in seen)
    assert bounded(whole, 20 * len(words), 0.15)


class Bare(Bytes):
    """A tokenizer without reserved ids."""

    specials = reserved = {"<|eos|>": 2}


def test_without_its_special_tokens_an_objective_is_refused_by_name(arm):
    if isinstance(arm, Causal | MTP | Prefix | Distill):
        assert read_by(arm, Bare())
        return
    with pytest.raises(ConfigError, match=f"special tokens of the objective {arm.name}") as caught:
        read_by(arm, Bare())
    assert "it has no <|" in caught.value.why


@pytest.mark.parametrize("arm", PAIRED.values(), ids=PAIRED)
def test_in_pairs_it_is_refused_with_a_tokenizer_that_has_them(arm):
    """And with no objective that an encoder-decoder does not learn by."""
    with pytest.raises(ConfigError, match=f"special tokens of the objective {arm.name}") as caught:
        read_by(arm, Bare(), is_paired=True)
    assert caught.value.fix.startswith("import the model again with --add_token='<|sentinel_0|>'")


@pytest.mark.parametrize("arm", [FIM(), Span(rate=0.5, mean=1)])
def test_rows_too_short_for_what_is_added_are_refused(arm):
    with pytest.raises(ConfigError, match="too short"):
        read_by(arm, sequence=12)


def test_settings_that_contradict_each_other_are_named():
    assert list(dataclasses.replace(Masked(), hidden=0.9, random=0.2).problems())
    assert list(Mixture(weights=Weights(causal=0, fim=0)).problems())
    assert not [*Masked().problems(), *Mixture().problems()]
