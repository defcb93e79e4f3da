"""Line H9: random faults from all groups, one about every half minute; at the end every bit is as if none had been.

Faults of numbers belong to the run: the reference has them too, and is told which batches the rewinds left out.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import harness

TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
POINTS = (
    *("save.begin", "save.files", "save.digest", "save.commit", "save.retire"),
    *("step.before", "step.after", "data.next", "restore.read", "eval", "rewind"),
)
HANGS = ("data.next", "step.before", "save.begin", "save.digest")
# Without an end: how far two cores come in the time given is seen when it is over.
RUN = (
    *("--config.train.steps=1000000", "--config.eval.every=40", "--config.checkpoint.keep_last=4"),
    *("--config.guard.budget=3", "--config.guard.reach=6", "--config.guard.skip=8"),
    *("--config.guard.window=16", "--config.guard.rewinds=99"),
)
LIMITS = tuple(f"--config.watch.{phase}=30s" for phase in ("data", "step", "save"))
NUMBERS = ",".join(
    ["grads:nan@50", "grads:spike=1000@90", "grads:inf@700"]
    + [f"batch:nan@{first}-{first + 5}" for first in (150, 500, 1500, 5000, 15000)]
)
# How a life may end, by the fault that it had; each may be killed or told to stop before that strikes.
CODES = {"none": (), "point": (70, 74), "hang": (76,), "disk": (74,)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "texts").mkdir()
    config = harness.write_config(folder / "texts")
    run, whole = folder / "run", folder / "whole"
    words = harness.words(config, run, *RUN, *LIMITS)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    begun = time.monotonic()
    deadline = begun + args.minutes * 60
    while time.monotonic() < deadline:
        kind, code, said = life(words, run, draw, deadline)
        counts[kind, f"exit {code}"] += 1
        told = (
            f"{(time.monotonic() - begun) / 60:5.1f} min, step {newest(run)}: {kind}, exit {code}"
        )
        print(told, flush=True)
        if code not in (-signal.SIGKILL, -signal.SIGTERM, 75, *CODES[kind]):
            print(f"{said}\nunexpected exit code {code}; see {folder}", file=sys.stderr)
            return 1
        if damage(run, draw):
            counts["flipped bit", "in the newest"] += 1
    end = f"--stop_at={newest(run) + 20}"
    code, said = finish([*words, end])
    if code == 0:
        whole.mkdir()
        if (run / "rewinds.json").exists():
            shutil.copy(run / "rewinds.json", whole)
        every = "--config.checkpoint.every=1000"
        code, said = finish([*harness.words(config, whole, *RUN), every, end])
    if code:
        print(f"{said}\nexit code {code}; see {folder}", file=sys.stderr)
        return 1
    for (kind, how), count in sorted(counts.items()):
        print(f"{count:5} x {kind:<12} {how}")
    ours, theirs = harness.losses(run), harness.losses(whole)
    same = ours == theirs and harness.state_digest(run) == harness.state_digest(whole)
    notes = run / "rewinds.json"
    rewound = len(json.loads(notes.read_text())) if notes.exists() else 0
    skipped = max(r["skipped_total"] for r in harness.records(run) if r["split"] == "train")
    print(
        f"{sum(counts.values())} faults, {skipped} updates skipped, "
        f"{rewound} rewinds, {len(ours)} losses compared; bit-identical: {same}"
    )
    if same:
        shutil.rmtree(folder)
        return 0
    print(f"see {folder}", file=sys.stderr)
    return 1


def newest(workdir: Path) -> int:
    """The newest committed step."""
    return max(harness.steps(workdir), default=0)


def life(
    words: list[str], workdir: Path, draw: random.Random, deadline: float
) -> tuple[str, int, str]:
    """One process of the run: the kind of fault that was drawn for it, how it ended, and what it said."""
    kind = draw.choice(list(CODES))
    at = newest(workdir) + draw.randint(1, 60)
    plan = {
        "point": f",{draw.choice(POINTS)}:{draw.choice(['sigkill', 'raise'])}@{at}",
        "hang": f",{draw.choice(HANGS)}:hang@{at}",
        "disk": f",save.digest:enospc@{at}-{at + draw.randint(0, 4)}",
    }.get(kind, "")
    metrics = workdir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    # Most of a life comes after its first step, else most faults would meet a process that only starts.
    is_early = draw.random() < 0.2
    moments = draw.uniform(1, 10) if is_early else draw.uniform(0, 40)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxlm", *words],
            env=os.environ | TWO | {"JAXLM_FAULTS": NUMBERS + plan},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not is_early and process.poll() is None and time.monotonic() < deadline:
                size = metrics.stat().st_size if metrics.exists() else 0
                if size > before:
                    break
                before = min(before, size)  # lines of steps that come again are cut at a start
                time.sleep(0.05)
            # A hang needs its time to be noticed.
            limit = min(time.monotonic() + moments + 60 * (kind == "hang"), deadline)
            while process.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
            if process.poll() is None:
                process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            process.wait(60)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return kind, process.returncode, log.read()


def finish(words: list[str]) -> tuple[int, str]:
    """Runs to the end, however long that takes."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", *words],
        env=os.environ | TWO | {"JAXLM_FAULTS": NUMBERS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def damage(workdir: Path, draw: random.Random) -> bool:
    """Now and then flips a bit of the newest step, where there is another to fall back on."""
    sound = [step for step in harness.steps(workdir) if not harness.store(workdir).problems(step)]
    if len(sound) < 2 or draw.random() < 0.5:
        return False
    step = workdir / "checkpoints" / str(sound[-1])
    names = [p for p in sorted(step.rglob("*")) if p.is_file() and p.name != "commit_success.txt"]
    path = draw.choice([name for name in names if name.stat().st_size])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return True


if __name__ == "__main__":
    sys.exit(main())
