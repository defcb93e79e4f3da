"""Situations of rewards, whose fixes `test_fix_lines` pastes."""

from tests.house.situation import Situation

VALIDATE = "config validate --config=c.py --config.reward.functions"
PROMPTS = 'echo \'{"prompt": "7 + 5 =", "answer": "12"}\' > p.jsonl'
REWARDS = "tests/rl/test_rewards.py"

SITUATIONS: dict[str, Situation] = {
    "no such reward": Situation(f"{VALIDATE}=numbr=1"),
    "a reward of weight 0": Situation(f"{VALIDATE}=number=0"),
    "a length without a limit": Situation(f"{VALIDATE}=length"),
    "no reward to try": Situation("reward try --prompts=p.jsonl", PROMPTS),
    "rewards of a file that is gone": Situation("reward try number --prompts=none.jsonl", PROMPTS),
    "a reward named twice": Situation(f"{VALIDATE}=number=1,number=2"),
    "a reward of a file that is gone": Situation(f"{VALIDATE}=rewards.py:score"),
}

SLOW: set[str] = set()
SANDBOX = f"{REWARDS}::test_programs_need_namespaces_or_a_word_of_the_user"
FILES = f"{REWARDS}::test_a_file_that_fails_is_an_error_before_the_first_sample"
UNSCORED = "tests/rl/test_verifiers.py::test_too_many_samples_without_a_score_end_the_run"
ELSEWHERE = {
    "rl/programs.py:check_sandbox:1": SANDBOX,
    "rl/rewards.py:check_scored:1": UNSCORED,
    "rl/workers.py:_refused:1": FILES,
}
NOT_YET: set[str] = set()
