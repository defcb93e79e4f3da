"""Cost of the loop, the config and Flax: `jaxlm train` against a hand-written step.

    taskset -c 0 python scripts/bench_step.py --size=quickstart
    taskset -c 0 python scripts/bench_step.py --size=100m --json

Both run in this process, from the same weights, on the same rows, in turns. Ours is the engine of
`jaxlm train`, and its time includes the loader, the transfer, the loop, the metrics of every step
and a line in metrics.jsonl for each tenth. The hand-written one is that of a person for this one
model: plain functions, matrix products of two dimensions in the same precision, the same loss with
the same backward pass, AdamW in a few lines; its batches are on the device before its clock starts,
and it computes no metric except the loss. Both losses must agree, or the comparison ends. The ratio
is the median over rounds of ours / hand-written, in tokens a second.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxlm.core import config
from jaxlm.data import dataset
from jaxlm.models.cost import model_cost
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.qwen import Qwen3
from jaxlm.monitor import sinks
from jaxlm.monitor.clock import Clock
from jaxlm.optim.config import AdamW
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training.loop import LoopLimits, Progress, TrainLoop
from jaxlm.training.signals import StopRequest

ROOT = Path(__file__).parents[1]
LOG_EVERY = 10  # steps; a run of 1,000 logs as often by default
# What the hand-written step does not do is turned off; the model is the config's.
PLAIN = {
    # In bfloat16 XLA for CPU widens products in their usual form; jaxlm writes them otherwise, and
    # would win by that for any cost of its loop.
    "precision.compute": "float32",
    "optim.name": "adamw",
    "optim.lr": "1e-4",
    "schedule.name": "constant",
    "schedule.warmup": "0",
    "train.microbatches": "1",
    "train.remat": "none",
    "loss.chunk": "None",
    "data.tokenizer": "bytes",
    "model.vocab": "2048",
    "log.every": str(LOG_EVERY),
}
SIZES = {
    "quickstart": PLAIN,
    "100m": PLAIN
    | {
        "model.depth": "12",
        "model.width": "768",
        "model.heads": "12",
        "model.kv_heads": "12",
        "model.head_dim": "auto",
        "model.hidden": "auto",
        "model.vocab": "16384",
        "model.tied": "True",
        "data.sequence": "256",
        "train.batch": "8",
    },
}
Timed = Callable[[int], tuple[float, float]]  # steps -> (seconds, last loss)


def ours(run: Run, data: dataset.Data, folder: Path) -> tuple[Any, Timed]:
    """The parameters that both start from, and `jaxlm train` from its loader to metrics.jsonl."""
    mesh = meshes.build(run.mesh)
    model = setup.build_sharded_model(run, setup.vocabulary(run, data.tokenizer.size), mesh)
    with jax.set_mesh(mesh):
        engine = TrainPrograms(run, data, model)
        state = engine.init_state()
        start = jax.tree.map(jnp.copy, state.params)
    batches = engine.batches(0)
    lines = sinks.Jsonl(folder / "metrics.jsonl")
    clock = Clock(
        start=0,
        steps=run.train.steps,
        flops_per_step=model_cost.flops_per_token(
            model.blueprint.config, run.data.sequence, causal=True
        )
        * run.tokens_per_step,
        flops_per_step_full=0.0,
        peak_flops=None,
    )
    done, losses = 0, [math.nan]

    class Bench(TrainLoop):
        """The loop of a run that only logs."""

        def __init__(self) -> None:
            self.progress = Progress()

        def is_log_due(self, step: int) -> bool:
            return True

        def count(
            self,
            values: dict[str, float],
            data_wait_seconds: float,
            begun_at: float,
            done_at: float,
        ) -> None:
            clock.add(
                tokens=values["tokens"], data_wait_seconds=data_wait_seconds, completed_at=done_at
            )

        def log(self, step: int, values: dict[str, float]) -> None:
            losses.append(values["loss_nats"])
            if step % LOG_EVERY == 0:
                lines.write({"step": step, "split": "train"} | clock.read(step) | values)

        def save(self, state: Any, step: int, loss_nats: float | None) -> None:
            pass

    bench = Bench()

    def timed(count: int) -> tuple[float, float]:
        nonlocal state, done
        begun = time.perf_counter()
        with jax.set_mesh(mesh):
            limits = LoopLimits(
                start=done,
                steps=run.train.steps,
                stop_at=done + count,
                patience=None,
                keep_best=False,
                budget=run.guard.budget,
            )
            state = bench.run(engine.step, state, batches, limits, StopRequest())
        jax.block_until_ready(state)
        done += count
        return time.perf_counter() - begun, losses[-1]

    return start, timed


def hand_written(run: Run, params: Any, batches: Iterator[Any]) -> Timed:
    """The same model and optimizer without jaxlm."""
    model, optim = run.model, run.optim
    assert isinstance(model, Llama | Qwen3)
    assert isinstance(optim, AdamW)
    largest = optim.clip_norm
    assert largest is not None
    heads, shared, size = model.heads, model.kv_heads, model.size_of_head
    low = functools.partial(jnp.asarray, dtype=run.precision.compute)

    @jax.custom_vjp
    def product(x: Array, w: Array) -> Array:
        return jnp.dot(low(x), low(w), preferred_element_type=jnp.float32)

    def product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
        x = low(x)
        return product(x, w), (x, w)

    def product_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
        (x, w), grad = saved, low(grad)
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        return dot(grad, low(w).T), dot(x.T, grad)

    product.defvjp(product_forward, product_backward)

    @jax.custom_vjp
    def nll(logits: Array, targets: Array) -> Array:
        return nll_forward(logits, targets)[0]

    def nll_forward(logits: Array, targets: Array) -> tuple[Array, tuple[Array, ...]]:
        peak = logits.max(-1, keepdims=True)
        log_sum = jnp.log(jnp.exp(logits - peak).sum(-1))
        hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
        picked = jnp.where(hit, logits - peak, 0.0).sum(-1)
        return log_sum - picked, (logits, targets, peak[:, 0] + log_sum)

    def nll_backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, None]:
        logits, targets, normalizer = saved
        hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
        softmax = jnp.exp(logits - normalizer[:, None])
        return softmax * grad[:, None] - jnp.where(hit, grad[:, None], 0.0), None

    nll.defvjp(nll_forward, nll_backward)

    def norm(x: Array, scale: Array) -> Array:
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + model.norm_eps) * scale

    def rotate(x: Array, cosine: Array, sine: Array) -> Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)

    def loss(p: dict[str, Any], batch: Any) -> Array:
        rows, length = batch.tokens.shape
        x = p["embedding"][batch.tokens.reshape(-1)]
        turns = batch.positions[..., None] * (
            model.rope_theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
        )
        cosine, sine = jnp.cos(turns)[:, :, None], jnp.sin(turns)[:, :, None]
        at = jnp.arange(length)
        same = batch.segments[:, :, None] == batch.segments[:, None, :]
        seen = (at[:, None] >= at) & same & (batch.segments[:, None, :] > 0)

        def layer(x: Array, w: dict[str, Array]) -> tuple[Array, None]:
            y = norm(x, w["attention_norm"])
            q = product(y, w["query"]).reshape(rows, length, heads, size)
            k = product(y, w["key"]).reshape(rows, length, shared, size)
            v = product(y, w["value"]).reshape(rows, length, shared, size)
            if model.family == "qwen3":
                q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
            q, k = rotate(q, cosine, sine) * size**-0.5, rotate(k, cosine, sine)
            q = q.reshape(rows, length, shared, heads // shared, size)
            scores = jnp.einsum(
                "btkgh,bskh->bkgts", low(q), low(k), preferred_element_type=jnp.float32
            )
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
            out = jnp.einsum(
                "bkgts,bskh->btkgh", low(weights), low(v), preferred_element_type=jnp.float32
            )
            x = x + product(out.reshape(rows * length, heads * size), w["out"])
            y = norm(x, w["mlp_norm"])
            return x + product(
                jax.nn.silu(product(y, w["gate"])) * product(y, w["up"]), w["down"]
            ), None

        if run.train.stack == "scan":
            x, _ = lax.scan(layer, x, p["layers"])
        else:
            for number in range(model.depth):
                x, _ = layer(x, jax.tree.map(lambda w, n=number: w[n], p["layers"]))
        x = norm(x, p["final_norm"])
        logits = product(x, p["embedding"].T if model.tied else p["unembedding"])
        weights = batch.weights.reshape(-1)
        return (nll(logits, batch.targets.reshape(-1)) * weights).sum() / weights.sum()

    def update(p: Any, m: Any, v: Any, count: Array, batch: Any) -> tuple[Any, ...]:
        value, grads = jax.value_and_grad(loss)(p, batch)
        length = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        shrink = jnp.minimum(1.0, largest / length)
        count = count + 1
        first, second = 1 - optim.b1**count, 1 - optim.b2**count

        def one(path: Any, w: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
            g = g * shrink
            m = optim.b1 * m + (1 - optim.b1) * g
            v = optim.b2 * v + (1 - optim.b2) * g * g
            decay = 0.0 if "norm" in path[-1].key else optim.weight_decay
            direction = (m / first) / (jnp.sqrt(v / second) + optim.eps) + decay * w
            return w - optim.lr * direction, m, v

        new = jax.tree_util.tree_map_with_path(one, p, m, v, grads)
        p, m, v = jax.tree.transpose(jax.tree.structure(p), None, new)
        return p, m, v, count, value

    step = jax.jit(update, donate_argnums=(0, 1, 2, 3))
    p = _flat(params, model)
    m, v = (jax.tree.map(jnp.zeros_like, p) for _ in range(2))
    count = jnp.zeros((), jnp.int32)

    def timed(number: int) -> tuple[float, float]:
        nonlocal p, m, v, count
        ready = [jax.device_put(next(batches)) for _ in range(number)]
        jax.block_until_ready(ready)
        begun = time.perf_counter()
        for batch in ready:
            p, m, v, count, value = step(p, m, v, count, batch)
        jax.block_until_ready((p, value))
        return time.perf_counter() - begun, float(value)

    return timed


def _flat(params: Any, model: Any) -> dict[str, Any]:
    """Our parameters under the hand-written names, every matrix with two dimensions."""
    block = params["stack"]["0"]
    wide = ("query", "key", "value")
    layers = {
        name: block["attention"][name]["weight"].reshape(model.depth, model.width, -1)
        for name in wide
    }
    layers["out"] = block["attention"]["out"]["weight"].reshape(model.depth, -1, model.width)
    layers |= {name: block["mlp"][name]["weight"] for name in ("gate", "up", "down")}
    layers |= {name: block[name]["scale"] for name in ("attention_norm", "mlp_norm")}
    if model.family == "qwen3":
        layers |= {name: block["attention"][name]["scale"] for name in ("query_norm", "key_norm")}
    flat = {
        "embedding": params["embedding"]["table"],
        "layers": layers,
        "final_norm": params["final_norm"]["scale"],
    }
    if not model.tied:
        flat["unembedding"] = params["unembedding"]["weight"]
    return jax.tree.map(jnp.copy, flat)


def measure(size: str, rounds: int, count: int) -> dict[str, Any]:
    """Tokens a second of both, by round, and the median of their ratio."""
    setup.start()
    run: Run = config.load(
        Run, str(ROOT / "configs/quickstart.py"), [*SIZES[size].items(), ("train.steps", "1000000")]
    ).value
    data = dataset.open_data(run.data, seed=run.seed)
    with tempfile.TemporaryDirectory() as folder:
        start, our_steps = ours(run, data, Path(folder))
        raw = data.train.batches(0, batch=run.train.batch)
        sides = {"hand_written": hand_written(run, start, raw), "jaxlm": our_steps}
        del start
        first = {name: timed(2)[1] for name, timed in sides.items()}
        if not math.isclose(*first.values(), rel_tol=1e-3):
            raise SystemExit(f"bench_step: the two are not the same model: {first}")
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sorted(sides, reverse=bool(number % 2)):
                rates[name].append(count * run.tokens_per_step / sides[name](count)[0])
    ratios = [a / b for a, b in zip(rates["jaxlm"], rates["hand_written"], strict=True)]
    return {
        "size": size,
        "parameters": model_cost.parameters(run.model.build()),
        "tokens_per_step": run.tokens_per_step,
        "rounds": rounds,
        "steps_per_round": count,
        "loss_nats": first,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of each side in a round; 20, or 1 at 100m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    answer = measure(args.size, args.rounds, args.steps or {"quickstart": 20, "100m": 1}[args.size])
    if args.json:
        print(json.dumps(answer))
        return 0
    print(f"{answer['parameters']:,} parameters, {answer['tokens_per_step']} tokens a step")
    for name, rate in answer["tokens_per_second"].items():
        print(f"{name:<13} {rate:10.1f} tokens/s")
    low, high = min(answer["ratios"]), max(answer["ratios"])
    print(f"ratio         {answer['ratio']:10.4f} (from {low:.4f} to {high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
