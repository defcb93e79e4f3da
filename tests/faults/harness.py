"""A tiny real run, as a command and as files, for the tests that break it."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxlm.checkpoint import object_store
from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from tests import forked, machine

# XLA_FLAGS of processes with a user's devices: those of the tests, without fake devices. The others
# stay, as programs that are compiled in a hurry take half the time and are in the cache for all.
FLAGS = re.sub(
    r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
).strip()
CONFIG = """
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg=""):
    c = config.new(Run)
    c.data.train = ("{folder}/*.txt",)
    c.data.validation = ("20%",)
    c.data.tokenizer = "bytes"
    c.data.sequence = 32
    c.data.packing = "first_fit"
    c.model.width = 32
    c.model.depth = 2
    c.model.heads = 4
    c.model.kv_heads = 2
    c.model.hidden = 64
    c.model.dropout = 0.1
    c.optim.lr = 3e-3
    c.schedule.name = "constant"
    c.train.steps = 12
    c.train.batch = 8
    c.eval.every = "100%"
    c.checkpoint.every = 2
    c.checkpoint.keep_last = 3
    c.guard.rewind_steps = 2  # of so short a run the first healthy step would be kept for good else
    c.log.every = 1
    c.log.sinks = ()
    c.sample.every = "100%"
    c.sample.prompts = ()
    return c
"""


@dataclasses.dataclass
class Took:
    """Seconds of the clock, and of the processor with all processes that were started and ended."""

    clock: float = 0.0
    processor: float = 0.0

    def require(self, seconds: float, what: str = "it") -> None:
        """Raise TooSlow if both exceed the limit.

        The clock also counts other programs; the processor does not count waiting.
        """
        machine.require_processor(self.processor, seconds, what)
        machine.require_clock(self.clock, seconds, what)

    def __str__(self) -> str:
        return f"{self.clock:.1f} s, {self.processor:.1f} of the processor"


@contextlib.contextmanager
def timing() -> Iterator[Took]:
    """Yield a Took whose seconds are set once the block is over."""

    def processor() -> float:
        return sum(os.times()[:4])

    took, begun, used = Took(), time.monotonic(), processor()
    yield took
    took.clock, took.processor = time.monotonic() - begun, processor() - used


def write_config(folder: Path, settings: dict[str, object] | None = None) -> str:
    """Eighty documents of words, and the path of a config over them; its settings, and these."""
    draw = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    for number in range(80):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(3, 60)))
        (folder / f"{number:03d}.txt").write_text(text)
    path = folder / "config.py"
    assignments = "".join(f"    c.{name} = {value!r}\n" for name, value in (settings or {}).items())
    path.write_text(
        CONFIG.format(folder=folder).replace("    return c\n", f"{assignments}    return c\n")
    )
    return str(path)


def words(config: str, workdir: Path, *flags: str) -> list[str]:
    """The words of a training command."""
    return ["train", f"--config={config}", f"--workdir={workdir}", "--quiet", *flags]


def trained(config: str, workdir: Path, *flags: str) -> Path:
    """Train in this process, and return the run directory."""
    assert main(words(config, workdir, *flags)) == 0
    return workdir


def start(
    command: list[str], faults: str = "", *, module: str = "jaxlm", is_new: bool = False, **env: str
) -> subprocess.Popen:
    """Starts `jaxlm` with these words, perhaps with faults; or a module that stands for it.

    The process is forked from one that has imported everything, unless it is to be a new one.
    """
    start = subprocess.Popen if is_new else forked.Process
    return start(
        [sys.executable, "-m", module, *command],
        env=os.environ | {"JAXLM_FAULTS": faults} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(
    command: list[str], faults: str = "", *, is_new: bool = False, **env: str
) -> tuple[int, str]:
    """The exit code, negative for a signal, and all that was printed."""
    process = start(command, faults, is_new=is_new, **env)
    (output,) = outputs_of([process])
    return process.returncode, output


def outputs_of(processes: list[subprocess.Popen], seconds: float = 300) -> list[str]:
    """Return the output of each process until its end; all processes have ended afterwards."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def records(workdir: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The whole lines of a file of the run."""
    path = Path(workdir) / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(workdir: Path) -> dict[tuple[str, int], str]:
    """Each loss with every digit, by split and step."""
    return {
        (r["split"], r["step"]): float(r["loss_nats"]).hex()
        for r in records(workdir)
        if r["loss_nats"] is not None
    }


def steps(workdir: Path) -> list[int]:
    """The committed steps."""
    return store(workdir).steps()


def store(workdir: Path) -> Store:
    """The run's checkpoints, to read."""
    return object_store.of_run(Path(workdir))


def state_digest(workdir: Path, step: int | None = None) -> str:
    """sha256 over the leaves of a step, its cursor and its counters; the newest step by default.

    A leaf counts with its path, dtype, shape and bytes.
    """
    opened = store(workdir)
    step = opened.steps()[-1] if step is None else step
    meta = opened.record(step).meta
    left_out = [(each["low"], each["high"]) for each in meta["rewinds"]]
    cursor = [meta["step"], [batches for batches in left_out if batches[0] < batches[1]]]
    digest = hashlib.sha256(json.dumps([cursor, meta["progress"]], sort_keys=True).encode())
    for path, leaf in sorted(opened.arrays(step).items()):
        digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def tree(workdir: Path) -> dict[str, bytes]:
    """Every file of the run but its lock, which names its last reader."""
    files = (path for path in sorted(Path(workdir).rglob("*")) if path.is_file())
    return {
        str(path.relative_to(workdir)): path.read_bytes() for path in files if path.name != "lock"
    }


def children(pid: int) -> dict[int, str]:
    """Child processes of all threads of a process, and their command lines.

    A process that ends meanwhile is left out.
    """
    commands = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # A thread that ends takes its list along.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ")
                    commands[int(child)] = words.decode(errors="replace")
    return commands


def private_mounts(folder: Path) -> list[str] | None:
    """Prefix of a command that mounts what no other process sees, or None if this is forbidden."""
    for words in (["unshare", "-m"], ["unshare", "-rm"]):
        with contextlib.suppress(FileNotFoundError):
            tried = [*words, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
            if subprocess.run(tried, capture_output=True).returncode == 0:
                return words
    return None


def exit_of(workdir: Path) -> dict:
    """exit.json."""
    return json.loads((Path(workdir) / "exit.json").read_text())
