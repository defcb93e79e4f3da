"""Situations of prompts whose answers are sampled, and whose fixes `test_fix_lines` pastes."""

from tests.house.situation import CONFIG, Situation
from tests.house.situations_recipes import trained
from tests.house.situations_texts import _shell

PROMPTS = _shell(
    "import json; f, g = open('prompts.jsonl', 'w'), open('bare.jsonl', 'w'); "
    "[(print(json.dumps({'prompt': f'{n}+1=', 'answer': str(n + 1)}), file=f), "
    "print(json.dumps({'prompt': f'{n}+1='}), file=g)) for n in range(60)]"
)
ON = "--config.data.train=prompts.jsonl --config.data.kind=prompts --config.data.validation=20%"
SAMPLE = (
    f"{ON} --config.objective.name=policy --config.rl.max_tokens=8 --config.rl.samples=2 "
    "--config.reward.functions=ended"
)
VALIDATE = "config validate --config=c.py"

SITUATIONS: dict[str, Situation] = {
    "prompts that are learned as text": Situation(f"{VALIDATE} {ON}", PROMPTS),
    "rewards of text": Situation(
        f"{VALIDATE} --config.objective.name=policy --config.rl.max_tokens=8 "
        "--config.data.validation=20% --config.reward.functions=ended",
        PROMPTS,
    ),
    "samples that are no whole prompts": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.samples=3", PROMPTS
    ),
    "new tokens that fill a row": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.max_tokens=500 --config.data.sequence=32", PROMPTS
    ),
    "a group of one sample": Situation(f"{VALIDATE} {SAMPLE} --config.rl.samples=1", PROMPTS),
    "groups of the baseline of a batch that are drawn again": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.algorithm=reinforce "
        "--config.objective.dead_groups=redraw",
        PROMPTS,
    ),
    "turns without a tool": Situation(f"{VALIDATE} {SAMPLE} --config.rl.turns=2", PROMPTS),
    "a tool without a further turn": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.tool=calculator", PROMPTS
    ),
    "a tool that does not exist": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.turns=2 --config.rl.tool=search", PROMPTS
    ),
    "a tool in no file": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.turns=2 --config.rl.tool=nowhere.py:tool", PROMPTS
    ),
    "samples at temperature 0": Situation(
        f"{VALIDATE} {SAMPLE} --config.rl.temperature=0", PROMPTS
    ),
    "a policy without a reward": Situation(
        f"{VALIDATE} {SAMPLE} '--config.reward.functions=()'", PROMPTS
    ),
    "a penalty by an adapter that is not there": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.kl=loss_k3", PROMPTS
    ),
    "a penalty by the start of an adapter": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.kl=loss_k3 --config.objective.reference=start "
        "--config.tune.name=lora",
        PROMPTS,
    ),
    "a penalty by fresh weights": Situation(
        f"train {CONFIG} {SAMPLE} --config.objective.kl=loss_k3 --config.objective.reference=start",
        PROMPTS,
    ),
    "samples that are labels of themselves": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.name=distill --config.objective.teacher=runs/a "
        "--config.objective.sampled=0.5",
        PROMPTS,
    ),
    "prompts that a teacher does not answer": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.name=distill --config.objective.teacher=runs/a",
        PROMPTS,
    ),
    "a correction of a divergence": Situation(
        f"{VALIDATE} {SAMPLE} --config.objective.name=distill --config.objective.teacher=runs/a "
        "--config.objective.sampled=1 --config.objective.weight=1 --config.rl.correction=tis",
        PROMPTS,
    ),
    "rollouts of growing batches": Situation(
        f"{VALIDATE} {SAMPLE} --config.train.batch_warmup=2@10%", PROMPTS
    ),
    "curvature of a reward": Situation(f"{VALIDATE} {SAMPLE} --config.optim.name=sophia", PROMPTS),
    "a term that rewards lack": Situation(f"{VALIDATE} {SAMPLE} --config.loss.z_loss=0.1", PROMPTS),
    "prompts without the answers of a reward": Situation(
        f"train {CONFIG} {SAMPLE} --config.data.train=bare.jsonl --config.reward.functions=number",
        PROMPTS,
    ),
    "layers of a policy": Situation(
        "prune --workdir=runs/policy --out=new --keep=0", f"{PROMPTS}; {trained('policy', SAMPLE)}"
    ),
}
SAMPLED = "tests/rl/test_rollout.py"
ANSWERED = "tests/recipes/train/test_rollouts.py"
SLOW = {"prompts without the answers of a reward", "layers of a policy"}  # they train a model
ELSEWHERE = {
    "recipes/train/rollouts.py:_count_dead:1": f"{ANSWERED}::"
    "test_groups_of_equal_rewards_change_nothing_and_end_the_run",
    "recipes/train/rollouts.py:_stored:1": f"{ANSWERED}::"
    "test_a_run_that_stops_inside_a_rollout_resumes_to_the_same_bits",
    "rl/turns.py:_probed:1": "tests/rl/test_turns.py::"
    "test_a_template_without_such_a_turn_is_refused",
    "rl/rollout.py:_check:1": f"{SAMPLED}::test_a_prompt_that_leaves_no_positions_is_refused",
}
NOT_YET: set[str] = set()
