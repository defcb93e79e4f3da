"""A server with a draft: the same texts, and its guesses are counted."""

import json

import openai
import pytest

from tests.serve.conftest import Running

BIAS = {str(ord(each) + 40): 100 for each in "ab"}
ASKED = {"prompt": "ababababab", "max_tokens": 40, "temperature": 0.7, "seed": 3}


def served_text(running):
    with openai.OpenAI(base_url=running.base, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="run", logit_bias=BIAS, **ASKED)
    return answer.choices[0].text, running.get("/metrics")[1], running.get("/health")[1]


def test_a_draft_changes_no_text_and_its_guesses_are_counted(trained):
    texts, facts = [], []
    for draft in ("lookup", None):
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
    assert texts[0] == texts[1]
    (shown, counted), (none, uncounted) = facts
    assert counted.accepted_tokens > 0
    share = round(counted.accepted_tokens / counted.guessed_tokens, 4)
    assert shown == {"name": "lookup", "is_on": True, "accepted": share}
    assert (none, uncounted.guessed_tokens) == (None, 0)
