"""Collect answers of a run to prompts, with scores: samples, the best ones, or pairs.

The folder has `collect.json`, which identifies the collection; `samples.jsonl`, from which the same
command resumes; and, at the end, `kept.jsonl`, which a run trains on.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxlm.checkpoint import object_store
from jaxlm.core import disk
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError, cannot_write
from jaxlm.evals.samples import SAMPLES, Samples, read
from jaxlm.generate.continuer import sizes_of
from jaxlm.generate.requests import CompletedRequest, Request
from jaxlm.generate.rows import Sampling
from jaxlm.monitor import sinks
from jaxlm.recipes.collect import critique, judges, keeping, over_optimization, prompts
from jaxlm.recipes.collect.critique import Principles, Revision
from jaxlm.recipes.collect.drawing import Drawer, PromptEncoder
from jaxlm.recipes.collect.judges import TRUTH_FLAG, DrawnAnswer, Judge
from jaxlm.recipes.collect.prompts import CollectPrompt
from jaxlm.recipes.rate.texts import TextPair
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import InitSource, LoadedRun
from jaxlm.rl.rewards import check_scored

FACTS, KEPT, REPORT = "collect.json", "kept.jsonl", "best_of_n.html"
VERSION = 2  # of samples.jsonl and of the rule of its seeds
BLOCK = 64  # samples that are scored and written at a time, at least
TOO_LONG = "longer than the context"
NOT_FINITE = "its logits were not finite"

Keep = Literal["best", "pairs", "all"]
Pairs = Literal["best", "all"]
Critic = Callable[[Sequence[tuple[CollectPrompt, int, str]]], list[Revision]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Settings of the draws, of the scores, and of the records that are kept.

    Args:
      prompts: globs of files of prompts, see `prompts.read`.
      judge: see `judges.build`.
      truth: a judge of what is true, for the table and the page of best of n; empty for none.
      samples: answers to each prompt.
      keep: `all` samples, the `best` answer of each prompt, or `pairs` of answers.
      pairs: the best and the worst answer of a prompt, or `all` pairs of different scores.
      max_tokens: largest number of tokens of an answer.
      temperature: of the draws.
      seed: of the draws.
      is_chat: a prompt that is a text is the message of a user.
      slots: answers that are drawn at a time.
      critique: file of principles, see `critique.read`; empty for answers without a revision.
      rounds: critiques of each answer.
    """

    prompts: tuple[str, ...]
    judge: str
    truth: str = ""
    samples: int = 8
    keep: Keep = "best"
    pairs: Pairs = "best"
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    is_chat: bool = False
    slots: int = 16
    critique: str = ""
    rounds: int = 1

    @property
    def lines(self) -> int:
        """Return the lines of a prompt in samples.jsonl: its samples, or drafts and revisions."""
        return 2 * self.samples if self.critique else self.samples


