"""Store a teacher's likeliest ids behind each token of the training data, for distillation.

The rows are those of the plan that a run with the same config reads. They are written to the
folder OUT.partial, with a record of the finished batches: the same command continues an interrupted
pass, and writes the same bytes.
"""

import dataclasses
import functools
import itertools
import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import disk, faults
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import (
    EARLIER_STEP,
    CommandError,
    ConfigError,
    DataError,
    NotWritable,
    cannot_write,
)
from jaxlm.corpus.run import LOCK, output_folder
from jaxlm.data import teacher
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader
from jaxlm.data.mixture import MixtureLoader
from jaxlm.data.shards import TokenShards
from jaxlm.data.teacher import Facts, RowWriter, StoredTeacher
from jaxlm.monitor import formatting
from jaxlm.objectives.config import Causal, Distill
from jaxlm.objectives.distill import top_of
from jaxlm.objectives.loss import logits_function, read_sharded
from jaxlm.ops import top_parts
from jaxlm.ops.cross_entropy import in_chunks
from jaxlm.parallel import context, host
from jaxlm.parallel.config import format_mesh
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.init_from import check_tokenizer
from jaxlm.recipes.train.teacher import frozen_model, vocabulary_of
from jaxlm.recipes.use.load import InitSource, check_teaches, open_run_ref
from jaxlm.training import state as states

PROGRESS = "progress.json"
SAVE_SECONDS = 10.0
LARGEST = 6e4  # of float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeachOptions:
    """The teacher, the folder of its rows, and their ids."""

    workdir: Path
    out: Path
    step: int | None = None  # the newest one without it
    top: int | None = None  # `teacher.most_ids` without it
    cpu_devices: int | None = None


