"""The draft of `--draft`: what guesses the tokens of a model of a run."""

from pathlib import Path
from typing import Literal

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError
from jaxlm.generate.draft import Draft, DraftHeads, DraftModel, Lookup
from jaxlm.generate.engine import Engine, check_supported
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan.serving import check_heads
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import LoadedRun

KINDS: dict[str, Literal["lookup", "heads"]] = {"lookup": "lookup", "heads": "heads"}


def read_draft(draft: str | None) -> Run | Literal["lookup", "heads"] | None:
    """Return the kind of a draft, or the config of its run. Raises as `load.read_config` does."""
    if draft is None:
        return None
    return KINDS.get(draft) or load.read_config(Path(draft), "--draft")


def open_draft(opened: LoadedRun, draft: str | None, context: int, say: Log) -> Draft | None:
    """Return what guesses tokens.

    Args:
      opened: the run whose tokens are guessed.
      draft: `lookup`, `heads` or a run; None guesses nothing.
      context: largest number of tokens of a request.
      `say`: receives log lines.

    Raises:
      ConfigError: if the draft run has other ids, or fewer positions than the context, or if the
        model has no heads that are to guess.
    """
    if draft is None:
        return None
    if draft == "lookup":
        return Lookup()
    if draft == "heads":
        return DraftHeads(check_heads(opened.run, opened.model.blueprint.config))
    smaller = load.load_run(Path(draft), say=say)
    load.check_generates(smaller, is_chat=False)
    check_supported(smaller.model.blueprint)
    positions = smaller.model.blueprint.text_positions
    mine, its = (each.model.blueprint.config.vocab for each in (opened, smaller))
    if smaller.tokenizer.digest != opened.tokenizer.digest or mine != its:
        why = f"its tokenizer or its number of ids, {its}, is not that of the run, {mine}"
    elif positions is not None and positions < context:
        why = f"it has {positions} positions for text, and a request up to {context} tokens"
    else:
        return DraftModel(smaller.model.blueprint, smaller.params)
    raise ConfigError(
        "this run cannot guess tokens of the other",
        where=f"--draft={draft}",
        why=why,
        fix="--draft=lookup    # needs no run",
    )


def log_guesses(engine: Engine, say: Log) -> None:
    """Log in which passes the draft of an engine guessed, and what stood; nothing without one."""
    counters = engine.counters
    if engine.drafting is None or not counters.passes:
        return
    name = engine.drafting.draft.name
    if not counters.drafts:
        say(f"draft {name}: no pass had guesses, which would have cost time")
        return
    shares = " ".join(f"{count / counters.drafts:.2f}" for count in counters.accepted)
    say(
        f"draft {name}: in {counters.guessed_passes / counters.passes:.0%} of the passes, "
        f"{counters.mean_acceptance_length:.2f} tokens of a row in those, guesses that stood by "
        f"position {shares}"
    )
