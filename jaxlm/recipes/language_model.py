"""A trained model in Python: call it, generate, score, evaluate, export. `load` makes it."""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_download import fetch_model
from jaxlm.core import config, hub
from jaxlm.core.callbacks import Log, OnText
from jaxlm.core.errors import ConfigError, InputMissing
from jaxlm.core.nearest import nearest_word
from jaxlm.data import cache
from jaxlm.data.batch import Tokens
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Continuation
from jaxlm.models.build import Model, Params
from jaxlm.models.families.union import SIZES
from jaxlm.objectives import loss
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import export_model
from jaxlm.recipes.exchange.import_model import COMPANION_FILES, ImportOptions, import_model
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import drafts, evaluate, generate, inspection, untrained
from jaxlm.recipes.use.inspection import Inspection
from jaxlm.recipes.use.load import (
    LoadedRun,
    Weights,
    check_generates,
    check_scores,
    is_model_of_another_library,
    load_run,
)
from jaxlm.training.rundir import split_ref

MIN_SCORED = 32  # slots of a row that is scored; longer ones are powers of two, to compile few


@dataclasses.dataclass(frozen=True)
class TextScores:
    """Tokens of a text and the negative log-probability of each, given those before it."""

    ids: list[int]
    tokens: list[str]
    nats: list[float]

    @property
    def total(self) -> float:
        """Negative log-probability of the text in nats."""
        return float(np.sum(self.nats))


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The model of a step of a run, with its tokenizer and config; `jaxlm.load` makes it.

    An adapter is merged into the weights, if it can be.
    """

    loaded: LoadedRun
    adapter: str | None = None
    weights: Weights = "raw"  # of the run: the parameters, or their average

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        family = self.config.model.family
        state = f"step {self.step}" if self.is_trained else "untrained"
        place = f"{str(self.workdir)!r}, {state}"
        return f"LanguageModel({place}, {family}, {count:,} parameters)"

    @property
    def workdir(self) -> Path:
        """The run directory; for a published size its name."""
        return self.loaded.workdir

    @property
    def is_trained(self) -> bool:
        """False for a published size, whose parameters are random."""
        return self.loaded.is_trained

    @property
    def step(self) -> int:
        """The step of the run that the weights are from."""
        return self.loaded.step

    @property
    def config(self) -> Run:
        """The config of the run."""
        return self.loaded.run

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run: `encode(text)` and `decode(ids)`."""
        return self.loaded.tokenizer

    @property
    def params(self) -> Params:
        """The parameters as a nested dict of arrays."""
        return self.loaded.params

    @functools.cached_property
    def model(self) -> Model:
        """The Flax module: `model(ids)` returns the logits [B, T, V] of ids [B, T]."""
        return self.loaded.model.blueprint.merge(self.params)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        chat: bool = False,
        on_text: OnText | None = None,
        **settings: Any,
    ) -> list[Continuation]:
        """Return the continuation of each prompt, with its text, ids and log-probabilities.

        Args:
          prompts: a text, or several that are continued as one batch.
          chat: read each prompt as a user's turn, in the model's chat template.
          on_text: receives text while it is generated: index of the prompt, next part of its text,
            and True at its end.
          settings: the flags of `jaxlm generate`: `max_tokens`, `temperature`, `top_k`, `seed`...
            `draft` names what guesses tokens, which changes no text;
            `json_schema`, a dict or its text, `regex`, `choice` or `grammar` limit the texts.

        Raises:
          ConfigError: if a setting is wrong, the model cannot continue text, a grammar is
            refused, or a prompt and its continuation do not fit its positions.
          TypeError: if a prompt is no text, or there is none.
        """
        several = [*prompts] if isinstance(prompts, Sequence | np.ndarray) else []
        several = [prompts] if isinstance(prompts, str) else several
        if not several or not all(isinstance(each, str) for each in several):
            raise _no_text("generate", prompts)
        raw: dict[str, Any] = {"prompts": several, **settings}
        if isinstance(raw.get("json_schema"), dict):
            raw["json_schema"] = json.dumps(raw["json_schema"])
        for name in ("seed", "stop", "choice"):  # a setting of several values takes one, too
            if isinstance(raw.get(name), int | str):
                raw[name] = [raw[name]]
        built = config.from_json(GenerateConfig, raw, where="generate")
        generate.check_grammar(built)
        drafts.read_draft(built.draft)
        check_generates(self.loaded, is_chat=chat)
        template = None
        if chat:
            template = generate.template_of(self.workdir, adapters.template_folder(self.adapter))
        return generate.continue_prompts(self.loaded, built, template, on_text)

    def score(self, text: str) -> TextScores:
        """Return the negative log-probability of each token of a text that begins a document.

        Raises ConfigError if the model is bidirectional or has an encoder, or the text exceeds its
        positions, and TypeError if it is no text.
        """
        if not isinstance(text, str):
            raise _no_text("score", text)
        check_scores(self.loaded)
        before, ids = self.tokenizer.before or self.tokenizer.after, self.tokenizer.encode(text)
        known = np.array([*before, *ids], np.int32)
        limit = self.loaded.model.blueprint.text_positions
        if limit is not None and len(known) > limit:
            what, why = f"the text has {len(known)} tokens", f"the model has {limit} positions"
            raise ConfigError(what, where="score(text)", why=why, fix=f"text[:{limit}]")
        if not ids:
            return TextScores([], [], [])
        slots = max(MIN_SCORED, 1 << (len(known) - 2).bit_length())
        row = np.full(slots + 1, self.tokenizer.pad, np.int32)
        row[: len(known)] = known
        is_real = (np.arange(slots) < len(known) - 1).astype(np.int32)
        index = np.minimum(np.arange(slots, dtype=np.int32), len(known) - 1)
        fields = row[:-1], row[1:], is_real.astype(np.float32), is_real, index
        tokens, targets, weights, segments, positions = (
            jnp.asarray(field)[None] for field in fields
        )
        batch = Tokens(tokens, targets, weights, segments, positions)
        with jax.set_mesh(self.loaded.model.mesh):
            nll = np.asarray(self._nll(self.params, batch))[0]
        nats = nll[len(before) - 1 : len(known) - 1].tolist()
        return TextScores(ids, [self.tokenizer.decode([each]) for each in ids], nats)

    def inspect(self, text: str) -> Inspection:
        """Return what the model computes on a text that begins a document.

        `streams` [L+1, T, D], `attention` [L, N, T, T], and `lens(layer)`, the log-probabilities
        [T, V] of the next token if that layer were the last.

        Raises ConfigError if the model is no decoder, or the text exceeds its positions.
        """
        return inspection.inspect(self.loaded, self.params, text)

    @functools.cached_property
    def _nll(self) -> Any:
        blueprint, chunk = self.loaded.model.blueprint, setup.pass_chunk(self.config)
        return jax.jit(
            lambda params, batch: loss.score(blueprint.merge(params), batch, None, chunk)[0].nll
        )

    def evaluate(
        self,
        text: str | Sequence[str] = (),
        *,
        sequence: int | None = None,
        batch: int | None = None,
        say: Log | None = None,
    ) -> dict[str, Any]:
        """Return loss, perplexity, bits per byte, accuracy and calibration, as `jaxlm eval` does.

        Args:
          text: globs of the text to evaluate on; () for the validation sets of the run.
          sequence: length of the rows; None for the run's own.
          batch: rows of a step; by default (None) as many as a micro-batch, and at most 16,384
            tokens for each part of the batch.
          `say`: receives log lines; None for none.
        """
        globs = (text,) if isinstance(text, str) else tuple(text)
        if not globs:
            self._check_trained(
                "an untrained model has no validation sets", "evaluate('texts/*.txt')"
            )
        length = evaluate.checked_length(self.loaded, sequence, say or _silent)
        folder = adapters.template_folder(self.adapter)
        loaders = evaluate.open_loaders(self.loaded, globs, length, say or _silent, adapter=folder)
        sets = evaluate.measure(self.loaded, loaders, batch)
        return {"step": self.step, "sequence": length} | evaluate.with_first(
            self.loaded, globs, sets
        )

    def export(self, out: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
        """Write the model for another program, read it back and compare the logits.

        Args:
          out: the folder or the file to write.
          options: `to` ("hf" or "gguf"), `dtype`, `shard_bytes` and `say` of `jaxlm export`.

        Raises:
          ConfigError: if the model was loaded with an adapter that is not its run's own.
          ParityError: if the export gives other logits.
        """
        objective = f"--config.objective.name={self.config.objective.name}"
        fix = f"jaxlm train --config={self.workdir} {objective} --workdir=runs/a"
        self._check_trained("an untrained model is not exported", fix)
        if self.adapter is not None:
            raise ConfigError(
                "an adapter of --adapter is not exported",
                where=f"adapter={self.adapter}",
                why="an export is of a run",
                fix=f"jaxlm import --adapter={self.adapter} --init_from={self.workdir} --workdir=R",
            )
        chosen: dict[str, Any] = {"step": self.step, "weights": self.weights}
        return export_model.export_model(self.workdir, Path(out), **chosen, **options)

    def _check_trained(self, what: str, fix: str) -> None:
        if not self.is_trained:
            why = "its parameters are random, and no run made them"
            raise ConfigError(what, where=f"load({str(self.workdir)!r})", why=why, fix=fix)


def load(
    source: str | os.PathLike[str],
    *,
    step: int | None = None,
    best: bool = False,
    weights: Weights = "raw",
    adapter: str | None = None,
    seed: int = 0,
    cpu_devices: int | None = None,
    say: Log | None = None,
) -> LanguageModel:
    """Open a model: call it, generate, score text, evaluate, export.

    A model of another library is imported once, to a run in the cache folder. A published size,
    such as `gpt2-124m`, is not downloaded: it has random parameters, and a warning names it
    untrained. Raises InputMissing if there is no model, DataError if it is damaged, and ConfigError
    or CommandError if an argument does not fit it.

    Args:
      source: a run, RUN@STEP, a folder of transformers, a .gguf, hf:ORG/NAME[@REVISION], or a
        published size.
      step: the step of the run; None for the newest.
      best: load the step with the lowest validation loss instead.
      weights: the parameters, or the average of them that the run maintains.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model.
      seed: seed of the random parameters of a published size.
      cpu_devices: number of devices to split the CPU into.
      `say`: receives log lines; None for none.
    """
    ref, say = os.fspath(source), say or _silent
    if not Path(ref).exists() and (size := untrained.size_named(ref)):
        if step is not None or best or weights != "raw" or adapter is not None:
            raise ConfigError(
                "an untrained model has no steps, averages or adapters",
                where=f"load({ref!r})",
                why=f"{size} is a published size, whose parameters are random",
                fix=f"jaxlm.load({ref!r})",
            )
        return LanguageModel(untrained.fresh_run(size, seed, cpu_devices))
    if is_model_of_another_library(ref):
        workdir = _imported(ref, cpu_devices, say)
    else:
        workdir, named = split_ref(ref)
        if named is None or not named.isdigit() or Path(ref).exists():
            workdir = Path(ref)
        else:
            step = int(named)
    if not (workdir / "config.json").is_file():
        meant = hub.guessed_name(ref) or nearest_word(ref, SIZES)
        raise InputMissing(
            f"there is no model at {ref}",
            where=f"load({ref!r})",
            why="it is no run directory, folder of transformers, .gguf, hf:ORG/NAME or size",
            fix=f"jaxlm.load({meant!r})" if meant else "find . -name checkpoints",
        )
    loaded = load_run(
        workdir,
        step=step,
        best=best,
        weights=weights,
        adapter=adapters.reader(adapter, say),
        cpu_devices=cpu_devices,
        say=say,
    )
    return LanguageModel(loaded, adapter, weights)


def _silent(line: str) -> None:
    """Write no log line."""


def _imported(ref: str, cpu_devices: int | None, say: Log) -> Path:
    """Return the run of an imported model in the cache folder, made once for the same files."""
    if ref.startswith(hub.PREFIX):
        ref = str(fetch_model(ref, COMPANION_FILES, check=hub_architecture.family_of, say=say).path)
    path = Path(ref).resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(each.name, (stat := each.stat()).st_size, stat.st_mtime_ns) for each in files]
    workdir = cache.folder(cache.default(), "models", path=str(path), files=stats)
    if not (workdir / "config.json").exists():
        say(f"importing {ref} to {workdir}; `jaxlm import` makes a run of it elsewhere")
        options = ImportOptions(source=path, workdir=workdir, cpu_devices=cpu_devices)
        import_model(options, say)
    return workdir


def _no_text(method: str, value: Any) -> TypeError:
    """Return the error of a method that got no text."""
    taken = "texts" if method == "generate" else "one text at a time"
    return TypeError(f"{method} takes {taken}, not {type(value).__name__} {str(value)[:80]!r}")
