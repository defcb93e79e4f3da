"""Settings of all tests: eight fake devices, strict ranks, a compile cache, private caches."""

import collections
import contextlib
import gc
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tests import forked, machine

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"
SESSION = "JAXLM_TEST_SESSION"  # in the environment of every process that the tests start
TEST = (
    "PYTEST_CURRENT_TEST="  # pytest keeps it in the environment, and so do those that a test starts
)
ENDING_SECONDS = 10
LONGEST_SECONDS = 10  # of a fast test, but for those of the bar's lines
# A first run compiles what later ones find, and other programs share the processor: 18 s were seen
# of a test of 8. So a test fails that is far beyond the limit; those just above it are in the list
# of the slowest that each run ends with.
SLACK = 3
BEFORE = pytest.StashKey[set[str]]()
OWN = pytest.StashKey[str]()
LATER = (
    "slow",
    "alone",
    "parity",
    "cluster",
    "trackers",
    "gpu",
    "atheris",
)  # what scripts/test leaves to --slow
LINE = re.compile(r"([a-hs])(\d{1,2})_")
IDS = re.compile(
    rf"(?<=::test_)({LINE.pattern})+|$"
)  # the ids of lines at the start of a test's name

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
# libtpu would leave its logs among the temporary files, as it does where this folder is not there.
os.environ.setdefault("TPU_LOG_DIR", str(CACHE / "libtpu"))
Path(os.environ["TPU_LOG_DIR"]).mkdir(parents=True, exist_ok=True)
# Without bytecode, each process that tests start would compile all sources of jaxlm again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
gc.set_threshold(100_000, 20, 100)  # as in cli.main.entry; with the default a twentieth of it all


def pytest_configure(config):
    """A folder for temporary files of its own, so that what is left in it is ours.

    What pytest makes stays where it was.

    Workers have that of the process that started them. A run of pytest that a test starts has
    another.
    """
    if hasattr(config, "workerinput"):
        return
    os.environ[SESSION] = uuid.uuid4().hex
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = config.stash[OWN] = folder


def pytest_assertrepr_compare(op, left, right):
    """Compare bytes in one line: with the variable CI, pytest compares them in full, for hours."""
    if op == "==" and isinstance(left, bytes) and isinstance(right, bytes):
        both = enumerate(zip(left, right, strict=False))
        at = next((n for n, (a, b) in both if a != b), min(len(left), len(right)))
        return [f"{len(left)} and {len(right)} bytes, different from byte {at} on"]
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow all but the first n sets of parameters of a test marked `few(n)`."""
    seen = collections.Counter()
    for item in items:
        few = item.get_closest_marker("few")
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        if few and seen[name] > few.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Keep the thousands of tests out of the garbage collections that follow.

    They leave hardly any garbage: a collection before it takes two seconds and finds nothing.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a fast test that should be marked slow; tests of the reliability bar are exempt.

    Both the clock and the processor time, of this process and of those that it waited for, must
    exceed the limit: other programs lengthen the first, several threads the second. The limit is
    higher on a slower machine.
    """
    begun, before = time.monotonic(), os.times()
    result = yield
    seconds = min(time.monotonic() - begun, sum(os.times()[:4]) - sum(before[:4]))
    is_free = IDS.search(item.nodeid)[0] or any(map(item.get_closest_marker, LATER))
    if seconds > LONGEST_SECONDS and not is_free:
        limit = LONGEST_SECONDS * SLACK * machine.slowness()
        if seconds > limit:
            raise machine.TooSlow(
                f"it took {seconds:.1f} s of the processor, a fast test may take {limit:.1f}: "
                "make it shorter, or slow"
            )
    return result


@pytest.fixture(scope="module")
def one_device():
    """Runs of this module, in this process and in those that it starts, are on one device.

    The two are then the same in every bit, and a process with one device starts and steps at two
    thirds of the cost. They have as many threads: how jax 0.10 adds a loss up depends on that, and
    a client has one for each device at least.
    """
    import jax

    threads = max(len(os.sched_getaffinity(0)), jax.device_count())
    first = jax.devices()[:1]
    flags = re.sub(r"(force_host_platform_device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        patch.setattr(jax, "device_count", lambda *_: 1)
        patch.setenv("XLA_FLAGS", flags)
        patch.setenv("PJRT_NPROC", str(threads))
        yield


@pytest.fixture(scope="module")
def without_plots():
    """Draw no plots in runs of this module in this process: each costs a second.

    Plots have tests of their own.
    """
    from jaxlm.monitor import plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda _: [])
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_of_this_worker_is_left_behind():
    """Fail if the worker leaves a process or a listening socket, except pytest's plugins."""
    before = _listening()
    yield
    forked.close()
    left = [f"process {pid}" for pid in _children() if not _is_resource_tracker(pid)]
    left += [f"a socket that listens at {address}" for address in _listening() - before]
    assert not left, f"left behind: {', '.join(left)}"


