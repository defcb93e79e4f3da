"""Differences of two models of one run: distributions, greedy texts, and answers to tasks."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.core import backend
from jaxlm.core.callbacks import Log
from jaxlm.data.batch import Tokens
from jaxlm.data.loader import Loader
from jaxlm.generate.config import GenerateConfig
from jaxlm.generate.sampler import Sampler
from jaxlm.models.build import Blueprint
from jaxlm.objectives.loss import read_sharded
from jaxlm.parallel import host
from jaxlm.recipes import setup
from jaxlm.recipes.compare import tasks as comparison
from jaxlm.recipes.use import tasks
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.recipes.use.tasks import PreparedTask

BATCHES = 64  # of the text, on which the distributions of both models are compared
SLOTS = 64  # of each row, whose logits are in memory at a time
TEXTS, PROMPT, TOKENS = 20, 16, 48  # greedy texts, and the tokens of a prompt and of its answer
TIMED, TIMED_SECONDS = 3, 1.0  # repetitions, and their time, at least; the fastest counts


def answers(
    models: dict[str, LoadedRun],
    prepared: Sequence[PreparedTask],
    places: Sequence[Path],
    say: Log,
) -> dict[str, dict[str, Any]]:
    """Return by task the first metric before and after, and the items whose value changed.

    `places` are the folders of the results of each model; the one that has them is not scored.
    """
    if not prepared:
        return {}
    results = []
    for model, place in zip(models.values(), places, strict=True):
        scored = tasks.score_tasks(model, prepared, place, say)
        results.append([comparison.read_one(Path(each["folder"])) for each in scored.values()])
    pairs = [comparison.pair("before", a, "after", b) for a, b in zip(*results, strict=True)]
    firsts = comparison.adjusted([each[0] for each in pairs])
    return {each.task: _changed(each) for each in firsts}


def _changed(pair: comparison.TaskComparison) -> dict[str, Any]:
    """Return a comparison as JSON; a text has no flips, as each of its values is another."""
    changed = pair.rises + pair.falls
    items = pair.difference.items
    return {
        "metric": pair.metric,
        "before": pair.a.mean,
        "after": pair.b.mean,
        "items": items,
        "rises": len(pair.rises),
        "falls": len(pair.falls),
        "flips": None if pair.is_loss else len(changed) / items,
        "p_value": pair.p_adjusted,
        "changed": [] if pair.is_loss else changed,
        "difference": dataclasses.asdict(pair.difference),
    }


def divergence(opened: LoadedRun, rounded: LoadedRun, loader: Loader) -> dict[str, Any]:
    """Return KL(before | after) in nats, mean and 99.9%, and the share of equal likeliest ids."""
    mesh = opened.model.mesh
    size = setup.pass_rows(opened.run, mesh, sequence=loader.sequence, most=loader.plan.rows)
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


def texts(
    models: dict[str, LoadedRun], loader: Loader, table: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the tokens after which greedy texts depart; adds the speed of both to the table.

    A token loop on a CPU reads copies of the weights. So that the copies of one model are in memory
    at a time, the parameters of the first model are deleted when their copies exist, but for those
    that the second has too.
    """
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
    if backend.name() == "cpu":
        backend.release_freed_memory()
    ids, retained = [], jax.tree.leaves(models["after"].params)
    for name, each in models.items():
        with jax.set_mesh(each.model.mesh):
            is_both = each.run.objective.prompts == "both ways"
            sampler = Sampler(
                settings, each.model.blueprint, each.tokenizer, both_ways=is_both, flag="--"
            )
            prepare = functools.partial(sampler.consumed, retained=retained)
            ready = (prepare if name == "before" else sampler.prepared)(each.params)
            ids.append([text.ids for text in sampler.write_prepared(ready)])
            speeds = list[float]()
            begun = time.perf_counter()
            while len(speeds) < TIMED or time.perf_counter() - begun < TIMED_SECONDS:
                begin = time.perf_counter()
                count = sum(len(text.ids) for text in sampler.write_prepared(ready))
                speeds.append(count / (time.perf_counter() - begin))
            table[name]["tokens_per_second"] = max(speeds)
            del ready
    departures = [
        next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), None)
        for pair in zip(*ids, strict=True)
    ]
    return {"departures": departures}
