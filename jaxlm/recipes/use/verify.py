"""Answers of a run to the prompts of its conversations, compared with the references."""

import dataclasses
import functools
import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import chat_templates, parts
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_encoder import ChatEncoder
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.loader import Loader
from jaxlm.data.records import MENDED
from jaxlm.evals import verify
from jaxlm.evals.tasks.answers import asks_of
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.continuer import Ask, Continuer, sizes_of
from jaxlm.generate.sampler import Continuation
from jaxlm.parallel import rules
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use.generate import template_of
from jaxlm.recipes.use.load import LoadedRun, read_config

# Reasons to leave a conversation out, besides those for which it has no tokens.
TOO_LONG = "with a prompt longer than the context minus max_tokens"
NO_TEXT = "without a prompt and an answer of text"
NO_NUMBER = "without a number in the answer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """Comparison of answers, and how they are drawn."""

    check: verify.Check
    samples: int = 0  # of each prompt, at temperature 1
    prompts: int | None = None  # of each set; None for all
    max_tokens: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Questions:
    """Prompts of a set as ids, their references, and the conversations left out by reason."""

    prompts: list[list[int]]
    references: list[str]
    left_out: Counter[str]


def check_run(workdir: Path, text: Sequence[str], adapter: Path | None = None) -> None:
    """Raise ConfigError if a run cannot answer, or has no conversations and no template for `text`.

    Args:
      workdir: the run.
      text: globs of other conversations.
      adapter: the folder with the chat template of an adapter; None without one.
    """
    run = read_config(workdir)
    what, fix = "this run has no answers to verify", _without(workdir)
    if run.objective.prompts == "none" or run.architecture == "encoder-decoder":
        where = f"objective.name={run.objective.name}"
        why = f"{run.model.family} does not continue a conversation"
        raise ConfigError(what, where=where, why=why, fix=fix)
    folders = [each for each in (adapter, workdir / chat_templates.HUB) if each is not None]
    has_template = any(chat_templates.of_folder(folder) is not None for folder in folders)
    if not run.data.has_chats and not (text and has_template):
        why = "it was trained on text, not on conversations"
        if text:
            why = f"{why}, and has no chat template"
        raise ConfigError(what, where="data.kind=text", why=why, fix=fix)


def _without(workdir: Path) -> str:
    return f"jaxlm eval --workdir={shlex.quote(str(workdir))}    # without answers"


def encoder_of(opened: LoadedRun, template: ChatTemplate, sequence: int) -> ChatEncoder:
    """Return the encoding of other conversations than those of a run, in rows of a length."""
    data = opened.run.data
    return ChatEncoder(opened.tokenizer, template, sequence, data.overlong, data.max_dropped)


class AnswerVerifier:
    """Answers of a run to the prompts of conversations, each a beginning of the ids trained on.

    Args:
      opened: the run.
      workdir: its directory.
      settings: the comparison.
      adapter: the folder with the chat template of an adapter; None without one.
      `say`: receives log lines.
    """

    def __init__(
        self,
        opened: LoadedRun,
        workdir: Path,
        settings: VerifySettings,
        adapter: Path | None = None,
        say: Log = lambda _: None,
    ):
        self._opened, self._workdir, self._settings = opened, workdir, settings
        self._template = template_of(workdir, adapter, say)
        self._tokenizer = ChatTokenizer(opened.tokenizer, self._template)

    def encoder(self, sequence: int) -> ChatEncoder:
        """Return the encoding of other conversations, in rows of a length."""
        return encoder_of(self._opened, self._template, sequence)

    def questions(self, loaders: Mapping[str, Loader]) -> dict[str, Questions]:
        """Return the prompts of each set of conversations; text has none.

        Raises:
          ConfigError: if every prompt of a set is too long.
          DataError: if a set has no answers, or was encoded by another template.
        """
        chats = {name: each for name, each in loaders.items() if each.shards.manifest.template}
        return {name: self._questions(name, each) for name, each in (chats or loaders).items()}

    def _questions(self, name: str, loader: Loader) -> Questions:
        shards, settings = loader.shards, self._settings
        template = shards.template
        if template is None or not chat_templates.is_same(template, self._template):
            raise DataError(
                "the conversations have another chat template than the run",
                where=shards.source,
                why=f"the run was trained with {self._template.where}",
                fix="restore the file that data.template names",
            )
        known = {*parts.ELSEWHERE, *MENDED}
        left_out = Counter({r: n for r, n in shards.manifest.left_out.items() if r not in known})
        positions = self._opened.model.blueprint.text_positions
        asked = Questions([], [], left_out)
        shortest = None
        documents = min(shards.documents, settings.prompts or shards.documents)
        for document, length in enumerate(shards.lengths(0, documents)):
            ids = shards.read(document, 0, int(length))
            weights = np.broadcast_to(shards.weights(document, 0, int(length)), ids.shape)
            start, text = verify.last_turn(
                ids, weights, self._tokenizer.ends, self._tokenizer.table
            )
            if not start or not text:
                left_out[NO_TEXT] += 1
            elif settings.check == "number" and verify.last_number(text) is None:
                left_out[NO_NUMBER] += 1
            elif positions is not None and start > positions - settings.max_tokens:
                left_out[TOO_LONG] += 1
                shortest = min(start, shortest or start)
            else:
                asked.prompts.append(ids[:start].tolist())
                asked.references.append(text)
        if asked.prompts:
            return asked
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        if shortest is not None and positions is not None and shortest < positions:
            raise ConfigError(
                f"no prompt of {name} and its answer fit in the context",
                where="--max_tokens",
                why=f"the model has {positions} positions: {why}",
                fix=f"--max_tokens={positions - shortest}",
            )
        raise DataError(
            f"no conversation of {name} has an answer to verify",
            where=f"--verify={settings.check}",
            why=f"left out: {why}",
            fix="--verify=exact" if settings.check == "number" else _without(self._workdir),
        )

    def answer(self, asked: Questions, batch: int) -> dict[str, Any]:
        """Return the scores of greedy answers and of samples.

        Args:
          asked: the prompts of a set.
          batch: rows of a step; it does not change the answers.
        """
        settings, prompts, samples = self._settings, asked.prompts, self._settings.samples
        asks = [
            ask
            for number, ids in enumerate(prompts)
            for ask in asks_of(ids, str(number), settings.seed, samples, 1.0)
        ]
        texts = iter(self._texts(asks, batch))
        answers = [[*itertools.islice(texts, 1 + samples)] for _ in prompts]
        sampled = None
        if samples:
            drawn = self._score(asked, [each[1:] for each in answers])
            sampled = {"samples": samples, **drawn._asdict()}
        return {
            "verify": settings.check,
            "prompts": len(prompts),
            "max_tokens": settings.max_tokens,
            "greedy": self._score(asked, [each[:1] for each in answers])._asdict(),
            "sampled": sampled,
            "left_out": dict(asked.left_out),
        }

    def _texts(self, asks: Sequence[Ask], batch: int) -> list[Continuation]:
        """Return the continuation of each prompt, at most `batch` at a time."""
        opened, tokens = self._opened, self._settings.max_tokens
        lengths = [len(ask.ids) for ask in asks]
        with jax.set_mesh(opened.model.mesh):
            ways = rules.split(jax.sharding.get_abstract_mesh(), "batch")
            sizes = sizes_of(lengths, tokens, -(-min(batch, len(asks)) // ways))
            limits = GenerateConfig(prompts=(), max_tokens=tokens)
            model = opened.model.blueprint, self._tokenizer
            both_ways = opened.run.objective.prompts == "both ways"
            continuer = Continuer(*model, sizes, limits, both_ways=both_ways)
            explain = functools.partial(oom.texts_error, longest=max(lengths), fewer="--batch={}")
            decoder = opened.model.blueprint.config
            with oom.explain_engine_oom(opened.run, decoder, sizes, None, explain):
                return continuer.texts(opened.params, asks)

    def _score(self, asked: Questions, answers: Sequence[Sequence[Continuation]]) -> verify.Score:
        """Return the score of as many answers to each prompt."""
        matches = [
            [verify.is_match(self._settings.check, each.text, reference) for each in drawn]
            for drawn, reference in zip(answers, asked.references, strict=True)
        ]
        ended = [[each.finish_reason == "eos_token" for each in drawn] for drawn in answers]
        has_marks = any(verify.MARK in reference for reference in asked.references)
        marked = [[verify.MARK in each.text for each in drawn] for drawn in answers]
        return verify.score(
            np.array(matches), np.array(ended), np.array(marked) if has_marks else None
        )
