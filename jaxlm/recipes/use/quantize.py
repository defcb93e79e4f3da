"""Quantize the weights of a run: a new run, refused if it loses more than is allowed."""

import dataclasses
import hashlib
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import EARLIER_STEP, CommandError, ConfigError, DataError, JaxlmError
from jaxlm.data.loader import Loader
from jaxlm.evals.tasks import scoring
from jaxlm.ops import integer_product
from jaxlm.ops.kernels import INTEGERS
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.import_model import copy_hub_files
from jaxlm.recipes.train import resume
from jaxlm.recipes.use import calibrate, calibration_text, evaluate, load, model_difference, tasks
from jaxlm.recipes.use.layer_runner import STACKS
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.recipes.use.tasks import TaskSettings
from jaxlm.training.rundir import RunDir
from jaxlm.tune import surgery
from jaxlm.tune.config import PROJECTIONS, Quantized
from jaxlm.tune.quantized import StoredWeight

Scheme = Literal["int8", "fp8", "int4", "int4_zero", "nf4", "nf4_double", "w8a8", "w4a8"]
# Inputs of one output that share a scale.
BLOCKS: dict[Scheme, int | Literal["all"]] = {
    "int8": "all", "fp8": "all", "int4": 128, "int4_zero": 128, "nf4": 64, "nf4_double": 64,
    "w8a8": "all", "w4a8": "all",
}  # fmt: skip
LIMIT = re.compile(r"(loss|flips):(\d+(?:\.\d+)?)%")
LOSS = 0.01  # its growth without a limit of its own