def collect(
    workdir: Path, out: Path, settings: CollectSettings, say: Log = lambda _: None, **selection: Any
) -> dict[str, Any]:
    """Draw and score answers, write what is kept, and return the counts.

    Raises:
      InputMissing: if there is no such run, step or file of prompts.
      ConfigError: if the model cannot continue text, or the judge cannot be used.
      CommandError: if there is no such judge, or `out` has another collection.
      DataError: if prompts are damaged, none fits, or too many samples have no score.

    Args:
      workdir: the run.
      out: the folder.
      settings: draws, scores and records.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    left_out = Counter[str]()
    asked = prompts.read(settings.prompts, is_chat=settings.is_chat, left_out=left_out)
    judge = judges.build(settings.judge, say)
    judges.check_samples(judge, settings.lines)
    judges.check_answers(judge, settings.judge, asked, settings.prompts)
    truth = judges.build(settings.truth, say, TRUTH_FLAG)
    judges.check_answers(truth, settings.truth, asked, settings.prompts, TRUTH_FLAG)
    principles = critique.read(Path(settings.critique)) if settings.critique else None
    opened = load.load_run(workdir, say=say, **selection)
    load.check_left_to_right(opened, "collect")
    facts = _facts(opened, settings, judge, asked, str(selection.get("weights", "raw")))
    if principles is not None:
        facts |= {"principles": principles.digest, "rounds": settings.rounds}
    _check_folder(out, facts)
    encoder = PromptEncoder(opened, say)
    ids = encoder.ids([each.messages for each in asked])
    context = _context(opened)
    fitting = [
        each
        for each in zip(asked, ids, strict=True)
        if len(each[1]) + settings.max_tokens <= context
    ]
    left_out[TOO_LONG] += len(asked) - len(fitting)
    if not fitting:
        shortest = min(map(len, ids))
        raise DataError(
            "no prompt and its answer fit in the context",
            where=f"--max_tokens={settings.max_tokens}",
            why=f"rows have {context} tokens, and the shortest prompt {shortest}",
            fix=f"--max_tokens={context - shortest}"
            if shortest < context
            else "shorten the prompts",
        )
    with judge, Samples(out / SAMPLES) as samples:
        _collect(opened, settings, judge, fitting, samples, say, encoder, principles)
        if principles is not None and not settings.judge:
            records = keeping.select_revisions(samples.lines, settings.keep, left_out)
        else:
            records = keeping.select(samples.lines, settings.keep, settings.pairs, left_out)
        _write(out / KEPT, "".join(map(sinks.line, records)).encode())
        scores = [each["score"] for each in samples.lines if each["score"] is not None]
        best = []
        if settings.truth:
            best = over_optimization.measure(truth, settings.truth, fitting, samples.lines)
            page = over_optimization.page(best, settings.judge, settings.truth)
            _write(out / REPORT, page.encode())
        return {
            "out": str(out),
            "step": opened.step,
            "prompts": len(fitting),
            "samples": len(samples.lines),
            "unscored": len(samples.lines) - len(scores),
            "mean_score": sum(scores) / len(scores) if scores else None,
            "keep": settings.keep,
            "kept": len(records),
            "best_of_n": [each._asdict() for each in best],
            "left_out": {reason: number for reason, number in left_out.items() if number},
        }


def pairs_to_ask(out: Path) -> list[tuple[TextPair, Any]]:
    """Return the two answers to each prompt of a folder, with the prompt's text or messages."""
    lines = read(out / SAMPLES)
    pairs = []
    for one, other in zip(lines[::2], lines[1::2], strict=True):
        pairs.append((TextPair(_text(one["prompt"]), one["text"], other["text"]), one["prompt"]))
    return pairs


def _text(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _context(opened: LoadedRun) -> int:
    return min(opened.run.data.sequence, opened.model.blueprint.text_positions or 2**31)


def _facts(
    opened: LoadedRun,
    settings: CollectSettings,
    judge: Judge,
    asked: Sequence[CollectPrompt],
    weights: str,
) -> dict[str, Any]:
    """Return what determines the samples; `keep` does not."""
    source = InitSource(opened.run, object_store.of_run(opened.workdir), opened.step)
    free = ("prompts", "truth", "keep", "pairs", "critique", "rounds")
    drawn = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in free
    }
    return {
        "version": VERSION,
        "run": {"digest": source.digest, "step": opened.step, "weights": weights},
        "judge_digest": judge.digest,
        "prompts": [each.id for each in asked],
        **drawn,
    }


def _check_folder(out: Path, facts: dict[str, Any]) -> None:
    """Write the facts of a new collection. Raise CommandError if the folder has another one."""
    file = out / FACTS
    content = (json.dumps(facts, indent=1) + "\n").encode()
    if not file.is_file():
        _write(file, content)
        return
    if file.read_bytes() != content:
        try:
            known = json.loads(file.read_text())
            changed = [name for name in facts if known.get(name) != facts[name]]
        except (ValueError, AttributeError):
            changed = [FACTS]
        raise CommandError(
            "the folder has another collection",
            where=f"--out={out}",
            why=f"it differs in {', '.join(changed)}",
            fix=shlex.quote(f"--out={out}-2"),
        )


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(file, content)
    except OSError as error:
        raise cannot_write(file.name, file, error, fix="--out=another/place") from error


