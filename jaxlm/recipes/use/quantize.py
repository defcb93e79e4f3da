"""Quantize the weights of a run: a new run, refused if it loses more than is allowed."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import shlex
import shutil
import time
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
from jaxlm.core.errors import CommandError, ConfigError, DataError, JaxlmError
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Sampler
from jaxlm.models.build import Blueprint
from jaxlm.objectives.loss import read_sharded
from jaxlm.optim.average_config import NoAverage
from jaxlm.parallel import host, rules
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.train import resume
from jaxlm.recipes.use import calibrate, calibration_text, evaluate, load
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.training.rundir import RunDir
from jaxlm.tune import surgery
from jaxlm.tune.config import PROJECTIONS, Full, Quantized
from jaxlm.tune.quantized import QuantizedLinear

Scheme = Literal["int8", "fp8", "int4", "int4_zero", "nf4", "nf4_double"]
# Inputs of one output that share a scale.
BLOCKS: dict[Scheme, int | Literal["all"]] = {
    "int8": "all", "fp8": "all", "int4": 128, "int4_zero": 128, "nf4": 64, "nf4_double": 64,
}  # fmt: skip
BATCHES = 64  # of the text, on which the distributions of both models are compared
SLOTS = 64  # of each row, whose logits are in memory at a time
TEXTS, PROMPT, TOKENS = 20, 16, 48  # greedy texts, and the tokens of a prompt and of its answer
TIMED = 3  # repetitions; the fastest counts
ALLOWED = re.compile(r"loss:(\d+(?:\.\d+)?)%")


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
      ConfigError: if a pattern matches no linear layer, or the run is quantized.
      DataError: if a weight is not finite, or the calibration text is reported on.
      QualityLost: if the loss grows by more than `allow`; nothing is written.
    """
    import_model.check_free(options.out, "--out", "a quantized run")
    allowed = _allowed(options)
    _check_method(options)
    opened = load.load_run(options.workdir, say=say, **selection)
    if not isinstance(opened.run.tune, Full):
        raise ConfigError(
            "the run is quantized"
            if isinstance(opened.run.tune, Quantized)
            else f"a {opened.run.tune.name} cannot be merged into its base",
            where=f"--workdir={options.workdir}",
            why=opened.run.tune.unmerged,
            fix=f"jaxlm eval --workdir={shlex.quote(str(options.workdir))}",
        )
    loaders = evaluate.open_loaders(opened, options.text, opened.run.data.sequence, say)
    rounded = _rounded(opened, options, loaders, say)
    models = {"before": opened, "after": rounded}
    table: dict[str, dict[str, Any]] = {}
    for name, each in models.items():
        say(f"{name}: loss of {', '.join(loaders)}")
        sets = evaluate.measure(each, loaders, each.run.train.batch)
        first = evaluate.with_first(each, options.text, sets)
        table[name] = {key: first[key] for key in ("loss_nats", "bits_per_byte")}
        table[name]["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(each.params))
    growth = table["after"]["loss_nats"] / table["before"]["loss_nats"] - 1
    loader = loaders[next(iter(loaders)) if options.text else _ranking(opened, loaders)]
    answer = {
        "workdir": str(options.out),
        "step": opened.step,
        "scheme": options.scheme,
        "method": options.method,
        "calibration": list(options.calibration),
        "quantized": len(surgery.quantized_weights(rounded.model.blueprint)),
        "loss_growth": growth,
        **_divergence(opened, rounded, loader),
        **_texts(models, loader, table),
        **table,
    }
    if not growth <= allowed:
        enough = max(0.1, math.ceil(1000 * growth) / 10) if math.isfinite(growth) else None
        raise QualityLost(
            f"{options.scheme} changes the loss by {growth:+.2%}",
            where=f"--allow={options.allow}",
            why=f"{table['before']['loss_nats']:.4f} nats became {table['after']['loss_nats']:.4f}",
            fix=f"--allow=loss:{enough:g}%" if enough else "use an earlier --step",
        )
    store = Store(options.workdir / "checkpoints", CheckpointConfig(), read_only=True)
    base = load.InitSource(opened.run, store, opened.step)
    with RunDir(options.out) as directory:
        directory.write_json(load.BASE, base.record())
        tokenizer = (options.workdir / "tokenizer").read_bytes()
        facts = answer | {"dtype": opened.run.precision.params}
        import_model.write(directory, rounded.run, rounded.params, tokenizer, facts)
        resume.copy_hub_files(options.workdir, directory.path)
    shutil.rmtree(_unfinished(options), ignore_errors=True)
    return answer


def _unfinished(options: QuantizeOptions) -> Path:
    """Return the folder of the layers that are finished before the run is written."""
    return options.out.with_name(f"{options.out.name}.partial")


def _allowed(options: QuantizeOptions) -> float:
    match = ALLOWED.fullmatch(options.allow)
    if match is None:
        what, why = "the limit is not a growth of the loss", "it is a name and percent, as loss:1%"
        raise CommandError(what, where=f"--allow={options.allow}", why=why, fix="--allow=loss:1%")
    return float(match[1]) / 100


def _check_method(options: QuantizeOptions) -> None:
    """Raise CommandError if the method needs another scheme or a text."""
    where = f"--method={options.method}"
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
    layers: dict[str, QuantizedLinear],
    reported: dict[str, Loader],
    say: Log,
) -> dict[str, np.ndarray]:
    """Return the leaves that the calibration gives, by path; none for rounding to nearest."""
    if options.method == "rtn":
        return {}
    calibrate.check_decoder(opened.model.blueprint)
    text = options.calibration, options.tokens
    batches = calibration_text.read(opened, *text, reported, say)
    facts = dataclasses.asdict(options) | {"allow": None, "out": None, "text": None}
    ids = hashlib.sha256(b"".join(np.asarray(each.tokens).tobytes() for each in batches))
    store = Store(options.workdir / "checkpoints", CheckpointConfig(), read_only=True)
    digest = load.InitSource(opened.run, store, opened.step).digest
    return calibrate.Calibration(
        blueprint=opened.model.blueprint,
        params=opened.params,
        layers=layers,
        method=options.method,
        batches=batches,
        facts=json.loads(json.dumps(facts, default=str)) | {"ids": ids.hexdigest(), "run": digest},
        folder=_unfinished(options),
        say=say,
    ).leaves()


