"""Scores of answers under the reference of a preference run, computed once before the first step.

A score is the log-probability of an answer, one number for each document. Scores are kept in the
cache, under the digests of weights, data and template, and what else determines their bits; an
interrupted pass is kept there too. A copy is in the run directory: a run resumes without the cache
and without the reference.
"""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from jax.experimental import multihost_utils

from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config, disk
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import cache, dataset
from jaxlm.data.dataset import Data
from jaxlm.data.loader import Loader
from jaxlm.evals.preference import scores_of_answers
from jaxlm.monitor import formatting
from jaxlm.objectives.preference import score_answers
from jaxlm.parallel import host
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import checkpointing
from jaxlm.recipes.train.api import ResumeOptions, RunContext
from jaxlm.recipes.train.init_from import check_tokenizer
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.train.teacher import load_teacher
from jaxlm.recipes.use.load import BASE, InitSource, check_teaches, open_run_ref
from jaxlm.training import state as states
from jaxlm.training.rundir import read_json

FILE = "reference.safetensors"  # of a run directory
VERSION = 1  # of the scores; those of another version are computed again
SAVES = 20  # of an unfinished pass
START, ADAPTER_OFF = "start", "adapter_off"
FLAG = "--config.objective.reference"


class Reference(NamedTuple):
    """The model that answers are compared with: `start`, `adapter_off` or a run.

    `source` is that run, or the one that a new run begins with; None for fresh weights. For
    `adapter_off` it is the run of the adapter that was continued; None for a new adapter.
    """

    name: str
    source: InitSource | None


def find(context: RunContext, begun_with: InitSource | None, digest: str, warn: Log) -> Reference:
    """Return the reference of a run that has one.

    `begun_with` is the run of --init_from, `digest` that of the tokenizer, and `warn` gets lines
    about damaged steps. Raises as `open_run_ref` and `continued_adapter`, and ConfigError if the
    reference has another tokenizer or an adapter of its own, or does not predict the next token.
    """
    name = context.run.objective.compared_with
    assert name is not None
    if name == ADAPTER_OFF:
        source = begun_with if begun_with is not None and begun_with.adapter else None
        if begun_with is None:
            source = continued_adapter(context.directory.path, warn, context.store.verifier)
        return Reference(name, source)
    if name == START:
        return Reference(name, begun_with)
    return Reference(name, find_named(name, digest, warn, context.store.verifier))


def find_named(name: str, digest: str, warn: Log, verifier: Verifier | None = None) -> InitSource:
    """Return the run RUN[@STEP] that answers are compared with, see `find`."""
    source = open_run_ref(name, FLAG, warn, verifier)
    check_teaches(source, FLAG)
    check_tokenizer(source, digest)
    return source


def continued_adapter(
    workdir: Path, warn: Log, verifier: Verifier | None = None
) -> InitSource | None:
    """Return the adapter that a run in a directory began with; None for a new one.

    Raises DataError if its checkpoint is gone or changed.
    """
    file = workdir / BASE
    record = read_json(workdir, BASE).get("adapter") if file.is_file() else None
    if record is None:
        return None
    name = "{run}@{step}".format_map(record)
    why = "its sha256 is another one"
    try:
        source = open_run_ref(name, FLAG, warn, verifier)
        if source.digest == record["sha256"]:
            return dataclasses.replace(source, adapter=source)
    except InputMissing as error:
        why = error.what
    raise DataError(
        "the adapter that the run began with is gone",
        where=str(file),
        why=f"it is compared with {name}: {why}",
        fix=f"restore {name} from a copy",
    )


def attach(context: RunContext, programs: TrainPrograms, reference: Reference) -> None:
    """Give the loaders of `programs` the scores, and `programs` a line for the header.

    Raises DataError if the run has begun, and its scores and the weights of its start are gone.
    """
    if reference.name == ADAPTER_OFF:
        programs.reference = "the base without the adapter, scored in each step"
        if reference.source is not None:
            begun_with = reference.source.trained
            programs.reference = f"the adapter of {begun_with}, frozen and scored in each step"
            programs.adapter = checkpointing.state_from(programs, reference.source).params
        return
    directory, sets = context.directory, _sets(programs.data)
    is_first = context.processes.peers.is_first
    stored = read_stored(directory.path, programs.run, programs.data) if is_first else None
    scores = _broadcast(context, sets, "stored", stored)
    programs.reference = f"{reference.name}, scored before the run began"
    if scores is None:
        begun = time.monotonic()
        read = _Pass(context, programs, reference)
        scores = {name: read.scores(name, loader) for name, loader in sets.items()}
        seconds = formatting.duration(time.monotonic() - begun)
        cost = f"in {seconds}" if read.tokens else "from the cache"
        programs.reference = f"{reference.name}, {read.answers:,} answers scored {cost}"
        key = {"key": _key(programs.run, sets)}
        directory.write_bytes(FILE, safetensors.numpy.save(scores, metadata=key))
    programs.data = with_scores(programs.data, scores)


