"""Situations of pairs and of labels, whose fixes `test_fix_lines` pastes."""

import sys

from tests.house.situation import CONFIG, Situation
from tests.house.situations_recipes import trained
from tests.house.situations_serving import T5
from tests.house.situations_texts import _shell

PAIRS = _shell(
    "import json; f, g = open('pairs.jsonl', 'w'), open('labeled.jsonl', 'w'); "
    "[(print(json.dumps({'prompt': f'{n}', 'chosen': 'a', 'rejected': 'b'}), file=f), "
    "print(json.dumps({'prompt': f'{n}', 'completion': 'a', 'label': n % 2 == 0}), file=g)) "
    "for n in range(60)]"
)
PROCESS = _shell(
    "import json; f = open('steps.jsonl', 'w'); "
    "[print(json.dumps({'prompt': f'{n}', 'steps': ['a', 'b'], 'labels': [True, n % 2 == 0]}), "
    "file=f) for n in range(60)]"
)
ALIKE = f"{PAIRS}; sed -i 's/false/true/' labeled.jsonl"
ON = "--config.data.train=pairs.jsonl --config.data.kind=pairs --config.data.validation=20%"
LABELED = (
    "--config.data.train=labeled.jsonl --config.data.kind=labeled --config.data.validation=20%"
)
STEPS = "--config.data.train=steps.jsonl --config.data.kind=steps --config.data.validation=20%"
PREFER = f"{ON} --config.objective.name=preference"
SCORE = f"{ON} --config.objective.name=reward"
KTO = f"{LABELED} --config.objective.name=preference --config.objective.loss=kto"
SCORED = f"{PAIRS}; {trained('rewarded', SCORE)}"
VALIDATE = "config validate --config=c.py"
COLLECT = "collect --workdir=runs/a --max_tokens=4 --samples=2"
ASK = "echo one > p.txt"
COLLECTED = f"{ASK}; {sys.executable} -m jaxlm {COLLECT} --prompts=p.txt --judge=ended --out=c >&2"

