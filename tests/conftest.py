"""What every test stands on: eight fake devices, strict ranks, a compile cache, caches outside of the home folder."""

import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".cache"

# Before the first import of jax, and for the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAXLM_CACHE", str(CACHE / "jaxlm"))
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
