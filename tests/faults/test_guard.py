"""Lines C of the reliability bar, through the front door: numbers that go wrong."""

import collections
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlm.cli.main import main
from jaxlm.core import faults
from jaxlm.training import step as steps
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


def broken(monkeypatch, plan: str) -> None:
    monkeypatch.setattr(faults, "_faults", faults.parse(plan))


# The same programs, as the compiler fuses them, without the faults.
NEVER = "grads:nan@999"
STEPS = ("--config.train.steps=40",)  # the program of the harness; its window is not filled
WATCHED = (*STEPS, "--config.guard.window=16")
# Fewer steps are kept than a rewind goes back.
LIMITS = (
    "--config.guard.budget=3",
    "--config.guard.rewind_steps=6",
    "--config.guard.skip=8",
    "--config.checkpoint.keep_last=1",
)
STRETCH = "batch:nan@20-25"


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    return harness.trained(config, workdir, *WATCHED, "--config.checkpoint.keep_last=99")


@pytest.mark.slow
def test_an_ordinary_run_skips_nothing(unbroken):
    assert harness.records(unbroken)[-1]["split"] == "val"
    assert {r["skipped_total"] for r in harness.records(unbroken) if r["split"] == "train"} == {0}
    assert harness.records(unbroken, "spikes.jsonl") == []


