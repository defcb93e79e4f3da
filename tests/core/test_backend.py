import platform
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops.matmul import matmul


def test_it_is_that_of_the_process_but_for_what_is_made_for_another():
    assert backend.name() == jax.default_backend()
    with backend.compiling_for("tpu"):
        assert backend.name() == "tpu"
    assert backend.name() == jax.default_backend()


def test_activations_and_products_are_those_of_the_platform_that_a_program_is_for():
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))

    def product():
        x, weight = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
        program = jax.make_jaxpr(lambda x, w: matmul(x, w, precision))(x, weight)
        return program.out_avals[0].dtype, "reshape" in str(program)

    assert product() == (jnp.float32, True), "on a CPU rows are merged, and sums stay as they are"
    with backend.compiling_for("tpu"):
        assert product() == (jnp.bfloat16, False)


@pytest.mark.parametrize(
    ("platform", "units", "version", "compute", "dtype"),
    [
        ("cpu", {backend.AMX, backend.VECTORS}, (0, 12), "bfloat16", "bfloat16"),
        ("cpu", {backend.AMX, backend.VECTORS}, (0, 10), "bfloat16", "float32"),
        ("cpu", {backend.VECTORS}, (0, 12), "bfloat16", "bfloat16"),
        ("cpu", {backend.VECTORS}, (0, 10), "bfloat16", "float32"),
        ("cpu", set(), (0, 12), "bfloat16", "float32"),
        ("cpu", {backend.AMX}, (0, 12), "float16", "float32"),
        ("cpu", {backend.AMX}, (0, 12), "float32", "float32"),
        ("gpu", set(), (0, 10), "bfloat16", "bfloat16"),
        ("gpu", set(), (0, 12), "float16", "float16"),
    ],
)
def test_a_cache_has_the_dtype_of_products_where_they_are_fast(
    platform, units, version, compute, dtype, monkeypatch
):
    monkeypatch.setattr(backend, "cpu_units", lambda: frozenset(units))
    monkeypatch.setattr(backend, "jax_version", lambda: version)
    with backend.compiling_for(platform):
        assert Precision.of(PrecisionConfig(compute=compute)).cached == dtype
    assert backend.cached_dtype(compute, is_cpu=platform == "cpu") == dtype


@pytest.mark.parametrize(
    ("platform", "capability", "units", "dtype"),
    [
        ("cpu", None, {backend.VECTORS}, "bfloat16"),
        ("cpu", None, {backend.VECTORS, backend.INTEL}, "float32"),
        ("cpu", None, {backend.VECTORS, backend.AMX, backend.INTEL}, "bfloat16"),
        ("cpu", None, {backend.INTEL}, "float32"),
        ("cpu", None, set(), "float32"),
        ("tpu", None, set(), "bfloat16"),
        ("gpu", "9.0", set(), "bfloat16"),
        ("gpu", "7.5", set(), "float16"),
        ("gpu", "6.1", set(), "float32"),
        ("gpu", "gfx942", set(), "bfloat16"),
    ],
)
def test_the_fastest_dtype_is_one_that_the_platform_has_fast_units_for(
    platform, capability, units, dtype, monkeypatch
):
    device = SimpleNamespace(compute_capability=capability) if capability else SimpleNamespace()
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(backend, "_words", lambda path: frozenset(units))
    with backend.compiling_for(platform):
        assert backend.fastest_dtype() == dtype


FREED = """
import ctypes
from jaxlm.core import backend

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

backend.keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
block, last = library.malloc(2**26), library.malloc(1)  # no part of the end of the heap
ctypes.memset(ctypes.c_void_p(block), 1, 2**26)
library.free(block)
kept = resident()
backend.release_freed_memory()
print(kept - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_kept_until_it_is_released():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0.9 * 2**16  # KiB