def _rounded(
    opened: LoadedRun, options: QuantizeOptions, reported: dict[str, Loader], say: Log
) -> LoadedRun:
    """Return the run with quantized weights."""
    block = options.block or BLOCKS[options.scheme]
    tune = Quantized(base=options.scheme, block=block, at=options.at)
    run = dataclasses.replace(opened.run, tune=tune, average=NoAverage())
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
                fix="use an earlier --step, whose weights are finite",
            )
    calibrated = _calibrated(opened, options, layers, reported, say)
    leaves: dict[str, Array] = {}
    for path, leaf in plain.items():
        if path not in layers:
            leaves[path] = jax.device_put(calibrated.get(path, leaf), shardings[path])
            continue
        stem = path.removesuffix("weight")
        made = {new: each for new, each in calibrated.items() if new.startswith(f"{path}_")}
        if not made:
            rounded = jax.jit(layers[path].quantized)(jnp.asarray(np.asarray(leaf)))
            made = {f"{stem}{name}": np.asarray(each) for name, each in rounded.items()}
        for new, each in made.items():
            leaves[new] = jax.device_put(each, shardings[new])
    params = tree.map_with_path(lambda path, _: leaves[path], model.blueprint.shapes)
    return dataclasses.replace(opened, run=run, model=model, params=params)


def is_finite(weight: np.ndarray) -> bool:
    """Return True if all numbers of a weight are finite."""
    return bool(np.isfinite(weight.astype(np.float32)).all())


