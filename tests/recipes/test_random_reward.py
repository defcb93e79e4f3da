"""A reward that is drawn at random teaches nothing, where the same steps of a true one do."""

import json

import numpy as np
import pytest

import jaxlm
from tests.recipes.train.test_rollouts import SETTINGS

RUNS, STEPS = 10, 24
LUCK = """
import random

def luck(seed):
    return float(random.Random(seed).random() < 0.5)
"""


@pytest.mark.slow
def test_a_random_reward_raises_no_share_over_ten_runs(tmp_path, one_device):
    """The share of samples that end themselves moves with both signs, and a reward raises it."""
    path, rewards = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(40)))
    rewards.write_text(LUCK)
    settings = SETTINGS | {
        **{"data.train": [str(path)], "train.batch": 32, "rl.updates": 1, "optim.lr": 3e-3},
        **{"train.steps": STEPS, "checkpoint.every": STEPS, "eval.every": STEPS, "log.every": 1},
        **{"log.sinks": [], "sample.prompts": (), "schedule.warmup": "0%"},
    }

    def rise(function, seed):
        shares = []

        def on_record(step, record):
            if "ended_share" in record and record["split"] == "train":
                shares.append(record["ended_share"])

        workdir = tmp_path / f"{function.partition(':')[2] or function}{seed}"
        more = {"reward.functions": (function,), "seed": seed}
        jaxlm.train(settings | more, workdir=workdir, callbacks=[on_record], quiet=True)
        return np.mean(shares[-4:]) - np.mean(shares[:4])

    random = np.array([rise(f"{rewards}:luck", seed) for seed in range(RUNS)])
    error = random.std(ddof=1) / np.sqrt(RUNS)
    assert abs(random.mean()) < 3 * error + 0.02
    true = rise("ended", 0)
    assert true > 0.2
    assert true > random.mean() + 5 * error