def teach(run: Run, options: TeachOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Write the teacher's rows for the training data of `run`; return what was written.

    The temperature is that of the objective of `run`, 1 if it is no distillation.

    Raises:
      InputMissing: if there is no such teacher.
      CommandError: if `top` is no number of ids.
      ConfigError: if the teacher does not predict the next token, or has another tokenizer than the
        data, or `out` has rows of another pass.
      NotWritable: if the folder cannot be written, or its disk has too little space.
      DataError: if the teacher's distributions are not finite.
      InUse: if another process writes the folder.
    """
    ref = str(options.workdir) + ("" if options.step is None else f"@{options.step}")
    if run.data.has_prompts or run.data.answers:
        raise ConfigError(
            "a teacher reads texts",
            where=f"data.kind = {run.data.kind}",
            why="a run on stored distributions learns each token of its data",
            fix="name a --config of the objective causal",
        )
    source = open_run_ref(ref, "--workdir", say)
    check_teaches(source, "--workdir")
    vocab = vocabulary_of(source)
    top = teacher.most_ids(vocab) if options.top is None else options.top
    if not 0 < top <= vocab:
        why = f"the vocabulary has {vocab} ids"
        fix = f"--top={teacher.most_ids(vocab)}"
        what = "the ids of a row are at least one and at most the vocabulary"
        raise CommandError(what, where=f"--top={top}", why=why, fix=fix)
    objective = run.objective
    temperature = objective.temperature if isinstance(objective, Distill) else 1.0
    run = dataclasses.replace(run, objective=Causal())
    setup.start(options.cpu_devices)
    data = setup.open_data(run, say=say, warn=say, progress=formatting.ProgressLines(say))
    check_tokenizer(source, data.tokenizer.digest)
    facts = _facts(
        run,
        source,
        tokenizer=data.tokenizer.digest,
        vocab=vocab,
        top=top,
        temperature=temperature,
    )
    loaders = data.train.sources if isinstance(data.train, MixtureLoader) else (data.train,)
    shards = {teacher.key(part): part for part in data.train.shards.folders}
    if (options.out / teacher.NAME).exists():
        stored = StoredTeacher.open(options.out)
        _check_same(dataclasses.asdict(stored.facts), facts, options.out)
        if missing := shards.keys() - stored.sets.keys():
            raise _of_another_pass(options.out, f"it has no rows of {shards[min(missing)].source}")
        return _answer(options, facts, stored.sets)
    partial = options.out.with_name(f"{options.out.name}.partial")
    with output_folder(partial):
        try:
            pass_ = _Pass(run, source, facts, loaders, partial, say)
            pass_.check_space(shards)
            pass_.read(shards)
            sets = {name: pass_.writers[name].finish() for name in sorted(shards)}
            teacher.write_facts(partial, facts, sets)
            faults.point("teach.finish")
            for folder in (partial, *partial.glob("*/")):
                disk.remove_partial(folder)
            for name in (PROGRESS, LOCK):
                (partial / name).unlink()
            disk.rename(partial, options.out)
        except OSError as error:
            fix = "free space on the disk; the same command continues the pass"
            raise cannot_write("the stored teacher", partial, error, fix=fix) from error
    return _answer(options, facts, sets)


def _facts(run: Run, source: InitSource, **facts: Any) -> Facts:
    """Return the facts of a pass; its bits depend on nothing else."""
    mesh = setup.build_mesh_for(run)
    return Facts(
        run=str(source.workdir),
        step=source.step,
        weights=source.digest,
        sequence=run.data.sequence,
        passes={
            "precision": dataclasses.asdict(source.run.precision),
            "packing": run.data.packing,
            "seed": run.seed,
            "rows": setup.pass_rows(run, mesh),
            "mesh": format_mesh(dict(mesh.shape)),
            "kernel": [run.train.attention, run.train.stack, setup.pass_chunk(run)],
        },
        **facts,
    )


def _answer(options: TeachOptions, facts: Facts, sets: dict[str, Any]) -> dict[str, Any]:
    size = sum(shard["size"] for shards in sets.values() for shard in shards)
    return {
        "out": str(options.out),
        "teacher": facts.run,
        "step": facts.step,
        "top": facts.top,
        "temperature": facts.temperature,
        "tokens": size // facts.dtype.itemsize,
        "bytes": size,
        "bytes_per_token": facts.dtype.itemsize,
    }


def _check_same(before: dict[str, Any], facts: Facts, folder: Path) -> None:
    """Raise ConfigError if a folder has rows of another pass."""
    after = dataclasses.asdict(facts)
    before, after = ({**each, **each["passes"]} for each in (before, after))
    changed = [
        name for name in after if name not in ("passes", "run") and before[name] != after[name]
    ]
    if changed:
        name, *_ = changed
        why = f"its {name} is {before[name]}, and now {after[name]}"
        raise _of_another_pass(folder, why)


def _of_another_pass(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        "the folder has the rows of another pass",
        where=str(folder),
        why=why,
        fix=f"--out={shlex.quote(str(folder).removesuffix('.partial'))}-2",
    )


class _Pass:
    """One forward pass of the teacher over the training rows."""

    def __init__(
        self,
        run: Run,
        source: InitSource,
        facts: Facts,
        loaders: tuple[Loader, ...],
        folder: Path,
        say: Log,
    ):
        self._run, self._source, self._facts, self._loaders = run, source, facts, loaders
        self._folder, self._say = folder, say
        self._data = [teacher.key(loader.shards) for loader in loaders]
        self.writers: dict[str, RowWriter] = {}
        self._done: dict[str, int] = {}  # finished batches of each loader
        if (folder / PROGRESS).is_file():
            record = json.loads((folder / PROGRESS).read_text())
            _check_same(record["facts"], facts, folder)
            if record.get("data") != self._data:
                raise _of_another_pass(folder, "it was begun on other text, or in another order")
            self._done = record["done"]
            say(f"continuing {folder}")
        else:
            for path in folder.glob("*/"):
                shutil.rmtree(path)
            self._save()

    def check_space(self, shards: dict[str, TokenShards]) -> None:
        """Raise NotWritable if the rows do not fit on the disk."""
        tokens = sum(part.manifest.tokens for part in shards.values())
        size = self._facts.dtype.itemsize
        written = sum(512 * path.stat().st_blocks for path in self._folder.glob("*/top-*"))
        free = shutil.disk_usage(self._folder).free
        if (needed := tokens * size - written) > free:
            raise NotWritable(
                "the stored teacher will not fit on the disk",
                where=str(self._folder),
                why=f"{tokens:,} tokens of {size} bytes need {formatting.size(needed)}, and "
                f"{formatting.size(free)} are free",
                fix="choose an --out folder on a disk with free space\nchoose a smaller --top",
            )

    def read(self, shards: dict[str, TokenShards]) -> None:
        """Write the rows of all loaders that are not written yet."""
        for name, part in shards.items():
            self.writers[name] = RowWriter(self._folder / name, part, self._facts.dtype)
        mesh = setup.build_mesh_for(self._run)
        progress = formatting.ProgressLines(self._say, shown=formatting.count)
        with jax.set_mesh(mesh):
            step, total = None, sum(loader.plan.rows for loader in self._loaders)
            size, saved, before = setup.pass_rows(self._run, mesh), time.monotonic(), 0
            for number, loader in enumerate(self._loaders):
                done, count = self._done.get(str(number), 0), -(-loader.plan.rows // size)
                batches = itertools.islice(loader.evaluation(batch=size), done, None)
                for index, batch in enumerate(batches, done):
                    step = step or self._step(mesh)
                    self._write(loader, index * size, step(host.put(mesh, batch)))
                    self._done[str(number)] = index + 1
                    is_last = index + 1 == count
                    if is_last or time.monotonic() - saved > SAVE_SECONDS:
                        self._save()
                        saved = time.monotonic()
                    progress("rows of the teacher", before + min((index + 1) * size, total), total)
                before += loader.plan.rows

    def _step(self, mesh: Any) -> Any:
        """Return the compiled function of a batch to its rows, as NumPy arrays."""
        facts, chunk = self._facts, setup.pass_chunk(self._run)
        frozen = frozen_model(self._run, self._source, facts.vocab, mesh)

        def top(params: Any, batch: Tokens) -> Any:
            model = frozen.blueprint.merge(params)
            sharded, hidden, parts = read_sharded(model, batch, None)
            logits_of = logits_function(model)

            def chosen(values: Any, targets: Any) -> Any:
                taught = top_of(logits_of(values), targets, facts.top, facts.temperature)
                return taught._replace(nll=jnp.minimum(taught.nll, LARGEST))

            rows = in_chunks(chosen, hidden.values, sharded.targets, tokens=chunk)
            return context.zigzag_unshard(rows, parts)

        compiled = jax.jit(top, out_shardings=states.replicated(mesh))
        step = functools.partial(compiled, frozen.params)
        return lambda batch: jax.tree.map(np.asarray, step(batch))

    def _write(self, loader: Loader, first: int, top: Any) -> None:
        """Write the rows of a batch whose first row has the number `first` in the plan."""
        rows = np.zeros(top.ids.shape[:2], self._facts.dtype)
        rows["ids"], rows["nll"] = top.ids, top.nll
        for name in ("log_p", "tail"):
            rows[name] = np.maximum(getattr(top, name), top_parts.LEAST)
        for row in range(first, min(first + len(rows), loader.plan.rows)):
            faults.point("teach.row", row)
            slot = 0
            for document, start, length in loader.plan.pieces(row).tolist():
                part, number, place = loader.shards.place(document)
                values = rows[row - first, slot : slot + length]
                if why := teacher.problem(values, self._facts.vocab):
                    raise DataError(
                        "the teacher's distributions are not finite",
                        where=str(self._source),
                        why=why,
                        fix=EARLIER_STEP,
                    )
                self.writers[teacher.key(part)].write(number, place + start, values)
                slot += length

    def _save(self) -> None:
        """Record the finished batches, after their rows are on the disk."""
        for writer in self.writers.values():
            writer.sync()
        facts = dataclasses.asdict(self._facts)
        record = {"facts": facts, "data": self._data, "done": self._done}
        disk.replace(self._folder / PROGRESS, json.dumps(record).encode())
