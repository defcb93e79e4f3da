"""Settings of rollouts: answers that are sampled from the model, rewarded and trained on.

Example:
  >>> rl = RLConfig(samples=8)
  >>> rl.prompts(rows=64), rl.slots_of(rows=64)
  (8, 64)
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

MAX_SLOTS = 256  # of `slots=auto`


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Rollouts of the objective policy: train.batch samples for each update, one in a row."""

    samples: int = setting(
        8, "samples of each prompt; a rollout has train.batch * updates / samples prompts", low=1
    )
    max_tokens: int = setting(64, "maximum new tokens of a sample", unit="tokens", low=1)
    temperature: float = setting(
        1.0,
        "divisor of the logits, in drawing and in the loss; there is no top-k, top-p, min-p or "
        "penalty, as their distribution is not the one that is trained",
        low=0,
        high=100,
    )
    updates: int = setting(
        1, "updates with the samples of a rollout, each with its own part", low=1
    )
    slots: int | Literal["auto"] = setting(
        "auto",
        "samples that are drawn at once, each replaced by the next when it has ended; auto is all "
        f"of a rollout, at most {MAX_SLOTS}",
        low=1,
    )
    lag: int = setting(
        0,
        "rollouts that are drawn ahead, from the parameters of as many rollouts before, while the "
        "others are trained on; 0 draws each from the newest",
        low=0,
    )
    redraws: int = setting(
        3,
        "times that other prompts replace groups without a gradient, with dead_groups=redraw",
        low=1,
    )
    held_out_samples: int = setting(
        1,
        "samples of each held-out prompt in an evaluation, besides the greedy one: "
        "pass@1, and pass@k of as many",
        low=1,
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that samples of a prompt can differ."""
        if self.temperature == 0:
            why = "at temperature 0 all samples of a prompt are the same"
            yield "temperature", why, "--config.rl.temperature=1"

    def prompts(self, rows: int) -> int:
        """Return the prompts of a rollout, for updates of some rows."""
        return rows * self.updates // self.samples

    def slots_of(self, rows: int) -> int:
        """Return the samples that are drawn at once, for updates of some rows."""
        return min(rows * self.updates, MAX_SLOTS) if self.slots == "auto" else self.slots

    def batch_problems(self, rows: int, sequence: int) -> Iterator[tuple[str, str, str]]:
        """Yield (setting, why, fix) if updates of some rows have no whole prompts, or no room."""
        if rows * self.updates % self.samples:
            why = f"train.batch * updates = {rows * self.updates} samples are no whole prompts"
            nearest = max(rows // self.samples, 1) * self.samples
            yield "samples", why, f"--config.train.batch={nearest}"
        if self.max_tokens >= sequence:
            why = f"rows of {sequence} tokens hold no prompt and {self.max_tokens} new tokens"
            yield "max_tokens", why, f"--config.data.sequence={2 * self.max_tokens}"
