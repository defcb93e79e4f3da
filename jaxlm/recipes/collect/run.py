"""Collect answers of a run to prompts, with scores: samples, the best ones, or pairs.

The folder has `collect.json`, which identifies the collection; `samples.jsonl`, from which the same
command resumes; and, at the end, `kept.jsonl`, which a run trains on.
"""

import dataclasses
import itertools
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxlm.checkpoint import object_store
from jaxlm.core import disk
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError, cannot_write
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals.samples import SAMPLES, Samples, read
from jaxlm.generate.engine import Delta, Engine, Request, Result, joined
from jaxlm.generate.rows import Sampling
from jaxlm.monitor import sinks
from jaxlm.recipes.collect import judges, keeping, prompts
from jaxlm.recipes.collect.judges import Answer, Judge
from jaxlm.recipes.collect.prompts import Prompt
from jaxlm.recipes.rate.texts import TextPair
from jaxlm.recipes.use import generate, load
from jaxlm.recipes.use.load import InitSource, LoadedRun
from jaxlm.rl.rewards import check_scored

FACTS, KEPT = "collect.json", "kept.jsonl"
VERSION = 1  # of samples.jsonl
BLOCK = 64  # samples that are scored and written at a time, at least
TOO_LONG = "longer than the context"
NOT_FINITE = "its logits were not finite"

