"""Problems of a machine and their fixes: versions, devices, memory, disks and arithmetic."""

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import JaxlmError, installs
from jaxlm.data import cache
from jaxlm.monitor import environment, formatting
from jaxlm.monitor.host_machine import Hardware

# docs.nvidia.com/deploy/cuda-compatibility: the oldest driver of each major version on Linux.
MIN_DRIVER = {12: 525, 13: 580}
RUNTIMES = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")  # next to the plugins, of the same release
MIN_MEMORY = 2 * 2**30
MIN_DISK = 5 * 10**9
MIN_DISK_RATE = 50e6  # bytes a second: a checkpoint of GPT-2 124M would take half a minute
WRITTEN = 64 * 2**20
SIZE = 1024  # of the square matrices of a product
REDUCED = 4 * 2**20  # numbers per device in an all-reduce


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check. A problem has a fix; a warning may cost time or end a larger run."""

    name: str
    verdict: Literal["ok", "warning", "problem"]
    said: str
    fix: str = ""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        mark = "" if self.verdict == "ok" else f"{self.verdict.upper()}: "
        fix = "".join(f"\n{'':14}fix: {line}" for line in self.fix.splitlines())
        return f"{self.name:<14}{mark}{self.said}{fix}"


def examine(folder: Path, say: Log = lambda _: None) -> Iterator[CheckResult]:
    """Check this machine; `folder` is the place of future runs. Starts JAX."""
    packages = environment.installed((*environment.PACKAGES, *RUNTIMES))
    hardware = Hardware.found()
    yield from versions(packages, sys.version_info[:2])
    yield from _started(hardware, packages)
    yield host_memory(_meminfo())
    say(f"writing {formatting.size(WRITTEN)} into {folder} and into the cache ...")
    yield disk("run folder", folder, "name a --workdir on another disk")
    fix = "name a folder on another disk in the variable JAXLM_CACHE"
    yield disk("cache folder", cache.default(), fix)


def versions(packages: Mapping[str, str], python: tuple[int, int]) -> Iterator[CheckResult]:
    """Check Python and the parts of JAX, which must be of one release."""
    jax, jaxlib = packages.get("jax", ""), packages.get("jaxlib", "")
    yield CheckResult("python", "ok", f"{python[0]}.{python[1]}, jax {jax}, jaxlib {jaxlib}")
    plugins = {name: packages[name] for name in packages if re.match(r"jax-cuda\d+-", name)}
    pip = f"{sys.executable} -m pip"
    for name, version in plugins.items():
        if version.split(".")[:3] != jaxlib.split(".")[:3]:
            text = f"{version} with jaxlib {jaxlib}: JAX loads no plugin of another release"
            yield CheckResult(name, "problem", text, f"{pip} install '{name}=={jaxlib}'")
    if len(majors := {re.sub(r"\D", "", name) for name in plugins}) > 1:
        cuda = " and ".join(sorted(majors))
        text = f"plugins for CUDA {cuda} are installed; JAX takes the first"
        fix = f"{pip} uninstall {' '.join(n for n in plugins if min(majors) in n)}"
        yield CheckResult("plugins", "problem", text, fix)


def accelerators(
    hardware: Hardware, backend: str, packages: Mapping[str, str], platforms: str
) -> Iterator[CheckResult]:
    """Check that JAX uses the accelerators of the machine. `platforms` is JAX_PLATFORMS."""
    if hardware.driver and (major := _cuda(packages)):
        yield _driver(hardware.driver, major)
    if hardware.gpus and backend != "gpu":
        platform, unused = "gpu", ", ".join(hardware.gpus)
    elif hardware.has_tpu and backend != "tpu":
        platform, unused = "tpu", "a TPU"
    else:
        return
    if platforms and platform not in platforms and not (platform == "gpu" and "cuda" in platforms):
        text = f"{unused} is not used: JAX_PLATFORMS={platforms} keeps JAX from it"
        yield CheckResult("accelerator", "warning", text, "unset JAX_PLATFORMS")
        return
    if platform == "gpu" and not _cuda(packages):
        extra = "cuda12" if hardware.driver and _supported_cuda(hardware.driver) == 12 else "cuda"
        why, fix = "no plugin for CUDA is installed", installs(extra)
    elif platform == "tpu" and "libtpu" not in packages:
        why, fix = "libtpu is not installed", installs("tpu")
    else:
        why = "the plugin is installed but did not start; its own message has the reason"
        choice = "cuda" if platform == "gpu" else "tpu"
        fix = f"JAX_PLATFORMS={choice} {sys.executable} -c 'import jax; jax.devices()'"
    yield CheckResult("accelerator", "problem", f"{unused} is not used: {why}", fix)


def host_memory(meminfo: Mapping[str, int]) -> CheckResult:
    """Check the host's memory, given the fields of /proc/meminfo in bytes; empty if unavailable."""
    total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    if total is None or free is None:
        return CheckResult("memory", "ok", "the system does not report it")
    numbers = {"total_bytes": total, "available_bytes": free}
    text = f"{formatting.size(free)} of {formatting.size(total)} are available"
    if free >= MIN_MEMORY:
        return CheckResult("memory", "ok", text, numbers=numbers)
    return CheckResult("memory", "warning", text, "end other programs on this machine", numbers)


