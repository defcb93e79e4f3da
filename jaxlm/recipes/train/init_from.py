"""Weights of another run to start from: `--init_from`, the base of an adapter, a reference."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxlm.checkpoint.verify import Verifier
from jaxlm.core import config, hub
from jaxlm.core.callbacks import Log
from jaxlm.core.config import Change, Loaded, Origin
from jaxlm.core.errors import CommandError, ConfigError, InputMissing
from jaxlm.core.problems import DEFAULT, short
from jaxlm.data import tokenizer_file
from jaxlm.objectives.config import mtp_heads
from jaxlm.optim.average_config import NoAverage
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange.import_model import ImportOptions, import_model
from jaxlm.recipes.train.api import StartOptions
from jaxlm.recipes.use.load import (
    BASE,
    InitSource,
    check_plain,
    find_base,
    is_model_of_another_library,
    open_run_ref,
    read_config,
)
from jaxlm.training.rundir import RunDir, read_json, split_ref
from jaxlm.tune.config import Full

START_FILE = "start.json"  # of a run directory: the run that its reference is
RANDOM_WEIGHTS = (
    "the weights are random: data.kind={} is for a model that was trained on text\n"
    "  --init_from=MODEL names a run, a folder of transformers, a .gguf file or hf:ORG/NAME"
)
MODEL_FREE = ("model.dropout", "model.init", "model.init_std")  # weights keep their meaning


def find_init_source(
    run: Run, ref: str | None, workdir: Path, warn: Log, verifier: Verifier, *, is_begun: bool
) -> InitSource:
    """Return the run and step of --init_from=RUN[@STEP], or of an adapter's base.

    All processes of `verifier` must call it; the first one chooses the step. Raises as
    `open_run_ref` and `find_base`, and ConfigError if the model of the run differs from that of
    `run`, or all weights are to be trained and it has an adapter.

    Args:
      run: the config.
      ref: RUN[@STEP] of --init_from; None for the base of the run's adapter.
      workdir: the run directory.
      warn: called with a line for each damaged step that is passed over.
      verifier: compares the step with its record.
      is_begun: the run has a checkpoint.
    """
    if isinstance(run.tune, Full):
        assert ref is not None
        source = open_run_ref(ref, "--init_from", warn, verifier)
        check_plain(source, why="its checkpoints have an adapter, and tune.name=full trains all")
    else:
        source = find_base(workdir, run, ref, warn, verifier, is_begun=is_begun)
    if source.run.objective.has_reward_head and not run.objective.has_reward_head:
        raise ConfigError(
            "the run to start from is a reward model",
            where=f"--init_from={source.workdir}",
            why=f"{run.objective.name} has no use for the head that scores texts",
            fix=f"--config.objective.name={source.run.objective.name} --config.data.kind=pairs",
        )
    if source.run.objective.has_value_head and not run.objective.has_value_head:
        warn(
            f"left out: the value head of {source.workdir}; {run.objective.name} predicts no value"
        )
    had_heads, has_heads = (mtp_heads(each.objective) is not None for each in (source.run, run))
    if had_heads and not has_heads:
        warn(f"left out: the heads for later tokens of {source.workdir}")
    if has_heads and not had_heads and not is_begun:
        warn(f"random at first: the heads for later tokens, which {source.workdir} has not")
    if not (is_begun or isinstance(source.run.average, NoAverage)):
        warn(f"the run begins with the parameters of {source}, not with their average")
    size = tokenizer_file.read(source.workdir / "tokenizer").size
    if changes := model_differences(*(_with_vocabulary(each, size) for each in (source.run, run))):
        more = f"\nand {len(changes) - 3} more" if len(changes) > 3 else ""
        raise ConfigError(
            "the model differs from that of the run to start from",
            where=f"--init_from={source.workdir}",
            why="\n".join(map(str, changes[:3])) + more,
            fix=shlex.join(f"--config.{each.path}={each.old}" for each in changes),
        )
    return source


def _with_vocabulary(run: Run, tokens: int) -> Run:
    """Return the run with the size of its vocabulary in place of `auto`."""
    model = dataclasses.replace(run.model, vocab=setup.vocabulary(run, tokens))
    return dataclasses.replace(run, model=model)


def with_imported_source(options: StartOptions) -> StartOptions:
    """Return the options with a run in place of a model of another library, which is imported.

    The run is WORKDIR-base; a later start uses it again. Raises CommandError if there are several
    processes, as an import needs one, and else as `import_model`.
    """
    ref = options.init_from
    assert ref is not None
    several = options.process.count not in (None, 1)

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr)

    run = as_run(ref, options.workdir, options.cpu_devices, say, is_alone=not several)
    return dataclasses.replace(options, init_from=run)


def as_run(
    ref: str, workdir: Path | None, cpu_devices: int | None, say: Log, *, is_alone: bool = True
) -> str:
    """Return a run in place of a model of another library, which is imported to WORKDIR-base.

    Raises CommandError if the process is not alone or has no WORKDIR, InputMissing for ORG/NAME
    without its prefix, and else as `import_model`.

    Args:
      ref: RUN[@STEP], or a model of another library.
      workdir: the new run directory, if it is known.
      cpu_devices: number of devices of a CPU.
      `say`: receives log lines.
      is_alone: if there is one process.
    """
    if not is_model_of_another_library(ref):
        if name := hub.guessed_name(ref):
            raise InputMissing(
                f"there is no run {ref}",
                where=f"--init_from={ref}",
                why=f"a model of the Hugging Face Hub begins with {hub.PREFIX}",
                fix=f"--init_from={name}\nfind . -name config.json    # or a local one",
            )
        return ref
    if workdir is None:
        raise CommandError(
            "the model is not a run yet",
            where=f"--init_from={ref}",
            why="it is imported to the directory of the run to train, with -base at its end",
            fix="--workdir=runs/new",
        )
    target = workdir.with_name(f"{workdir.name}-base")
    if (target / "config.json").exists():
        return str(target)
    if not is_alone:
        words = ["jaxlm", "import", f"--from={ref}", f"--workdir={target}"]
        raise CommandError(
            "several processes cannot import a model",
            where=f"--init_from={ref}",
            why="one process reads it and writes a run",
            fix=f"{shlex.join(words)}\n--init_from={target}    # afterwards",
        )
    say(f"importing {ref} to {target}")
    import_model(ImportOptions(source=ref, workdir=target, cpu_devices=cpu_devices), say)
    return str(target)


def with_model_of(loaded: Loaded, ref: str, workdir: Path | None) -> tuple[Loaded, list[str]]:
    """Return the config with model, muP and tokenizer of RUN[@STEP], and lines that name changes.

    The weights have a meaning in that model alone, so only flags of the command line, and settings
    that do not change the meaning, replace its settings. A run that has begun in `workdir` keeps
    its own, so that a resumed run does not need the other one.

    Raises InputMissing if there is no such run.
    """
    named, _ = split_ref(ref)
    is_begun = workdir is not None and (workdir / "config.json").is_file()
    folder = workdir if workdir is not None and is_begun else named
    run, origins, lines = loaded.value, dict(loaded.provenance), []
    source = read_config(folder, "--workdir" if is_begun else "--init_from")
    origin = Origin("file", short(f"{folder}/config.json"))
    raw, typed = config.to_json(run), {p for p, o in origins.items() if o.kind == "command line"}
    if "model.family" not in typed:
        model = config.to_json(source)["model"]
        free = {path for path in MODEL_FREE if origins.get(path, origin).kind == "file"}
        names = {path.removeprefix("model.") for path in typed | free if path.startswith("model.")}
        raw["model"] = model | {name: raw["model"][name] for name in names & model.keys()}
    for name, value in config.to_json(source)["mup"].items():
        if f"mup.{name}" not in typed:
            raw["mup"][name] = value
    one, other = source.data, run.data
    is_same = one.tokenizer == other.tokenizer and (
        one.train == other.train or "/" in one.tokenizer or one.tokenizer == "bytes"
    )
    if "data.tokenizer" not in typed and not is_same:
        raw["data"]["tokenizer"] = one.tokenizer if is_begun else str(named / "tokenizer")
    # The sections are checked against each other again.
    run = config.from_json(Run, raw, where=f"{folder}/config.json")
    sections = (("model.", "model"), ("mup.", "muP"), ("data.tokenizer", "tokenizer"))
    for section, name in sections:
        changed = [each.path for each in config.diff(loaded.value, run)]
        changed = [path for path in changed if path.startswith(section)]
        set_by = [each for path in changed if (each := origins.get(path, DEFAULT)).kind == "file"]
        if changed:
            why = f"in place of that of {set_by[0].place}" if set_by else "as the config names none"
            lines.append(f"{name}: that of {named}, {why}")
            origins |= dict.fromkeys(changed, origin)
    return Loaded(run, {path: origins.get(path, origin) for path in config.flatten(run)}), lines


def model_differences(before: Run, after: Run) -> list[Change]:
    """Return the settings of model and muP that differ and change the meaning of weights."""
    changes = config.diff(before, after)
    sections = ("model.", "mup.")
    return [
        each for each in changes if each.path.startswith(sections) and each.path not in MODEL_FREE
    ]


def check_tokenizer(source: InitSource, digest: str) -> None:
    """Raise ConfigError if the tokenizer of the run to start from has another digest."""
    file = source.workdir / "tokenizer"
    if tokenizer_file.read(file).digest != digest:
        raise ConfigError(
            "the tokenizer differs from that of the run to start from",
            where="data.tokenizer",
            why="the weights would read other text into its ids",
            fix=f"--config.data.tokenizer={file}",
        )


def names_other_base(options: StartOptions) -> bool:
    """Return whether --init_from names another place than base.json of the run directory."""
    if options.init_from is None or not (options.workdir / BASE).is_file():
        return False
    workdir, step = split_ref(options.init_from)
    named = str(workdir.absolute())
    base = read_json(options.workdir, BASE)
    known = [(each["run"], str(each["step"])) for each in (base, base.get("adapter", base))]
    return not any(run == named and step in (None, number) for run, number in known)


def write_base(directory: RunDir, source: InitSource, *, is_begun: bool) -> None:
    """Write base.json; the adapter that a run began with stays named."""
    record, file = source.record(), directory.path / BASE
    if is_begun and file.is_file():
        before = read_json(directory.path, BASE)
        record |= {name: before[name] for name in ("adapter",) if name in before}
    directory.write_json(BASE, record)


def find_start(
    record: dict[str, Any] | None, source: InitSource | None, warn: Log, verifier: Verifier
) -> InitSource:
    """Return the run and step that a run begins with, which is the reference of its objective.

    Raises as `open_run_ref`, and ConfigError if the run begins with fresh weights.

    Args:
      record: the contents of start.json; None for a new run.
      source: the run of --init_from; None if the run has begun.
      warn, verifier: as of `open_run_ref`.
    """
    if record is not None:
        name = f"{record['run']}@{record['step']}"
        try:
            return open_run_ref(name, "--config.objective.reference", warn, verifier)
        except InputMissing as error:
            raise InputMissing(
                "the model that the run began with is gone",
                where="objective.reference = start",
                why=f"the run is compared with {name}: {error.what}",
                fix=f"restore {name} from a copy",
            ) from error
    if source is None:
        raise ConfigError(
            "the run begins with fresh weights, which are no reference",
            where="objective.reference = start",
            why="the distance to a model that writes noise is no use, and --init_from names none",
            fix="--config.objective.kl=none",
        )
    return source
