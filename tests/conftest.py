"""What every test stands on: eight fake devices, strict ranks, a compile cache, caches outside of the home folder."""

import os
import re
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent / ".cache"
SHARED_MEMORY = pytest.StashKey[set[str]]()

# Before the first import of jax, and for the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "xla"))
# A run compiles some forty small programs besides its step: from the cache they take half the time.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAXLM_CACHE", str(CACHE / "jaxlm"))
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))


@pytest.fixture(scope="module")
def one_device():
    """Runs of this module, in this process and in those that it starts, are on one device.

    The two are then the same in every bit, and a process with one device starts and steps at two thirds of the cost.
    """
    import jax

    first = jax.devices()[:1]
    flags = re.sub(r"(force_host_platform_device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        patch.setattr(jax, "device_count", lambda *_: 1)
        patch.setenv("XLA_FLAGS", flags)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind():
    """Processes that the tests of this worker started are gone at the end."""
    yield
    left = [f"process {pid}" for pid in _children() if not _is_resource_tracker(pid)]
    assert not left, f"left behind: {', '.join(left)}"


def pytest_terminal_summary(terminalreporter):
    """The tables that tests recorded, whichever worker they ran in."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    tables = [
        text
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "table"
    ]
    if tables:
        terminalreporter.section("tables")
    for text in tables:
        terminalreporter.write_line(text)


def pytest_sessionstart(session):
    session.config.stash[SHARED_MEMORY] = _shared_memory()


def pytest_sessionfinish(session):
    """Shared memory belongs to no process: once all workers are done, none is left that was not there before."""
    if hasattr(session.config, "workerinput"):
        return
    if left := _shared_memory() - session.config.stash[SHARED_MEMORY]:
        pytest.exit(f"left behind: {', '.join(f'/dev/shm/{name}' for name in left)}", returncode=1)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()


def _children() -> list[int]:
    """Of every thread. One that ends meanwhile takes its list along, and its children go to another."""
    return [
        int(pid)
        for task in Path("/proc/self/task").glob("*")
        for pid in _read(task / "children").split()
    ]


def _is_resource_tracker(pid: int) -> bool:
    """Python's own, which ends with us."""
    return "resource_tracker" in _read(Path(f"/proc/{pid}/cmdline"))


def _read(path: Path) -> str:
    """What a file of /proc says; nothing once its process or thread is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""
