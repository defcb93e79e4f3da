"""`jaxlm reward try`: built-in rewards pay for no attack, and a reward that does is named."""

import json
import re
import shlex

import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import DataError
from jaxlm.evals import code
from jaxlm.rl.attacks import ANSWER, read_questions

LINES = [
    {"prompt": f"{n} + 5 =", "answer": str(n + 5), "info": {"tests": "assert add(1, 2) == 3"}}
    for n in range(3, 6)
]


@pytest.fixture
def attempt(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in LINES))

    def attempt(*words):
        code = main(["reward", "try", *words, "--prompts=prompts.jsonl"])
        return code, capsys.readouterr()

    return attempt


def test_a_reward_that_the_right_answer_does_not_earn_is_named(attempt, tmp_path):
    (tmp_path / "mine.py").write_text("def none(completion):\n    return 0.0\n")
    assert attempt("mine.py:none")[1].out.endswith("caution: the right answer earns no reward\n")
    assert "the right answer" not in attempt("number")[1].out


def test_built_in_rewards_pay_for_no_attack(attempt):
    sandbox = "auto" if code.namespaces() else "process"
    names = ("exact", "number", "json", "regex", "format", "length:8", "ended", "python=2")
    code_, written = attempt(*names, f"--config.reward.sandbox={sandbox}", "--json")
    answer = json.loads(written.out)
    assert code_ == 0
    assert answer["paid"] == []
    assert [each["unscorable"] for each in answer["earned"].values()] == [0] * 9
    assert answer["earned"][ANSWER] == {"mean": 4, "share": 1, "unscorable": 0, "problem": ""}


def test_a_reward_that_pays_is_named(attempt, tmp_path):
    (tmp_path / "rewards.py").write_text("def shape(completion):\n    return len(completion)\n")
    code_, written = attempt("rewards.py:shape")
    assert code_ == 0
    first, _, reference, empty, *_, last = written.out.strip().splitlines()
    assert first == "3 prompts, rewards.py:shape"
    assert reference.split()[:5] == ["the", "answer", "1.333", "100.0%", "0"]
    assert empty.split() == ["empty", "0.000", "0.0%", "0"]
    assert last.startswith(
        "caution: a wrong completion earns a reward: echo, tags only, all digits"
    )


@pytest.mark.parametrize("line", ["{", "[]", '{"answer": 1}', '{"prompt": [1]}', '{"prompt": 1}'])
def test_a_line_without_a_prompt_is_named(attempt, tmp_path, line):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(line)
    code_, written = attempt("number")
    assert code_ == 65
    assert "prompts.jsonl:4" in written.err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('["a"]', "it is a list, not an object"),
        ('{"question": "x"}', "its fields are question"),
        ('{"prompt": [{"role": "user"}]}', "KeyError: 'content'"),
    ],
)
def test_a_line_without_a_prompt_is_described(tmp_path, line, why):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match="a line has no prompt") as caught:
        read_questions(file)
    assert caught.value.why == why


def test_the_fix_of_a_wrong_reward_is_a_line_that_runs_and_keeps_the_others(attempt):
    words = ["jaxlm", "reward", "try", "numbr", "ended=2", "--prompts=prompts.jsonl"]
    code_, written = attempt("numbr", "ended=2")
    fix = re.search(r"  fix    (.*)", written.err)[1]
    assert code_ == 2
    assert fix == "jaxlm reward try --prompts=prompts.jsonl number=1 ended=2"
    assert f"  where  {' '.join(words)}\n" in written.err
    assert main(shlex.split(fix)[1:]) == 0
