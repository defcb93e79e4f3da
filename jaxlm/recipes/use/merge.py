"""Merge an adapter into its base: a new run whose model needs no adapter."""

import dataclasses
import functools
import itertools
import shlex
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.objectives.loss import score
from jaxlm.objectives.reward import score_slots
from jaxlm.parallel import host
from jaxlm.recipes import setup
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.import_model import copy_hub_files
from jaxlm.recipes.train import resume
from jaxlm.recipes.use import evaluate, load
from jaxlm.training.rundir import RunDir, imported_facts
from jaxlm.tune.config import QLora, Quantized

BATCHES = 8  # of the validation set, on which both models are compared


def merge(
    workdir: Path,
    out: Path,
    *,
    onto: load.Onto = "dequantized",
    say: Log = lambda _: None,
    **selection: Any,
) -> dict[str, Any]:
    """Write a run whose step 0 has the merged weights, and compare it with the adapter on its base.

    The answer has the mean and the largest difference of the log-probabilities of the validation
    set's tokens, in nats; of a reward model, of the scores after these tokens. Weights on a
    dequantized base are stored in bfloat16. For a quantized base `onto` of the answer has both
    differences for both bases.

    Raises:
      CommandError: if `out` exists, the run has no adapter, or its base is not quantized and
        `onto` is "original".
      ConfigError: if the adapter is no linear map.

    Args:
      workdir: the run with the adapter.
      out: the new run directory.
      onto: the weights that the update is added to: those that it was trained on, or those that the
        base's run stores.
      `say`: receives log lines.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.
    """
    import_model.check_free(out, "--out", "a merged model")
    adapted = load.load_run(workdir, is_merged=False, say=say, **selection)
    if not adapted.model.base:
        name, place = adapted.run.tune.name, shlex.quote(str(workdir))
        is_quantized = isinstance(adapted.run.tune, Quantized)
        kind = "codes of all weights" if is_quantized else "all weights"
        raise CommandError(
            "the run has no adapter",
            where=f"--workdir={workdir}",
            why=f"its checkpoints have {kind} (tune.name = {name})",
            fix=f"jaxlm generate --workdir={place} --prompt=Hello"
            if is_quantized
            else f"jaxlm export --workdir={place} --out=export",
        )
    if setup.decoding(adapted.model)[0] is not adapted.model.plain:
        raise ConfigError(
            f"a {adapted.run.tune.name} cannot be merged",
            where=f"tune.name = {adapted.run.tune.name}",
            why=adapted.run.tune.unmerged,
            fix=f"jaxlm generate --workdir={shlex.quote(str(workdir))} --prompt=Hello",
        )
    is_quantized = isinstance(adapted.run.tune, QLora)
    if onto == "original" and not is_quantized:
        raise CommandError(
            "the base of this adapter is not quantized",
            where=f"--onto={onto}",
            why=f"tune.name = {adapted.run.tune.name} has one base",
            fix=f"jaxlm merge --workdir={shlex.quote(str(workdir))} --out={shlex.quote(str(out))}",
        )
    bases = sorted(get_args(load.Onto), key=onto.__eq__) if is_quantized else [onto]
    compared: dict[str, dict[str, Any]] = {}
    for base in bases:  # the chosen one is the last
        merged = load.load_run(workdir, onto=base, say=say, **(selection | {"cpu_devices": None}))
        if is_quantized and base == "dequantized":
            merged = _in_bfloat16(merged)
        compared[base] = differences = _differences(adapted, merged, say)
    answer = {
        "workdir": str(out),
        "step": merged.step,
        "parameters": tree.count(merged.params),
        "base": load.find_base(workdir, adapted.run, None, say).record(),
    } | differences
    if is_quantized:
        answer["onto"] = {"chosen": onto} | compared
    facts = imported_facts(workdir)
    with RunDir(out) as directory:
        dtype = merged.run.precision.params
        dtype = dtype if is_quantized else facts.get("dtype", dtype)
        marks = facts | answer | {"status": "merged", "dtype": dtype}
        marks["data"] = resume.trained_on(workdir)
        tokenizer = (workdir / "tokenizer").read_bytes()
        copy_hub_files(workdir, directory)
        import_model.write(directory, merged.run, merged.params, tokenizer, marks)
    return answer


def _in_bfloat16(merged: load.LoadedRun) -> load.LoadedRun:
    precision = dataclasses.replace(merged.run.precision, params="bfloat16")
    run = dataclasses.replace(merged.run, precision=precision)
    model = setup.build_sharded_model(run, merged.model.plain.config.vocab, merged.model.mesh)
    params = jax.tree.map(lambda x, like: x.astype(like.dtype), merged.params, model.plain.shapes)
    return dataclasses.replace(merged, run=run, model=model, params=params)


def _differences(adapted: load.LoadedRun, merged: load.LoadedRun, say: Log) -> dict[str, Any]:
    """Return mean and largest difference of the log-probabilities of the same tokens, or scores."""
    mesh, run = merged.model.mesh, merged.run
    size = setup.pass_rows(run, mesh)
    rows, put = host.host_rows(mesh, size), functools.partial(host.put, mesh)
    has_scores = run.objective.has_reward_head

    def values(blueprint: Blueprint, params: Any, batch: Tokens) -> jax.Array:
        model = blueprint.merge(params)
        if has_scores:
            return score_slots(model, batch._replace(answers=None), None)[0]
        return score(model, batch, None, setup.pass_chunk(run))[0].nll

    loader = next(iter(evaluate.open_loaders(merged, (), run.data.sequence, say).values()))
    with jax.set_mesh(mesh):
        scores = [
            jax.jit(functools.partial(values, each.model.blueprint)) for each in (adapted, merged)
        ]
        total, count, largest = 0.0, 0, 0.0
        for batch in itertools.islice(loader.evaluation(batch=size, rows=rows), BATCHES):
            placed = put(batch)
            first, second = (
                one(each.params, placed)
                for one, each in zip(scores, (adapted, merged), strict=True)
            )
            # Prompts have no targets, but for the program.
            is_read = (placed.segments if loader.shards.prompts else placed.weights) > 0
            distance = jnp.where(is_read, jnp.abs(first - second), 0.0)
            total, largest = total + float(distance.sum()), max(largest, float(distance.max()))
            count += int(is_read.sum())
    compared = "scores" if has_scores else "log-probabilities"
    differences = {"mean_nats": total / max(count, 1), "largest_nats": largest}
    return {"compared": compared, "tokens": count} | differences
