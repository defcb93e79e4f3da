"""Line H9: random faults of all groups, one in half a minute, change no bit of the result.

Faults of numbers belong to the run: the reference has them too, and gets the list of batches that
the rewinds left out. A life of the run has one process of two devices or two processes of one: the
arithmetic is the same, so are the bits. Each kind of fault must have struck at least once, else
this proves nothing and fails. It also fails if faults are rarer than that; a machine with more to
run than cores may take as many times longer as it has more.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import machine
from tests.faults import harness
from tests.faults.repeat import repeat
from tests.serve import soak as servers

CPU = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
POINTS = (
    *("save.begin", "save.files", "save.digest", "save.commit", "save.retire"),
    *("step.before", "step.after", "data.next", "restore.read", "eval", "rewind"),
)
AT_ANY_STEP = ("restore.read", "rewind")  # these come back to an earlier one
HANGS = ("data.next", "step.before", "save.begin", "save.digest")
ALL_RANKS = ("step.before", "step.after", "data.next", "eval", "save.begin")  # points of every rank
# Without an end: how far two cores come in the time given is seen when it is over.
RUN = (
    *("--config.train.steps=1000000", "--config.eval.every=40", "--config.checkpoint.keep_last=4"),
    *("--config.guard.budget=3", "--config.guard.rewind_steps=6", "--config.guard.skip=8"),
    *("--config.guard.window=16", "--config.guard.rewinds=99"),
)
MOMENTS = 8  # seconds of training until a fault from outside, at most: starting takes as long
STALL = 30  # seconds until a hang is noticed
LIMITS = tuple(f"--config.watch.{phase}={STALL}s" for phase in ("data", "step", "save", "eval"))
BETWEEN = 30  # seconds between two faults, on average
NUMBERS = ",".join(
    ["grads:nan@50", "grads:spike=1000@90", "grads:inf@700"]
    + [f"batch:nan@{first}-{first + 5}" for first in (150, 500, 1500, 5000, 15000)]
)
# The settings that a resumed run may change, and those that it may not.
FREE = ("checkpoint.every=3", "checkpoint.keep_last=2", "data.prefetch=2", "watch.eval=20m")
REFUSED = ("optim.lr=1e-4", "seed=1", "data.sequence=16", "train.batch=16", "model.depth=1")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault: the exit codes that prove that it struck, and the run's process count."""

    codes: tuple[int, ...]
    processes: int = 1