def disk(name: str, folder: Path, fix: str) -> CheckResult:
    """Check free space and write speed of the disk of `folder`, which may not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    target = existing / f".jaxlm-doctor.{os.getpid()}"
    started = time.perf_counter()
    try:
        with open(target, "xb") as file:
            file.write(os.urandom(2**20) * (WRITTEN // 2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return CheckResult(name, "problem", f"{existing} cannot be written: {error.strerror}", fix)
    finally:
        with contextlib.suppress(OSError):
            target.unlink()
    rate, free = WRITTEN / (time.perf_counter() - started), shutil.disk_usage(existing).free
    numbers = {"free_bytes": free, "write_bytes_per_second": rate}
    text = f"{formatting.size(free)} free in {existing}, written at {formatting.size(rate)}/s"
    is_ok = free >= MIN_DISK and rate >= MIN_DISK_RATE
    return CheckResult(name, "ok" if is_ok else "warning", text, "" if is_ok else fix, numbers)


def _started(hardware: Hardware, packages: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check JAX: its devices, and their arithmetic."""
    import jax

    from jaxlm.recipes import setup
    from jaxlm.recipes.diagnose import device_checks

    setup.start()
    try:
        devices = jax.devices()
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        text = f"JAX does not start: {message}"
        yield CheckResult("devices", "problem", text, "unset JAX_PLATFORMS")
        return
    backend, kinds = devices[0].platform, sorted({device.device_kind for device in devices})
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")  # unknown for a CPU
    held = f", {formatting.size(limit)} each" if limit else ""
    yield CheckResult("devices", "ok", f"{len(devices)} x {', '.join(kinds)} ({backend}){held}")
    yield from accelerators(hardware, backend, packages, os.environ.get("JAX_PLATFORMS", ""))
    yield from device_checks.products(SIZE)
    if len(devices) > 1:
        yield device_checks.sum_over_devices(REDUCED)
    try:
        yield CheckResult("compile cache", "ok", str(setup.compile_cache()))
    except JaxlmError as error:
        yield CheckResult("compile cache", "problem", f"{error.what}: {error.why}", error.fix)


def _driver(driver: str, major: int) -> CheckResult:
    oldest = MIN_DRIVER[major]
    text = f"{driver}, CUDA {major} needs {oldest} or newer"
    if _major(driver) >= oldest:
        return CheckResult("driver", "ok", text)
    older = _supported_cuda(driver)
    fix = installs(f"cuda{older}") if older else "a newer driver"
    return CheckResult("driver", "problem", text, fix)


def _supported_cuda(driver: str) -> int | None:
    """Return the newest CUDA that a driver supports."""
    versions = [cuda for cuda, oldest in MIN_DRIVER.items() if _major(driver) >= oldest]
    return max(versions, default=None)


def _cuda(packages: Mapping[str, str]) -> int | None:
    """Return the major version of CUDA of the installed plugin."""
    return next((major for major in MIN_DRIVER if f"jax-cuda{major}-plugin" in packages), None)


def _major(version: str) -> int:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else 0


def _meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    if not path.exists():
        return {}
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.M)
    return {name: int(amount) * 1024 for name, amount in rows}
