"""Scores of a run on tasks, with samples and results in its `evals` folder."""

import array
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.core.callbacks import Log
from jaxlm.core.config import to_json
from jaxlm.core.errors import ConfigError, DataError, Diverged, cannot_keep
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.evals import code
from jaxlm.evals import samples as files
from jaxlm.evals.tasks import answers, config, items, packing, requests, results, scoring
from jaxlm.evals.tasks.answers import Writer
from jaxlm.evals.tasks.config import Answer, Form, Prompted, Task, Text
from jaxlm.evals.tasks.requests import Prompter, Question
from jaxlm.evals.tasks.scoring import Scorer
from jaxlm.models.build import Blueprint
from jaxlm.models.config import ModelConfig
from jaxlm.monitor import sinks
from jaxlm.parallel import rules
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import load
from jaxlm.recipes.use.evaluate import checked_length
from jaxlm.recipes.use.generate import template_of
from jaxlm.training.lock import Lock

EVALS = "evals"  # folder of a run
TASK, RESULTS = "task.json", "results.json"
TOO_LONG = "too long"
INVALID = "not valid"
ENCODED_AT_ONCE = 1000  # items
SHOWN = 3  # items in an error
SEQUENCE = "--sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of the evaluation of tasks that are no part of a task file.

    Args:
      shots: examples before each item.
      form: text of the choices, or letters, for tasks of choices.
      limit: items of each task, drawn by a fixed hash of their ids; None for all.
      too_long: refuse a task with an item that does not fit a row, or skip such items.
      seed: seed of the draw of examples.
      is_chat: make each context a user's turn by the chat template of the run.
      allow_code: run the programs of tasks that have some.
    """

    shots: int = 0
    form: Form = "cloze"
    limit: int | None = None
    too_long: Literal["refuse", "skip"] = "refuse"
    seed: int = 0
    is_chat: bool = False
    allow_code: bool = False


def evaluate_tasks(
    workdir: Path,
    tasks: Sequence[str],
    settings: TaskSettings,
    *,
    sequence: int | None = None,
    batch: int | None = None,
    adapter: str | None = None,
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Return the results of each task by name under `tasks`, and the step.

    Samples are appended to a folder of `workdir/evals` while they are computed; the same call
    resumes from there.

    Args:
      workdir: the run.
      tasks: task files.
      settings: examples, form and limits.
      sequence: length of the rows; None for the run's own.
      batch: rows of a pass of scored items, see `Scorer`.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model of the run.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    read = read_tasks(tasks)
    for task in read:
        check_code(task, settings)
    if settings.allow_code:
        files = "its own" if code.namespaces() else "yours: namespaces are not permitted"
        say(f"each program that the model writes runs with limits, and its files are {files}")
    check_causal(workdir)
    reader = adapters.reader(adapter, say)
    opened = load.load_run(workdir, sequence=sequence, adapter=reader, say=say, **selection)
    length = checked_length(opened, sequence, say)
    template = None
    if settings.is_chat:
        template = template_of(workdir, adapters.template_folder(adapter), say)
    tokenizers = Tokenizers.of(opened.tokenizer, template)
    rows = ModelRows(length, opened.model.mesh, opened.model.blueprint.config)
    prepared = [PreparedTask(each, settings, tokenizers, rows) for each in read]
    if batch and any(isinstance(each.kind, Answer) for each in read):
        say(f"a device writes {answers.ROWS} answers at a time, for any --batch")
    scored = score_tasks(opened, prepared, workdir, say, batch=batch)
    return {"step": opened.step, "sequence": length, "tasks": scored}


def score_tasks(
    opened: load.LoadedRun,
    prepared: Sequence["PreparedTask"],
    place: Path,
    say: Log,
    *,
    batch: int | None = None,
) -> dict[str, Any]:
    """Return the results of each task by name.

    Args:
      opened: the run.
      prepared: the tasks.
      place: directory whose folder `evals` has the results, see `run_task`.
      `say`: receives log lines.
      batch: rows of a pass of scored items, see `Scorer`.
    """
    both_ways = opened.run.objective.prompts == "both ways"
    of_tasks = scorers(prepared, opened.model.blueprint, batch, both_ways=both_ways)
    with jax.set_mesh(opened.model.mesh):
        model = ScoredModel(
            params=opened.params,
            precision=to_json(opened.run.precision),
            step=opened.step,
            digest=scoring.weights_digest(opened.params),
        )
        scored = {}
        for each, scorer in zip(prepared, of_tasks, strict=True):
            with _explained(opened, each, scorer):
                scored[each.task.name] = run_task(each, scorer, model, place, say=say)
        return scored


def _explained(
    opened: load.LoadedRun, prepared: "PreparedTask", scorer: Scorer | Writer
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which answers beyond the memory raise OutOfMemory with a fix."""
    if isinstance(scorer, Scorer):
        return contextlib.nullcontext()
    sizes = scorer.sizes
    explain = functools.partial(
        oom.texts_error,
        longest=sizes.context - scorer.max_tokens,
        fewer="",
        shorter=f"max_tokens = {{}}    # in {prepared.task.path}",
    )
    decoder = opened.model.blueprint.config
    return oom.explain_engine_oom(opened.run, decoder, sizes, None, explain)


