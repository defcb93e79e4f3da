"""Evaluate a trained run on its validation sets or on any text."""

import contextlib
import dataclasses
import functools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.core import backend
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.core.mean import Mean
from jaxlm.corpus.config import Perplexity
from jaxlm.corpus.filters.models import Scorer
from jaxlm.data import cache, chat_templates, dataset, parts, records, writer
from jaxlm.data.batch import Tokens
from jaxlm.data.chat_encoder import ChatEncoder
from jaxlm.data.conversations import ChatFields
from jaxlm.data.documents import PROBED_BYTES, Corpus
from jaxlm.data.loader import Loader
from jaxlm.data.mixture_config import Temperature
from jaxlm.data.records import Broken, NoText, ReadBudget
from jaxlm.evals import loss, preference
from jaxlm.objectives import build as objectives
from jaxlm.parallel import host, rules
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.recipes.train import reference, resume
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import load
from jaxlm.recipes.use import verify as answers
from jaxlm.recipes.use.generate import template_of
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.rl.rewards import Rewards
from jaxlm.rl.scoring import PromptScorer, Samplers
from jaxlm.rl.turns import Turns
from jaxlm.training.rundir import IMPORTED


def evaluate(
    workdir: Path,
    *,
    text: Sequence[str] = (),
    sequence: int | None = None,
    batch: int | None = None,
    verify: answers.VerifySettings | None = None,
    adapter: str | None = None,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Return metrics by set under `sets`; those of the ranking set also at the top level.

    Totals are exact: every token counts once. The objective of the run decides what is predicted,
    see `objectives.objective`. A preference run has the figures of its training on its own
    validation sets; on other text, those of tokens alone, as the reference has no scores there. So
    has a run whose reference is its base without the adapter.

    Args:
      workdir: the run.
      text: globs of the text to evaluate on; () means the run's own validation sets. If the first
        record is a conversation, the chat template of the adapter or the run encodes them.
      sequence: length of the rows; None for the run's own.
      batch: rows of a step; by default (None) those of `setup.pass_rows`.
      verify: also generate an answer to each conversation and compare it, under `answers` of a set.
        Then `text` are conversations.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model of the run.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    if verify is not None:
        answers.check_run(workdir, text, adapters.template_folder(adapter))
    reader = adapters.reader(adapter, say)
    opened = load.load_run(workdir, sequence=sequence, adapter=reader, say=say, **selection)
    sequence = checked_length(opened, sequence, say)
    if verify is None:
        folder = adapters.template_folder(adapter)
        sets = measure(opened, open_loaders(opened, text, sequence, say, adapter=folder), batch)
    else:
        verifier = answers.AnswerVerifier(
            opened, workdir, verify, adapters.template_folder(adapter), say
        )
        chat = verifier.encoder(sequence)
        loaders = open_loaders(opened, text, sequence, say, chat)
        asked = verifier.questions(loaders)
        sets = measure(opened, loaders, batch)
        for name, questions in asked.items():
            say(f"answering {len(questions.prompts)} prompts of {name}")
            rows = batch or opened.run.train.batch
            sets[name]["answers"] = verifier.answer(questions, rows)
    return {"step": opened.step, "sequence": sequence} | with_first(opened, text, sets)


def checked_length(opened: LoadedRun, sequence: int | None, say: Log = lambda _: None) -> int:
    """Return the length of rows, by default the run's own. Raises ConfigError if it is too long.

    Log a caution if rows are longer than those that the model was trained for.
    """
    decoder = opened.model.blueprint.config
    length = sequence or opened.run.data.sequence
    limit = opened.model.blueprint.text_positions or length
    if length > limit:
        what = f"rows of {length} tokens are longer than the model's position table"
        why, fix = f"the model has {limit} positions for text", f"--sequence={limit}"
        raise ConfigError(what, where="--sequence", why=why, fix=fix)
    attention_kernels.check_length(opened.model.mesh.shape, decoder, length, flag="--sequence")
    if length > (positions := opened.run.model.max_positions):
        say(f"caution: rows of {length} tokens exceed model.max_positions = {positions}")
    return length


def with_first(opened: LoadedRun, text: Sequence[str], sets: dict[str, Any]) -> dict[str, Any]:
    """Return metrics by set under `sets`, and at the top level those of the set that ranks."""
    first = next(iter(sets)) if text else setup.ranking_set(opened.run, sets)
    assert first is not None  # there is at least one set
    return {**sets[first], "sets": sets}


def measure(
    opened: LoadedRun, loaders: Mapping[str, Loader], batch: int | None = None
) -> dict[str, Any]:
    """Return metrics by set over every token of each, once.

    Args:
      opened: the run.
      loaders: the sets by name, with rows of one length.
      batch: rows of a step, rounded up to what the devices share evenly; None for those of
        `setup.pass_rows`, at most the rows of the largest set.
    """
    mesh = opened.model.mesh
    if backend.name() == "cpu":
        backend.keep_freed_memory()
    if batch is None:
        most = max((each.plan.rows for each in loaders.values()), default=1)
        length = next(iter(loaders.values())).sequence
        batch = setup.pass_rows(opened.run, mesh, sequence=length, most=most)
    else:
        ways = rules.split(mesh, "batch")
        batch = -(-batch // ways) * ways
    sets = dict[str, dict[str, Any]]()
    with jax.set_mesh(mesh):
        table = setup.token_bytes(opened.model, opened.tokenizer)
        chunk = setup.pass_chunk(opened.run)
        prefix = setup.prefix(opened.tokenizer)
        step = jax.jit(loss.build(opened.model.blueprint.merge, table, chunk=chunk, prefix=prefix))
        rows, put = host.host_rows(mesh, batch), functools.partial(host.put, mesh)
        for name, loader in loaders.items():
            if loader.shards.prompts:
                sets[name] = _rewarded(opened, loader)
                continue
            sets[name] = {}
            if not opened.run.objective.has_reward_head:
                batches = loader.evaluation(batch=batch, rows=rows)
                result = loss.evaluate(functools.partial(step, opened.params), batches, put)
                reliability = dataclasses.asdict(result.reliability)
                sets[name] = result.record() | {"reliability": reliability}
            if _is_compared(opened.run, loader):
                batches = loader.evaluation(batch=batch, rows=rows)
                sums = _answer_sums(opened)
                sets[name] |= preference.evaluate(sums, batches, put, has_interval=True)
    return sets


def _rewarded(opened: LoadedRun, loader: Loader) -> dict[str, Any]:
    """Return the figures of samples of prompts, as the run evaluates them."""
    run = opened.run
    longest = run.rl.longest(loader.shards.manifest.figures["longest"], run.data.sequence)
    with contextlib.ExitStack() as stack:
        rewards, turns = stack.enter_context(Rewards(run.reward)), None
        if run.rl.turns > 1:
            template = loader.shards.template
            turns = Turns(run.rl, run.reward, opened.tokenizer, template, longest)
            stack.enter_context(turns)
        model = opened.model.blueprint, opened.tokenizer
        samplers = Samplers.of(*model, run.rl, rows=run.train.batch, longest=longest)
        scorer = PromptScorer(samplers, opened.tokenizer, rewards, turns)
        samples = run.rl.held_out_samples
        return scorer.evaluate(opened.params, loader, None, samples=samples, seed=run.seed)


def _is_compared(run: Run, loader: Loader) -> bool:
    """Return whether the figures of a preference are known: the scores of its reference are."""
    objective = run.objective
    if not objective.compares_answers or not loader.shards.manifest.answers:
        return False
    return objective.compared_with is None or loader.reference is not None


def _answer_sums(opened: LoadedRun) -> Callable[[Tokens], dict[str, Mean]]:
    """Return the function of a batch of answers to the metrics of the run's objective."""
    run, merge = opened.run, opened.model.blueprint.merge
    objective = objectives.build(run.objective, run.loss, run.architecture)
    sums = jax.jit(lambda params, batch: objective.loss(merge(params), batch, None).metrics)
    return functools.partial(sums, opened.params)


def _chat_encoder(
    opened: LoadedRun, text: Sequence[str], sequence: int, adapter: Path | None, say: Log
) -> ChatEncoder | None:
    """Return the encoding of other text that begins with a conversation; None for plain text.

    Without a chat template, or if the run has records of another form, other text is plain text.

    Args:
      opened: the run.
      text: globs of other text.
      sequence: length of the rows.
      adapter: the folder with the chat template of an adapter; None without one.
      `say`: receives log lines.
    """
    run, form = opened.run, opened.run.data.chat
    is_causal = run.objective.prompts != "none" and run.architecture == "decoder"
    folders = [each for each in (adapter, opened.workdir / chat_templates.HUB) if each is not None]
    has_template = any(chat_templates.of_folder(folder) is not None for folder in folders)
    is_other_form = form is not None and form.kind not in ("chat", "completion")
    if not text or not is_causal or not has_template or is_other_form:
        return None
    corpus = Corpus.find(tuple(text), run.data.text_key, "--text")
    place = corpus.files[0], corpus.names[0], corpus.text_key
    first = next(records.read(*place, Counter(), ReadBudget(1, PROBED_BYTES)), None)
    error = first.error if isinstance(first, Broken) else None
    if not isinstance(error, NoText):
        return None
    if not (error.is_conversation or (error.is_mapped and run.data.fields)):
        return None
    template = template_of(opened.workdir, adapter, say)
    say(f"the text is conversations, which are read by {template.where}")
    return answers.encoder_of(opened, template, sequence)


def _fix_of_run(opened: LoadedRun, error: DataError) -> str:
    """Return what replaces a fix that sets how records are read: a run has its own settings."""
    if not (isinstance(error, NoText) and error.is_conversation):
        key = opened.run.data.text_key
        return f"name files with one JSON object a line, whose text is in {key!r}"
    if chat_templates.of_folder(opened.workdir / chat_templates.HUB) is not None:
        return "name files of text: the run has records of another form than conversations"
    return "name files of text: the run has no chat template, which conversations need"


def open_loaders(
    opened: LoadedRun,
    text: Sequence[str],
    sequence: int,
    say: Log,
    chat: ChatEncoder | None = None,
    adapter: Path | None = None,
) -> dict[str, Loader]:
    """Return the validation sets of a run, or those of other text, in rows of a length.

    Args:
      opened: the run.
      text: globs of other text; () means the run's own validation sets.
      sequence: length of the rows.
      `say`: receives log lines.
      chat: the encoding of other text, which is conversations. By default (None) those are read by
        the chat template of the adapter or the run if the first record is one.
      adapter: the folder with the chat template of an adapter; None without one.
    """
    run = opened.run
    if text and run.objective.has_reward_head:
        raise ConfigError(
            "a reward model has no loss of text",
            where=f"--text={text[0]}",
            why="it scores answers, and is evaluated on pairs",
            fix=f"jaxlm eval --workdir={shlex.quote(str(opened.workdir))}    # its own pairs",
        )
    if text:
        chat = chat or _chat_encoder(opened, text, sequence, adapter, say)
        fields = None if chat is None else run.data.chat or ChatFields("chat")
        corpus = Corpus.find(tuple(text), run.data.text_key, "--text", chat=fields)
        if chat is not None:
            parts.probe(corpus, "--text")
        read = objectives.build(run.objective, run.loss, run.architecture).prepare
        options = opened.tokenizer, sequence, read, cache.default(), say, chat
        try:
            return dataset.text_loaders(corpus, *options)
        except DataError as error:
            if error.fix == writer.EMPTY_CHAT:
                error.fix = f"--sequence={2 * sequence}    # if they are longer than a row"
            elif error.fix.startswith("--config."):
                error.fix = _fix_of_run(opened, error)
            raise
    if names_no_data(opened):
        say("the text is Python's own library, as no data is named; --text=GLOB names other text")
    # Mixture weights do not matter for validation sets, and other lengths change the row counts.
    data = dataclasses.replace(run.data, sequence=sequence, mixture=Temperature())
    changed = dataclasses.replace(run, data=data)
    opened_data = setup.open_data(changed, workdir=opened.workdir, say=say, warn=say)
    fix = "name the text to evaluate on with --text"
    if opened_data.tokenizer.digest != opened.tokenizer.digest:
        what = "the run's data now gives another tokenizer than the one it was trained with"
        why = "files behind data.train have changed since then"
        raise ConfigError(what, where="data.tokenizer", why=why, fix=fix)
    if not opened_data.validation:
        what, why = "the run has no validation set", "it was trained with data.validation = ()"
        raise ConfigError(what, where="data.validation", why=why, fix=fix)
    if sequence == run.data.sequence:
        _warn_of_other_sets(opened.workdir, opened_data, say)
    if run.objective.compares_answers:
        scores = reference.read_stored(opened.workdir, changed, opened_data)
        if scores is not None:
            opened_data = reference.with_scores(opened_data, scores)
        elif run.objective.compared_with is not None:
            say("no figures of preferences: there are no scores of a reference for these rows")
    return opened_data.validation


def check_texts(opened: LoadedRun, loaders: Mapping[str, Loader]) -> None:
    """Raise ConfigError if the sets are prompts, which have no tokens to predict."""
    if any(each.shards.prompts for each in loaders.values()):
        raise ConfigError(
            "the validation sets are prompts, whose tokens are not predicted",
            where=f"--workdir={opened.workdir}",
            why=f"its objective {opened.run.objective.name} samples answers to them",
            fix="--text='texts/*.txt'",
        )


def _warn_of_other_sets(workdir: Path, data: dataset.Data, say: Log) -> None:
    """Log each validation set whose tokens are not those of the run's training."""
    trained = resume.trained_on(workdir)
    for name in data.validation:
        key = f"validation.{name}"
        if key in trained and trained[key] != data.fingerprint.get(key):
            say(
                f"caution: {name} is not the set of the training: its tokens differ. Files of "
                f"data.train or data.validation have changed, or {Path.cwd()} has others of the "
                "same names"
            )


def names_no_data(opened: LoadedRun) -> bool:
    """Return True if a model was imported without data of its own."""
    return opened.run.data.train == ("stdlib:train",) and (opened.workdir / IMPORTED).exists()


def scorer(config: Perplexity) -> Scorer:
    """Return a function for a filter of a data recipe: the perplexity of a text under a run.

    Perplexity is exp of the mean of -log p over the first tokens of the text, in rows. A row holds
    as many tokens as the run's own; each token is predicted from those before it in its row. The
    scores are the same in every process on one kind of device. Raises InputMissing if the run has
    no checkpoint, ConfigError if its model is bidirectional, and so has no perplexity.
    """
    opened = load.load_run(Path(config.run))
    if opened.run.objective.prompts == "none" or opened.run.architecture == "encoder-decoder":
        what, where = "a bidirectional model has no perplexity", f"perplexity.run={config.run}"
        why = f"its objective.name is {opened.run.objective.name}"
        fix = "name a run whose objective.name is causal"
        raise ConfigError(what, where=where, why=why, fix=fix)
    mesh = opened.model.mesh
    batch, length = rules.split(mesh, "batch"), opened.run.data.sequence
    table = setup.token_bytes(opened.model, opened.tokenizer)
    chunk = setup.pass_chunk(opened.run)
    step = jax.jit(loss.build(opened.model.blueprint.merge, table, chunk=chunk))
    rows_of = functools.partial(_rows, batch=batch, length=length)

    def score(text: str) -> float | None:
        ids = [*opened.tokenizer.before, *opened.tokenizer.encode(text)][: config.tokens]
        nll = weight = 0.0
        with jax.set_mesh(mesh):
            for rows in rows_of(np.array(ids, np.int32), pad=opened.tokenizer.pad):
                sums = step(opened.params, host.put(mesh, rows))
                nll, weight = nll + float(sums.nll), weight + float(sums.weight)
        # e^709 is the limit of float64.
        return math.exp(min(nll / weight, 700.0)) if weight else None

    return score


def _rows(ids: np.ndarray, *, batch: int, length: int, pad: int) -> list[Tokens]:
    """Return batches in which each token but the first is a target once."""
    count = max(0, len(ids) - 1)
    size = batch * length
    batches = []
    for begin in range(0, count, size):
        filled = min(size, count - begin)
        tokens, targets = np.full(size, pad, np.int32), np.full(size, pad, np.int32)
        tokens[:filled] = ids[begin : begin + filled]
        targets[:filled] = ids[begin + 1 : begin + filled + 1]
        is_filled, slots = np.arange(size) < filled, np.tile(np.arange(length), batch)
        weights, segments = is_filled.astype(np.float32), is_filled.astype(np.int32)
        fields = (tokens, targets, weights, segments, slots.astype(np.int32))
        # NumPy until it is placed on devices.
        shaped: Any = (field.reshape(batch, length) for field in fields)
        batches.append(Tokens(*shaped))
    return batches