KINDS = {
    "killed": Kind((-signal.SIGKILL,)),
    "stopped": Kind((75,)),
    "point": Kind((70, 74, -signal.SIGKILL)),
    "hang": Kind((76,)),
    "full disk": Kind((74,)),
    "lost rank": Kind((69,), processes=2),
    "raising rank": Kind((70,), processes=2),
    "stopped rank": Kind((75,), processes=2),
    "hanging rank": Kind((76,), processes=2),
    "frozen rank": Kind((76,), processes=2),
    "loader worker": Kind((70,)),
    "damaged shard": Kind((65,)),
    "refused change": Kind((2,)),
    "free change": Kind((75,)),
}
# To one of the ranks.
SENT = {
    "lost rank": signal.SIGKILL,
    "stopped rank": signal.SIGTERM,
    "frozen rank": signal.SIGSTOP,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--serve", action="store_true", help="line V33")
    kinds.add_argument(
        "--fuzz", action="store_true", help="lines S13 and V33, minutes for each kind"
    )
    kinds.add_argument("--repeat", type=int, metavar="TIMES", help="line H3, on these tests")
    parser.add_argument("tests", nargs="*")
    args = parser.parse_args()
    if args.repeat:
        return repeat(args.repeat, args.tests)
    if args.fuzz:
        return fuzz(args.minutes or 10, args.seed)
    if args.serve:
        return servers.soak(args.minutes or 60, args.seed)
    return soak(args.minutes or 20, args.seed)


def fuzz(minutes: float, seed: int) -> int:
    """Lines S13 and V33: damage each kind of file, and of request, for `minutes` minutes."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "slow or atheris",
        "-s",
        "--timeout=0",
        "-n",
        "logical",
    ]
    environment = {"JAXLM_FUZZ_MINUTES": str(minutes), "JAXLM_FUZZ_SEED": str(seed)}
    return subprocess.call(
        [*command, "tests/faults/fuzz", "tests/serve/test_fuzz_requests.py"],
        env=os.environ | environment,
    )


def soak(minutes: float, seed: int) -> int:
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "texts").mkdir()
    config = harness.write_config(folder / "texts")
    harness.run(["data", "tokenize", f"--config={config}", f"--out={folder / 'shards'}"], **CPU)
    data = (
        f"--config.data.train={folder / 'shards/train'}",
        f"--config.data.validation={folder / 'shards/val'}",
    )
    run, whole = folder / "run", folder / "whole"
    words = harness.words(config, run, *RUN, *LIMITS, *data)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    struck: collections.Counter[str] = collections.Counter(dict.fromkeys(KINDS, 0))
    flipped: list[int] = []
    allowed: list[float] = []
    begun = time.monotonic()
    deadline = begun + minutes * 60
    while time.monotonic() < deadline:
        # What struck least comes next, in any order.
        kind = draw.choice([k for k, count in struck.items() if count == min(struck.values())])
        fault = KINDS[kind]
        code, output = Life(words, run, folder / "shards/train", kind, draw, deadline).live()
        allowed.append(BETWEEN * machine.shared() * machine.slowness())
        counts[kind, f"exit {code}"] += 1
        struck[kind] += code in fault.codes
        progress = (
            f"{(time.monotonic() - begun) / 60:5.1f} min, step {newest(run)}: {kind}, exit {code}"
        )
        print(progress, flush=True)
        # Each may be stopped before its own fault strikes, some before they can report it.
        if code not in (*fault.codes, 75, -signal.SIGTERM):
            print(f"{output}\nunexpected exit code {code}; see {folder}", file=sys.stderr)
            return 1
        if step := damage(run, draw):
            flipped.append(step)
    lived = time.monotonic() - begun
    end = f"--stop_at={newest(run) + 20}"
    code, output = finish([*words, end])
    if code == 0:
        whole.mkdir()
        if (run / "rewinds.json").exists():
            shutil.copy(run / "rewinds.json", whole)
        every = "--config.checkpoint.every=1000"
        code, output = finish([*harness.words(config, whole, *RUN, *data), every, end])
    if code:
        print(f"{output}\nexit code {code}; see {folder}", file=sys.stderr)
        return 1
    for (kind, how), count in sorted(counts.items()):
        print(f"{count:5} x {kind:<14} {how}")
    ours, theirs = harness.losses(run), harness.losses(whole)
    same = ours == theirs and harness.state_digest(run) == harness.state_digest(whole)
    notes = run / "rewinds.json"
    rewound = len(json.loads(notes.read_text())) if notes.exists() else 0
    skipped = max(r["skipped_total"] for r in harness.records(run) if r["split"] == "train")
    faults = sum(struck.values()) + len(flipped)
    between, most = lived / max(faults, 1), statistics.mean(allowed)
    print(
        f"{between:.0f} s between two faults, where {most:.0f} are allowed: {BETWEEN}, and the "
        "load of the machine; "
        f"{faults} in {lived / 60:.1f} min"
    )
    print(
        f"{sum(counts.values())} lives, {sum(struck.values())} faults, {len(flipped)} flipped "
        "bits, "
        f"{skipped} updates skipped, {rewound} rewinds, {len(ours)} losses compared; "
        f"bit-identical: {same}"
    )
    missed = [kind for kind, count in struck.items() if not count]
    missed += [] if flipped else ["flipped bit"]
    missed += [] if rewound else ["rewind"]
    if missed:
        print(f"never struck, so nothing is shown of it: {', '.join(missed)}", file=sys.stderr)
    if lost := [step for step in flipped if not in_quarantine(run, step)]:
        print(f"damaged, and not in the quarantine: steps {lost}", file=sys.stderr)
    if is_seldom := between > most:
        print("faults were rarer than the line requires", file=sys.stderr)
    if same and not missed and not lost and not is_seldom:
        shutil.rmtree(folder)
        return 0
    print(f"see {folder}", file=sys.stderr)
    return 1


def newest(workdir: Path) -> int:
    """The newest committed step."""
    return max(harness.steps(workdir), default=0)


@dataclasses.dataclass
class Life:
    """One start of the run, with one fault of a kind."""

    words: list[str]
    workdir: Path
    shards: Path
    kind: str
    draw: random.Random
    deadline: float

    def live(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        if self.kind == "damaged shard":
            return self._with_damage()
        flags, faults = self._plan()
        return self._start(flags, faults)

    def _plan(self) -> tuple[list[str], str]:
        """The flags and the faults that this life has from its start."""
        draw = self.draw
        at = newest(self.workdir) + draw.randint(1, 30)
        then = f"{at}-{at + 80}"  # evaluations and saves are periodic
        match self.kind:
            case "point":
                point, action = draw.choice(POINTS), draw.choice(["sigkill", "raise"])
                return [], f"{point}:{action}" + (f"@{then}" if point not in AT_ANY_STEP else "")
            case "hang":
                return [], f"{draw.choice(HANGS)}:hang@{then}"
            case "full disk":
                return [], f"save.digest:enospc@{at}-{at + draw.randint(2, 4)}"
            case "raising rank" | "hanging rank":
                action = "raise" if self.kind == "raising rank" else "hang"
                return [], f"{draw.choice(ALL_RANKS)}:{action}@{then}#{draw.randrange(2)}"
            case "loader worker":
                return ["--config.data.workers=1"], ""
            case "refused change":
                return [f"--config.{draw.choice(REFUSED)}"], ""
            case "free change":
                return [f"--config.{draw.choice(FREE)}"], ""
            case _:
                return [], ""

    def _start(self, flags: list[str], faults: str) -> tuple[int, str]:
        processes = KINDS[self.kind].processes
        words = [*self.words, *flags]
        if processes == 1:
            words += ["--cpu_devices=2"]
        else:
            words = ["launch", "--processes=2", "--cpu_devices=1", "--restarts=0", "--", *words]
        metrics = self.workdir / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        # Most faults come after the first step of a life, else they would meet a process that only
        # starts.
        is_early = self.kind in ("killed", "stopped") and self.draw.random() < 0.3
        moments = self.draw.uniform(1, MOMENTS)
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxlm", *words],
                env=os.environ | CPU | {"JAXLM_FAULTS": f"{NUMBERS},{faults}"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                while not is_early and process.poll() is None and time.monotonic() < self.deadline:
                    size = metrics.stat().st_size if metrics.exists() else 0
                    if size > before:
                        break
                    before = min(before, size)  # lines of steps that come again are cut at a start
                    time.sleep(0.05)
                # What was planned needs its time to come, and a hang to be noticed.
                planned = 20 + (STALL if ":hang" in faults else 0) if faults else 0
                limit = min(time.monotonic() + moments + planned, self.deadline)
                while process.poll() is None and time.monotonic() < limit:
                    time.sleep(0.05)
                if time.monotonic() < self.deadline:
                    self._strike(process)
                else:
                    process.terminate()
                process.wait(120)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            return process.returncode, log.read()

    def _strike(self, process: subprocess.Popen) -> None:
        """Strike from outside; without such a fault, end this life.

        Do nothing if the process has already ended.
        """
        inside = harness.children(process.pid)
        match self.kind:
            case "killed":
                process.kill()
            case "lost rank" | "stopped rank" | "frozen rank" if inside:
                os.kill(self.draw.choice(list(inside)), SENT[self.kind])
            case "loader worker" if workers := [
                pid for pid, c in inside.items() if "spawn_main" in c
            ]:
                os.kill(workers[0], signal.SIGKILL)
            case _:
                process.terminate()

    def _with_damage(self) -> tuple[int, str]:
        """A bit of a file of the training data is flipped, and brought right again afterwards."""
        path = self.draw.choice(sorted(self.shards.glob("*.bin")))
        content = path.read_bytes()
        path.write_bytes(flipped_bit(content, self.draw))
        try:
            code, output = self._start([], "")
        finally:
            path.write_bytes(content)
        assert code != 65 or str(path) in output, output
        return code, output


def finish(words: list[str]) -> tuple[int, str]:
    """Runs to the end, however long that takes."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", *words, "--cpu_devices=2"],
        env=os.environ | CPU | {"JAXLM_FAULTS": NUMBERS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def damage(workdir: Path, draw: random.Random) -> int | None:
    """Sometimes flip a bit of the newest step, if there is an older one; return the step."""
    sound = [step for step in harness.steps(workdir) if not harness.store(workdir).problems(step)]
    if len(sound) < 2 or draw.random() < 0.5:
        return None
    step = workdir / "checkpoints" / str(sound[-1])
    names = [p for p in sorted(step.rglob("*")) if p.is_file() and p.name != "commit_success.txt"]
    path = draw.choice([name for name in names if name.stat().st_size])
    path.write_bytes(flipped_bit(path.read_bytes(), draw))
    return sound[-1]


def flipped_bit(content: bytes, draw: random.Random) -> bytes:
    """One bit of it is another."""
    flipped = bytearray(content)
    flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def in_quarantine(workdir: Path, step: int) -> bool:
    """Return True if a step was quarantined together with the reason."""
    reasons = [p.name for p in (workdir / "quarantine").glob("*.reason.txt")]
    return any(re.fullmatch(rf"{step}(\.\d+)?\.reason\.txt", name) for name in reasons)


if __name__ == "__main__":
    sys.exit(main())