def with_scores(data: Data, scores: dict[str, np.ndarray]) -> Data:
    """Return the data with the scores of each set in its loader."""
    loaders = {
        name: dataclasses.replace(loader, reference=scores[name])
        for name, loader in _sets(data).items()
    }
    return dataclasses.replace(data, train=loaders.pop("train"), validation=loaders)


def read_stored(workdir: Path, run: Run, data: Data) -> dict[str, np.ndarray] | None:
    """Return the scores in a run directory; None if there are none, or of other data."""
    sets = _sets(data)
    try:
        with safetensors.safe_open(workdir / FILE, framework="numpy") as file:
            if (file.metadata() or {}).get("key") != _key(run, sets):
                return None
            return {name: file.get_tensor(name) for name in sets}
    except (OSError, safetensors.SafetensorError):
        return None


def with_stored(data: Data, run: Run, workdir: Path) -> Data:
    """Return the data with the scores in a run directory. Raise DataError if they are gone."""
    if run.objective.compared_with in (None, ADAPTER_OFF):
        return data
    if (scores := read_stored(workdir, run, data)) is None:
        raise _gone(workdir)
    return with_scores(data, scores)


def _gone(workdir: Path) -> DataError:
    return DataError(
        "the scores of the reference are gone",
        where=str(workdir / FILE),
        why="they are those of the weights and the data that the run began with",
        fix="restore the file from a copy of the run",
    )


def _sets(data: Data) -> dict[str, Loader]:
    return {"train": data.train} | data.validation


def _key(run: Run, sets: dict[str, Loader]) -> str:
    """Return what the scores in the directory of a run belong to: reference, data, length."""
    digests = {name: loader.shards.manifest.digests for name, loader in sets.items()}
    facts = [VERSION, run.objective.compared_with, run.data.sequence, digests]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _broadcast(
    context: RunContext, sets: dict[str, Loader], name: str, scores: dict[str, np.ndarray] | None
) -> dict[str, np.ndarray] | None:
    """Return the scores of the first process in every process; None if it has none."""
    if not context.processes.share(f"reference/{name}", scores is not None):
        return None
    if context.processes.peers.count == 1:
        return scores
    blank = {each: np.zeros(loader.shards.documents, np.float32) for each, loader in sets.items()}
    return multihost_utils.broadcast_one_to_all(scores or blank)


