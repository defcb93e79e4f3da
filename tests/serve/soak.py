"""Line V33: clients of every kind, and deaths of the server, change no answer and leave nothing.

Each life of the server is a process of `jaxlm serve`. Clients ask, leave, and send what is refused,
with pauses between. A list of questions has the same answers, bit for bit, in every life; guesses
of a draft may change the last bits of log-probabilities. At the end of a life no request, open
file, thread, process or temporary file is left, and memory has not grown. Each kind of end must
have been seen, however long that takes.
"""

import collections
import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxlm.serve.keys import add_key
from jaxlm.training.launch import free_port
from tests.faults import harness
from tests.serve.clients import QUESTIONS, Client, Surprise, texts_of

CLIENTS = 3
PAUSE = 0.5  # seconds between two calls of a client, on average
GROWTH = 8 * 2**20  # bytes of memory that the second half of a life may add
SETTLED = 300  # seconds of a life; a shorter one may add four times as much, as it fills its pools
WORKERS = min(32, (os.cpu_count() or 1) + 4)  # threads of the server for slow parts of calls
PREFIX_MIB = 1
DRAFT_TOLERANCE = 1e-5  # of log-probabilities
KEYS_EVERY = 20  # seconds between two changes of the file of keys
# Exit codes by kind of end.
ENDS = {
    "drained": 0,
    "killed": -signal.SIGKILL,
    "hurried": 130,
    "suspended": 0,
    "full disk": 0,
    "closed log": 0,
}
# A full disk of its own, with the log, the compile cache and temporary files; "$0" is its folder.
FULL = """mount -t tmpfs -o size=64k tmpfs "$0" && mkdir "$0/tmp" "$0/xla" || exit 1
dd if=/dev/zero of="$0/other" bs=4k 2>/dev/null; exec "$@" >"$0/log" 2>&1"""
LIMITED = 'ulimit -f 0; exec "$@" >"$0/log" 2>&1'  # on a machine without private mounts


def soak(minutes: float, seed: int) -> int:
    """Return the exit code; print a line for each life, and tables at the end."""
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    served = Served(folder, trained(folder))
    before = harness.tree(served.run)
    ends: collections.Counter[str] = collections.Counter(dict.fromkeys(ENDS, 0))
    begun = time.monotonic()
    deadline = begun + 60 * minutes
    try:
        while time.monotonic() < deadline or 0 in ends.values():
            # A quarter of the time in one life, another with guesses, then what was seen least.
            number, left = ends.total(), deadline - time.monotonic()
            is_long, has_draft = number < 2, number == 1 or (number > 1 and draw.random() < 0.3)
            seldom = [kind for kind, count in ends.items() if count == min(ends.values())]
            kind = "drained" if is_long else draw.choice(seldom)
            seconds = 15 * minutes if is_long else max(2, min(draw.uniform(2, 60), left))
            figures = Life(served, kind, draw, has_draft=has_draft).live(seconds)
            ends[kind] += 1
            at = (time.monotonic() - begun) / 60
            guesses = ", guesses" if has_draft else ""
            print(f"{at:5.1f} min: {kind}{guesses}, exit {ENDS[kind]}: {figures}", flush=True)
        if harness.tree(served.run) != before:
            raise Surprise("a file of the run has changed")
    except Surprise as surprise:
        print(f"{surprise}\nsee {folder}", file=sys.stderr)
        return 1
    for kind, count in ends.items():
        print(f"{count:6} x {kind}, exit {ENDS[kind]}")
    for (name, status), count in sorted(served.counts.items(), key=str):
        print(f"{count:6} x {name}, {status or 'left'}")
    print(
        f"{ends.total()} lives, {served.counts.total()} calls, {served.checks} answers compared in "
        f"{(time.monotonic() - begun) / 60:.1f} min: no other answer, nothing left"
    )
    shutil.rmtree(folder)
    return 0


def trained(folder: Path) -> Path:
    """Return a run of two steps on conversations."""
    from tests.recipes.test_chat import chat_config

    config = chat_config(folder, 128, **{"train.steps": 2})
    words = harness.words(config, folder / "run")
    code, output = harness.run(words, is_new=True, JAX_PLATFORMS="cpu", XLA_FLAGS=harness.FLAGS)
    assert code == 0, output
    return folder / "run"


