"""Objectives: how packed rows become batches, and the loss of a batch.

Example:
  >>> from jaxlm.objectives.config import Causal, Prefix
  >>> Objective(Causal(), LossConfig()).parts[0].settings.keeps_rows
  True
  >>> PrefixLM(Prefix(), LossConfig()).settings.bidirectional
  True
"""

import dataclasses
import functools
from abc import ABC
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax import Array

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.data.corrupt import fim, masked, pairs, rows, spans
from jaxlm.data.corrupt.pairs import EncoderDecoderRows, SourceTarget
from jaxlm.data.corrupt.rows import ChangedPiece, Corruption, PieceChange, PieceResult, RowChanges
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.build import Model
from jaxlm.objectives import config
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.facts import Architecture
from jaxlm.objectives.loss import Loss, sampled_label_nll, token_nll

Settings = TypeVar("Settings", bound=config.Objective, covariant=True)
BLANK_TOKENS = "<|mask|>", "<|sentinel_0|>", "<|sentinel_1|>"  # GLM's [MASK], [START] and [END]
UL2_DRAWS, MIXTURE_DRAWS = 1, 2  # numbers that keep their random draws apart


@dataclasses.dataclass(frozen=True)
class Objective(ABC, Generic[Settings]):
    """Next-token prediction. A subclass overrides the part in which it differs.

    `build.build` makes the objective of a run from its settings; no other code tests their type.
    """

    settings: Settings
    loss_settings: LossConfig
    architecture: Architecture = "decoder"  # of the model that is trained

    # Rows.

    def prepare(self, tokenizer: Tokenizer, sequence: int) -> RowChanges:
        """Return how rows are changed, in training and for each validation set.

        Validation rows are changed as in training, with draws that never change. The loss of an
        evaluation is that of the predicted tokens, and bits per byte are those of their bytes.
        An objective that is `evaluated_as_causal` has the bits per byte of any left-to-right model.
        Each part of a mixture is evaluated alone: the first under the name of the set, the others
        under `SET.objective`.

        Raises:
          ConfigError: if the tokenizer lacks special tokens that the objective writes, or a row of
            `sequence` slots is too short for it.
        """
        if self.architecture == "encoder-decoder":
            self._check_tokens(tokenizer, "")
            change = self.pair_change(tokenizer)
            pairs = EncoderDecoderRows(change, self.settings.target_length(sequence), tokenizer.eos)
            return RowChanges(pairs, {"": pairs})
        if self.settings.keeps_rows:
            return RowChanges()
        self._check_tokens(tokenizer, "--config.objective.name=causal\n")
        training = self.corruption(tokenizer, sequence)
        self._check_room(training.reserved_slots, sequence)
        # All parts that are evaluated as causal share one validation set.
        evaluated: dict[str, Objective[config.Objective] | None] = {}
        for part in self.parts:
            if part.settings.evaluated_as_causal:
                evaluated.setdefault("causal", None)
            else:
                evaluated.setdefault(part.settings.name, part)
        evaluations = {
            f".{name}" if number else "": part.corruption(tokenizer, sequence) if part else None
            for number, (name, part) in enumerate(evaluated.items())
        }
        return RowChanges(training, evaluations)

    @property
    def parts(self) -> Sequence["Objective[config.Objective]"]:
        """Return the objectives that a row may be read by: a mixture has several."""
        return (self,)

    def corruption(self, tokenizer: Tokenizer, sequence: int) -> Corruption:
        """Return the corruption of rows of `sequence` slots, a pure function of row and key."""
        settings = self.settings
        change, room = self.change(tokenizer, sequence)
        return Corruption(
            change,
            reserved_slots=room,
            bidirectional=settings.bidirectional,
            has_block_positions=settings.block_positions is not None,
            has_ahead_weights=settings.marks_mtp_rows,
        )

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        """Return the change of the documents of a row, and the most slots that it adds to a row."""
        return rows.causal, 0

    def pair_change(self, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
        """Return the change of documents into encoder and decoder pairs; ValueError if none."""
        raise ValueError(f"{self.settings.name} makes no pairs for an encoder-decoder")

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        """Return the special tokens that the objective writes and the tokenizer lacks."""
        return ()

    def _check_tokens(self, tokenizer: Tokenizer, other_fix: str) -> None:
        lists = [part.missing_tokens(tokenizer) for part in self.parts]
        if missing := list(dict.fromkeys(name for names in lists for name in names)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            flags = " ".join(f"--add_token='{name}'" for name in missing)
            raise ConfigError(
                f"the tokenizer lacks special tokens of the objective {self.settings.name}",
                where="objective.name",
                why=f"it has no {missing[0]}{more}",
                fix=f"{other_fix}import the model again with {flags}, and start from that run",
            )

    def _check_room(self, room: int, sequence: int) -> None:
        if sequence - room < sequence // 2:
            raise ConfigError(
                f"rows of {sequence} tokens are too short for the objective {self.settings.name}",
                where="data.sequence",
                why=f"it adds up to {room} tokens to a row, more than half of the row",
                fix="--config.data.sequence=256\n--config.objective.name=causal",
            )

    # Loss.

    def loss(
        self, model: Model, batch: Tokens, key: Array | None, teacher: Model | None = None
    ) -> Loss:
        """Return the loss of a batch of rows as `prepare` changes them: sums and weights.

        A `key` turns dropout on; `teacher` is the frozen model that `settings.teacher` names.
        """
        mtp = self.settings.mtp_settings
        weights = () if mtp is None else mtp.weights
        mask = self.settings.document_mask
        return token_nll(
            model, batch, key, self.loss_settings, mtp_weights=weights, document_mask=mask
        )

    def curvature_loss(self, model: Model, batch: Tokens) -> Loss:
        """Return the loss of labels sampled from the model, whose gradient gives the curvature."""
        return sampled_label_nll(model, batch, self.loss_settings)


class MultiToken(Objective[config.MTP]):
    """Next tokens and the tokens after them; the rows of a mixture are marked as such."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        return rows.causal_with_mtp, 0


class PrefixLM(Objective[config.Prefix]):
    """Documents whose start is read bidirectionally."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        return rows.split_prefix, 0


class MaskedLM(Objective[config.Masked]):
    """Tokens that are hidden and predicted in place."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
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
        return masked.MASK_TOKENS[:1] if masked.mask_id(tokenizer) is None else ()


class _Spans:
    """The parts that T5's span corruption and UL2 share."""

    def missing_tokens(self, tokenizer: Tokenizer) -> Sequence[str]:
        return () if len(spans.sentinel_ids(tokenizer)) else (spans.SENTINEL_FORMS[0].format(0),)


class SpanCorruption(_Spans, Objective[config.Span]):
    """Spans that are cut out and predicted after the rest, or by a decoder."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        return _span_change(self.settings.rate, self.settings.mean, tokenizer, sequence)

    def pair_change(self, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
        return _pair_spans(self.settings.rate, self.settings.mean, tokenizer)


class UnifiedDenoising(_Spans, Objective[config.UL2]):
    """UL2: one of seven denoisers for each row, each equally often, without mode tokens.

    No tokenizer here reserves ids for UL2's mode tokens.

    Source: Tay et al. 2022, arXiv:2205.05131, section 3.1.2.
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        drawn = [_span_change(rate, mean, tokenizer, sequence) for rate, mean in config.UL2_SPANS]
        changes, rooms = zip(*drawn, strict=True)
        suffix = functools.partial(rows.split_prefix, share=config.UL2_SUFFIX)
        return _evenly_drawn([*changes, suffix]), max(rooms)

    def pair_change(self, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
        cut = functools.partial(
            pairs.cut_suffix, share=config.UL2_SUFFIX, edges=spans.Edges.of(tokenizer)
        )
        drawn = [_pair_spans(rate, mean, tokenizer) for rate, mean in config.UL2_SPANS]
        return _evenly_drawn([*drawn, functools.partial(pairs.cut_pieces, cut=cut)])


class BlankInfilling(Objective[config.Blank]):
    """GLM: spans that are cut out and predicted in a random order."""

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
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
        return [name for name in BLANK_TOKENS if name not in tokenizer.reserved]


class FillInTheMiddle(Objective[config.FIM]):
    """Documents rearranged into prefix, suffix and middle; evaluated in their own order.

    Source: Bavarian et al. 2022, arXiv:2207.14255, section 4.1 (the evaluation).
    """

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
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
        if fim.fim_ids(tokenizer) is not None:
            return ()
        return [name for name in fim.FIM_TOKENS[0] if name not in tokenizer.reserved]


@dataclasses.dataclass(frozen=True)
class MixtureObjective(Objective[config.Mixture]):
    """One of several objectives for each row."""

    members: tuple[Objective[config.Objective], ...] = ()

    @property
    def parts(self) -> Sequence[Objective[config.Objective]]:
        return self.members

    def change(self, tokenizer: Tokenizer, sequence: int) -> tuple[PieceChange[ChangedPiece], int]:
        drawn = [part.change(tokenizer, sequence) for part in self.parts]
        changes, rooms = zip(*drawn, strict=True)
        shares = [share for _, share in self.settings.parts]
        return _drawn(changes, shares, MIXTURE_DRAWS), max(rooms)


def _span_change(
    rate: float, mean: float, tokenizer: Tokenizer, sequence: int
) -> tuple[PieceChange[ChangedPiece], int]:
    change = functools.partial(spans.corrupt_spans, **_span_terms(rate, mean, tokenizer))
    return change, spans.reserved_slots(sequence, rate, mean)


def _pair_spans(rate: float, mean: float, tokenizer: Tokenizer) -> PieceChange[SourceTarget]:
    cut = functools.partial(pairs.cut_spans, **_span_terms(rate, mean, tokenizer))
    return functools.partial(pairs.cut_pieces, cut=cut)


def _span_terms(rate: float, mean: float, tokenizer: Tokenizer) -> dict[str, Any]:
    sentinels, edges = spans.sentinel_ids(tokenizer), spans.Edges.of(tokenizer)
    return {"rate": rate, "mean": mean, "sentinels": sentinels, "edges": edges}


def _evenly_drawn(changes: Sequence[PieceChange[PieceResult]]) -> PieceChange[PieceResult]:
    return _drawn(changes, [1 / len(changes)] * len(changes), UL2_DRAWS)


def _drawn(
    changes: Sequence[PieceChange[PieceResult]], shares: Sequence[float], number: int
) -> PieceChange[PieceResult]:
    return functools.partial(
        rows.draw_change, changes=tuple(changes), shares=tuple(shares), number=number
    )