Keep = Literal["best", "pairs", "all"]
Pairs = Literal["best", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectSettings:
    """Settings of the draws, of the scores, and of the records that are kept.

    Args:
      prompts: globs of files of prompts, see `prompts.read`.
      judge: see `judges.build`.
      samples: answers to each prompt.
      keep: `all` samples, the `best` answer of each prompt, or `pairs` of answers.
      pairs: the best and the worst answer of a prompt, or `all` pairs of different scores.
      max_tokens: largest number of tokens of an answer.
      temperature: of the draws.
      seed: of the draws.
      is_chat: a prompt that is a text is the message of a user.
      slots: answers that are drawn at a time.
    """

    prompts: tuple[str, ...]
    judge: str
    samples: int = 8
    keep: Keep = "best"
    pairs: Pairs = "best"
    max_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    is_chat: bool = False
    slots: int = 16


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
    judges.check_samples(judge, settings.samples)
    judges.check_answers(judge, settings.judge, asked, settings.prompts)
    opened = load.load_run(workdir, say=say, **selection)
    generate.check_generates(opened, is_chat=False)
    facts = _facts(opened, settings, judge, asked, str(selection.get("weights", "raw")))
    _check_folder(out, facts)
    ids = _encoded(opened, asked, say)
    context = min(opened.run.data.sequence, opened.model.blueprint.text_positions or 2**31)
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
        _collect(opened, settings, judge, fitting, samples, say)
        records = keeping.select(samples.lines, settings.keep, settings.pairs, left_out)
        _write(out / KEPT, "".join(map(sinks.line, records)).encode())
        scores = [each["score"] for each in samples.lines if each["score"] is not None]
        return {
            "out": str(out),
            "step": opened.step,
            "prompts": len(fitting),
            "samples": len(samples.lines),
            "unscored": len(samples.lines) - len(scores),
            "mean_score": sum(scores) / len(scores) if scores else None,
            "keep": settings.keep,
            "kept": len(records),
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


def _facts(
    opened: LoadedRun,
    settings: CollectSettings,
    judge: Judge,
    asked: Sequence[Prompt],
    weights: str,
) -> dict[str, Any]:
    """Return what determines the samples; `keep` does not."""
    source = InitSource(opened.run, object_store.of_run(opened.workdir), opened.step)
    free = ("prompts", "keep", "pairs")
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
            fix=f"--out={out}-2",
        )


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(file, content)
    except OSError as error:
        raise cannot_write(file.name, file, error, fix="--out=another/place") from error


def _encoded(opened: LoadedRun, asked: Sequence[Prompt], say: Log) -> list[list[int]]:
    """Return the ids of each prompt: of text, or of messages by the template of the run."""
    tokenizer: Tokenizer = opened.tokenizer
    texts = [each.messages for each in asked if isinstance(each.messages, str)]
    chats = [each.messages for each in asked if not isinstance(each.messages, str)]
    plain = iter([[*tokenizer.before, *ids] for ids in tokenizer.encode_many(texts)])
    rendered: Iterator[list[int]] = iter(())
    if chats:
        template = generate.template_of(opened.workdir, say=say)
        rendered = iter(ChatTokenizer(tokenizer, template).encode_chats(chats))
    return [next(plain if isinstance(each.messages, str) else rendered) for each in asked]


def _collect(
    opened: LoadedRun,
    settings: CollectSettings,
    judge: Judge,
    fitting: Sequence[tuple[Prompt, list[int]]],
    samples: Samples,
    say: Log,
) -> None:
    """Draw and score the samples that are not on disk yet, in the order of the prompts."""
    total, block = len(fitting) * settings.samples, -(-BLOCK // settings.samples)
    if len(samples.lines) == total:
        return
    say(f"{total:,} samples of {len(fitting):,} prompts, {len(samples.lines):,} on disk")
    # A block that was cut is drawn again as a whole: a judge gives the same bits to the same batch.
    done = len(samples.lines) // settings.samples // block * block
    known = samples.lines[done * settings.samples :]
    with jax.set_mesh(opened.model.mesh):
        drawn = _drawn(opened, settings, fitting, done)
        while part := list(itertools.islice(drawn, block)):
            lines = _lines(settings, judge, part)
            samples.append(lines[len(known) :])
            known = known[len(lines) :]
            check_scored(
                [
                    (each["problem"], _text(each["prompt"]))
                    for each in samples.lines
                    if each["problem"]
                ],
                total,
                judges.FAILURES,
                where=f"--judge={settings.judge}",
                limit="a collection",
                fix="correct the prompts and the judge, then write to another folder",
            )


def _drawn(
    opened: LoadedRun,
    settings: CollectSettings,
    asked: Sequence[tuple[Prompt, list[int]]],
    done: int,
) -> Iterator[tuple[Prompt, list[Result]]]:
    """Yield each prompt but the first `done` with its answers; later ones are drawn meanwhile."""
    tokenizer: Tokenizer = opened.tokenizer
    ends = tuple(tokenizer.ends)
    if any(not isinstance(prompt.messages, str) for prompt, _ in asked):
        template = generate.template_of(opened.workdir)
        ends = tuple(ChatTokenizer(tokenizer, template).ends)
    longest = max(len(ids) for _, ids in asked) + settings.max_tokens
    engine = Engine(
        opened.model.blueprint,
        opened.params,
        tokenizer,
        rows=settings.slots,
        context=longest,
        prefix_bytes=2**28,
    )
    sampling = Sampling(temperature=settings.temperature)
    waiting = deque(asked[done:])
    running: deque[tuple[Prompt, list[list[Delta]]]] = deque()
    try:
        while waiting or running:
            while waiting and engine.waiting < settings.slots:
                prompt, ids = waiting.popleft()
                answers: list[list[Delta]] = [[] for _ in range(settings.samples)]
                for number, parts in enumerate(answers):
                    request = Request(
                        ids=tuple(ids),
                        max_tokens=settings.max_tokens,
                        sampling=sampling,
                        seed=prompt.seed(settings.seed, number),
                        ends=ends,
                        top=0,
                    )
                    engine.submit(request, parts.append)
                running.append((prompt, answers))
            while running and all(parts and parts[-1].reason for parts in running[0][1]):
                prompt, answers = running.popleft()
                yield prompt, [joined(parts) for parts in answers]
            if running:
                engine.advance()
                if engine.failure is not None:
                    raise engine.failure
    finally:
        engine.close()


def _lines(
    settings: CollectSettings, judge: Judge, part: Sequence[tuple[Prompt, list[Result]]]
) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl of some prompts."""
    answers = [
        Answer(prompt, each.text, each.reason, prompt.seed(settings.seed, number), len(each.ids))
        for prompt, results in part
        for number, each in enumerate(results)
    ]
    results = [each for _, drawn in part for each in drawn]
    return [
        {
            "id": answer.prompt.id,
            "sample": number % settings.samples,
            "seed": answer.seed,
            "prompt": answer.prompt.messages,
            "text": answer.text,
            "ids": [*result.ids],
            "log_probabilities": [each.log_probability for each in result.scores],
            "reason": answer.reason,
            "score": None if answer.reason == "error" else scored.score,
            "problem": NOT_FINITE if answer.reason == "error" else scored.problem,
        }
        for number, (answer, result, scored) in enumerate(
            zip(answers, results, judge.score(answers), strict=True)
        )
    ]
