"""The data of scripts/chain.py: half of it is wrong, and no held-out sum is in it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.recipes.config import Run

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("chain", ROOT / "scripts/chain.py")
chain = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chain)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    made = chain.Chain(tmp_path_factory.mktemp("chain"), 1)
    made.write_data()
    return made.data


def read(data, name):
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]


def test_half_of_the_demonstrations_are_wrong_and_no_held_out_sum_is_trained_on(data):
    def turns(name):
        return [[m["content"] for m in each["messages"]] for each in read(data, name)]

    demonstrations, held_out = turns("sft"), turns("held_out")

    def is_right(question, answer):
        return sum(map(int, question[:-1].split("+"))) == int(answer)

    right = sum(is_right(*each) for each in demonstrations)
    assert 0.45 < right / len(demonstrations) < 0.55
    assert len(held_out) == chain.FULL.held_out
    assert all(is_right(*each) for each in held_out)
    hidden = {question for question, _ in held_out}
    lines = {line[:6] for line in (data / "lines.txt").read_text().splitlines()}
    known = {each["prompt"][0]["content"] for each in read(data, "prompts")}
    assert not hidden & (lines | known | {question for question, _ in demonstrations})
    assert len({question[4] for question in hidden}) == 10, "every last digit is held out"


@pytest.mark.parametrize("name", ["pretrain", "sft", "dpo", "grpo"])
def test_the_configs_of_the_chain_load(data, name):
    run = config.load(Run, f"{ROOT}/configs/chain/{name}.py:{data}").value
    assert str(data) in run.data.train[0]


@pytest.mark.slow
def test_the_smallest_chain_runs_to_its_end(tmp_path):
    """Every stage and control is in the table; what each answers is another matter."""
    words = [sys.executable, ROOT / "scripts/chain.py", f"--out={tmp_path}", "--smallest"]
    done = subprocess.run(
        [*words, "--controls"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    names = [row[0] for row in rows[2:]]
    controls = ["more_sft", "grpo_from_sft", "random_reward", "form_reward", "accepted_sft"]
    assert names == ["pretrain", "sft", "dpo", "grpo", *controls, "in all"]
    assert all(0 <= float(cell) <= 1 for row in rows[3:-1] for cell in row[2:5])
