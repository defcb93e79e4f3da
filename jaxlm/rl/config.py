"""Settings of rollouts: answers that are sampled from the model, rewarded and trained on.

Example:
  >>> rl = RLConfig(samples=8)
  >>> rl.prompts(rows=64), rl.prompts_at(step=2, rows=64), rl.slots_of(rows=64)
  (8, range(16, 24), 64)
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxlm.core import user_code
from jaxlm.core.config import setting
from jaxlm.core.errors import ConfigError

MAX_SLOTS = 256  # of `slots=auto`
REFILLS = 4  # slots are filled again when this part of them is free
CALCULATOR = "calculator"
_FILE = re.compile(r"(.+\.py):[A-Za-z_]\w*")


def refilled(slots: int, ways: int) -> int:
    """Return the slots that are filled together, if a mesh splits them into `ways` parts."""
    return -(-max(slots // REFILLS, 1) // ways) * ways


def prompt_rows(size: int, samples: int) -> int:
    """Return the rows in which the prompts of `size` samples that begin together are read.

    The `samples` of a prompt begin one after another: some of those of the first prompt may have
    begun before, and some of the last prompt's may wait.
    """
    return min(size, -(-(size - 1) // samples) + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Rollouts of objectives that sample answers: train.batch samples an update, one in a row."""

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
        1, "updates with the samples of a rollout in an epoch, each with its own part", low=1
    )
    epochs: int = setting(1, "times that each part of a rollout is trained on, in turn", low=1)
    correction: Literal["none", "tis"] = setting(
        "none",
        "tis, truncated importance sampling, scores each rollout again by the program that is "
        "trained, and weights a token by its probability there over that when it was drawn, at "
        "most correction_cap; none trusts the log-probabilities of the sampler",
    )
    correction_cap: float = setting(2.0, "largest weight of tis", above=0)
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
    turns: int = setting(
        1,
        "most turns of the model in a sample; after each but the last the tool may answer, whose "
        "text is not trained on",
        low=1,
    )
    tool: str = setting(
        "",
        "text after a turn of the model: calculator, or FILE.py:FUNCTION, which returns a text, or "
        "None at the end",
    )
    tool_sources: tuple[str, ...] = setting(
        (),
        "FILE=DIGEST of the file of the tool, which is part of the run's identity",
        derived_from="tool",
    )
    tool_role: Literal["tool", "user"] = setting(
        "tool", "role of the tool's text in the chat template"
    )
    tool_tokens: int = setting(
        64, "maximum tokens of the tool's text; a longer one is cut", unit="tokens", low=1
    )
    held_out_samples: int = setting(
        1,
        "samples of each held-out prompt in an evaluation, besides the greedy one: "
        "pass@1, and pass@k of as many",
        low=1,
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that samples of a prompt can differ, and that the tool exists and is used."""
        if self.temperature == 0:
            why = "at temperature 0 all samples of a prompt are the same"
            yield "temperature", why, "--config.rl.temperature=1"
        if self.turns > 1 and not self.tool:
            why = f"nothing answers between {self.turns} turns of the model"
            yield "tool", why, "--config.rl.tool=calculator\n--config.rl.turns=1"
        if self.tool and self.turns == 1:
            why = f"after its only turn nothing calls {self.tool}"
            yield "turns", why, "--config.rl.turns=2\n--config.rl.tool="
        match = _FILE.fullmatch(self.tool)
        if self.tool not in ("", CALCULATOR) and match is None:
            why = f"there is no tool {self.tool}; it is calculator, or FILE.py:FUNCTION"
            yield "tool", why, "--config.rl.tool=calculator"
        elif match is not None and match[1] not in dict(self.recorded_files):
            try:
                user_code.named_file(match[1], self.tool)
            except ConfigError as error:
                yield "tool", f"{error.what}: {error.why}", error.fix

    @property
    def recorded_files(self) -> Iterator[tuple[str, str]]:
        """The file of the tool with its digest."""
        for text in self.tool_sources:
            name, _, digest = text.rpartition("=")
            yield name, digest

    @staticmethod
    def files_without_digest(raw: Mapping[str, Any]) -> list[str]:
        """Return the file of a section of a config.json that has no digest there."""
        recorded = {str(text).rpartition("=")[0] for text in raw.get("tool_sources") or ()}
        match = _FILE.fullmatch(str(raw.get("tool") or ""))
        return [match[1]] if match and match[1] not in recorded else []

    def derived(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield (setting, value, reason): the digest of a file that the user names."""
        recorded, match = dict(self.recorded_files), _FILE.fullmatch(self.tool)
        sources: tuple[str, ...] = ()
        if match is not None:
            try:
                name = match[1]
                digest = recorded.get(name) or user_code.named_file(name, "rl.tool").digest
            except ConfigError:  # which `problems` reports
                return
            sources = (f"{name}={digest}",)
        if sources != self.tool_sources:
            yield "tool_sources", sources, "digest of the file of rl.tool"

    def longest(self, prompts: int, sequence: int) -> int:
        """Return the most tokens before a turn of the model, for prompts of a most length."""
        return prompts if self.turns == 1 else sequence - self.max_tokens

    @property
    def steps(self) -> int:
        """The updates with the samples of a rollout, over all epochs."""
        return self.updates * self.epochs

    def prompts(self, rows: int) -> int:
        """Return the prompts of a rollout, for updates of some rows."""
        return rows * self.updates // self.samples

    def prompts_at(self, step: int, rows: int) -> range:
        """Return the numbers of the prompts in the run that an update of some rows trains on."""
        rollout, part = divmod(step, self.steps)
        first = (rollout * self.updates + part % self.updates) * rows
        return range(first // self.samples, -(-(first + rows) // self.samples))

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