SITUATIONS: dict[str, Situation] = {
    "a preference without a reference": Situation(
        f"{VALIDATE} {PREFER} --config.objective.reference=none", PAIRS
    ),
    "smoothing of another loss": Situation(
        f"{VALIDATE} {PREFER} --config.objective.loss=hinge --config.objective.smoothing=0.1", PAIRS
    ),
    "sums of a loss of means": Situation(
        f"{VALIDATE} {PREFER} --config.objective.loss=orpo --config.objective.length=sum", PAIRS
    ),
    "pairs that are learned as text": Situation(f"{VALIDATE} {ON}", PAIRS),
    "a preference of text": Situation(
        f"{VALIDATE} --config.objective.name=preference --config.data.validation=20%", PAIRS
    ),
    "labels for a loss of pairs": Situation(f"{VALIDATE} {KTO} --config.objective.loss=dpo", PAIRS),
    "no adapter to turn off": Situation(
        f"{VALIDATE} {PREFER} --config.objective.reference=adapter_off", PAIRS
    ),
    "steps that are learned as text": Situation(f"{VALIDATE} {STEPS}", PROCESS),
    "steps for a reward model": Situation(
        f"{VALIDATE} {STEPS} --config.objective.name=reward", PROCESS
    ),
    "pairs for a process reward model": Situation(
        f"{VALIDATE} {ON} --config.objective.name=process", f"{PAIRS}; {PROCESS}"
    ),
    "steps of one kind": Situation(
        f"data stats --config=c.py {STEPS} --config.objective.name=process",
        f"{PROCESS}; sed -i 's/false/true/' steps.jsonl",
    ),
    "one answer to compare": Situation(
        f"{COLLECT.replace('--samples=2', '--samples=1')} --prompts=p.txt "
        "--judge=compare:runs/a --out=c",
        ASK,
    ),
    "curvature of a preference": Situation(
        f"{VALIDATE} {PREFER} --config.optim.name=sophia", PAIRS
    ),
    "a term that preferences lack": Situation(
        f"{VALIDATE} {PREFER} --config.loss.z_loss=0.1", PAIRS
    ),
    "pairs in a mixture with text": Situation(
        f"{VALIDATE} {PREFER} --config.data.train=a=pairs.jsonl,b=texts/*.txt "
        "--config.data.kinds=b=text",
        PAIRS,
    ),
    "labels that are read as pairs": Situation(
        f"data stats --config=c.py {PREFER} --config.objective.loss=kto "
        "--config.data.train=labeled.jsonl",
        PAIRS,
    ),
    "labels for a reward model": Situation(
        f"{VALIDATE} {LABELED} --config.objective.name=reward", PAIRS
    ),
    "a start from a reward model": Situation(
        f"train {CONFIG} {PREFER} --init_from=runs/rewarded", SCORED
    ),
    "a loss of text of a reward model": Situation(
        "eval --workdir=runs/rewarded --text=t.txt", SCORED
    ),
    "an export of a reward model": Situation(
        "export --workdir=runs/rewarded --out=out --to=gguf", SCORED
    ),
    "a seed that is too large": Situation(
        f"{COLLECT} --prompts=p.txt --judge=ended --out=c --seed=4294967296", ASK
    ),
    "a seed of a text that is too large": Situation(
        "generate --workdir=runs/a --prompt=a --max_tokens=2 --seed=4294967297"
    ),
    "a truth without a judge": Situation(
        f"{COLLECT} --prompts=p.txt --ask --truth=ended --out=c", ASK
    ),
    "a collection without a judge": Situation(f"{COLLECT} --prompts=p.txt --out=c", ASK),
    "a win rate without a judge": Situation(
        "eval --workdir=runs/a --against=runs/a --text=p.txt --max_tokens=4", ASK
    ),
    "a collection without prompts": Situation(
        f"{COLLECT} --judge=ended --out=c", 'echo \'{"prompt": "1"}\' > prompts.jsonl'
    ),
    "a judge that does not exist": Situation(
        f"{COLLECT} --prompts=p.txt --judge=ende --out=c", ASK
    ),
    "a judge that is no reward model": Situation(
        f"{COLLECT} --prompts=p.txt --judge=reward:runs/a --out=c",
        f"{ASK}; {PAIRS}",
        "--config.train.steps=1 --config.train.batch=4 --config.data.validation=20%",
    ),
    "a judge with an encoder": Situation(
        f"{COLLECT} --prompts=p.txt --judge=judge:runs/t5 --out=c", f"{ASK}; {T5}"
    ),
    "prompts that are nowhere": Situation(
        f"{COLLECT} --prompts=p.jsonl --judge=ended --out=c", code=66
    ),
    "a prompt that is none": Situation(
        f"{COLLECT} --prompts=p.jsonl --judge=ended --out=c",
        'echo 1 > p.jsonl; echo \'{"prompt": "1"}\' >> p.jsonl',
        code=65,
    ),
    "prompts that are empty": Situation(
        f"{COLLECT} --prompts=p.jsonl --judge=ended --out=c", "touch p.jsonl", code=65
    ),
    "prompts without answers": Situation(
        f"{COLLECT} --prompts=p.txt --judge=number --out=c", ASK, code=65
    ),
    "answers that fit in no context": Situation(
        f"{COLLECT} --prompts=p.txt --judge=ended --out=c --max_tokens=4000", ASK, code=65
    ),
    "principles that are nowhere": Situation(
        f"{COLLECT} --prompts=p.txt --critique=r.txt --out=c", ASK, code=66
    ),
    "principles that are empty": Situation(
        f"{COLLECT} --prompts=p.txt --critique=r.txt --out=c", f"{ASK}; touch r.txt", code=65
    ),
    "another collection in the folder": Situation(
        f"{COLLECT} --prompts=p.txt --judge=ended --out=c --seed=1", COLLECTED
    ),
    "a collection in a file": Situation(
        f"{COLLECT} --prompts=p.txt --judge=ended --out=c", f"{ASK}; touch c"
    ),
    "labels of one kind": Situation(f"data stats --config=c.py {KTO}", ALIKE),
    "shards of pairs that are read as text": Situation(
        "data stats --config=c.py --config.data.train=judged/train "
        "--config.data.validation=judged/val "
        "--config.data.tokenizer=judged/train/tokenizer",
        f"{PAIRS}; {sys.executable} -m jaxlm data tokenize --config=c.py {PREFER} --out=judged >&2",
    ),
}

# Each trains a model, or several.
SLOW = {
    "a seed that is too large",
    "an export of a reward model",
    "a collection without prompts",
    "a judge that is no reward model",
    "a judge with an encoder",
    "a start from a reward model",
    "a win rate without a judge",
    "another collection in the folder",
    "answers that fit in no context",
    "one answer to compare",
}
ELSEWHERE: dict[str, str] = {}
NOT_YET: set[str] = set()
