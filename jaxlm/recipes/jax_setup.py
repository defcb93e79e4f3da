"""Start of JAX: simulated CPU devices, the compilation cache, the mesh."""

import errno
import importlib.metadata
import os
import platform
import re
import stat
import threading
from pathlib import Path

import jax
from jax._src import lru_cache
from jax.sharding import AbstractMesh, Mesh

from jaxlm.core import backend
from jaxlm.core.errors import CommandError, NotWritable
from jaxlm.data import cache
from jaxlm.ops.kernels import Target
from jaxlm.parallel import mesh as meshes
from jaxlm.parallel.config import MeshConfig

_put_in_place = lru_cache.LRUCache.put


def start(cpu_devices: int | None = None) -> None:
    """Configure JAX before it initializes its devices.

    `cpu_devices` splits this machine's CPU into that many devices, to try a mesh without the
    hardware. The cache folder stores compiled programs, so the second start of a run does not
    compile again.

    Raises:
      CommandError: if JAX has started with another number of devices.
    """
    if cpu_devices is not None:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            raise CommandError(
                "the number of CPU devices cannot change once JAX has started",
                where=f"--cpu_devices={cpu_devices}",
                why=str(error),
                fix="set it in the first command of the process",
            ) from error
    # On a CPU, asynchronous dispatch gains no parallelism; and core/backend.py keeps freed memory
    # only for programs that the main thread runs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(compile_cache()))
    lru_cache.LRUCache.put = _put  # type: ignore[assignment]


def _put(store: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Store a compiled program atomically.

    JAX writes the file in place and never again: a process that is killed while writing leaves a
    file that every later start fails to read, and a concurrent reader gets an incomplete file.
    """
    if store.eviction_enabled:  # under a lock of its own
        return _put_in_place(store, key, value)
    target = store.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if not target.exists():
        partial = store.path / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        partial.write_bytes(value)
        partial.replace(target)


def compile_cache() -> Path:
    """Return a folder for compiled programs; only this user can write it, since they are executed.

    Its name depends on the user, the compiler and the features of the processor: a program for
    another processor may crash.
    """
    folder = cache.folder(
        cache.default(),
        "compiled",
        user=os.getuid(),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        processor=_processor(),
    )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        folder.chmod(0o700)
    except OSError as error:
        raise NotWritable(
            "the folder for compiled programs cannot be used",
            where=str(folder),
            why=f"{type(error).__name__}: {error.strerror}",
            fix="export JAXLM_CACHE=~/jaxlm-cache",
        ) from error
    return folder


def _processor() -> str:
    """Return the model and the features of this machine's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    facts = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([platform.machine(), *facts])


def target(mesh: Mesh | AbstractMesh) -> Target:
    """Return the compilation target of a mesh; without devices, the platform of the trace."""
    if isinstance(mesh, AbstractMesh):
        return Target(backend.name())
    device = mesh.devices.flat[0]
    # On AMD the capability is a name.
    capability = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return Target(device.platform, float(capability[0]) if capability else None)


def build_mesh(config: MeshConfig) -> Mesh:
    """Build the mesh over all devices. Raises ConfigError if it does not fit them."""
    return meshes.build(config)


def slices() -> int:
    """Return the number of slices: device groups with slow links between them.

    Raises ConfigError if they differ in size.
    """
    return meshes.slices(jax.devices())