def pytest_terminal_summary(terminalreporter):
    """Print the tables that tests recorded in any worker, and the results of the bar."""
    every = [report for outcome in terminalreporter.stats.values() for report in outcome]
    # What failed or was skipped before it was called has no report of a call.
    reports = [
        report
        for report in every
        if isinstance(report, pytest.TestReport) and (report.when == "call" or not report.passed)
    ]
    tables = [
        text for report in reports for name, text in report.user_properties if name == "table"
    ]
    for title, texts in (("tables", tables), ("lines of the reliability bar", _lines(reports))):
        if texts:
            terminalreporter.section(title)
        for text in texts:
            terminalreporter.write_line(text)


def _lines(reports) -> list[str]:
    """Return a row for each line of the bar, and a row with the sums.

    A row has the id of the line, the outcomes of its tests and the figures that they recorded as a
    property with this id.
    """
    ended = collections.defaultdict(collections.Counter)
    figures = collections.defaultdict(list)
    tests = [report for report in reports if IDS.search(report.nodeid)[0]]
    for report in tests:
        for group, number in LINE.findall(IDS.search(report.nodeid)[0]):
            line = group.upper(), int(number)
            ended[line][report.outcome] += 1
            name = "{}{}".format(*line)
            figures[line] += [text for known, text in report.user_properties if known == name]
    rows = [
        "{:4} {:10} {}".format(
            "{}{}".format(*line),
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())),
            "; ".join(figures[line]),
        ).rstrip()
        for line, outcomes in sorted(ended.items())
    ]
    seconds = sum(report.duration for report in tests)
    return (
        [*rows, f"{len(ended)} lines, {len(tests)} tests, {seconds:.0f} s of the workers"]
        if rows
        else []
    )


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = _files(session.config.stash[OWN])


def pytest_sessionfinish(session):
    """Fail the session if a process, shared memory or a file is left after all workers ended."""
    if hasattr(session.config, "workerinput"):
        return
    folder, before = session.config.stash[OWN], session.config.stash[BEFORE]
    left = [_described(pid) for pid in _orphans()]
    left += sorted(name for name in _files(folder) - before if not _is_mapped(name))
    # By its name: where it is gone, Python's folder for temporary files is everybody's.
    shutil.rmtree(folder, ignore_errors=True)
    if left:
        session.config.get_terminal_writer().line(f"\nleft behind: {', '.join(left)}")
        session.exitstatus = 1


def _files(own_folder: str) -> set[str]:
    """Paths in shared memory, our temporary folder, the home folder and this repository.

    The caches of the repository are left out.
    """
    home = Path.home()
    places = (Path("/dev/shm"), Path(own_folder), home, home / ".cache")
    paths = {str(path) for place in places if place.is_dir() for path in place.iterdir()}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [n for n in folders if not n.startswith(".") and n != "__pycache__"]
        paths |= {os.path.join(folder, name) for name in names}
    return paths


def _is_mapped(name: str) -> bool:
    """Return True for shared memory that a process has mapped: it belongs to another program."""
    maps = Path("/proc").glob("[0-9]*/maps") if name.startswith("/dev/shm/") else ()
    return any(name in _read(path) for path in maps)


def _orphans() -> list[int]:
    """Processes of these tests, with any parent, that do not end by themselves within seconds.

    A process whose parent was killed notices it by a closed pipe, and ends slowly if all cores are
    busy.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _marked() -> list[int]:
    """Processes of these tests that live, but for this one and Python's own."""
    mark = f"{SESSION}={os.environ[SESSION]}"
    marked = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if mark in _read(path).split("\0")
    ]
    return [pid for pid in marked if pid != os.getpid() and not _is_resource_tracker(pid)]


def _described(pid: int) -> str:
    """A process, the test that was running where it was started, and its command."""
    environ = _read(Path(f"/proc/{pid}/environ")).split("\0")
    tests = [entry.partition("=")[2] for entry in environ if entry.startswith(TEST)]
    command = " ".join(_read(Path(f"/proc/{pid}/cmdline")).split("\0"))[:200]
    return f"process {pid} of {tests[0] if tests else 'no test'}: {command!r}"


def _listening() -> set[str]:
    """The addresses, in hexadecimal, at which this process listens."""
    sockets = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in _read(Path(f"/proc/self/net/{table}")).splitlines()
    ]
    return {
        fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets
    }


def _children() -> list[int]:
    """Child processes of all threads.

    If a thread ends meanwhile, its children get another parent.
    """
    return [
        int(pid)
        for task in Path("/proc/self/task").glob("*")
        for pid in _read(task / "children").split()
    ]


def _is_resource_tracker(pid: int) -> bool:
    """Python's own, which ends with us."""
    return "resource_tracker" in _read(Path(f"/proc/{pid}/cmdline"))


def _read(path: Path) -> str:
    """Contents of a file of /proc; empty after its process or thread has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
