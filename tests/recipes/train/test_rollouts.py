"""Runs that learn from rewards: rollouts, figures, resuming, and errors before the first step."""

import json
import shutil
import types

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import faults
from jaxlm.core.errors import Diverged
from jaxlm.objectives.policy_config import Policy
from jaxlm.recipes.train.rollouts import Drawing, Rollouts
from jaxlm.rl import verifiers
from jaxlm.rl.config import RLConfig
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = {
    "data.kind": "prompts",
    "data.tokenizer": "characters",  # a model that draws among few ids ends some samples
    "data.sequence": 16,
    "data.validation": ("20%",),
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.hidden": 32,
    "model.dropout": 0.0,
    "train.steps": 4,
    "train.batch": 8,
    "eval.every": 2,
    "checkpoint.every": 1,
    "objective.name": "policy",
    "rl.samples": 4,
    "rl.max_tokens": 6,
    "rl.updates": 2,
    "rl.held_out_samples": 2,
    "reward.functions": ("ended",),
}
HOST = "seconds", "per_second", "goodput", "peak_bytes", "time_unix"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(30)]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.fixture(scope="module")
def config(prompts, tmp_path_factory):
    settings = SETTINGS | {"data.train": (str(prompts),)}
    return harness.write_config(tmp_path_factory.mktemp("config"), settings)


def train(config, workdir, *flags):
    return main(harness.words(config, workdir, *flags))


def records(workdir, name="metrics.jsonl"):
    lines = (workdir / name).read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not any(part in k for part in HOST)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "base"
    assert train(config, workdir) == 0
    return workdir


def test_the_header_has_the_rewards_and_no_share_of_trained_tokens(base):
    log = (base / "log.txt").read_text()
    assert "  reward      ended; 4 samples of each prompt, at most 6 tokens each\n" in log
    assert "tokens are trained" not in log
    assert "; 0.333 epochs\n" in log  # 8 of 24 prompts
    assert "the weights are random: data.kind=prompts is for a model that was trained" in log


@pytest.mark.parametrize("verb", ["prune --keep=0", "quantize --scheme=int8 --allow=loss:50%"])
def test_a_text_is_named_to_compare_on(base, tmp_path, capsys, verb):
    """Tokens of prompts are no targets."""
    words = [*verb.split(), f"--workdir={base}", f"--out={tmp_path / 'out'}"]
    assert main(words) == 2
    assert "--text='texts/*.txt'" in capsys.readouterr().err


@pytest.mark.slow
def test_layers_of_a_policy_with_a_value_head_are_left_out(config, prompts, tmp_path):
    ppo, text = tmp_path / "ppo", tmp_path / "text.txt"
    flags = ("--config.objective.name=ppo", "--config.model.depth=2")
    assert train(config, ppo, *flags) == 0
    text.write_text("1+1=" * 100)
    words = [f"--workdir={ppo}", f"--out={tmp_path / 'small'}", f"--text={text}"]
    assert main(["prune", *words, "--keep=0"]) == 0
    assert main(["eval", f"--workdir={tmp_path / 'small'}", f"--text={text}"]) == 0


