"""Starting JAX: fake CPU devices, the compile cache, the mesh."""

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
    """Settles what must be settled before JAX looks for devices.

    `cpu_devices` splits this machine's CPU into that many devices, to try a mesh without owning one. Compiled programs
    are kept in the cache folder, so the second start of a run does not compile again.

    Raises:
      CommandError: where JAX has started with another number of devices.
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
                fix="name it in the first command of the process",
            ) from error
    # Nothing runs beside a program on a CPU but its own threads; and what the main thread runs, `allocator` can keep.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(compile_cache()))
    lru_cache.LRUCache.put = _put  # type: ignore[assignment]


def _put(store: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Keeps a compiled program, which appears whole or not at all.

    JAX writes it in place and never again: who is killed meanwhile leaves one that every later start fails to read, and
    who reads meanwhile gets half of it.
    """
    if store.eviction_enabled:  # under a lock of its own
        return _put_in_place(store, key, value)
    target = store.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if not target.exists():
        partial = store.path / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        partial.write_bytes(value)
        partial.replace(target)


def compile_cache() -> Path:
    """A folder for compiled programs that only this user can write, since what is in it is run.

    It is named by the user, the compiler, and what the processor can do: a program for another one may crash.
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
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
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
    """What this machine's processor is and can do."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(errors="replace").splitlines() if known.exists() else []
    told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([platform.machine(), *told])


def target(mesh: Mesh | AbstractMesh) -> Target:
    """What is compiled for on a mesh; one without devices is of the platform that is traced for."""
    if isinstance(mesh, AbstractMesh):
        return Target(backend.name())
    device = mesh.devices.flat[0]
    # AMD's are words.
    capability = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return Target(device.platform, float(capability[0]) if capability else None)


def build_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices. Raises ConfigError where it does not fit them."""
    return meshes.build(config)


def slices() -> int:
    """How many groups of devices with slow wires between them this process sees. Raises ConfigError where they differ in size."""
    return meshes.slices(jax.devices())