def scorers(
    prepared: Sequence["PreparedTask"],
    blueprint: Blueprint,
    batch: int | None = None,
    *,
    both_ways: bool = False,
) -> list[Scorer | Writer]:
    """Return the scorer of each task of a model, which is the same object, or its writer.

    Args:
      prepared: the tasks, prepared for one model and one length of rows.
      blueprint: the model.
      batch: rows of a pass of scored items, see `Scorer`.
      both_ways: the model reads a prompt that it answers in both directions.
    """
    first = prepared[0]
    shared = Scorer(blueprint.merge, first.mesh, first.pad, is_shared=first.is_shared, batch=batch)
    return [each.writer(blueprint, both_ways=both_ways) or shared for each in prepared]


def read_tasks(paths: Sequence[str], flag: str = "--tasks") -> list[Task]:
    """Return the tasks of some files; `flag` names them, for errors.

    Raises ConfigError if two have one name.
    """
    tasks = [config.read(Path(path), flag) for path in paths]
    names = [task.name for task in tasks]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"two tasks have the name {repeated}",
            where=f"{flag}={','.join(paths)}",
            why="results are stored by the name of their task",
            fix="write another name into one of the files",
        )
    return tasks


def check_code(task: Task, settings: TaskSettings) -> None:
    """Raise ConfigError if a task runs programs and that is not allowed."""
    if isinstance(task.kind, Answer) and task.kind.program_end and not settings.allow_code:
        raise ConfigError(
            f"the task {task.name} runs programs that the model writes",
            where=f"{task.path}, program_end",
            why="they can read and change the files of the user who runs them",
            fix="--allow_code    # of jaxlm eval; training runs no programs",
        )