@pytest.mark.slow
def test_an_adapter_with_a_value_head_changes_a_base_without_one(config, base, tmp_path, capsys):
    tuned, text = tmp_path / "tuned", tmp_path / "text.txt"
    lora = ("--config.objective.name=ppo", "--config.tune.name=lora", "--config.tune.rank=2")
    assert train(config, tuned, *lora, f"--init_from={base}", "--config.optim.lr=1e-2") == 0
    text.write_text("1+1=" * 100)
    losses = []
    for flags in ([f"--workdir={tuned}"], [f"--workdir={base}", f"--adapter={tuned}"]):
        capsys.readouterr()
        assert main(["eval", *flags, f"--text={text}", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss_nats"])
    assert losses[0] == losses[1]


def test_the_parts_of_an_iteration_are_its_seconds(base):
    """Drawing, scoring and training have no time in common.

    The clock begins after the compilation of the first step, whose samples are drawn before it.
    """
    for each in harness.records(base):
        if each["split"] == "train" and each["step"] > 1:
            parts = [each.get(f"{name}_seconds", 0) for name in ("draw", "score", "train")]
            assert all(part >= 0 for part in parts)
            assert parts[2] > 0
            assert sum(parts) <= each["step_seconds"] * 1.01


def test_a_run_logs_its_rewards_and_every_sample(base):
    steps = [each for each in harness.records(base) if each["split"] == "train"]
    drawn = [each for each in steps if "reward" in each]
    assert [each["step"] for each in drawn] == [1, 3]  # two updates of a rollout
    assert {"reward/ended", "entropy_nats", "clipped_share", "drift_nats"} <= drawn[0].keys()
    for each in drawn:  # the model that draws is the model that is trained
        assert each["sampler_gap_nats"] < 1e-5
        assert each["sampler_gap_high_nats"] < 1e-4
    assert steps[1]["sampler_gap_nats"] > 1e-4  # the second update is of another model
    samples = records(base, "rollouts.jsonl")
    assert len(samples) == 2 * 16
    for record in drawn:
        groups = [each for each in samples if each["step"] == record["step"]]
        rewards = np.array([each["reward"] for each in groups]).reshape(-1, 4)
        spreads = rewards.std(1)
        expected = {"reward": rewards.mean(), "reward_std": spreads.mean()}
        expected |= {"reward_stderr": rewards.mean(1).std(ddof=1) / len(rewards) ** 0.5}
        expected |= {"dead_groups": (spreads == 0).mean(), "unscorable_share": 0}
        expected |= {"ended_share": np.mean([each["reason"] == "eos_token" for each in groups])}
        expected |= {"sample_tokens": np.mean([each["tokens"] for each in groups])}
        assert {name: record[name] for name in expected} == pytest.approx(expected)
        assert 0 < record["ended_share"] < 1
        assert record["score_seconds"] < record["draw_seconds"]
    assert [each["prompt"] for each in samples] == [
        samples[n // 4 * 4]["prompt"] for n in range(32)
    ]
    assert len({each["prompt"] for each in samples}) == 8  # four in each rollout
    assert len({each["digest"] for each in samples[:4]}) > 1
    for each in samples:  # all fields of a record are of one sample
        is_ended = each["reason"] == "eos_token"
        assert each["reward"] == each["rewards"]["ended"] == is_ended - 1
        assert len(each["text"]) == each["tokens"] - is_ended
    advantages = [each["advantage"] for each in samples]
    for first in range(0, 32, 4):
        group = np.array([each["reward"] for each in samples[first : first + 4]])
        scale = group.std(ddof=1) + 1e-4
        expected = [*((group - group.mean()) / scale)] if group.std() else [None] * 4
        assert advantages[first : first + 4] == pytest.approx(expected)
    trained = [each["tokens"] * (each["advantage"] is not None) for each in samples]
    totals = np.array(trained).reshape(4, 8).sum(1).cumsum()  # each update has its own samples
    assert [each["tokens"] for each in steps] == totals.tolist()
    held_out = [each for each in records(base) if each["split"] == "val"][-1]
    assert {"reward", "pass_1", "pass_2", "greedy_pass"} <= held_out.keys()
    assert held_out["loss_nats"] == -held_out["reward"]


@pytest.mark.slow
def test_an_evaluation_has_the_rewards_of_the_last_one_of_the_run(base, capsys, monkeypatch):
    """It ends as a run does if more samples than reward.tolerance have no score."""
    assert main(["eval", f"--workdir={base}", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["sets"]["val"]
    logged = [each for each in records(base) if each["split"] == "val"][-1]
    for name in ("reward", "pass_1", "pass_2", "greedy_reward", "sample_tokens"):
        assert figures[name] == pytest.approx(logged[name]), name

    def fails(sample, argument):
        raise verifiers.Unscorable("it fails")

    monkeypatch.setitem(verifiers.VERIFIERS, "ended", fails)
    assert main(["eval", f"--workdir={base}"]) == 65
    assert "12 of 12 samples have no score" in capsys.readouterr().err


def test_a_run_that_stops_inside_a_rollout_resumes_to_the_same_bits(config, base, tmp_path, capsys):
    """The samples, rewards and losses of the uninterrupted run; never without its samples.

    Records that were changed in between are named: another reward, and a fall of the held-out one.
    """
    workdir = tmp_path / "parts"
    assert train(config, workdir, "--stop_at=1") == 0
    (file,) = (workdir / "rollouts").iterdir()
    moved = file.rename(tmp_path / "moved")
    capsys.readouterr()
    assert train(config, workdir) == 65
    assert "--start_at=0 --force" in capsys.readouterr().err
    moved.rename(file)
    assert train(config, workdir) == 0
    assert records(workdir) == records(base)
    assert records(workdir, "rollouts.jsonl") == records(base, "rollouts.jsonl")

    def change(name, step, split, **fields):
        lines = (workdir / name).read_text().splitlines()
        changed = [
            each | fields if (each["step"], each.get("split")) == (step, split) else each
            for each in map(json.loads, lines)
        ]
        (workdir / name).write_text("".join(json.dumps(each) + "\n" for each in changed))

    change("rollouts.jsonl", 3, None, reward=7.0)
    change("metrics.jsonl", 1, "train", reward=-9.0)
    change("metrics.jsonl", 2, "val", reward=9.0)
    assert train(config, workdir, "--start_at=2", "--force") == 0
    log = (workdir / "log.txt").read_text()
    assert "was 7.0 before the run resumed, and is" in log
    assert "the reward of val fell from 9 to" in log


def test_a_logged_step_has_the_figures_of_the_rollout_before_it(config, base, tmp_path):
    """A rollout of two steps begins at steps 1 and 3; only steps 2 and 4 are logged."""
    flags = ["--config.log.every=2", "--config.eval.every=4"]
    for stop in (["--stop_at=1"], ["--stop_at=3"], []):  # inside of a rollout
        assert train(config, tmp_path / "run", *flags, *stop) == 0
    drawn = {each["step"]: each for each in records(base) if "reward_std" in each}
    logged = {each["step"]: each for each in records(tmp_path / "run") if each["split"] == "train"}
    assert [*logged] == [2, 4]
    for step, each in logged.items():
        for name in ("reward", "reward_std", "dead_groups", "ended_share"):
            assert each[name] == drawn[step - 1][name]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["rollout.draw", "rollout.score", "step.after", "save.files"])
def test_a_run_that_is_killed_anywhere_resumes_to_the_same_bits(config, base, tmp_path, point):
    words = harness.words(config, tmp_path / "b")
    code, _ = harness.run(words, f"{point}:sigkill@3")
    assert code < 0
    assert train(config, tmp_path / "b") == 0
    assert records(tmp_path / "b") == records(base)
    assert records(tmp_path / "b", "rollouts.jsonl") == records(base, "rollouts.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("data",), ("data", "tensor")])
def test_a_mesh_draws_the_samples_of_one_device(config, base, tmp_path, axes):
    flags = [f"--config.mesh.{axis}=2" for axis in axes]
    words = harness.words(config, tmp_path / "a", f"--cpu_devices={2 ** len(axes)}", *flags)
    code, output = harness.run(words)
    assert code == 0, output
    drawn, expected = (records(each, "rollouts.jsonl") for each in (tmp_path / "a", base))
    assert [each["digest"] for each in drawn] == [each["digest"] for each in expected]
    for one, other in zip(records(tmp_path / "a"), records(base), strict=True):
        assert one.get("reward") == other.get("reward")
        assert one["loss_nats"] == pytest.approx(other["loss_nats"], abs=1e-4)


@pytest.mark.slow
def test_micro_batches_learn_the_same_where_some_have_no_sample_with_a_gradient(
    config, base, tmp_path
):
    assert train(config, tmp_path / "a", "--config.train.microbatches=4") == 0
    steps = [[r for r in records(each) if r["split"] == "train"] for each in (tmp_path / "a", base)]
    assert any(each.get("dead_groups", 0) > 0 for each in steps[0])
    for one, other in zip(*steps, strict=True):
        assert one.get("reward") == other.get("reward")
        for name in ("loss_nats", "grad_norm", "entropy_nats"):
            assert one[name] == pytest.approx(other[name], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0.6", "1", "1.3"])
@pytest.mark.parametrize(
    "tune",
    [
        (),
        (
            "--config.tune.name=lora",
            "--config.tune.rank=2",
            "--config.tune.at=*/attention/*,*/mlp/*",
        ),
        ("--config.tune.name=bottleneck", "--config.tune.hidden=4"),
    ],
)
def test_the_first_ratio_is_1_at_each_temperature_and_for_adapters(
    config, base, tmp_path, temperature, tune
):
    flags = [f"--config.rl.temperature={temperature}", "--config.rl.updates=1", *tune]
    begin = [f"--init_from={base}"] if tune else []
    assert train(config, tmp_path / "a", *flags, *begin) == 0
    gaps = [each.get("sampler_gap_high_nats") for each in records(tmp_path / "a")]
    known = [gap for gap in gaps if gap is not None]  # a step of dead groups has none
    assert known
    assert max(known) < 1e-4


@pytest.mark.slow
def test_a_lag_draws_from_earlier_parameters_and_resumes_to_the_same_bits(config, base, tmp_path):
    """Rollout 1 is drawn from the first parameters, as in a run that does not learn."""
    reward = "--config.reward.functions=length:2"
    flags = ["--config.rl.lag=1", "--config.train.steps=6", reward]
    assert train(config, tmp_path / "whole", *flags) == 0
    assert train(config, tmp_path / "still", "--config.optim.lr=1e-30", reward) == 0
    still, whole = (records(tmp_path / each, "rollouts.jsonl") for each in ("still", "whole"))
    columns = [[each["digest"] for each in rows] for rows in (still, whole)]
    assert columns[0] == columns[1][:32]
    assert columns[1][:16] == [each["digest"] for each in records(base, "rollouts.jsonl")][:16]
    assert [each["step"] for each in whole] == [1] * 16 + [3] * 16 + [5] * 16
    steps = [each for each in records(tmp_path / "whole") if each["split"] == "train"]
    drift = {each["step"]: each["drift_nats"] for each in steps}
    assert drift[3] > drift[1]
    for stop in (["--stop_at=2"], ["--stop_at=3"], []):  # between rollouts, and inside of one
        assert train(config, tmp_path / "parts", *flags, *stop) == 0
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert records(tmp_path / "parts", "rollouts.jsonl") == whole


@pytest.mark.slow
def test_turns_of_a_tool_are_read_and_not_trained_on(config, tmp_path):
    """The model sees the ids of each turn as they were drawn, also in a run that resumes."""
    tool = tmp_path / "tools.py"
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def short(tokens):\n    return -tokens\n")
    tool.write_text("def more(completion):\n    return '1+1='\n")
    flags = [f"--config.rl.tool={tool}:more", "--config.rl.turns=2", "--config.rl.max_tokens=4"]
    flags += ["--config.data.sequence=24", f"--config.reward.functions={rewards}:short"]
    assert train(config, tmp_path / "whole", *flags) == 0
    steps = [each for each in records(tmp_path / "whole") if "tool_calls" in each]
    assert 1 < steps[0]["turns"] <= 2
    assert steps[0]["sampler_gap_high_nats"] < 1e-4
    samples = records(tmp_path / "whole", "rollouts.jsonl")
    assert any("1+1=" in each["text"] for each in samples)
    assert all(each["tokens"] <= 8 for each in samples)
    assert train(config, tmp_path / "parts", *flags, "--stop_at=1") == 0
    assert train(config, tmp_path / "parts", *flags) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(tmp_path / "parts", name) == records(tmp_path / "whole", name)
    tool.write_text("def more(completion):\n    return '2+2='\n")
    assert train(config, tmp_path / "parts", *flags) == 2  # another tool


@pytest.mark.slow
def test_groups_without_a_gradient_are_drawn_again(config, tmp_path):
    """Other prompts replace them, a bounded number of times; a resumed run draws the same."""
    flags = ["--config.objective.dead_groups=redraw", "--config.rl.redraws=2"]
    flags += ["--config.rl.max_tokens=2", "--config.rl.updates=1", "--config.train.steps=3"]
    assert train(config, tmp_path / "whole", *flags) == 0
    steps = [each for each in records(tmp_path / "whole") if each["split"] == "train"]
    assert sum(each["redrawn_groups"] for each in steps) > 0
    assert all(each["redrawn_groups"] <= 2 * 2 for each in steps)
    assert len(records(tmp_path / "whole", "rollouts.jsonl")) == 3 * 8
    assert train(config, tmp_path / "parts", *flags, "--stop_at=1") == 0
    assert train(config, tmp_path / "parts", *flags) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(tmp_path / "parts", name) == records(tmp_path / "whole", name)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_groups_of_equal_rewards_change_nothing_and_end_the_run(config, tmp_path, capsys, updates):
    """No step is applied or made again, and the error names what could give a gradient."""
    flags = ["--config.reward.functions=exact", f"--config.rl.updates={updates}"]
    flags += ["--config.guard.budget=3", "--config.train.steps=20"]
    assert train(config, tmp_path / "a", *flags) == 79
    error = capsys.readouterr().err
    assert "equal rewards in 3 rollouts in a row" in error
    assert not (tmp_path / "a/rewinds.json").exists()
    assert "--config.rl.samples=8 --config.train.batch=16" in error
    log = (tmp_path / "a/log.txt").read_text()
    assert "no trained token: the rewards of the samples of each prompt are equal" in log
    steps = [each for each in records(tmp_path / "a") if each["split"] == "train"]
    assert [each["dead_groups"] for each in steps[::updates]] == [1.0] * len(steps[::updates])
    assert all(each["tokens"] == 0 for each in steps)
    assert train(config, tmp_path / "parts", *flags, "--stop_at=1") == 0
    assert train(config, tmp_path / "parts", *flags) == 79
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(tmp_path / "parts", name) == records(tmp_path / "a", name)


def bare(**settings):
    """The rollouts of a run without its samplers."""
    rollouts = object.__new__(Rollouts)
    guard = types.SimpleNamespace(budget=3)
    train = types.SimpleNamespace(batch=8)
    run = types.SimpleNamespace(rl=RLConfig(**settings), guard=guard, train=train, seed=0)
    rollouts.__dict__ |= {"_run": run, "_objective": Policy(), "_thread": None, "_unnoted": None}
    rollouts.__dict__ |= {"_drawings": {}, "_dead": 0}
    return rollouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "start", "settings"),
    [
        # Step 5 of the abandoned steps began with a rollout; now step 4 does, and step 7 is logged.
        ("batch:nan@4-5", 3, "log.every=7,guard.skip=5,rl.updates=4"),
        # Rollout 7 was drawn ahead when batches 4 to 6 are left out.
        ("batch:nan@5-6", 4, "rl.updates=1,rl.lag=4,guard.skip=3,guard.rewind_steps=4"),
        # The batches that are left out are parts of a rollout.
        ("batch:nan@5-6", 4, "rl.updates=4,rl.epochs=2,guard.skip=2,guard.rewind_steps=4"),
    ],
)
def test_a_run_after_a_rewind_is_one_that_resumes_there(
    config, tmp_path, monkeypatch, plan, start, settings
):
    monkeypatch.setattr(faults, "_faults", faults.parse(plan))
    common = "train.steps=8,eval.every=8,guard.budget=2,checkpoint.keep_last=9,optim.lr=1e-2"
    common += ",reward.functions=length:3"
    flags = [f"--config.{each}" for each in f"{common},{settings}".split(",")]
    assert train(config, tmp_path / "whole", *flags) == 0
    assert len(json.loads((tmp_path / "whole/rewinds.json").read_text())) == 1
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    assert train(config, tmp_path / "parts", *flags, f"--start_at={start}", "--force") == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(tmp_path / "parts", name) == records(tmp_path / "whole", name)
    assert harness.state_digest(tmp_path / "parts") == harness.state_digest(tmp_path / "whole")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_rollout_is_drawn_once_from_the_parameters_of_a_lag_before(lag):
    rollouts, drawn = bare(lag=lag, updates=2), []

    def draw(number, step, params):
        drawn.append((number, step, params))
        return Drawing(None, list, {}, False)

    rollouts._drawn = draw
    for number in range(4):
        rollouts._params = number
        rollouts._draw_ahead(number, 2 * number + 1)
        assert number in rollouts._drawings
    assert drawn == [(n, 2 * n + 1, max(n - lag, 0)) for n in range(4 + lag)]


def test_groups_that_are_drawn_again_have_other_prompts_and_keys_of_their_own():
    """Those of their places in an attempt, with any other groups."""
    rollouts, calls = bare(samples=2), []

    def documents(start, stop, attempt):
        return [100 * attempt + number for number in range(start, stop)]

    rollouts._loader = types.SimpleNamespace(documents=documents)

    def score(params, loader, chosen, count, keys, *, where):
        calls.append((chosen, jax.random.key_data(keys).reshape(len(chosen), -1).tolist()))

    rollouts._scorer = types.SimpleNamespace(score=score)
    for groups, attempt in (([0, 1, 2, 3], 0), ([1, 3], 1), ([3], 1), ([3], 2)):
        rollouts._scored(5, 1, None, groups, attempt)
    whole, pair, single, second = calls
    assert whole[0] == [20, 21, 22, 23]  # four prompts a rollout
    assert (pair[0], single[0], second[0]) == ([121, 123], [123], [223])
    assert single[1] == pair[1][1:]
    keys = [str(key) for key in (*whole[1], *pair[1], *second[1])]
    assert len(set(keys)) == len(keys)


def test_rollouts_without_a_gradient_end_a_run_if_they_are_in_a_row():
    rollouts = bare()
    dead, alive = (Drawing(None, list, {"reward": 0.0}, is_dead) for is_dead in (True, False))
    for each in (dead, dead, alive, dead, dead):
        rollouts._count_dead(each, 1)
    with pytest.raises(Diverged, match="in 3 rollouts in a row"):
        rollouts._count_dead(dead, 6)


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (2, "those of steps 5 and 7; a cut sample of step 3 has another reward"),
        (0, "a damaged line"),
        (0, "another number of samples"),
        (0, "no file"),
        (0, "the start of a run"),
    ],
)
def test_a_run_that_resumes_counts_the_rollouts_before_it(tmp_path, count, why):
    """`truncated` is `score`: a cut sample counts."""
    rollouts, path = bare(samples=2), tmp_path / "rollouts.jsonl"
    noted = {
        3: ((1, "stop"), (0, "length")),
        5: ((1, "stop"), (1, "stop")),
        7: 2 * ((None, "stop"),),
    }
    lines = [
        json.dumps({"step": step, "reward": reward, "reason": reason}) + "\n"
        for step, samples in noted.items()
        for reward, reason in samples
    ]
    if why == "another number of samples":
        del lines[-1]
    if why == "a damaged line":
        lines[-1] = "{\n"
    if why != "no file":
        path.write_text("".join(lines))
    processes = types.SimpleNamespace(
        peers=types.SimpleNamespace(is_first=True), share=lambda name, value: value
    )
    directory = types.SimpleNamespace(path=tmp_path)
    rollouts._context = types.SimpleNamespace(directory=directory, processes=processes)
    assert rollouts._dead_before(0 if why == "the start of a run" else 8) == count


@pytest.mark.parametrize("part", ["train", "validation"])
def test_prompts_without_the_answers_of_a_reward_end_the_run_before_it_begins(
    config, tmp_path, capsys, part
):
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}1="}) + "\n" for n in range(30)))
    flags = [f"--config.data.{part}={path}", "--config.reward.functions=number"]
    assert train(config, tmp_path / "a", *flags) == 65
    error = capsys.readouterr().err
    assert "prompts have no answer" in error
    assert not (tmp_path / "a/config.json").exists()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The config of a mixture of two sources of prompts, and its run."""
    folder, sources = tmp_path_factory.mktemp("mixed"), []
    for name, sign in (("sums", "+"), ("signs", "=")):  # the ids of the base, and its programs
        lines = [{"prompt": f"{n:02}{sign}1=", "answer": n} for n in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        sources.append(f"{name}={folder}/{name}.jsonl")
    settings = {
        "data.train": tuple(sources),
        "data.mixture.name": "weights",
        "data.mixture.weights": ("sums=0.75", "signs=0.25@0%..0.25@100%"),
    }
    config = harness.write_config(folder, SETTINGS | settings)
    assert train(config, folder / "whole") == 0
    return config, folder / "whole"


@pytest.mark.slow
def test_a_mixture_of_prompts_resumes_to_the_same_bits(mixed, tmp_path):
    config, whole = mixed
    assert train(config, tmp_path / "part", "--stop_at=1") == 0
    assert train(config, tmp_path / "part") == 0
    assert records(tmp_path / "part", "rollouts.jsonl") == records(whole, "rollouts.jsonl")


@pytest.mark.slow
def test_a_mixture_of_prompts_has_its_shares(mixed, capsys):
    config, whole = mixed
    samples = records(whole, "rollouts.jsonl")
    prompts = [each["prompt"] for each in samples[::4]]
    assert len(prompts) == 8  # four in each of two rollouts
    for rollout in (prompts[:4], prompts[4:]):
        assert sum("+" not in each for each in rollout) == 1
    assert len(set(prompts)) == 8
    newest = [each for each in records(whole) if each["split"] == "train"][-1]
    assert (newest["sources/sums/rows"], newest["sources/signs/rows"]) == (6, 2)
    drawn = next(each for each in records(whole) if "reward" in each)
    by_source = [drawn[f"sources/{name}/reward"] for name in ("sums", "signs")]
    assert 0.75 * by_source[0] + 0.25 * by_source[1] == pytest.approx(drawn["reward"])

    capsys.readouterr()
    for verb in ("stats", "peek"):
        assert main(["data", verb, f"--config={config}"]) == 0
    assert "signs 25.0% of the prompts" in capsys.readouterr().out
    flags = ["--step=3", "--rows=9", "--json"]  # the last update
    assert main(["data", "peek", f"--config={config}", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [each["text"].removeprefix("<|bos|>") for each in shown] == prompts[6:]
    for each in shown:
        name = "sums" if "+" in each["text"] else "signs"
        assert each["source"].startswith(f"{name}, {whole.parent}/{name}.jsonl")