class _Pass:
    """One forward pass over every set, without dropout, sharded as an evaluation is.

    Attributes:
      answers: number of answers whose scores were asked for.
      tokens: slots of the rows that were read; 0 if the cache had all scores.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms, reference: Reference):
        self._context, self._programs, self._reference = context, programs, reference
        run, mesh = programs.run, programs.model.mesh
        self._size = run.train.batch if run.eval.batch == "auto" else run.eval.batch
        self._facts = {
            "weights": self._digest(),
            "sequence": run.data.sequence,
            "rows": self._size,
            "mesh": dict(mesh.shape),
            "precision": dataclasses.asdict(run.precision),
            "kernel": [run.train.attention, run.train.stack, run.loss.chunk],
            "version": VERSION,
        }
        self._score: Callable[..., Any] | None = None
        self.answers = self.tokens = 0

    def scores(self, name: str, loader: Loader) -> np.ndarray:
        """Return the score of each document of a set, float32."""
        shards, context = loader.shards, self._context
        self.answers += shards.documents
        key = {"data": shards.manifest.digests, "template": shards.manifest.template}
        folder = cache.folder(cache.default(), "references", **self._facts, **key)
        whole, partial = (folder.with_suffix(end) for end in (".scores", ".partial"))
        is_first, count = context.processes.peers.is_first, shards.documents
        cached = _unsealed(whole, count) if is_first else None
        sets = {name: loader}
        scores = _broadcast(context, sets, name, None if cached is None else {name: cached})
        if scores is None:
            begun = _unsealed(partial, count) if is_first else None
            values = _broadcast(
                context, sets, f"{name}.partial", None if begun is None else {name: begun}
            )
            start = np.full(count, np.nan, np.float32)
            scores = {name: self._read(loader, start if values is None else values[name], partial)}
            if is_first:
                with cache.writing(whole):
                    disk.replace(whole, _sealed(scores[name]))
                    partial.unlink(missing_ok=True)
        return scores[name]

    def _read(self, loader: Loader, scores: np.ndarray, partial: Path) -> np.ndarray:
        """Fill in the scores that are not a number; save them now and then in `partial`."""
        programs, context, size = self._programs, self._context, self._size
        # The same rows for every seed of the run, so that its scores have the same bits.
        loader = dataset.in_order_of_evaluation(loader, programs.run.data)
        plan, scores = loader.plan, scores.copy()
        firsts = range(0, plan.rows, size)
        is_read = [
            not np.isnan(scores[plan.pieces(min(first + size, plan.rows) - 1)["document"]]).any()
            for first in firsts
        ]
        done = is_read.index(False) if False in is_read else len(firsts)
        every = -(-len(firsts) // SAVES)
        rows = host.host_rows(programs.model.mesh, size)
        batches = itertools.islice(loader.evaluation(batch=size, rows=rows), done, None)
        score, mesh = self._model(), programs.model.mesh
        with (
            context.processes.watch.phase("eval"),
            context.console.timer(f"scoring {loader.shards.documents:,} answers"),
        ):
            read = scores_of_answers(
                lambda batch: score(host.put(mesh, batch)), lambda x: np.asarray(x), batches
            )
            for number, each in enumerate(read, done):
                self.tokens += size * loader.sequence
                for row in range(firsts[number], min(firsts[number] + size, plan.rows)):
                    documents = plan.pieces(row)["document"]
                    scores[documents] = each[row - firsts[number], : len(documents)]
                if context.processes.peers.is_first and (number + 1) % every == 0:
                    with cache.writing(partial):
                        disk.replace(partial, _sealed(scores))
        return scores

    def _model(self) -> Callable[..., Any]:
        """Return the function of a batch to its scores; the model is loaded at the first call."""
        if self._score is not None:
            return self._score
        programs, source = self._programs, self._reference.source
        if self._reference.name == START:
            blueprint, params = programs.model.blueprint, programs.whole(self._start().params)
        else:
            assert source is not None  # only `adapter_off` and `start` may have none
            teacher = load_teacher(programs.run, source, programs.model)
            blueprint, params = teacher.blueprint, teacher.params
        chunk = programs.run.loss.chunk

        def score(params: Any, batch: Any) -> Any:
            return score_answers(blueprint.merge(params), batch, None, chunk)[0].log_p

        step = jax.jit(score, out_shardings=states.replicated(programs.model.mesh))
        self._score = lambda batch: step(params, batch)
        return self._score

    def _start(self) -> Any:
        """Return the state before the first step."""
        programs, store = self._programs, self._context.store
        if 0 in store.steps():
            return checkpointing.restored_state(programs, store, 0, ResumeOptions())
        if self._context.directory.step:
            raise _gone(self._context.directory.path)
        source = self._reference.source
        return (
            programs.init_state() if source is None else checkpointing.state_from(programs, source)
        )

    def _digest(self) -> str:
        """Return a digest of the weights of the reference."""
        source, run = self._reference.source, self._programs.run
        if source is not None:
            adapter = "" if source.adapter is None else source.adapter.digest
            facts: list[Any] = [source.digest, adapter]
        else:
            facts = [*(config.to_json(run)[each] for each in ("model", "mup")), jax.__version__]
        is_start = self._reference.name == START
        facts += [config.to_json(run)["tune"], run.seed] if is_start else []
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _sealed(scores: np.ndarray) -> bytes:
    content = scores.astype("<f4").tobytes()
    return content + hashlib.sha256(content).digest()


def _unsealed(file: Path, count: int) -> np.ndarray | None:
    """Return the scores in a file; None if it is missing, cut or changed."""
    content = file.read_bytes() if file.is_file() else b""
    scores, digest = content[: 4 * count], content[4 * count :]
    if len(scores) != 4 * count or hashlib.sha256(scores).digest() != digest:
        return None
    return np.frombuffer(scores, "<f4").copy()