def _collect(
    opened: LoadedRun,
    settings: CollectSettings,
    judge: Judge,
    fitting: Sequence[tuple[CollectPrompt, list[int]]],
    samples: Samples,
    say: Log,
    encoder: PromptEncoder,
    principles: Principles | None,
) -> None:
    """Draw and score the samples that are not on disk yet, in the order of the prompts."""
    size = settings.lines
    total, block = len(fitting) * size, -(-BLOCK // size)
    if len(samples.lines) == total:
        return
    say(f"{total:,} samples of {len(fitting):,} prompts, {len(samples.lines):,} on disk")
    # A block that was cut is drawn again as a whole: a judge gives the same bits to the same batch.
    done = len(samples.lines) // size // block * block
    known = samples.lines[done * size :]
    sizes = sizes_of([len(ids) for _, ids in fitting], settings.max_tokens, settings.slots)
    if principles is not None:
        sizes = dataclasses.replace(sizes, context=_context(opened))
    answer = Request(
        ids=(),
        max_tokens=settings.max_tokens,
        sampling=Sampling(temperature=settings.temperature),
        ends=encoder.ends(prompt.messages for prompt, _ in fitting),
        top=0,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(opened.model.mesh))
        drawer = stack.enter_context(Drawer(opened, sizes, answer))
        critic: Critic | None = None
        if principles is not None:
            critic = functools.partial(
                critique.revise,
                drawer,
                encoder,
                principles,
                seed=settings.seed,
                rounds=settings.rounds,
                room=sizes.context - settings.max_tokens,
            )
        drawn = _drafts(drawer, settings, fitting[done:], block, is_apart=critic is not None)
        while part := list(itertools.islice(drawn, block)):
            lines = _lines(judge, _samples(part, critic))
            samples.append(lines[len(known) :])
            known = known[len(lines) :]
            if settings.judge:
                check_scored(
                    [(x["problem"], _text(x["prompt"])) for x in samples.lines if x["problem"]],
                    total,
                    judges.FAILURES,
                    where=f"--judge={settings.judge}",
                    limit="a collection",
                    fix="correct the prompts and the judge, then write to another folder",
                )


class _Drawn(NamedTuple):
    """A prompt with the seed and the result of each of its samples."""

    prompt: CollectPrompt
    seeds: Sequence[int]
    results: list[CompletedRequest]


def _drafts(
    drawer: Drawer,
    settings: CollectSettings,
    asked: Sequence[tuple[CollectPrompt, list[int]]],
    block: int,
    *,
    is_apart: bool,
) -> Iterator[_Drawn]:
    """Yield each prompt with its answers; later ones are drawn meanwhile, unless `is_apart`.

    Then the engine is free after each block of prompts, for critiques.
    """
    size = block if is_apart else len(asked)
    for first in range(0, len(asked), size):
        part = asked[first : first + size]
        numbers = range(settings.samples)
        drawn = prompts.seeds([(prompt, n) for prompt, _ in part for n in numbers], settings.seed)
        seeds = [drawn[n : n + len(numbers)] for n in range(0, len(drawn), len(numbers))]
        asks = zip(part, seeds, strict=True)
        answers = drawer.results((ids, seed) for (_, ids), each in asks for seed in each)
        for (prompt, _), each in zip(part, seeds, strict=True):
            yield _Drawn(prompt, each, list(itertools.islice(answers, len(each))))


class _Sample(NamedTuple):
    """A drawn answer, and the further fields of its line."""

    answer: DrawnAnswer
    number: int
    result: CompletedRequest | None
    problem: str = ""
    more: dict[str, Any] = {}


def _samples(
    part: Sequence[_Drawn],
    critic: Critic | None,
) -> list[_Sample]:
    """Return the answers of some prompts; with a critic, each draft and its revision."""
    drafts = [
        (prompt, number, result, seed)
        for prompt, seeds, results in part
        for number, (seed, result) in enumerate(zip(seeds, results, strict=True))
    ]
    samples = [_sample(*each) for each in drafts]
    if critic is None:
        return samples
    revisions = critic([(prompt, number, result.text) for prompt, number, result, _ in drafts])
    both: list[_Sample] = []
    for (prompt, number, *_), draft, revision in zip(drafts, samples, revisions, strict=True):
        revised = _sample(prompt, number, revision.result, revision.seed)
        more = {"role": "revision", "steps": revision.steps}
        both.append(draft._replace(more={"role": "draft"}))
        both.append(revised._replace(problem=revised.problem or revision.problem, more=more))
    return both


def _sample(
    prompt: CollectPrompt, number: int, result: CompletedRequest | None, seed: int
) -> _Sample:
    if result is None:
        return _Sample(DrawnAnswer(prompt, "", "none", seed, 0), number, None)
    problem = NOT_FINITE if result.reason == "error" else ""
    answer = DrawnAnswer(prompt, result.text, result.reason, seed, len(result.ids))
    return _Sample(answer, number, result, problem)


def _lines(judge: Judge, samples: Sequence[_Sample]) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl of some answers."""
    scores = judge.score([each.answer for each in samples])
    lines = []
    for each, scored in zip(samples, scores, strict=True):
        answer, result = each.answer, each.result
        line = {
            "id": answer.prompt.id,
            "sample": each.number,
            "seed": answer.seed,
            "prompt": answer.prompt.messages,
            "text": answer.text,
            "ids": [] if result is None else [*result.ids],
            "log_probabilities": []
            if result is None
            else [score.log_probability for score in result.scores],
            "reason": answer.reason,
            "score": None if each.problem else scored.score,
            "problem": each.problem or scored.problem,
        }
        lines.append(line | each.more)
    return lines
