"""Objectives that change rows: masks, spans, blanks, infilling, multi-token rows, and mixtures."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxlm.data.corrupt import fim, masked, pairs, rows, spans
from jaxlm.data.corrupt.pairs import PieceCut, SourceTarget
from jaxlm.data.corrupt.rows import ChangedPiece, PieceChange, PieceResult
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.objectives import config
from jaxlm.objectives.objective import Objective

BLANK_TOKENS = "<|mask|>", "<|sentinel_0|>", "<|sentinel_1|>"  # GLM's [MASK], [START] and [END]
UL2_DRAWS, MIXTURE_DRAWS = 1, 2  # numbers that keep their random draws apart


class MultiToken(Objective[config.MTP]):
    """Next tokens and the tokens after them; the rows of a mixture are marked as such."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return rows.causal_with_mtp, 0


class PrefixLM(Objective[config.Prefix]):
    """Documents whose start is read bidirectionally."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return rows.split_prefix, 0


class MaskedLM(Objective[config.Masked]):
    """Tokens that are hidden and predicted in place."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        settings, mask = self.settings, masked.mask_id(tokenizer)
        assert mask is not None  # checked by `prepare`
        change = functools.partial(
            masked.mask_tokens,
            rate=settings.rate,
            hidden=settings.hidden,
            random=settings.random,
            mask=mask,
            is_text=tokenizer.is_text,
            is_fixed=settings.masking == "static",
            words=masked.WordNumbers(tokenizer) if settings.unit == "word" else None,
        )
        return change, 0

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return masked.MASK_TOKENS[:1] if masked.mask_id(tokenizer) is None else ()


class _Spans:
    """The parts that T5's span corruption and UL2 share."""

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return () if len(spans.sentinel_ids(tokenizer)) else (spans.SENTINEL_FORMS[0].format(0),)


class SpanCorruption(_Spans, Objective[config.Span]):
    """Spans that are cut out and predicted after the rest, or by a decoder."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return _span_change(self.settings.rate, self.settings.mean, tokenizer, sequence)

    def pair_change(self, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
        """Return the change of documents into pairs of encoder and decoder sequences."""
        return _pair_spans(self.settings.rate, self.settings.mean, tokenizer)


class UnifiedDenoising(_Spans, Objective[config.UL2]):
    """UL2: one of seven denoisers for each row, each equally often, without mode tokens.

    No tokenizer here reserves ids for UL2's mode tokens.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2.
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        drawn = [_span_change(rate, mean, tokenizer, sequence) for rate, mean in config.UL2_SPANS]
        changes, rooms = zip(*drawn, strict=True)
        suffix = functools.partial(rows.split_prefix, share=config.UL2_SUFFIX)
        return _evenly_drawn([*changes, suffix]), max(rooms)

    def pair_change(self, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
        """Return the change of documents into pairs of encoder and decoder sequences."""
        cut = functools.partial(
            pairs.cut_suffix, share=config.UL2_SUFFIX, edges=spans.Edges.of(tokenizer)
        )
        drawn = [_pair_spans(rate, mean, tokenizer) for rate, mean in config.UL2_SPANS]
        return _evenly_drawn([*drawn, _cut_all(cut)])


class BlankInfilling(Objective[config.Blank]):
    """GLM: spans that are cut out and predicted in a random order."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        settings = self.settings
        change = functools.partial(
            spans.infill_blanks,
            rate=settings.rate,
            mean=settings.mean,
            marks=spans.BlankIds(*(tokenizer.reserved[name] for name in BLANK_TOKENS)),
            max_block_positions=config.BLOCK_POSITIONS,
            edges=spans.Edges.of(tokenizer),
        )
        return change, spans.reserved_slots(sequence, settings.rate, settings.mean)

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return [name for name in BLANK_TOKENS if name not in tokenizer.reserved]


class FillInTheMiddle(Objective[config.FIM]):
    """Documents rearranged into prefix, suffix and middle; evaluated in their own order.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 4.1 (the evaluation).
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        is_split, marks = self.settings.level == "character", fim.fim_ids(tokenizer)
        assert marks is not None  # checked by `prepare`
        change = functools.partial(
            fim.infill,
            rate=self.settings.rate,
            spm=self.settings.spm,
            marks=marks,
            tokenizer=tokenizer if is_split else None,
            edges=spans.Edges.of(tokenizer),
        )
        return change, fim.reserved_slots(sequence, is_split=is_split)

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        if fim.fim_ids(tokenizer) is not None:
            return ()
        return [name for name in fim.FIM_TOKENS[0] if name not in tokenizer.reserved]


@dataclasses.dataclass(frozen=True)
class Mixture(Objective[config.Mixture]):
    """One of several objectives for each row."""

    members: tuple[Objective[config.Objective], ...] = ()

    @property
    def parts(self) -> Sequence[Objective[config.Objective]]:
        """Return the objectives that a row may be read by."""
        return self.members

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        changes, rooms = zip(
            *(part.change(tokenizer, sequence) for part in self.parts), strict=True
        )
        shares = [share for _, share in self.settings.parts]
        return _drawn(changes, shares, MIXTURE_DRAWS), max(rooms)


def _span_change(
    rate: float, mean: float, tokenizer: Tokenizer, sequence: int
) -> tuple[PieceChange[ChangedPiece], int]:
    change = functools.partial(
        spans.corrupt_spans,
        rate=rate,
        mean=mean,
        sentinels=spans.sentinel_ids(tokenizer),
        edges=spans.Edges.of(tokenizer),
    )
    return change, spans.reserved_slots(sequence, rate, mean)


def _pair_spans(rate: float, mean: float, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
    cut = functools.partial(
        pairs.cut_spans,
        rate=rate,
        mean=mean,
        sentinels=spans.sentinel_ids(tokenizer),
        edges=spans.Edges.of(tokenizer),
    )
    return _cut_all(cut)


def _cut_all(cut: PieceCut) -> PieceChange[SourceTarget]:
    return functools.partial(pairs.cut_pieces, cut=cut)


def _evenly_drawn(changes: Sequence[PieceChange[PieceResult]]) -> PieceChange[PieceResult]:
    return _drawn(changes, [1 / len(changes)] * len(changes), UL2_DRAWS)


def _drawn(
    changes: Sequence[PieceChange[PieceResult]], shares: Sequence[float], number: int
) -> PieceChange[PieceResult]:
    return functools.partial(
        rows.draw_change, changes=tuple(changes), shares=tuple(shares), number=number
    )
