"""The interface of objectives: how packed rows become batches, and the loss of a batch."""

import dataclasses
from collections.abc import Sequence
from typing import Generic, TypeVar

from jax import Array

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.data.corrupt import rows
from jaxlm.data.corrupt.pairs import EncoderDecoderRows, SourceTarget
from jaxlm.data.corrupt.rows import ChangedPiece, Corruption, PieceChange, RowChanges
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.models.build import Model
from jaxlm.objectives import config
from jaxlm.objectives.config import Architecture, LossConfig
from jaxlm.objectives.loss import Loss, sampled_label_nll, token_nll

Settings = TypeVar("Settings", bound=config.Objective, covariant=True)


@dataclasses.dataclass(frozen=True)
class Objective(Generic[Settings]):
    """Next-token prediction. A subclass overrides the part in which it differs.

    `build.build` makes the objective of a run from its settings; no other code tests their type.

    Args:
      settings: settings of the objective.
      loss_settings: settings of the token loss.
      architecture: kind of model that is trained.
    """

    settings: Settings
    loss_settings: LossConfig
    architecture: Architecture = "decoder"

    # Rows.

    def prepare(self, tokenizer: Tokenizer, sequence: int) -> RowChanges:
        """Return how rows are changed, in training and for each validation set.

        Validation rows are changed as in training, with draws that never change. The loss of an
        evaluation is that of the predicted tokens, and bits per byte are those of their bytes.
        An objective that is `evaluated_as_causal` has the bits per byte of any left-to-right model.
        Each part of a mixture is evaluated alone: the first under the name of the set, the others
        under `SET.objective`.

        Args:
          tokenizer: tokenizer of the run.
          sequence: slots of a row.

        Raises:
          ConfigError: if the tokenizer lacks special tokens that the objective writes, or a row is
            too short for it.
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
            f".{name}" if number else "": None
            if part is None
            else part.corruption(tokenizer, sequence)
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
        """Return the change of documents into pairs of encoder and decoder sequences.

        Raises:
          ValueError: if the objective makes no pairs.
        """
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
        """Return the loss of a batch: sums and weights, see `Loss`.

        Args:
          model: the model that is trained.
          batch: rows as `prepare` changes them.
          key: random key of dropout; None turns dropout off.
          teacher: frozen model, if `settings.teacher` names one.
        """
        mtp = self.settings.mtp_settings
        weights = () if mtp is None else mtp.weights
        return token_nll(model, batch, key, self.loss_settings, mtp_weights=weights)

    def curvature_loss(self, model: Model, batch: Tokens) -> Loss:
        """Return the loss of labels sampled from the model, whose gradient gives the curvature."""
        return sampled_label_nll(model, batch, self.loss_settings)