@dataclasses.dataclass
class Served:
    """Files, answers and counts of all lives.

    `answers` are those of the first life, `counts` are calls by name and status.
    """

    folder: Path
    run: Path
    answers: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: collections.Counter[tuple[str, int | str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    checks: int = 0


@dataclasses.dataclass(frozen=True)
class Held:
    """Names of open files, threads, bytes of memory and processor seconds of a process."""

    files: tuple[str, ...]
    threads: int
    memory: int
    processor: float

    @classmethod
    def of(cls, pid: int) -> "Held":
        """Read what a process holds now."""
        files = []
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                files.append(re.sub(r"\[\d+\]", "", os.readlink(each)))  # sockets by number
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            tuple(sorted(files)),
            len([*Path(f"/proc/{pid}/task").iterdir()]),
            pages * os.sysconf("SC_PAGE_SIZE"),
            sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        )


class Life:
    """One process of the server, its clients, and its end of a kind of ENDS."""

    def __init__(self, served: Served, kind: str, draw: random.Random, *, has_draft: bool):
        self._served, self._kind, self._draw, self._has_draft = served, kind, draw, has_draft
        self._scratch = Path(tempfile.mkdtemp(dir=served.folder, prefix="life-"))
        self._disk = self._scratch / "disk"  # for temporary files, and in one kind for others
        (self._disk / "tmp").mkdir(parents=True)
        self._keys = self._scratch / "keys"
        self._tokens = [add_key(self._keys) for _ in range(3)]  # the last one is revoked
        self._port = free_port()
        self._client = self._client_of(self._tokens[0])
        self._threads: list[threading.Thread] = []
        self._stopping, self._ending = threading.Event(), threading.Event()
        self._surprises: list[str] = []

    def live(self, seconds: float) -> str:
        """Live so long, end, and return figures. Raises Surprise."""
        with self._process() as process:
            ready = self._wait_until_ready(process)
            self._check_answers()
            if self._kind == "closed log":
                assert process.stdout is not None
                process.stdout.close()
                self._check_answers()
            at_start, begun = Held.of(process.pid), time.monotonic()
            self._begin_clients()
            memory = self._watch(process, begun + seconds)
            figures = f"ready in {ready:.1f} s, {seconds:.0f} s of calls"
            if self._kind != "killed":
                self._end_clients()
                self._check_answers()
                held = self._check_left(at_start, process.pid)
                cores = (held.processor - at_start.processor) / (time.monotonic() - begun)
                grown = growth(memory)
                if grown > (GROWTH if seconds >= SETTLED else 4 * GROWTH):
                    raise Surprise(f"the second half of a life added {grown} bytes of memory")
                figures += f", {memory[-1] / 2**20:.0f} MiB ({grown / 2**20:+.1f} in the second "
                figures += f"half), {cores:.2f} cores"
                self._begin_clients()
            self._end(process)
            self._end_clients()
            if process.returncode != ENDS[self._kind]:
                raise Surprise(f"{self._kind}: exit code {process.returncode}{self._log()}")
        if left := [*(self._disk / "tmp").iterdir()]:
            raise Surprise(f"temporary files are left: {left}")
        if "Traceback" in self._log():
            raise Surprise(self._log())
        return figures

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen]:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self._served.folder / "xla"))
        words = [sys.executable, "-m", "jaxlm", "serve", f"--workdir={self._served.run}"]
        words += [f"--port={self._port}", f"--keys={self._keys}", "--slots=3", "--chunk=16"]
        words += [f"--prefix_mib={PREFIX_MIB}", "--stall_seconds=60", "--drain_seconds=300"]
        words += ["--draft=lookup"] * self._has_draft
        out: Any = subprocess.PIPE
        if self._kind == "full disk":
            cache = str(self._disk / "xla")
            private = harness.private_mounts(self._disk)
            script = FULL if private else LIMITED
            words = [*(private or ()), "sh", "-c", script, str(self._disk), *words]
            out = subprocess.DEVNULL
        elif self._kind != "closed log":
            out = (self._scratch / "log").open("w")
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": harness.FLAGS,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "TMPDIR": str(self._disk / "tmp"),
        }
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        try:
            yield process
        finally:
            self._ending.set()
            process.kill()
            process.wait()
            for file in (process.stdout, out):
                if hasattr(file, "close"):
                    file.close()
            self._end_clients()

    def _log(self) -> str:
        log = self._scratch / "log"
        return "\n" + log.read_text()[-3000:] if log.exists() else ""

    def _client_of(self, token: str) -> Client:
        tolerance = DRAFT_TOLERANCE if self._has_draft else 0.0
        draw = random.Random(self._draw.random())
        return Client(self._port, token, self._served.answers, tolerance, draw)

    def _wait_until_ready(self, process: subprocess.Popen) -> float:
        """Return the seconds until requests are accepted."""
        begun = time.monotonic()
        while time.monotonic() < begun + 180:
            with contextlib.suppress(ConnectionError):
                if self._client.get("/ready")[0] == 200:
                    return time.monotonic() - begun
            if process.poll() is not None:
                break
            time.sleep(0.05)
        raise Surprise(f"{self._kind}: the server did not become ready{self._log()}")

    def _check_answers(self) -> None:
        """Ask all questions, whole and as streams."""
        for name in QUESTIONS:
            self._client.ask(name)
            self._client.ask_as_stream(name)
            self._served.checks += 2

    def _begin_clients(self) -> None:
        self._stopping.clear()
        self._threads = [
            threading.Thread(target=self._call, args=[self._client_of(self._tokens[n % 2])])
            for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _end_clients(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._surprises:
            raise Surprise("\n".join(self._surprises) + self._log())

    def _call(self, client: Client) -> None:
        """Make calls until the life is over; what fails then is no surprise."""
        while not self._stopping.wait(client.draw.expovariate(1 / PAUSE)):
            try:
                self._served.counts[client.call()] += 1
            except Exception as error:
                if not self._ending.is_set():
                    self._surprises.append(f"{type(error).__name__}: {error}")
                    return
                self._served.counts["any call", "while the server ended"] += 1

    def _watch(self, process: subprocess.Popen, end: float) -> list[int]:
        """Let clients call until `end`; return bytes of memory, ten times a second at most."""
        memory, changed = [Held.of(process.pid).memory], time.monotonic()
        self._change_keys()
        while time.monotonic() < end and not self._surprises:
            if process.poll() is not None:
                raise Surprise(f"the server has ended with {process.returncode}{self._log()}")
            if time.monotonic() > changed + KEYS_EVERY:
                self._change_keys()
                changed = time.monotonic()
            time.sleep(0.2)
            memory.append(Held.of(process.pid).memory)
        return memory

    def _change_keys(self) -> None:
        """Revoke a key by a new file, and bring it back; damage, open and remove the file."""
        whole = self._keys.read_text()

        def check(changed: str, *, is_revoked: bool = False) -> None:
            for number, token in enumerate(self._tokens):
                status = self._client.get("/v1/models", token)[0]
                if status != (401 if is_revoked and number == 2 else 200):
                    raise Surprise(f"{status} to key {number}, the file of keys is {changed}")

        def replace(text: str) -> None:
            # A rename: a server that reads a file as it is written sees fewer keys.
            following = self._keys.with_name("next")
            following.touch(0o600)
            following.write_text(text)
            following.rename(self._keys)

        replace("".join(whole.splitlines(keepends=True)[:2]))
        check("without the last one", is_revoked=True)
        replace(whole)
        check("whole")
        replace("no digest")
        check("damaged")
        replace(whole)
        self._keys.chmod(0o644)
        check("open to others")
        self._keys.unlink()
        check("removed")
        replace(whole)
        check("whole")

    def _check_left(self, at_start: Held, pid: int) -> Held:
        """Raise Surprise if calls have left something; return what the process holds."""
        gauges = {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "tokens_waiting": 0,
            "compiles_total": 0,
            "failed_passes_total": 0,
        }
        lines: list[str] = []

        def is_idle() -> bool:
            lines[:] = self._client.get("/metrics")[1].splitlines()
            return all(f"jaxlm:{name} {value:.1f}" in lines for name, value in gauges.items())

        def is_as_before() -> bool:
            held = Held.of(pid)
            opened = collections.Counter(held.files) - collections.Counter(at_start.files)
            return not opened and held.threads <= at_start.threads + WORKERS

        self._require_soon(is_idle, lambda: "\n".join(lines))
        if failed := [each for each in lines if re.match(r'jaxlm:rejected_total.status="5', each)]:
            raise Surprise(f"calls have failed: {failed}")
        (size,) = (float(x.split()[1]) for x in lines if x.startswith("jaxlm:prefix_cache_bytes "))
        if not 0 < size <= PREFIX_MIB * 2**20:
            raise Surprise(f"{size:.0f} bytes of beginnings of prompts are kept")
        self._require_soon(is_as_before, lambda: f"{at_start} at the start, then {Held.of(pid)}")
        if inside := harness.children(pid):
            raise Surprise(f"processes are left: {inside}")
        return Held.of(pid)

    def _require_soon(self, is_true: Callable[[], bool], what: Callable[[], str]) -> None:
        limit = time.monotonic() + 30
        while not is_true():
            if time.monotonic() > limit:
                raise Surprise(f"something is left after all calls: {what()}")
            time.sleep(0.1)

    def _end(self, process: subprocess.Popen) -> None:
        """End the process while it writes streams, and require those that it accepted."""
        if self._kind == "suspended":
            process.send_signal(signal.SIGSTOP)
            time.sleep(3)
            process.send_signal(signal.SIGCONT)
        with contextlib.ExitStack() as stack:
            choices = 8 if self._kind == "hurried" else 1  # more than end at once
            streams = [stack.enter_context(self._client.stream(n=choices)) for _ in range(3)]
            self._ending.set()
            if self._kind == "killed":
                process.kill()
                process.wait(300)
                return
            process.send_signal(signal.SIGTERM)
            if self._kind == "hurried":
                time.sleep(0.1)
                process.send_signal(signal.SIGTERM)
                process.wait(300)
                return
            texts = [texts_of(each) for each in streams]
            expected = self._served.answers.setdefault("endless", texts[0])
            if any(each != expected for each in texts):
                raise Surprise(f"streams of a server that ends: {texts}, not {expected}")
        process.wait(300)


def growth(memory: list[int]) -> float:
    """Return what the second half of a life added: a tenth from the middle, and the last tenth."""
    half, tenth = len(memory) // 2, len(memory) // 10 + 1
    return statistics.median(memory[-tenth:]) - statistics.median(memory[half : half + tenth])
