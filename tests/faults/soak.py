"""Line H9: random faults from all groups, one about every half minute; at the end every bit is as if none had been."""

import argparse
import collections
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import harness

TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
POINTS = ("save.begin", "save.files", "save.digest", "save.commit", "step.before", "step.after")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "texts").mkdir()
    config = harness.write_config(folder / "texts")
    # About as many steps as fit the time at the speed of two cores; the run may also end early.
    steps = f"--config.train.steps={int(args.minutes * 300)}"
    words = harness.words(config, folder / "run", steps, "--config.checkpoint.keep_last=4")
    counts: collections.Counter[str] = collections.Counter()
    deadline = time.monotonic() + args.minutes * 60
    while time.monotonic() < deadline:
        code = life(words, folder / "run", draw, counts)
        if code == 0:
            break
        if code not in (-signal.SIGKILL, 70, 74, 75):
            print(f"unexpected exit code {code}; see {folder}", file=sys.stderr)
            return 1
        damage(folder / "run", draw, counts)
    code, said = harness.run(words, **TWO)
    if code:
        print(said, file=sys.stderr)
        return 1
    whole = harness.words(config, folder / "whole", steps, "--config.checkpoint.keep_last=4")
    code, said = harness.run(whole, **TWO)
    same = (
        code == 0
        and harness.losses(folder / "run") == harness.losses(folder / "whole")
        and harness.state_digest(folder / "run") == harness.state_digest(folder / "whole")
    )
    told = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    print(
        f"{told or 'no fault'}; {len(harness.losses(folder / 'run'))} losses compared; bit-identical: {same}"
    )
    if same:
        shutil.rmtree(folder)
        return 0
    print(f"see {folder}", file=sys.stderr)
    return 1


def life(words: list[str], workdir: Path, draw: random.Random, counts: collections.Counter) -> int:
    """One process of the run, with a fault that was drawn; its exit code."""
    kind = draw.choice(["kill", "terminate", "point", "disk"])
    newest = max(harness.steps(workdir), default=0) if workdir.exists() else 0
    at = newest + draw.randint(1, 60)
    plan = {
        "point": f"{draw.choice(POINTS)}:{draw.choice(['sigkill', 'raise'])}@{at}",
        "disk": f"save.digest:enospc@{at}-{at + draw.randint(0, 4)}",
    }.get(kind, "")
    process = harness.start(words, plan, **TWO)
    try:
        if kind in ("kill", "terminate"):
            number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
            limit = time.monotonic() + draw.uniform(2, 40)
            while process.poll() is None and time.monotonic() < limit:
                time.sleep(0.05)
            if process.poll() is None:
                process.send_signal(number)
        process.communicate(timeout=600)
    finally:
        process.kill()
        process.communicate()
    if process.returncode:
        counts[kind] += 1
    return process.returncode


def damage(workdir: Path, draw: random.Random, counts: collections.Counter) -> None:
    """Now and then flips a bit of the newest step, where there is another to fall back on."""
    steps = harness.steps(workdir) if workdir.exists() else []
    sound = [step for step in steps if not harness.store(workdir).problems(step)]
    if len(sound) < 2 or draw.random() < 0.5:
        return
    step = workdir / "checkpoints" / str(sound[-1])
    names = [p for p in sorted(step.rglob("*")) if p.is_file() and p.name != "commit_success.txt"]
    path = draw.choice(names)
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        counts["flipped bit"] += 1


if __name__ == "__main__":
    sys.exit(main())
