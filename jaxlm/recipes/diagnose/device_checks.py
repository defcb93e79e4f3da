"""Correctness and speed of the devices: a matrix product on each, and an all-reduce."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.monitor import formatting
from jaxlm.recipes.diagnose.doctor import CheckResult

SECONDS = 0.3  # of each timing
CHECKED = 8  # rows of a product that are compared with float64
# Along each side of the timed product: a small one measures its launch.
REPEATS = 4
# Relative to the largest; tensor cores multiply float32 in fewer digits.
TOLERANCE = {"float32": 1e-2, "bfloat16": 3e-2}


def products(size: int) -> Iterator[CheckResult]:
    """Check a [size, size] product on every local device, in both dtypes, against float64.

    An accelerator is timed with `REPEATS` copies of the operands along each side.
    """
    draw = np.random.default_rng(0)
    left, right = draw.standard_normal((2, size, size))
    expected = left[:CHECKED] @ right
    for device in jax.local_devices():
        rates, wrong = {}, []
        for dtype, tolerance in TOLERANCE.items():
            operands = [jax.device_put(jnp.asarray(x, dtype), device) for x in (left, right)]
            product = jax.jit(jnp.matmul)
            out = np.asarray(product(*operands)[:CHECKED], np.float64)
            error = float(np.abs(out - expected).max() / np.abs(expected).max())
            if not error <= tolerance:
                wrong.append(f"{dtype} is off by {error:.1e} of the largest")
            repeats = 1 if device.platform == "cpu" else REPEATS
            large = [jnp.tile(x, (repeats, repeats)) for x in operands]
            seconds = _seconds(functools.partial(product, *large))
            rates[dtype] = 2 * (repeats * size) ** 3 / seconds
        name = f"device {device.id}"
        numbers = {f"flops_per_second_{dtype}": rate for dtype, rate in rates.items()}
        shown = [f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in rates.items()]
        if wrong:
            text, fix = "; ".join(wrong), "remove the device and have it repaired"
            text = f"{text}: this device computes wrongly"
            yield CheckResult(name, "problem", text, fix, numbers)
        else:
            yield CheckResult(name, "ok", f"{', '.join(shown)}, right", numbers=numbers)


def sum_over_devices(count: int) -> CheckResult:
    """Check an all-reduce of `count` numbers of each device."""
    devices = jax.devices()
    grid = Mesh(np.array(devices), ("every",))
    sharding = NamedSharding(grid, PartitionSpec("every"))

    def local(index: Any) -> np.ndarray:
        return np.full((1, count), (index[0].start or 0) + 1, np.float32)

    numbers = jax.make_array_from_callback((len(devices), count), sharding, local)
    run = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(grid, PartitionSpec()))
    out = np.asarray(run(numbers))
    expected = len(devices) * (len(devices) + 1) / 2
    if not (out == expected).all():
        what = f"a sum over {len(devices)} devices gives {out.min()} to {out.max()}"
        fix = "NCCL_DEBUG=INFO jaxlm doctor"
        return CheckResult("all-reduce", "problem", f"{what} instead of {expected}", fix)
    # A ring sends each number of a device on twice, but for its own part.
    sent = 2 * (len(devices) - 1) / len(devices) * out.nbytes
    rate = sent / _seconds(lambda: run(numbers))
    text = f"right over {len(devices)} devices, {formatting.size(rate)}/s from each"
    return CheckResult("all-reduce", "ok", text, numbers={"bytes_per_second": rate})


def _seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest call within 0.3 s."""
    jax.block_until_ready(run())
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        begun = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - begun)
    return best
