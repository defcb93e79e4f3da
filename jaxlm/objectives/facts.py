"""Facts of an objective that the model, the data and the rest of a run depend on. Free of JAX.

Example:
  >>> LeftToRight.keeps_rows, BothWays.prompts
  (True, 'both ways')
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxlm.core.user_code import Interface

if TYPE_CHECKING:
    from jaxlm.objectives.config import MTP

Architecture = Literal["decoder", "encoder", "encoder-decoder"]
# The way a model trained on an objective reads a prompt; "none": it cannot continue one.
Prompts = Literal["left to right", "both ways", "none"]

_PREFERENCE = "--config.objective.name=preference --config.objective.loss={} --config.data.kind={}"
_POLICY = (
    "--config.objective.name=policy --config.objective.algorithm={} --config.data.kind=prompts"
)


class ObjectiveFacts:
    """Facts of an objective that the model, the data and the rest of a run depend on.

    Attributes:
      bidirectional: some slots attend to later slots.
      prompts: the way a model trained on this reads a prompt.
      keeps_rows: rows stay as they were packed, every token predicted from those before it.
      evaluated_as_causal: validation rows are read as by `causal`.
      architectures: models that the objective can train.
      block_positions: size of the table of second positions that the model needs, if any.
      marks_mtp_rows: batches mark the rows that predict tokens beyond the next one.
      teacher: RUN[@STEP] of a frozen model that the loss reads, if any.
      compares_answers: the data is answers that were compared or judged, and the loss is no
        negative log-likelihood.
      has_reward_head: the model has a head of one output, which scores texts.
      labels_steps: the data is answers with a label at the end of each step.
      samples_answers: the data is prompts, whose answers are sampled from the model and rewarded.
      has_value_head: the model has a head of one output, which predicts rewards.
      sums_over_rows: loss and metrics are sums over rows, and random only by the model's dropout,
        so that replicas of the model may add up those of their rows apart.
      document_mask: in training a token sees no other document of its row.
      METHODS: flags of methods that are settings of an objective and of the data, by name.

    The settings of an objective in a file of a user have `build(loss, architecture)` too, which
    returns the `Objective`, as `objectives.build` does for the others.
    """

    bidirectional: ClassVar[bool] = False
    prompts: ClassVar[Prompts] = "left to right"
    keeps_rows: ClassVar[bool] = False
    evaluated_as_causal: ClassVar[bool] = False
    architectures: ClassVar[tuple[Architecture, ...]] = ("decoder",)
    block_positions: ClassVar[int | None] = None
    marks_mtp_rows: ClassVar[bool] = False
    compares_answers: ClassVar[bool] = False
    has_reward_head: ClassVar[bool] = False
    labels_steps: ClassVar[bool] = False
    samples_answers: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    sums_over_rows: ClassVar[bool] = False
    teacher: str | None = None
    document_mask: bool = True

    PARTS: ClassVar = Interface("objective", needs=("build",))
    METHODS: ClassVar[Mapping[str, str]] = {
        "sft": "--config.objective.name=causal --config.data.kind=chat",
        **{loss: _PREFERENCE.format(loss, "pairs") for loss in ("dpo", "ipo", "orpo", "simpo")},
        "kto": _PREFERENCE.format("kto", "labeled"),
        **{
            name: _POLICY.format(name)
            for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo", "reinforce")
        },
    }

    @property
    def mtp_settings(self) -> "MTP | None":
        """Settings of multi-token prediction; None without it."""
        return None

    @property
    def compared_with(self) -> str | None:
        """The model that answers are compared with: start, adapter_off or RUN; None for none."""
        return None

    def target_length(self, sequence: int) -> int:
        """Return the slots of the decoder's row for the encoder's; ValueError if it has none."""
        raise ValueError("the objective makes no pairs for an encoder and a decoder")


class LeftToRight(ObjectiveFacts):
    """Facts of an objective that predicts every token of a row from those before it."""

    keeps_rows = True
    evaluated_as_causal = True


class BothWays(ObjectiveFacts):
    """Facts of an objective that reads a part of each document bidirectionally."""

    bidirectional = True
    prompts = "both ways"