def check_causal(workdir: Path) -> None:
    """Raise ConfigError if the model of a run has no log-likelihood of a text."""
    run = load.read_config(workdir)
    if run.objective.prompts != "none" and run.architecture != "encoder-decoder":
        return
    raise ConfigError(
        "this run cannot be scored on tasks",
        where=f"objective.name={run.objective.name}",
        why=f"{run.model.family} does not predict each token of a text from those before it",
        fix=f"jaxlm eval --workdir={shlex.quote(str(workdir))}    # on its validation sets",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """Parameters that are scored, and everything by which their results are stored."""

    params: Any
    precision: dict[str, Any]
    step: int
    digest: str


class Tokenizers(NamedTuple):
    """The tokenizer of a run, that of its chat, and the digest of its template, if it is used."""

    text: Tokenizer
    chat: ChatTokenizer | None = None
    template: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> "Tokenizers":
        """Return the tokenizers of a run; without a template there is no chat."""
        if template is None:
            return cls(tokenizer)
        return cls(tokenizer, ChatTokenizer(tokenizer, template), chat_templates.digest(template))


class ModelRows(NamedTuple):
    """Rows that a model reads: their length in tokens, and what reads them.

    `mesh` is that of the parameters, `model` has the attention kernels of its layers, and errors
    name `length_flag` as the setting of the length.
    """

    length: int
    mesh: Mesh
    model: ModelConfig
    length_flag: str = SEQUENCE


class PreparedTask:
    """A task whose items were read, encoded and checked: all that does not depend on weights.

    Args:
      task: the task.
      settings: examples, form and limits.
      tokenizers: the tokenizers of the run.
      rows: the rows that the model reads.
      stored: the items of the task, if they were read before.

    Attributes:
      shape: shape of the rows.
      tokens: tokens that the model reads, and three for each that it may write, which costs as
        much as one of training.

    Raises:
      DataError: if an item is not valid.
      ConfigError: if an item is too long, or all are, or the task runs programs that are not
        allowed.
    """

    def __init__(
        self,
        task: Task,
        settings: TaskSettings,
        tokenizers: Tokenizers,
        rows: ModelRows,
        stored: items.StoredItems | None = None,
    ):
        check_code(task, settings)
        self.task, self._settings, self.mesh, self._rows = task, settings, rows.mesh, rows
        self._tokenizers, tokenizer = tokenizers, tokenizers.text
        self.pad = tokenizer.pad
        self._classifier = task.classifier()
        self._every = items.StoredItems(task, task.file) if stored is None else stored
        chosen = self._every.limited(settings.limit)
        pool = self._pool() if settings.shots else []
        self.prompter = Prompter(
            task,
            tokenizer,
            requests.Examples(pool, settings.shots, settings.seed),
            form=settings.form,
            chat=tokenizers.chat,
        )
        length, parts = rows.length, rules.split(rows.mesh, "length")
        self.is_shared = packing.is_shareable(rows.model, length, parts)
        sizes, longest = array.array("q"), array.array("q")  # of a few numbers an item
        totals = packing.Sizes()
        more = task.kind.max_tokens if isinstance(task.kind, Answer) else 0
        drawn = task.kind.samples if isinstance(task.kind, Answer) else 0
        for first in range(0, len(chosen), ENCODED_AT_ONCE):
            part = chosen[first : first + ENCODED_AT_ONCE]
            asked = self.prompter.questions([self._every[n] for n in part])
            if not first:
                self.first = asked[0].requests[0]
            for each in asked:
                longest.append(each.longest + more)
                is_read = isinstance(task.kind, Text) or longest[-1] <= length
                sizes.append(sum(map(totals.add, self._groups(each))) if is_read else 0)
        lengths = np.asarray(longest)
        is_scored = (lengths <= length) | isinstance(task.kind, Text)
        self._check_length(chosen, lengths, is_scored)
        self._scored = chosen[is_scored]
        self._lengths = (lengths[is_scored] - more + 1).tolist()  # of prompts: the last id is read
        self.left_out = {
            TOO_LONG: len(chosen) - len(self._scored),
            INVALID: self._every.left_out,
        }
        self.tokens = sum(sizes) + 3 * more * (1 + drawn) * len(self)
        self.shape = totals.shape(length, parts)
        self.blocks = requests.blocks(np.asarray(sizes)[is_scored], scoring.BLOCK_TOKENS)
        self._first_text = tokenizer.decode(self.first.ids)
        definition = {
            "task": task.definition(),
            "items": items.digest(self.scored_items()),
            "examples": items.digest(pool),
            "settings": dataclasses.asdict(settings),
            "tokenizer": tokenizer.digest,
            "template": tokenizers.template,
            "rows": [*self.shape, self.is_shared],
        }
        if self._classifier is not None:
            weights = self._classifier[0].weights.tobytes()
            definition["classifier"] = hashlib.sha256(weights).hexdigest()
        self.definition = json.loads(json.dumps(definition))

    def __len__(self) -> int:
        """Return the number of scored items."""
        return len(self._scored)

    @property
    def available(self) -> int:
        """Number of items that the task has."""
        return len(self._every)

    def limited(self, limit: int | None) -> "PreparedTask":
        """Return the task with another limit of items."""
        settings = dataclasses.replace(self._settings, limit=limit)
        return PreparedTask(self.task, settings, self._tokenizers, self._rows, self._every)

    def scored_items(self, part: slice = slice(None)) -> Iterator[items.Item]:
        """Yield the scored items, or a part of them."""
        return (self._every[number] for number in self._scored[part])

    def _pool(self) -> items.StoredItems:
        """Return the items that examples are drawn from."""
        kind, shots = self.task.kind, self._settings.shots
        if not isinstance(kind, Prompted):
            raise ConfigError(
                f"a task of kind {kind.name} has no examples",
                where=f"{self.task.path}, kind",
                why="its texts are scored as they are",
                fix="--shots=0",
            )
        pool = self._every
        if kind.examples:
            path = self.task.path.parent / kind.examples
            pool = items.StoredItems(self.task, path, "examples")
        if shots < len(pool):
            return pool
        raise ConfigError(
            f"{shots} examples are too many",
            where=f"--shots={shots}",
            why=f"the task {self.task.name} has {len(pool)} items to draw from",
            fix=f"--shots={len(pool) - 1}",
        )

    def _check_length(self, chosen: np.ndarray, longest: np.ndarray, is_scored: np.ndarray) -> None:
        long = chosen[~is_scored]
        if not len(long) or (self._settings.too_long == "skip" and len(long) < len(chosen)):
            return
        most = longest.max()
        length, flag = self._rows.length, self._rows.length_flag
        is_option = flag == SEQUENCE and len(long) < len(chosen)
        raise ConfigError(
            f"{len(long)} of {len(chosen)} items of {self.task.name} do not fit a row",
            where=f"{self.task.file}, {', '.join(self._every[n].id for n in long[:SHOWN])}",
            why=f"rows have {length} tokens, the longest item {most}; texts are not cut",
            fix="--too_long=skip" if is_option else f"{flag}={most}",
        )

    def writer(self, blueprint: Blueprint, *, both_ways: bool = False) -> Writer | None:
        """Return the programs that write the task's answers with a model; None without any."""
        tokenizers, kind = self._tokenizers, self.task.kind
        if not isinstance(kind, Answer):
            return None
        tokenizer = tokenizers.chat or tokenizers.text
        seed = self._settings.seed
        return Writer(kind, blueprint, tokenizer, self._lengths, seed, both_ways=both_ways)

    def score(self, scorer: Scorer | Writer, params: Any, block: slice) -> list[dict[str, Any]]:
        """Return the samples of a block of items."""
        asked = self.prompter.questions(list(self.scored_items(block)))
        if isinstance(scorer, Writer):
            kind = self.task.kind
            assert isinstance(kind, Answer)
            prompts = [question.requests[0] for question in asked]
            texts = scorer.write(params, prompts, [question.item.id for question in asked])
            written = []
            for question, (greedy, *others) in zip(asked, texts, strict=True):
                item = question.item
                fields = answers.judged(
                    kind, greedy, item.gold, item.program, others, self._classifier
                )
                written.append(results.written(question, fields))
            return written
        read = [self._read(question) for question in asked]
        asked_together = [one for each in read for one in each]
        nats = iter(scorer.nats(params, asked_together, self.shape))
        scores = [[next(nats) for _ in each] for each in read]
        if isinstance(self.task.kind, Text):  # each window is read by itself
            scores = [[[one for (one,) in each], []] for each in scores]
        return [
            results.sample(self.task, question, *each)
            for question, each in zip(asked, scores, strict=True)
        ]

    def _read(self, question: Question) -> Sequence[Sequence[requests.ScoringRequest]]:
        """Return the requests of an item that are read together: with its context, and without.

        A text longer than a row has several, each by itself.
        """
        if not isinstance(self.task.kind, Text):
            return question.requests, question.unconditional
        return [(each,) for each in requests.windows(question.requests[0], self._rows.length)]

    def _groups(self, question: Question) -> Iterator[list[packing.PrefixGroup]]:
        """Yield the groups of an item."""
        for each in self._read(question):
            yield packing.groups(each, self._rows.length, is_shared=self.is_shared)

    def record(self) -> dict[str, Any]:
        """Return the facts of the results that do not depend on weights."""
        return {
            "task": self.task.name,
            "version": self.task.version,
            "kind": self.task.kind.name,
            "shots": self._settings.shots,
            "form": self._settings.form,
            "ceiling": None if self.task.made is None else 1.0,
            "left_out": {name: count for name, count in self.left_out.items() if count},
            "first_request": {
                "ids": list(self.first.ids),
                "begin": self.first.begin,
                "text": self._first_text,
            },
        }


def run_task(
    prepared: PreparedTask,
    scorer: Scorer | Writer,
    model: ScoredModel,
    workdir: Path,
    *,
    is_writer: bool = True,
    share: Callable[[int], int] = lambda value: value,
    say: Log = lambda _: None,
) -> dict[str, Any]:
    """Return the results of a task; samples that are on disk are not computed again.

    Args:
      prepared: the task.
      scorer: its scorer.
      model: the parameters.
      workdir: the run, whose folder `evals` has the results.
      is_writer: this process writes them. Another one computes the same samples and returns no
        metrics.
      share: receives this process's number of samples and returns the writer's.
      `say`: receives log lines.

    Raises:
      Diverged: if a score is not finite.
      InUse: if another process scores the same task.
    """
    definition = prepared.definition
    facts = {**definition, "weights": model.digest, "precision": model.precision}
    key = _digest(facts)
    folder = workdir / EVALS / f"{prepared.task.name}.{key[:12]}"
    lock = Lock(folder / "lock")
    try:
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except OSError as error:
        raise cannot_keep("the folder of a task", folder, error) from error
    try:
        if is_writer and not (folder / TASK).exists():
            record = {**facts, "definition_digest": _digest(definition), "step": model.step}
            record["path"] = str(prepared.task.path)
            sinks.replace(folder / TASK, json.dumps(record, indent=1).encode() + b"\n")
        with files.SampleFile(folder / files.SAMPLES, is_writer=is_writer) as samples:
            if is_writer:
                _check_order(samples, prepared)
            done = share(samples.count)
            for block in prepared.blocks:
                if block.stop > done:
                    lines = prepared.score(scorer, model.params, block)
                    _check_finite(lines, prepared.task.name, model.step)
                    samples.append(lines[max(done - block.start, 0) :])
                    say(f"{prepared.task.name}: {samples.count} of {len(prepared)}")
            summary = results.summary(samples.each()) if is_writer else {}
        record = {"hash": key, "step": model.step, **prepared.record(), **summary}
        if is_writer:
            sinks.replace(folder / RESULTS, json.dumps(record, indent=1).encode() + b"\n")
        return {**record, "folder": str(folder)}
    finally:
        lock.release()


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _check_order(samples: files.SampleFile, prepared: PreparedTask) -> None:
    """Raise DataError if the samples on disk are not those of the first items."""
    pairs = itertools.zip_longest(samples.each(), prepared.scored_items(slice(samples.count)))
    for number, (line, item) in enumerate(pairs):
        if item is None or line.get("id") != item.id:
            raise DataError(
                "samples.jsonl has the samples of other items",
                where=f"{samples.path}:{number + 1}",
                why=f"the id is {line.get('id')!r}",
                fix=f"rm {shlex.quote(str(samples.path))}    # all items are scored again",
            )


def _check_finite(lines: Sequence[dict[str, Any]], name: str, step: int) -> None:
    """Raise Diverged if the model gave a score that is not finite."""
    wrong = [line["id"] for line in lines if not results.is_finite(line)]
    if wrong:
        raise Diverged(
            f"the model gives {len(wrong)} items a score that is not finite",
            where=f"step {step}, task {name}",
            why=f"a log-likelihood or a logit of {', '.join(wrong[:SHOWN])} is not a number",
            fix="evaluate an earlier step with --step",
        )
