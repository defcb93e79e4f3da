"""Situations of `jaxlm serve`, whose fixes `test_fix_lines` pastes. None starts a server."""

import importlib.util
import shlex
import sys

import pytest

from tests.house.situation import RUN, Situation
from tests.house.situations_recipes import trained

SERVE = f"serve {RUN}"
GENERATE = f"generate {RUN} --max_tokens=2"
PREFIX = trained("prefix", "--config.objective.name=prefix")
T5 = trained(
    "t5",
    "--config.model.family=t5 --config.model.width=32 --config.model.depth=1 "
    "--config.model.heads=4 --config.objective.name=span",
)


def without_llguidance(patch: pytest.MonkeyPatch) -> None:
    """Let the package be absent."""
    patch.setattr(importlib.util, "find_spec", lambda name: None)


SITUATIONS = {
    "a server without slots": Situation(f"{SERVE} --slots=0", code=2),
    "a server at no price": Situation(f"{SERVE} --price=0", code=2),
    "a server on no port": Situation(f"{SERVE} --port=70000", code=2),
    "a server for others without keys": Situation(f"{SERVE} --host=0.0.0.0", code=2),
    "a server without its keys": Situation(f"{SERVE} --keys=keys.txt", code=66),
    "a server with no key": Situation(
        f"{SERVE} --keys=keys.txt", "touch keys.txt; chmod 600 keys.txt", code=65
    ),
    "a server with a key in the open": Situation(
        f"{SERVE} --keys=keys.txt", "echo secret > keys.txt; chmod 600 keys.txt", code=65
    ),
    "a key without a file": Situation("serve --add_key", code=2),
    "limits of keys without a file": Situation("serve --key_calls=5", code=2),
    "a training plan of a server": Situation("plan --config=c.py --serve --fit", code=2),
    "slots of no server": Situation("plan --config=c.py --slots=4", code=2),
    "a plan of no slots": Situation("plan --config=c.py --serve --slots=0", code=2),
    "a server of an encoder-decoder": Situation(
        "plan --config=e.py --serve",
        'printf \'def get_config():\\n    return {"model": {"family": "t5"}, '
        '"objective": {"name": "span"}}\\n\' > e.py',
        code=2,
    ),
    "a draft that is an encoder-decoder": Situation(
        "plan --config=c.py --serve --draft=e.py",
        'printf \'def get_config():\\n    return {"model": {"family": "t5"}, '
        '"objective": {"name": "span"}}\\n\' > e.py',
        code=2,
    ),
    "a plan with a draft that is not there": Situation(
        "plan --config=c.py --serve --draft=runs/nowhere", code=66
    ),
    "a server with a draft that is not there": Situation(f"{SERVE} --draft=runs/nowhere", code=66),
    "a draft of heads that are not there": Situation(
        "plan --config=c.py --serve --draft=heads", code=2
    ),
    "a draft of no server": Situation("plan --config=c.py --draft=lookup", code=2),
    "a server on eight devices": Situation("plan --config=c.py --serve --on=h100x8", code=2),
    "a server on a slice": Situation("plan --config=c.py --serve --on=v5e-4", code=2),
    "a server on parts of a CPU": Situation("plan --config=c.py --serve --devices=2", code=2),
    "a text with a draft of heads that are not there": Situation(
        f"{GENERATE} --draft=heads", code=2
    ),
    "a text with a draft that is not there": Situation(f"{GENERATE} --draft=runs/nowhere", code=66),
    "a text with a grammar and a draft": Situation(f"{GENERATE} --regex=a --draft=lookup", code=2),
    "a text with the former flag of guesses": Situation(f"{GENERATE} --prompt_lookup=3", code=2),
    "a text of a wrong grammar": Situation(f"{GENERATE} --regex=[", code=2),
    "a text of a schema that is not closed": Situation(f"{GENERATE} --json_schema={{", code=2),
    "a text of no schema": Situation(f"{GENERATE} --json_schema=new.json", code=66),
    "a text of a schema that is no text": Situation(
        f"{GENERATE} --json_schema=new.json", """printf '{"title": "\\351"}' > new.json""", code=65
    ),
    "a text of two grammars": Situation(f"{GENERATE} --regex=a --choice=b", code=2),
    "a choice without text": Situation(f"{GENERATE} --choice=", code=2),
    "a text that becomes too complex": Situation(
        f"{GENERATE} --grammar=bomb.lark",
        f"{shlex.quote(sys.executable)} -c 'n = 2000; "
        'print("start: " + " | ".join(f"r{i}" for i in range(n))); '
        '[print(f"r{i}: \\"a\\" r{(i + 1) % n} | \\"b\\"") for i in range(n)]'
        "' > bomb.lark",
        code=2,
    ),
    "a text of a grammar without llguidance": Situation(
        f"{GENERATE} --regex=a", code=66, prepare=without_llguidance
    ),
    "a text of a grammar from a model of prefixes": Situation(
        "generate --workdir=runs/prefix --regex=a", PREFIX, code=2
    ),
    "a text of a grammar from an encoder-decoder": Situation(
        "generate --workdir=runs/t5 --regex=a", T5, code=2
    ),
    "a key in no folder": Situation("serve --add_key --keys=no/such/keys.txt", code=73),
}

# Situations that take long.
SLOW = {
    "a text of a grammar from a model of prefixes",
    "a text of a grammar from an encoder-decoder",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    # Its fix, pasted, serves until it is interrupted.
    "recipes/use/drafts.py:open_draft:1": "tests/serve/test_drafts.py::"
    "test_a_draft_run_with_another_tokenizer_is_refused",
    # Its fix, pasted, serves until it is interrupted.
    "serve/server.py:_listening:1": "tests/serve/test_serve.py::"
    "test_v9_v10_every_route_but_health_needs_a_key_and_the_file_is_private",
    # JAX has started with one device in the process of the situations.
    "generate/engine.py:check_supported:1": "tests/generate/test_engine.py::"
    "test_a_mesh_that_splits_batches_is_refused",
    # Its fix, pasted, serves until it is interrupted, too.
    "serve/watchdog.py:run:1": "tests/serve/test_watchdog.py::"
    "test_v27_a_pass_that_does_not_end_is_not_ready_before_the_process_ends",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