def _ranking(opened: LoadedRun, loaders: dict[str, Loader]) -> str:
    name = setup.ranking_set(opened.run, loaders)
    assert name is not None  # there is at least one set
    return name


def _divergence(opened: LoadedRun, rounded: LoadedRun, loader: Loader) -> dict[str, Any]:
    """Return KL(before | after) in nats, mean and 99.9%, and the share of equal likeliest ids."""
    mesh = opened.model.mesh
    ways = rules.split(mesh, "batch")
    size = -(-opened.run.train.batch // ways) * ways
    rows = host.host_rows(mesh, size)
    step = jax.jit(functools.partial(_compared, opened.model.blueprint, rounded.model.blueprint))
    distances, same = [], []
    with jax.set_mesh(mesh):
        for batch in itertools.islice(loader.evaluation(batch=size, rows=rows), BATCHES):
            kl, equal = step(opened.params, rounded.params, host.put(mesh, batch))
            is_target = np.asarray(batch.weights) > 0
            distances.append(np.asarray(kl)[is_target])
            same.append(np.asarray(equal)[is_target])
    every = np.concatenate(distances)
    return {
        "tokens": len(every),
        "kl_mean": float(np.mean(every, dtype=np.float64)),
        "kl_999": float(np.quantile(every, 0.999)),
        "top1_agreement": float(np.concatenate(same).mean()),
    }


def _compared(
    first: Blueprint, second: Blueprint, before: Any, after: Any, batch: Tokens
) -> tuple[Array, Array]:
    """Return KL [B, T] of the distributions of two models, and if their likeliest ids are equal."""
    models = first.merge(before), second.merge(after)
    hidden = [read_sharded(model, batch, None)[1].values for model in models]
    rows, length, width = hidden[0].shape
    size = max(each for each in range(1, SLOTS + 1) if length % each == 0)
    parts = tuple(each.reshape(rows, -1, size, width).swapaxes(0, 1) for each in hidden)

    def part(values: tuple[Array, Array]) -> tuple[Array, Array]:
        one, two = (
            jax.nn.log_softmax(model.logits(each).astype(jnp.float32))
            for model, each in zip(models, values, strict=True)
        )
        distance = jnp.sum(jnp.exp(one) * (one - two), -1)
        return jnp.maximum(distance, 0.0), one.argmax(-1) == two.argmax(-1)

    distance, equal = (
        each.swapaxes(0, 1).reshape(rows, length) for each in jax.lax.map(part, parts)
    )
    return distance, equal


def _texts(
    models: dict[str, LoadedRun], loader: Loader, table: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the tokens after which greedy texts depart; adds the speed of both to the table."""
    opened = models["before"]
    sequence = opened.run.data.sequence
    if opened.run.objective.prompts == "none" or opened.run.architecture == "encoder-decoder":
        return {}
    batch = next(loader.evaluation(batch=TEXTS))
    is_row = np.asarray(batch.weights).any(-1)  # others fill up the batch
    heads = np.asarray(batch.tokens)[is_row, : min(PROMPT, sequence // 4)]
    prompts = tuple(opened.tokenizer.decode(row.tolist()) for row in heads)
    settings = GenerateConfig(
        prompts=prompts, max_tokens=min(TOKENS, sequence // 4), temperature=0.0
    )
    ids = []
    for name, each in models.items():
        with jax.set_mesh(each.model.mesh):
            is_both = each.run.objective.prompts == "both ways"
            sampler = Sampler(
                settings, each.model.blueprint, each.tokenizer, both_ways=is_both, flag="--"
            )
            ids.append([text.ids for text in sampler.write(each.params)])
            speeds = []
            for _ in range(TIMED):
                begin = time.perf_counter()
                count = sum(len(text.ids) for text in sampler.write(each.params))
                speeds.append(count / (time.perf_counter() - begin))
            table[name]["tokens_per_second"] = max(speeds)
    departures = [
        next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), None)
        for pair in zip(*ids, strict=True)
    ]
    return {"departures": departures}
