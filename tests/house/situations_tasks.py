"""Situations of tasks, whose fixes `test_fix_lines` pastes."""

import json
import shlex
import sys

from tests.house.situation import CONFIG, RUN, SHORT, Situation
from tests.house.situations_recipes import BERT


def written(name, lines):
    """Return a shell command that writes a file."""
    return f"printf '%s\\n' {shlex.join(lines)} > {name}"


ITEMS = written("items.jsonl", [json.dumps({"a": "one", "b": "two", "c": "three"})] * 2)
SHARED = ['items = "items.jsonl"']
PAIR = "; ".join(
    [
        ITEMS,
        written(
            "pair.toml",
            [*SHARED, 'kind = "pair"', 'good = "{{ a }} {{ b }}"', 'bad = "{{ a }} {{ c }}"'],
        ),
    ]
)
CHOICES = ['choices = ["{{ b }}", "{{ c }}"]', 'answer = "0"', 'context = "{{ a }}"']
CHOICE = f"{ITEMS}; " + written("choice.toml", [*SHARED, 'kind = "choice"', *CHOICES])
PROGRAM = ['context = "{{ a }}"', 'answer = "{{ b }}"', "max_tokens = 4", 'program_end = "pass"']
CODE = f"{ITEMS}; " + written("code.toml", [*SHARED, 'kind = "answer"', *PROGRAM])
LONG = f"{CHOICE}; sed '1s/one/{'one ' * 40}/' -i items.jsonl"
SCORED = f"{PAIR}; {sys.executable} -m jaxlm eval {RUN} --tasks=pair.toml --quiet >&2"
SAMPLES = "runs/a/evals/*/samples.jsonl"
ON_PAIR = f"eval {RUN} --tasks=pair.toml"
ON_CHOICE = f"eval {RUN} --tasks=choice.toml"

REQUIRED = "compare runs/a runs/b --out=p.html --require=not_worse:1%"

SITUATIONS: dict[str, Situation] = {
    "a requirement with a task file": Situation(REQUIRED, f"{PAIR}; cp -r runs/a runs/b"),
    "a requirement with results of one run": Situation(REQUIRED, f"cp -r runs/a runs/b; {SCORED}"),
    "examples without tasks": Situation(f"eval {RUN} --shots=2"),
    "tasks and other text": Situation(f"{ON_PAIR} --text=texts/*.txt", PAIR),
    "no such task": Situation(f"eval {RUN} --tasks=nothing.toml"),
    "a task whose items are gone": Situation(ON_PAIR, f"{PAIR}; rm items.jsonl"),
    "a task of an encoder": Situation(
        "eval --workdir=runs/bert --tasks=pair.toml", f"{PAIR}; {BERT}"
    ),
    "an encoder trained with tasks": Situation(
        f"train {CONFIG} --config.model.family=bert --config.objective.name=masked "
        "--config.eval.tasks=pair.toml",
        PAIR,
        more=SHORT,
    ),
    "tasks of a chat in training without a template": Situation(
        f"train {CONFIG} --config.eval.tasks=pair.toml --config.eval.tasks_chat=true",
        PAIR,
        more=SHORT,
    ),
    "examples of pairs": Situation(f"{ON_PAIR} --shots=1", PAIR),
    "more examples than items": Situation(f"{ON_CHOICE} --shots=2", CHOICE),
    "an item longer than a row": Situation(ON_CHOICE, LONG),
    "an item longer than a row in training": Situation(
        f"train {CONFIG} --config.eval.tasks=choice.toml", LONG, more=SHORT
    ),
    "a template of no field": Situation(ON_PAIR, PAIR + "; sed 's/{{ b }}/{{ x }}/' -i pair.toml"),
    "a template of no field, and items left out": Situation(
        ON_PAIR,
        f"{PAIR}; sed '1i invalid = \"skip\"' -i pair.toml; "
        "sed 's/{{ b }}/{{ x }}/' -i pair.toml",
    ),
    "programs that are not allowed": Situation(f"eval {RUN} --tasks=code.toml", CODE),
    "damaged samples": Situation(ON_PAIR, f"{SCORED}; sed -i '1s/.*/[/' {SAMPLES}"),
    "samples of other items": Situation(
        ON_PAIR, f'{SCORED}; sed -i \'1s/"id": "1"/"id": "x"/\' {SAMPLES}'
    ),
}

# Of these, the ones that take long.
SLOW = {
    "tasks of a chat in training without a template",
    "an encoder trained with tasks",
    "an item longer than a row in training",
    "damaged samples",
    "programs that are not allowed",
    "samples of other items",
    "a task of an encoder",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    "recipes/lm_eval_model.py:_scores:1": "tests/parity/test_lm_eval.py::"
    "test_what_the_model_cannot_do_is_refused_with_a_way_out",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
