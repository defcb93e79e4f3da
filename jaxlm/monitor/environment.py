"""The environment of a run: versions, devices, flags, git state."""

import collections
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxlm.core.quoting import redacted

ROOM = Path(__file__).parents[1]  # folder of the package
PACKAGES = (
    *("jaxlm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("sentencepiece", "tokenizers", "ml-collections"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu"),
)

# Only these and the options of JAX are recorded: other variables may hold secrets.
VARIABLES = re.compile(
    r"JAXLM_(CACHE|FAULTS|PYTHON)|XLA_FLAGS|XLA_PYTHON_CLIENT_(PREALLOCATE|MEM_FRACTION|ALLOCATOR)"
    r"|GLIBC_TUNABLES|LIBTPU_INIT_ARGS|NCCL_(ALGO|PROTO|DEBUG)|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)


def facts() -> dict[str, Any]:
    """Return versions, devices, flags and git state, for environment.json. Starts JAX."""
    import jax

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "folder": str(Path.cwd()),  # relative paths of settings are from there
        "packages": installed(PACKAGES),
        "backend": jax.default_backend(),
        "devices": dict(sorted(collections.Counter(d.device_kind for d in jax.devices()).items())),
        "processes": jax.process_count(),
        "variables": {
            name: redacted(value)
            for name, value in sorted(os.environ.items())
            if VARIABLES.fullmatch(name) or name.lower() in jax.config.values
        },
        "git": git_state(ROOM.resolve().parent),
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    result = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result


def versions() -> dict[str, str]:
    """Return everything that decides the numbers: package versions, digests of jaxlm's folders."""
    packages = {f"package {name}": version for name, version in installed(PACKAGES).items()}
    return packages | _code(ROOM)


@functools.cache
def _code(package: Path) -> dict[str, str]:
    """Return a digest of each folder, from the first call of the process: running code is older."""
    digests: dict[str, Any] = collections.defaultdict(hashlib.sha256)
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        room = "/".join((package.name, *inner.parts[:-1][:1]))
        digests[room].update(str(inner).encode() + b"\0" + path.read_bytes())
    return {f"code of {room}": one.hexdigest()[:12] for room, one in digests.items()}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and the changed files; None if `folder` is not the root of a checkout."""
    if not (folder / ".git").exists():
        return None
    commit, changed = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "changed": [entry[3:] for entry in changed.splitlines()]}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