def moved(workdir, earlier: int, later: int) -> list[str]:
    """Arrays that differ between two saved steps, but for the count of steps and the guard's."""
    before, after = (harness.store(workdir).arrays(step) for step in (earlier, later))
    different = {path for path in before if before[path].tobytes() != after[path].tobytes()}
    counts = {path for path in different if path == "step" or path.startswith("guard/")}
    assert counts, "both steps are counted"
    return sorted(different - counts)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Two files of forty records, by their paths.

    A few letters of a text identify its file.
    """
    folder = tmp_path_factory.mktemp("records")
    texts_by_path = {}
    for name in "ab":
        texts = [
            " ".join(f"{name}{number}.{word}" for word in range(2 + 5 * number % 23))
            for number in range(40)
        ]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        texts_by_path[str(path)] = texts
    return texts_by_path


SPOILT = "grads:nan@7,loss:nan@12,batch:nan@20,grads:inf@27-99"  # one program for C3 and C2


@pytest.fixture(scope="module")
def spoilt(config, records, tmp_path_factory):
    """A run that meets SPOILT and keeps each step, stopped at step 22; and its flags."""
    saves = ("--config.checkpoint.every=1", "--config.checkpoint.keep_last=99")
    data = f"--config.data.train={','.join(records)}"
    flags = (*STEPS, data, *saves, "--config.guard.rewinds=0")
    workdir = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, SPOILT)
        return harness.trained(config, workdir, *flags, "--stop_at=22"), flags


def test_c3_a_bad_gradient_or_loss_is_skipped_counted_told_apart_and_explained(records, spoilt):
    run, _ = spoilt
    spikes = harness.records(run, "spikes.jsonl")
    assert [(s["step"], s["batch"], s["kind"]) for s in spikes] == [
        (7, 6, "gradient not finite"),
        (12, 11, "loss not finite"),
        (21, 20, "loss not finite, gradient not finite"),
    ]
    are_known = [(s["loss_nats"] is not None, s["grad_norm"] is not None) for s in spikes]
    assert are_known == [(True, False), (False, True), (False, False)]
    assert spikes[0]["layers_not_finite"] == [next(iter(spikes[0]["layers"]))]
    assert spikes[1]["layers_not_finite"] == []
    assert len(spikes[0]["layers"]["stack/0/mlp/down/weight"]) == 2
    documents = spikes[0]["documents"]
    assert {d["row"] for d in documents} == set(range(8))
    assert {d["file"] for d in documents} == records.keys()
    for named in documents:
        assert named["preview"].strip() in records[named["file"]][named["record"] - 1]
        others = [text for texts in records.values() for text in texts if named["preview"] in text]
        assert len(named["preview"]) < 12 or len(others) == 1
    assert sum(len(d["preview"]) >= 12 for d in documents) >= 8
    last = [r for r in harness.records(run) if r["split"] == "train"][-1]
    assert last["skipped_total"] == 3
    unmoved = [step for step in range(2, 23) if not moved(run, step - 1, step)]
    assert unmoved == [7, 12, 21], "these alone were not applied"
    log = (run / "log.txt").read_text()
    assert "step 7 was not applied: gradient not finite (loss " in log
    assert "step 12 was not applied: loss not finite (loss nan, gradient " in log


def test_c2_a_spent_budget_ends_with_79_and_the_next_bad_step_is_not_applied(
    config, spoilt, tmp_path, monkeypatch, capsys, record_property
):
    stopped, flags = spoilt
    run = shutil.copytree(stopped, tmp_path / "run")
    broken(monkeypatch, SPOILT)
    assert main(harness.words(config, run, *flags)) == 79
    output = capsys.readouterr().err
    assert "steps 27 to 36" in output
    assert harness.exit_of(run)["code"] == 79
    bad = [s["step"] for s in harness.records(run, "spikes.jsonl") if s["step"] > 22]
    assert bad == list(range(27, 37))
    record_property("C2", f"{len(bad)} bad steps, none applied")
    newest = harness.steps(run)[-1]
    assert newest >= 27, "saved among the bad steps"
    after = harness.store(run).arrays(newest)
    assert all(np.isfinite(leaf).all() for leaf in after.values())
    assert not moved(run, 26, newest)


def test_a_run_whose_evaluations_are_not_finite_saves_its_finite_state(config, tmp_path, capsys):
    """The first update makes the parameters so large that later losses are NaN."""
    flags = ("--config.train.steps=4", "--config.optim.lr=1e15", "--config.eval.every=1")
    words = harness.words(config, tmp_path / "run", *flags)
    assert main(words) == 0
    store = harness.store(tmp_path / "run")
    last = store.record(store.steps()[-1])
    assert last.step == 4
    assert (last.loss_nats, store.best()) == (None, None)
    assert last.meta["progress"]["best_loss"] is None
    assert last.meta["progress"]["evaluations_without_gain"] == 4
    assert last.meta["evaluation"]["loss_nats"] is None
    capsys.readouterr()
    assert main(words) == 0
    assert "already complete at step 4" in capsys.readouterr().out


@pytest.fixture(scope="module")
def rewound(config, tmp_path_factory):
    """A run that was rewound once, around a bad stretch of data."""
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, STRETCH)
        return harness.trained(config, tmp_path_factory.mktemp("runs") / "run", *STEPS, *LIMITS)


def test_c6_a_bad_stretch_of_data_is_rewound_and_gone_around(rewound, record_property):
    made = json.loads((rewound / "rewinds.json").read_text())
    # Batch 20 is read by step 21: back at least six steps to a saved one, around batches 16 to 23.
    assert made[0] == {"first_bad": 21, "to": 14, "low": 16, "high": 24}
    assert len(made) == 1
    bad = [s["batch"] for s in harness.records(rewound, "spikes.jsonl")]
    assert bad == [20, 21, 22, 24, 25], "the last two are within the budget"
    log = (rewound / "log.txt").read_text()
    gone = "returning to step 14, without batches 16 to 23"
    assert f"rewind 1 of 3: steps 21 to 23 could not be applied; {gone}" in log
    steps = [r["step"] for r in harness.records(rewound) if r["split"] == "train"]
    assert steps == list(range(1, 41))
    given_up = [int(p.name) for p in (rewound / "quarantine").iterdir() if p.is_dir()]
    assert 14 < min(given_up) < 21
    assert harness.steps(rewound)[-1] == 40
    record_property("C6", f"back to step {made[0]['to']}, around 8 batches")


def test_c7_a_kill_straight_after_a_rewind_does_not_bring_the_given_up_future_back(
    config, rewound, tmp_path, monkeypatch
):
    words = harness.words(config, tmp_path / "killed", *STEPS, *LIMITS)
    code, output = harness.run(words, f"{STRETCH},rewind:sigkill")
    assert code == -9, output
    assert max(harness.steps(tmp_path / "killed")) > 14, "killed before they were given up"
    broken(monkeypatch, STRETCH)
    assert main(words) == 0
    assert len(json.loads((tmp_path / "killed/rewinds.json").read_text())) == 1
    assert "was abandoned by a rewind" in (tmp_path / "killed/log.txt").read_text()
    assert harness.losses(tmp_path / "killed") == harness.losses(rewound)
    assert harness.state_digest(tmp_path / "killed") == harness.state_digest(rewound)


@pytest.mark.slow
def test_c6_rewinds_are_counted_over_restarts_and_end_with_79(
    config, tmp_path, monkeypatch, capsys, record_property
):
    broken(monkeypatch, "grads:nan@21-99")
    assert main(harness.words(config, tmp_path / "run", *WATCHED, *LIMITS)) == 79
    assert len(json.loads((tmp_path / "run/rewinds.json").read_text())) == 3
    assert "3 rewinds are used up" in capsys.readouterr().err
    spikes = len(harness.records(tmp_path / "run", "spikes.jsonl"))
    assert spikes == 4 * 3
    record_property("C6", "3 rewinds, then 79")
    assert main(harness.words(config, tmp_path / "run", *WATCHED, *LIMITS)) == 79
    # It resumes within the same bad stretch: one more and the budget is spent again.
    assert len(harness.records(tmp_path / "run", "spikes.jsonl")) == spikes + 1


@pytest.mark.slow
def test_c8_a_rewind_that_leaves_nothing_out_replays_bit_for_bit(config, tmp_path, monkeypatch):
    broken(monkeypatch, NEVER)
    assert main(harness.words(config, tmp_path / "unbroken", *WATCHED)) == 0
    broken(monkeypatch, "grads:nan@21-99")
    words = harness.words(config, tmp_path / "run", *WATCHED, *LIMITS, "--config.guard.skip=0")
    assert main(words) == 79
    broken(monkeypatch, NEVER)
    # What was committed after step 20 is skipped steps: go back by hand as the rewinds did.
    made = json.loads((tmp_path / "run/rewinds.json").read_text())
    assert len(made) == 3
    assert all(r["low"] == r["high"] for r in made)
    made.append(made[-1] | {"to": 14})
    (tmp_path / "run/rewinds.json").write_text(json.dumps(made))
    assert main(words) == 0
    assert harness.losses(tmp_path / "run") == harness.losses(tmp_path / "unbroken")
    assert harness.state_digest(tmp_path / "run") == harness.state_digest(tmp_path / "unbroken")


def test_c11_the_same_seed_is_the_same_run_and_another_is_another(config, tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for run in (one, same):
        assert main(harness.words(config, run, *STEPS, "--stop_at=10")) == 0
    theirs = harness.losses(one)
    assert len(theirs) == 10
    assert harness.losses(same) == theirs
    assert harness.state_digest(same) == harness.state_digest(one)
    assert main(harness.words(config, other, *STEPS, "--config.seed=1", "--stop_at=4")) == 0
    assert all(value != theirs[key] for key, value in harness.losses(other).items())


@pytest.mark.slow
def test_c9_a_flipped_bit_in_one_devices_gradient_is_caught_in_the_step_that_is_repeated(
    config, tmp_path, monkeypatch, capsys
):
    """One of eight devices changes one number of step 20, once; each fifth step runs twice."""
    asked = collections.Counter()

    def bit(step, device):
        """The error of the device's number. The step that is repeated calls this twice."""
        asked[int(step), int(device)] += 1
        is_wrong = (int(step), int(device)) == (19, 3) and asked[19, 3] == 2
        return np.uint32(1 << 20 if is_wrong else 0)

    def flipped(scale, step):
        wrong = jax.pure_callback(
            bit, jax.ShapeDtypeStruct((), jnp.uint32), step, jax.lax.axis_index("data")
        )
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
        return jax.lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ wrong), scale.dtype)

    def broken(point, grads, step):
        if point != "grads":
            return grads
        here = jax.shard_map(
            flipped, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        return grads | {"final_norm": {"scale": here(grads["final_norm"]["scale"], step)}}

    monkeypatch.setattr(steps, "inject_faults", broken)
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    words = harness.words(config, tmp_path / "run", *WATCHED, "--config.guard.repeat_every=5")
    assert main(words) == 79
    output = capsys.readouterr().err
    assert "step 20 gave another result" in output
    assert f"final_norm/scale on {jax.devices()[3]}" in output
    assert asked[19, 3] == 2, "the second time it was wrong"
    twice = {step + 1 for (step, _), count in asked.items() if count == 2}
    assert twice == {5, 10, 15, 20}
    assert harness.steps(tmp_path / "run")[-1] < 20


@pytest.mark.slow
def test_c10_copies_that_drift_apart_end_the_run_with_the_leaf_and_the_device(
    config, tmp_path, monkeypatch, capsys
):
    """One device's copy of one leaf changes before step 20; copies are compared every 8 steps."""
    from jaxlm.recipes.train.programs import CompiledStep

    step = CompiledStep.__call__

    def drifting(self, state, batch):
        if self.completed == 19:
            scale = state.params["final_norm"]["scale"]
            parts = [np.array(shard.data) for shard in scale.addressable_shards]
            parts[3][0] *= 1.001
            placed = [
                jax.device_put(part, shard.device)
                for part, shard in zip(parts, scale.addressable_shards, strict=True)
            ]
            state.params["final_norm"]["scale"] = jax.make_array_from_single_device_arrays(
                scale.shape, scale.sharding, placed
            )
        return step(self, state, batch)

    monkeypatch.setattr(CompiledStep, "__call__", drifting)
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    words = harness.words(config, tmp_path / "run", *WATCHED, "--config.guard.compare_every=8")
    assert main(words) == 79
    output = capsys.readouterr().err
    assert "before step 24" in output
    assert f"final_norm/scale on {jax.devices()[3]}" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "flags", "is_skipped"),
    [(1000, [], True), (8, [], False), (8, ["--config.optim.clip_norm=None"], True)],
)
def test_a_gradient_spike_of_the_real_run_is_skipped(
    config, tmp_path, monkeypatch, norm, flags, is_skipped
):
    """If the norm is clipped, so is a step: only a much larger one is skipped."""
    broken(monkeypatch, f"grads:spike={norm}@30")
    assert main(harness.words(config, tmp_path / "run", *WATCHED, *flags)) == 0
    spikes = harness.records(tmp_path / "run", "spikes.jsonl")
    assert [(each["step"], each["kind"]) for each in spikes] == [
        (30, "gradient spike")
    ] * is_skipped
    for each in spikes:
        assert each["grad_norm"] == pytest.approx(norm, rel=0.05)
