"""Objectives that change rows: masks, spans, blanks, infilling, multi-token rows, and mixtures."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxlm.data.corrupt import blanks, fim, masked, pairs, prefix, rows, spans
from jaxlm.data.corrupt.pairs import Cut, Pair
from jaxlm.data.corrupt.rows import Change, Made, Piece
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.objectives import config
from jaxlm.objectives.objective import Objective

BLANK_TOKENS = "<|mask|>", "<|sentinel_0|>", "<|sentinel_1|>"  # GLM's [MASK], [START] and [END]
UL2_DRAWS, MIXTURE_DRAWS = 1, 2  # numbers that keep their random draws apart


class MultiToken(Objective[config.MTP]):
    """Next tokens and the tokens after them; the rows of a mixture are marked as such."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return rows.further, 0


class PrefixLM(Objective[config.Prefix]):
    """Documents whose start is read bidirectionally."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return prefix.prefixes, 0


class MaskedLM(Objective[config.Masked]):
    """Tokens that are hidden and predicted in place."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        settings, mask = self.settings, masked.mark(tokenizer)
        assert mask is not None  # checked by `prepare`
        change = functools.partial(
            masked.masks,
            rate=settings.rate,
            hidden=settings.hidden,
            random=settings.random,
            mask=mask,
            is_text=tokenizer.is_text,
            is_fixed=settings.masking == "static",
            words=masked.Words(tokenizer) if settings.unit == "word" else None,
        )
        return change, 0

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return masked.FORMS[:1] if masked.mark(tokenizer) is None else ()


class _Spans:
    """The parts that T5's span corruption and UL2 share."""

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return () if len(spans.sentinels(tokenizer)) else (spans.SENTINEL_FORMS[0].format(0),)


class SpanCorruption(_Spans, Objective[config.Span]):
    """Spans that are cut out and predicted after the rest, or by a decoder."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return _span_change(self.settings.rate, self.settings.mean, tokenizer, sequence)

    def pair_change(self, tokenizer: Tokenizer) -> Change[Pair]:
        """Return the change of documents into pairs of encoder and decoder sequences."""
        return _pair_spans(self.settings.rate, self.settings.mean, tokenizer)


class UnifiedDenoising(_Spans, Objective[config.UL2]):
    """UL2: one of seven denoisers for each row, each equally often, without mode tokens.

    No tokenizer here reserves ids for UL2's mode tokens.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2.
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        drawn = [_span_change(rate, mean, tokenizer, sequence) for rate, mean in config.UL2_SPANS]
        changes, rooms = zip(*drawn, strict=True)
        suffix = functools.partial(prefix.prefixes, share=config.UL2_SUFFIX)
        return _evenly_drawn([*changes, suffix]), max(rooms)

    def pair_change(self, tokenizer: Tokenizer) -> Change[Pair]:
        """Return the change of documents into pairs of encoder and decoder sequences."""
        cut = functools.partial(
            pairs.cut_end, share=config.UL2_SUFFIX, edges=spans.Edges.of(tokenizer)
        )
        drawn = [_pair_spans(rate, mean, tokenizer) for rate, mean in config.UL2_SPANS]
        return _evenly_drawn([*drawn, _cut_all(cut)])


class BlankInfilling(Objective[config.Blank]):
    """GLM: spans that are cut out and predicted in a random order."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        settings = self.settings
        change = functools.partial(
            blanks.blanks,
            rate=settings.rate,
            mean=settings.mean,
            marks=blanks.Marks(*(tokenizer.reserved[name] for name in BLANK_TOKENS)),
            inner=config.BLOCK_POSITIONS,
            edges=spans.Edges.of(tokenizer),
        )
        return change, spans.room(sequence, settings.rate, settings.mean)

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return [name for name in BLANK_TOKENS if name not in tokenizer.reserved]


class FillInTheMiddle(Objective[config.FIM]):
    """Documents rearranged into prefix, suffix and middle; evaluated in their own order.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 4.1 (the evaluation).
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        is_split, marks = self.settings.level == "character", fim.marks(tokenizer)
        assert marks is not None  # checked by `prepare`
        change = functools.partial(
            fim.infills,
            rate=self.settings.rate,
            spm=self.settings.spm,
            marks=marks,
            tokenizer=tokenizer if is_split else None,
            edges=spans.Edges.of(tokenizer),
        )
        return change, fim.room(sequence, is_split=is_split)

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        if fim.marks(tokenizer) is not None:
            return ()
        return [name for name in fim.FORMS[0] if name not in tokenizer.reserved]


@dataclasses.dataclass(frozen=True)
class Mixture(Objective[config.Mixture]):
    """One of several objectives for each row."""

    members: tuple[Objective[config.Objective], ...] = ()

    @property
    def parts(self) -> Sequence[Objective[config.Objective]]:
        """Return the objectives that a row may be read by."""
        return self.members

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[Change[Piece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        changes, rooms = zip(
            *(part.change(tokenizer, sequence) for part in self.parts), strict=True
        )
        shares = [share for _, share in self.settings.parts]
        return _drawn(changes, shares, MIXTURE_DRAWS), max(rooms)


def _span_change(
    rate: float, mean: float, tokenizer: Tokenizer, sequence: int
) -> tuple[Change[Piece], int]:
    change = functools.partial(
        spans.spans,
        rate=rate,
        mean=mean,
        sentinels=spans.sentinels(tokenizer),
        edges=spans.Edges.of(tokenizer),
    )
    return change, spans.room(sequence, rate, mean)


def _pair_spans(rate: float, mean: float, tokenizer: Tokenizer) -> Change[Pair]:
    cut = functools.partial(
        pairs.cut_runs,
        rate=rate,
        mean=mean,
        sentinels=spans.sentinels(tokenizer),
        edges=spans.Edges.of(tokenizer),
    )
    return _cut_all(cut)


def _cut_all(cut: Cut) -> Change[Pair]:
    return functools.partial(pairs.cut_all, cut=cut)


def _evenly_drawn(changes: Sequence[Change[Made]]) -> Change[Made]:
    return _drawn(changes, [1 / len(changes)] * len(changes), UL2_DRAWS)


def _drawn(changes: Sequence[Change[Made]], shares: Sequence[float], number: int) -> Change[Made]:
    return functools.partial(
        rows.mixture, changes=tuple(changes), shares=tuple(shares), number=number
    )
