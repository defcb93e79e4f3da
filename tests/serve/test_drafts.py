"""A server with a draft: the same texts, and its guesses are counted."""

import dataclasses
import gc
import json
from unittest.mock import Mock

import jax
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Characters
from jaxlm.generate.balance import DraftBalance, DrawCall
from jaxlm.monitor import host_machine
from jaxlm.recipes.plan.serving import forecast_serving
from jaxlm.recipes.use import drafts, load
from jaxlm.serve import server
from jaxlm.serve.server import ServeOptions
from tests.serve.conftest import Running

BIAS = {str(ord(each) + 40): 100 for each in "ab"}
ASKED = {"prompt": "ababababab", "max_tokens": 40, "temperature": 0.7, "seed": 3}


def served_text(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="run", logit_bias=BIAS, **ASKED)
    return answer.choices[0].text, running.get("/metrics")[1], running.get("/health")[1]


def check_metrics(metrics, counters):
    """Require of the text of Prometheus what the engine has counted."""
    values = {
        (
            sample.name.removeprefix("jaxlm:spec_decode_"),
            sample.labels.get("position"),
        ): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    positions = {
        ("num_accepted_tokens_per_pos_total", str(place)): count
        for place, count in enumerate(counters.accepted)
    }
    totals = {
        ("passes_total", None): counters.guessed_passes,
        ("num_drafts_total", None): counters.drafts,
        ("num_draft_tokens_total", None): counters.guessed_tokens,
        ("num_accepted_tokens_total", None): sum(counters.accepted),
    }
    if counters.drafts:
        mean = 1 + sum(counters.accepted) / counters.drafts
        totals["mean_acceptance_length", None] = mean
    assert values == totals | positions


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lookup", "run"])
def test_a_draft_changes_no_text_and_its_guesses_are_counted(trained, name):
    texts, facts = [], []
    for draft in (name if name == "lookup" else str(trained), None):
        with pytest.MonkeyPatch.context() as patch:
            # If a draft saves time depends on the machine.
            patch.setattr(DraftBalance, "next_call", lambda _, passes: DrawCall(True, passes))
            running = Running(trained, patch, draft=draft)
            try:
                text, metrics, health = served_text(running)
            finally:
                running.close()
            counters = running.engine.counters
            check_metrics(metrics, counters)
            if draft is None:
                assert "draft" not in "".join(running.lines)
            else:
                shares = [f"{each / counters.drafts:.2f}" for each in counters.accepted]
                line = running.lines[-2]
                assert line.startswith(f"draft {name}: ")
                assert f" {1 + counters.accepted_tokens / counters.drafts:.2f} tokens " in line
                assert line.endswith(f"by position {' '.join(shares)}")
            texts.append(text)
            facts.append((json.loads(health).get("draft"), counters))
    assert len(set(texts)) == 1
    (shown, counted), (none, uncounted) = facts
    assert counted.accepted_tokens > 0
    share = round(counted.accepted_tokens / counted.guessed_tokens, 4)
    assert shown.pop("is_on") in (True, False)
    assert shown == {"name": name, "accepted": share}
    assert (none, uncounted.guessed_tokens) == (None, 0)


def live_bytes():
    gc.collect()
    return sum(each.nbytes for each in jax.live_arrays())


@pytest.mark.slow
def test_a_draft_run_keeps_the_bytes_of_its_plan(trained):
    opened = load.load_run(trained)
    machine = host_machine.this_machine(1, [])
    plan = forecast_serving(opened.run, machine, slots=4, draft=opened.run)
    before = live_bytes()
    guesser = drafts.open_draft(opened, str(trained), 128, print)
    assert guesser is not None
    assert live_bytes() - before == pytest.approx(plan.draft_bytes, rel=0.02)


def test_a_draft_run_with_another_tokenizer_is_refused(trained, monkeypatch):
    opened, made = load.load_run(trained), []
    monkeypatch.setattr(server, "Engine", lambda *args, draft, **more: made.append(draft) or Mock())
    server.build_engine(opened, ServeOptions(draft=str(trained)))
    assert made[0].name == "run"
    other = dataclasses.replace(opened, tokenizer=Characters("abc"))
    with pytest.raises(ConfigError, match="cannot guess tokens") as refused:
        server.build_engine(other, ServeOptions(draft=str(trained)))
    assert refused.value.fix.split("    ")[0] == "--draft=lookup"
    server.build_engine(other, ServeOptions(draft="lookup"))
    assert [each.name for each in made] == ["run", "lookup"]
