"""The command of scripts/bench_torch.py with fake arms: turns, ends, MFU and the table."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tests import machine

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Takes steps at a tenth of a second each, or misbehaves as named.
PLAYED = """
import json, math, sys, time
size, arm = (word.partition("=")[2] for word in sys.argv[1:])
with open({log!r}, "a") as log:
    print(arm, size, "begins", file=log)
if "raising" in arm:
    raise RuntimeError("no memory")
if "hanging" in arm:
    time.sleep(600)
print(json.dumps(dict(loss_nats=9.0 if "lost" in arm else math.log(128), seconds=1.0)), flush=True)
for line in sys.stdin:
    count = json.loads(line)["steps"]
    loss = math.nan if "diverging" in arm and count > 2 else 4.0
    print(json.dumps(dict(
        seconds=0.1 * count, loss_nats=loss, device="NVIDIA H200", library="played 1",
        peak_bytes=2**30,
    )), flush=True)
with open({log!r}, "a") as log:
    print(arm, size, "ends", file=log)
"""


@pytest.fixture(scope="module")
def scripts():
    """The modules of the scripts' folder, by the names under which they know each other."""
    modules = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bench_sizes", "bench_turns", "bench_torch"):
            spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
            modules[name] = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, modules[name])
            spec.loader.exec_module(modules[name])
        yield Namespace(**modules)


@pytest.fixture
def plan(scripts, tmp_path):
    def make(*, rounds=1, seconds=0.4, within=60.0):
        script = PLAYED.format(log=str(tmp_path / "log"))
        return scripts.bench_turns.Plan(
            command=[sys.executable, "-c", script],
            on="cpu",
            rounds=rounds,
            seconds=seconds,
            steps=None,
            deadline=time.monotonic() + within,
        )

    make.log = lambda: (tmp_path / "log").read_text().splitlines()
    return make


def last(rounds):
    return list(rounds)[-1]


def test_arms_that_run_alone_never_meet_and_change_order_every_round(scripts, plan):
    sizes = ("gpt2-tiny", "llama-tiny")
    result = last(scripts.bench_turns.alone(plan(rounds=2), sizes, ("a", "b")))
    order = [f"{arm} {size}" for arm in "ab" for size in sizes]
    order += [f"{arm} {size}" for arm in "ba" for size in sizes]
    assert plan.log() == [f"{each} {what}" for each in order for what in ("begins", "ends")]
    measured = result["gpt2-tiny"]["a"]
    assert measured.speeds == pytest.approx(6 * [128 / 0.1])  # 4 x 32 tokens a step
    assert (measured.peak_bytes, measured.error) == (2**30, None)
    assert measured.loss == pytest.approx(math.log(128))


def test_arms_that_live_together_take_turns(scripts, plan):
    result = last(scripts.bench_turns.together(plan(rounds=3), ("gpt2-tiny",), ("a", "b")))
    assert [line.split()[2] for line in plan.log()] == ["begins", "begins", "ends", "ends"]
    assert [len(of.speeds) for of in result["gpt2-tiny"].values()] == [3, 3]


@pytest.mark.parametrize("way", ["alone", "together"])
@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ("raising", "exit code 1: RuntimeError: no memory"),
        ("lost", "starts with a loss of 9.0"),
        ("diverging", "comes to a loss of nan"),
    ],
)
def test_an_arm_that_ends_is_noted_and_the_other_goes_on(scripts, plan, way, arm, reason):
    run = getattr(scripts.bench_turns, way)
    of = last(run(plan(rounds=2), ("gpt2-tiny",), (arm, "b")))["gpt2-tiny"]
    assert (of[arm].error, of[arm].speeds) == (reason, [])
    assert (of["b"].error, len(of["b"].speeds)) == (None, {"alone": 6, "together": 2}[way])


def test_what_hangs_is_ended_in_time_and_what_comes_after_is_not_begun(scripts, plan):
    begun = time.monotonic()
    results = scripts.bench_turns.alone(plan(within=2), ("gpt2-tiny",), ("a", "hanging", "b"))
    of = last(results)["gpt2-tiny"]
    machine.require_clock(time.monotonic() - begun, 20)
    late = scripts.bench_turns.LATE
    assert [each.error for each in of.values()][1:] == [late, late]
    assert "b gpt2-tiny begins" not in plan.log()


def test_mfu_and_ratio_are_counted_and_shown(scripts):
    def measured(*speeds, **fields):
        known = dict(device="NVIDIA H200", library="played 1", peak_bytes=3 * 2**30, loss=11.8)
        return scripts.bench_turns.Measured(speeds=list(speeds), **(known | fields))

    arms = {
        "jaxlm bfloat16": measured(60e3, 66e3, 72e3),
        "torch compiled flash bfloat16": measured(60e3),
        "torch compiled cudnn bfloat16": scripts.bench_turns.Measured(error="exit code 1: oh"),
        "transformers compiled bfloat16": measured(50e3, device="another"),
        "jaxlm offload bfloat16": measured(90e3),
    }
    row = scripts.bench_torch.row("llama-1B@2048", arms, Namespace(overrides=[("loss.chunk", "9")]))
    ours, flash, cudnn, other, offload = row["arms"].values()
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    flops = 6 * (16 * layer + 128_256 * 2048) + 16 * 12 * 2048 * 2049 / 2
    assert ours["mfu"] == pytest.approx(66e3 * flops / 989.4e12)
    assert (ours["ratio"], flash["ratio"], offload["ratio"], row["ratio"]) == (1.1, 1.0, 1.5, 1.1)
    assert (cudnn["tokens_per_second"], cudnn["mfu"], other["mfu"]) == (None, None, None)
    text = scripts.bench_torch.table([row])
    assert "| jaxlm bfloat16 | 66,000 (63,000 to 69,000) | 1.100 | 52.1% | 3 GiB | 11.800 |" in text
    assert "| torch compiled cudnn bfloat16 | exit code 1: oh | - | - | - | - |" in text
    assert "jaxlm with train.remat=none, loss.chunk=9, train.microbatches=1" in text
    assert row["verdict"]["bfloat16"] == "undecided", "three windows are too few"
    assert "  jaxlm in the better of each: undecided" in text


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((10, 11, 12, 30), (5, 6, 7, 8), "ahead"),
        ((5, 6, 7, 8), (10, 11, 12, 30), "behind"),
        ((5, 6, 9, 10), (7, 8, 9, 10), "undecided"),
        ((10, 11, 12), (5, 6, 7, 8), "undecided"),
        ((10, 11, 12, 13), (), "undecided"),
    ],
)
def test_a_verdict_needs_quartiles_that_are_apart_in_four_windows(scripts, ours, theirs, expected):
    sides = [scripts.bench_turns.Measured(speeds=list(each)) for each in (ours, theirs)]
    assert scripts.bench_turns.verdict(*sides) == expected


@pytest.mark.slow
def test_an_arm_keeps_the_state_of_the_optimizer_on_the_host(scripts):
    """On a CPU, whose memories are one: the same model, and a setting that jaxlm accepts."""
    assert "jaxlm offload bfloat16" in scripts.bench_torch.WANTED["gpu"]
    arms = ["jaxlm float32", "jaxlm offload float32"]
    words = ("--size=llama-tiny", f"--arms={','.join(arms)}", "--alone", "--rounds=1", "--steps=2")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_torch.py", *words, "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    plain, offload = (row["arms"][arm] for arm in arms)
    assert (plain["windows"], offload["windows"]) == (3, 3)
    assert offload["loss_nats"] == pytest.approx(plain["loss_nats"], rel=1e-6)