class QualityLost(JaxlmError, code=1, kind="quality lost"):
    """Quantized weights lose more than is allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """The run, the format of its weights, and the loss that is allowed."""

    workdir: Path
    out: Path
    scheme: Scheme
    method: Literal["rtn", "gptq", "awq"] = "rtn"  # rtn rounds to nearest
    calibration: tuple[str, ...] = ()  # globs of text for the other two, or `train`
    tokens: int = calibration_text.TOKENS  # of that text
    block: int | None = None  # of BLOCKS without it
    at: tuple[str, ...] = PROJECTIONS
    text: tuple[str, ...] = ()  # to compare on; () means the validation sets
    tasks: tuple[str, ...] = ()  # task files
    limit: int | None = None  # items of each; all without it
    allow: str = "loss:1%"


def quantize(
    options: QuantizeOptions, say: Log = lambda _: None, **selection: Any
) -> dict[str, Any]:
    """Write a run whose step 0 has the codes of the weights, and compare both models.

    Weights are rounded one at a time and on one device: the bytes do not depend on the mesh. Leaves
    that no pattern of `at` matches keep their bits, except those that AWQ divides by factors.
    `selection` are `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.

    Raises:
      CommandError: if `out` has a run, or `allow`, or the method without its text, cannot be read.
      ConfigError: if a pattern matches no linear layer, the run is quantized, or there is no text
        to compare on.
      DataError: if a weight is not finite, or the calibration text is reported on.
      QualityLost: if more changes than `allow` permits; nothing is written.
    """
    import_model.check_free(options.out, "--out", "a quantized run")
    allowed = _allowed(options)
    _check_method(options)
    files = tasks.read_tasks(options.tasks)
    if files:
        tasks.check_causal(options.workdir)
    opened = load.load_run(options.workdir, check=_check_plain, say=say, **selection)
    loaders = evaluate.open_loaders(opened, options.text, opened.run.data.sequence, say)
    evaluate.check_texts(opened, loaders)
    row, model = evaluate.checked_length(opened, None, say), opened.model
    tokenizers = tasks.Tokenizers(opened.tokenizer)
    settings = TaskSettings(limit=options.limit)
    rows = tasks.ModelRows(row, model.mesh, model.blueprint.config)
    prepared = [tasks.PreparedTask(each, settings, tokenizers, rows) for each in files]
    rounded, unread = _rounded(opened, options, loaders, say)
    models = {"before": opened, "after": rounded}
    if options.scheme in INTEGERS:
        say(integer_product.describe_speed())
    table: dict[str, dict[str, Any]] = {}
    for name, each in models.items():
        say(f"{name}: loss of {', '.join(loaders)}")
        sets = evaluate.measure(each, loaders)
        first = evaluate.with_first(each, options.text, sets)
        table[name] = {key: first[key] for key in ("loss_nats", "bits_per_byte")}
        table[name]["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(each.params))
    growth = table["after"]["loss_nats"] / table["before"]["loss_nats"] - 1
    loader = loaders[next(iter(loaders)) if options.text else _ranking(opened, loaders)]
    divergence = dict[str, Any]()
    if not opened.run.objective.has_reward_head:  # whose distributions are those of no text
        say("comparing the distributions of both")
        divergence = model_difference.divergence(opened, rounded, loader)
    answers = _answers(options, rounded)
    answer = {
        "workdir": str(options.out),
        "step": opened.step,
        "scheme": options.scheme,
        "method": options.method,
        "calibration": list(options.calibration),
        "quantized": len(surgery.quantized_weights(rounded.model.blueprint)),
        "unread_experts": unread,
        "loss_growth": growth,
        **divergence,
        "tasks": model_difference.answers(models, prepared, (options.workdir, answers), say),
        **table,
    }
    _check(answer, allowed, options)
    say("writing greedy texts")
    answer |= model_difference.texts(models, loader, table)
    store = Store(options.workdir / "checkpoints", CheckpointConfig(), read_only=True)
    base = load.InitSource(opened.run, store, opened.step)
    with RunDir(options.out) as directory:
        directory.copy_folder(answers / tasks.EVALS, tasks.EVALS)
        copy_hub_files(options.workdir, directory)
        directory.write_json(load.BASE, base.record())
        tokenizer = (options.workdir / "tokenizer").read_bytes()
        facts = answer | {"status": "quantized", "dtype": opened.run.precision.params}
        facts["data"] = resume.trained_on(options.workdir)
        import_model.write(directory, rounded.run, rounded.params, tokenizer, facts)
    shutil.rmtree(_unfinished(options), ignore_errors=True)
    return answer


def _check_plain(opened: LoadedRun) -> None:
    """Raise ConfigError if the run is quantized, or its adapter cannot be merged."""
    tune = opened.run.tune
    if tune.unmerged:
        raise ConfigError(
            "the run is quantized"
            if isinstance(tune, Quantized)
            else f"a {tune.name} cannot be merged into its base",
            where=f"--workdir={opened.workdir}",
            why=tune.unmerged,
            fix=load.unmerged_fix(opened.run, opened.workdir),
        )


def _unfinished(options: QuantizeOptions) -> Path:
    """Return the folder of the layers that are finished before the run is written."""
    return options.out.with_name(f"{options.out.name}.partial")


def _answers(options: QuantizeOptions, rounded: LoadedRun) -> Path:
    """Return the folder of the answers of these codes; a refused attempt has others.

    Schemes with the same codes multiply them differently.
    """
    identity = f"{options.scheme} {scoring.weights_digest(rounded.params)}"
    return _unfinished(options) / hashlib.sha256(identity.encode()).hexdigest()[:12]


def _allowed(options: QuantizeOptions) -> dict[str, float]:
    """Return the limits by name."""
    parts = [LIMIT.fullmatch(each) for each in options.allow.split(",")]
    limits = {each[1]: float(each[2]) / 100 for each in parts if each is not None}
    if None in parts:
        what = "the limit is no growth of the loss and no share of items"
        why = "it is a name and percent, as loss:1% or loss:1%,flips:2%"
        raise CommandError(what, where=f"--allow={options.allow}", why=why, fix="--allow=loss:1%")
    if "flips" in limits and not options.tasks:
        what, why = "a limit of flips needs tasks", "a flip is an item that is answered otherwise"
        fix = "find . -name '*.toml'    # task files, for --tasks"
        raise CommandError(what, where=f"--allow={options.allow}", why=why, fix=fix)
    return {"loss": LOSS} | limits


def _check(answer: dict[str, Any], allowed: dict[str, float], options: QuantizeOptions) -> None:
    """Raise QualityLost if a limit is exceeded."""
    growth, before, after = answer["loss_growth"], answer["before"], answer["after"]
    reached = {"loss": growth}
    what = {"loss": f"{options.scheme} changes the loss by {growth:+.2%}"}
    why = {"loss": f"{before['loss_nats']:.4f} nats became {after['loss_nats']:.4f}"}
    flips = {name: each["flips"] for name, each in answer["tasks"].items() if each["flips"]}
    if flips:
        worst = max(flips, key=lambda name: flips[name])
        each, reached["flips"] = answer["tasks"][worst], flips[worst]
        what["flips"] = f"{options.scheme} changes {flips[worst]:.1%} of the items of {worst}"
        why["flips"] = (
            f"{each['rises']} are better and {each['falls']} worse of {each['items']}, "
            f"and the loss grows by {growth:+.2%}"
        )
    beyond = [name for name, limit in allowed.items() if not reached.get(name, 0.0) <= limit]
    if not beyond:
        return
    enough = allowed | {name: _enough(reached[name]) for name in beyond if reached[name] < 1e3}
    limits = ",".join(f"{name}:{100 * limit:g}%" for name, limit in enough.items())
    is_finite = enough.keys() == allowed.keys() and all(map(math.isfinite, reached.values()))
    raise QualityLost(
        what[beyond[0]],
        where=f"--allow={options.allow}",
        why=why[beyond[0]],
        fix=f"--allow={limits}" if is_finite else EARLIER_STEP,
    )


def _enough(value: float) -> float:
    """Return the least limit of a tenth of a percent that a value does not exceed."""
    return max(0.001, math.ceil(1000 * value) / 1000)


def _check_method(options: QuantizeOptions) -> None:
    """Raise CommandError if the method needs another scheme or a text."""
    where = f"--method={options.method}"
    if options.scheme in INTEGERS and options.block:
        what, why = f"{options.scheme} has no blocks", "products of integers have a scale an output"
        block = f"--block={options.block}"
        raise CommandError(what, where=block, why=why, fix="--scheme=int4")
    if options.method == "rtn":
        if options.calibration:
            what, why = "rounding to nearest reads no text", "it depends on the weights alone"
            where = f"--calibration={options.calibration[0]}"
            raise CommandError(what, where=where, why=why, fix="--method=gptq")
        return
    if options.scheme not in ("int4", "int4_zero"):
        what, why = f"{options.method} searches integers of four bits", "other codes lose little"
        raise CommandError(what, where=f"--scheme={options.scheme}", why=why, fix="--scheme=int4")
    if not options.calibration:
        why = "its codes depend on the inputs of each weight"
        fix = f"--calibration={calibration_text.TRAIN}"
        raise CommandError(f"{options.method} needs a text", where=where, why=why, fix=fix)


def _calibrated(
    opened: LoadedRun,
    options: QuantizeOptions,
    layers: dict[str, StoredWeight],
    tables: dict[str, calibrate.Leaves],
    reported: dict[str, Loader],
    say: Log,
) -> calibrate.Calibrated:
    """Return the leaves that the calibration gives, by path; none for rounding to nearest.

    The layers that are calibrated read the rounded `tables`.
    """
    if options.method == "rtn":
        return calibrate.Calibrated({}, 0)
    values = {path: layers[path].dequantized(_parts(path, each)) for path, each in tables.items()}
    read = tree.map_with_path(
        lambda path, leaf: values[path].astype(leaf.dtype) if path in values else leaf,
        opened.params,
    )
    text = options.calibration, options.tokens
    batches = calibration_text.read(opened, *text, reported, say)
    names = ("scheme", "method", "calibration", "tokens", "block", "at")
    facts = {name: getattr(options, name) for name in names}
    ids = hashlib.sha256(b"".join(np.asarray(each.tokens).tobytes() for each in batches))
    store = Store(options.workdir / "checkpoints", CheckpointConfig(), read_only=True)
    digest = load.InitSource(opened.run, store, opened.step).digest
    return calibrate.Calibration(
        blueprint=opened.model.blueprint,
        params=read,
        layers=layers,
        method=options.method,
        batches=batches,
        facts=facts | {"ids": ids.hexdigest(), "run": digest, "weights": opened.weights},
        folder=_unfinished(options),
        nearest=_nearest_command(options),
        say=say,
    ).run()


def _nearest_command(options: QuantizeOptions) -> str:
    """Return the command that rounds the same weights to nearest."""
    words = ["jaxlm", "quantize", f"--workdir={options.workdir}", f"--out={options.out}"]
    words += [f"--scheme={options.scheme}", f"--allow={options.allow}"]
    words += [f"--block={options.block}"] if options.block else []
    words += [f"--at={','.join(options.at)}"] if options.at != PROJECTIONS else []
    return shlex.join(words)


def _rounded(
    opened: LoadedRun, options: QuantizeOptions, reported: dict[str, Loader], say: Log
) -> tuple[LoadedRun, int]:
    """Return the run with quantized weights, and how many experts no token of the text chose."""
    block = options.block or BLOCKS[options.scheme]
    tune = Quantized(base=options.scheme, block=block, at=options.at)
    precision = dataclasses.replace(opened.run.precision, qat="none", products="compute")
    run = dataclasses.replace(opened.run, tune=tune, precision=precision)
    vocab, mesh = opened.model.blueprint.config.vocab, opened.model.mesh
    try:
        model = setup.build_sharded_model(run, vocab, mesh)
    except ConfigError as error:
        if error.where == "tune.at":
            error.where, error.fix = "--at", "'--at=*/attention/*'"
        raise
    layers = surgery.quantized_weights(model.blueprint)
    shardings = tree.leaves(model.shardings)
    plain = tree.leaves(opened.params)
    for path in layers:
        if not is_finite(np.asarray(plain[path])):
            raise DataError(
                "a weight cannot be quantized",
                where=path,
                why="it has numbers that are not finite",
                fix=EARLIER_STEP,
            )
    made = {
        path: _nearest(path, layers[path], plain[path])
        for path in layers
        if not path.startswith(STACKS)
    }
    calibrated, unread = _calibrated(opened, options, layers, made, reported, say)
    if options.method != "rtn" and made:
        say(f"rounded to nearest, as they are outside of the layers: {', '.join(made)}")
    if unread:
        say(f"experts that no token of the text chose, rounded to nearest: {unread}")
    for path in [path for path in layers if path not in made]:
        codes = {new: leaf for new, leaf in calibrated.items() if new.startswith(f"{path}_")}
        made[path] = codes or _nearest(path, layers[path], plain[path])
    leaves: dict[str, Array] = {}
    for path, leaf in plain.items():
        new = made.pop(path, {path: calibrated.get(path, leaf)})
        leaves |= {name: jax.device_put(each, shardings[name]) for name, each in new.items()}
    params = tree.map_with_path(lambda path, _: leaves[path], model.blueprint.shapes)
    return dataclasses.replace(opened, run=run, model=model, params=params), unread


def _nearest(path: str, layer: StoredWeight, weight: Array) -> dict[str, np.ndarray]:
    """Return the leaves of a weight that is rounded to nearest, by their paths."""
    made = jax.jit(layer.quantized)(jnp.asarray(np.asarray(weight)))
    stem = path.removesuffix(layer.weight_name)
    return {f"{stem}{name}": np.asarray(leaf) for name, leaf in made.items()}


def _parts(path: str, leaves: dict[str, np.ndarray]) -> dict[str, Array]:
    """Return the leaves of a weight by their names in `WeightFormat`."""
    return {name.removeprefix(f"{path}_"): jnp.asarray(leaf) for name, leaf in leaves.items()}


def is_finite(weight: np.ndarray) -> bool:
    """Return True if all numbers of a weight are finite."""
    return bool(np.isfinite(weight.astype(np.float32)).all())


def _ranking(opened: LoadedRun, loaders: dict[str, Loader]) -> str:
    name = setup.ranking_set(opened.run, loaders)
    assert name is not None  # there is at least one set
    return name
