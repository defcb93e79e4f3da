"""A server with a draft: the same texts, and its guesses are counted."""

import dataclasses
import gc
import json

import jax
import openai
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Characters
from jaxlm.monitor import host_machine
from jaxlm.recipes.plan.serving import forecast_serving
from jaxlm.recipes.use import load
from jaxlm.serve import server
from jaxlm.serve.server import ServeOptions
from tests.serve.conftest import Running

BIAS = {str(ord(each) + 40): 100 for each in "ab"}
ASKED = {"prompt": "ababababab", "max_tokens": 40, "temperature": 0.7, "seed": 3}


def served_text(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="run", logit_bias=BIAS, **ASKED)
    return answer.choices[0].text, running.get("/metrics")[1], running.get("/health")[1]


def test_a_draft_changes_no_text_and_its_guesses_are_counted(trained):
    texts, facts = [], []
    for draft in ("lookup", str(trained), None):
        with pytest.MonkeyPatch.context() as patch:
            running = Running(trained, patch, draft=draft)
            try:
                text, metrics, health = served_text(running)
            finally:
                running.close()
            counters = running.engine.counters
            name = "jaxlm:spec_decode_num_accepted_tokens_total"
            assert f"{name} {counters.accepted_tokens:.1f}" in metrics
            texts.append(text)
            facts.append((json.loads(health).get("draft"), counters))
    assert len(set(texts)) == 1
    for name, (shown, counted) in zip(("lookup", "run"), facts[:2], strict=True):
        assert counted.accepted_tokens > 0
        share = round(counted.accepted_tokens / counted.guessed_tokens, 4)
        assert shown == {"name": name, "is_on": True, "accepted": share}
    none, uncounted = facts[2]
    assert (none, uncounted.guessed_tokens) == (None, 0)


def live_bytes():
    gc.collect()
    return sum(each.nbytes for each in jax.live_arrays())


def test_a_draft_run_keeps_the_bytes_of_its_plan(trained):
    opened = load.load_run(trained)
    machine = host_machine.this_machine(1, [])
    plan = forecast_serving(opened.run, machine, slots=4, draft=opened.run)
    before = live_bytes()
    guesser = server.open_draft(opened, ServeOptions(draft=str(trained)), 128, print)
    assert guesser is not None
    assert live_bytes() - before == pytest.approx(plan.draft_bytes, rel=0.02)


def test_a_draft_run_with_another_tokenizer_is_refused(trained, monkeypatch):
    opened, made = load.load_run(trained), []
    monkeypatch.setattr(server, "Engine", lambda *args, draft, **more: made.append(draft))
    server.build_engine(opened, ServeOptions(draft=str(trained)))
    assert made[0].name == "run"
    other = dataclasses.replace(opened, tokenizer=Characters("abc"))
    with pytest.raises(ConfigError, match="cannot guess tokens") as refused:
        server.build_engine(other, ServeOptions(draft=str(trained)))
    assert refused.value.fix.split("    ")[0] == "--draft=lookup"
    server.build_engine(other, ServeOptions(draft="lookup"))
    assert [each.name for each in made] == ["run", "lookup"]
