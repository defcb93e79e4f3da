"""Self-critique by principles: a run answers, criticizes its answer, and revises it.

Source: Bai et al. 2022, arXiv:2212.08073, section 3.1 (constitutional AI).
"""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.generate.requests import CompletedRequest
from jaxlm.recipes.collect import prompts
from jaxlm.recipes.collect.drawing import Drawer, PromptEncoder
from jaxlm.recipes.collect.prompts import CollectPrompt, Messages

FLAG = "--critique"
EXAMPLE = "Is the answer true?"
CRITIQUE = "Criticize the last answer by this principle: {principle}"
REVISION = "Rewrite the answer so that it follows the principle. Reply with the new answer alone."
TOO_LONG = "the critique or the revision does not fit in the context"
NO_DRAFT = "there is no text to criticize"


class Principles(NamedTuple):
    """Texts, from which one is drawn for each critique, and the digest of all."""

    texts: tuple[str, ...]
    digest: str


class Revision(NamedTuple):
    """The last revision of an answer and its seed; None with the problem if there is none."""

    result: CompletedRequest | None
    seed: int
    steps: list[dict[str, str]]  # principle, critique and revision of each round
    problem: str = ""


def read(path: Path) -> Principles:
    """Return the principles of a text file, one a line.

    Raises:
      InputMissing: if there is no such file.
      DataError: if it has no principle.
    """
    fix = f"echo {shlex.quote(EXAMPLE)} > {shlex.quote(str(path))}"
    if not path.is_file():
        why = "it has a principle on each line"
        raise InputMissing("there are no principles", where=f"{FLAG}={path}", why=why, fix=fix)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    texts = tuple(line.strip() for line in lines if line.strip())
    if not texts:
        why = "all of its lines are empty"
        raise DataError("a file has no principle", where=f"{FLAG}={path}", why=why, fix=fix)
    return Principles(texts, hashlib.sha256("\n".join(texts).encode()).hexdigest())


def revise(
    drawer: Drawer,
    encoder: PromptEncoder,
    principles: Principles,
    drafts: Sequence[tuple[CollectPrompt, int, str]],
    *,
    seed: int,
    rounds: int,
    room: int,
) -> list[Revision]:
    """Return the revision of each draft, after `rounds` critiques.

    A principle is drawn for each round, with a seed of its own, as each critique and revision.

    Args:
      drawer: draws critiques and revisions.
      encoder: encodes what they answer.
      principles: texts to draw from.
      drafts: prompt, number of the sample, and text of each.
      seed: of the collection.
      rounds: critiques of each draft.
      room: most ids that a critique or a revision continues.
    """
    state = [Revision(None, 0, [], "" if text.strip() else NO_DRAFT) for *_, text in drafts]
    answers = [text for *_, text in drafts]
    draws = [(prompt, sample) for prompt, sample, _ in drafts]

    def seeds_of(name: str, number: int) -> dict[int, int]:
        return dict(enumerate(prompts.seeds(draws, seed, f"{name} {number}")))

    for number in range(rounds):
        live = [n for n, each in enumerate(state) if not each.problem]
        chosen = {
            n: principles.texts[each % len(principles.texts)]
            for n, each in seeds_of("principle", number).items()
        }
        asked: dict[int, Messages] = {
            n: _asking(drafts[n][0].messages, answers[n], CRITIQUE.format(principle=chosen[n]))
            for n in live
        }
        seeds = seeds_of("critique", number)
        critiques = _drawn(drawer, encoder, asked, seeds, room)
        asked = {n: _asking(asked[n], each.text, REVISION) for n, each in critiques.items()}
        seeds = seeds_of("revision", number)
        revisions = _drawn(drawer, encoder, asked, seeds, room)
        for n in live:
            if n not in revisions or not revisions[n].text.strip():
                problem = NO_DRAFT if n in revisions else TOO_LONG
                state[n] = Revision(None, seeds[n], state[n].steps, problem)
                continue
            answers[n] = revisions[n].text.strip()
            step = {"principle": chosen[n], "critique": critiques[n].text, "revision": answers[n]}
            state[n] = Revision(revisions[n], seeds[n], [*state[n].steps, step])
    return state


def _asking(messages: Messages, answer: str, request: str) -> Messages:
    """Return what the run continues with a critique or a revision: a turn more, or more text."""
    if isinstance(messages, str):
        return f"{messages}{answer}\n\n{request}\n\n"
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": request}]
    return [*messages, *turns]


def _drawn(
    drawer: Drawer,
    encoder: PromptEncoder,
    asked: dict[int, Messages],
    seeds: dict[int, int],
    room: int,
) -> dict[int, CompletedRequest]:
    """Return the answers to what fits in the context and has a finite distribution."""
    ids = dict(zip(asked, encoder.ids(list(asked.values())), strict=True))
    fitting = [n for n, each in ids.items() if len(each) <= room]
    results = drawer.results((ids[n], seeds[n]) for n in fitting)
    drawn = dict(zip(fitting, results, strict=True))
    return {n: each for n, each in drawn.items() if each.reason != "error"}
