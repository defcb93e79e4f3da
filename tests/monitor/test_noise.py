import json

import pytest

from jaxlm.monitor import noise, report


def records(scale, batch=1000, steps=3):
    return [
        {"step": n, "split": "train", "loss_nats": 1.0, "tokens": n * batch, "time_unix": 0.0}
        | {"noise_scale_tokens": scale}
        for n in range(1, steps + 1)
    ]


def test_a_batch_as_large_as_the_noise_takes_twice_the_fewest_steps_and_tokens():
    """At B = N both are 2; at 2 B steps are 1.5 and tokens 3, at B / 2 the other way round."""
    told = noise.advice(records(1000.0))
    assert told.startswith("1k tokens, and the noise scale of the gradient is 1k: ")
    assert "twice the batch would take 25% fewer steps and 50% more tokens" in told
    assert "half of it 50% more steps and 25% fewer tokens" in told


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (1e6, "twice the batch would take 50% fewer steps and 0% more tokens"),
        (1.0, "half of it 0% more steps and 50% fewer tokens"),
    ],
)
def test_far_from_the_noise_one_of_the_two_costs_nothing(scale, said):
    assert said in noise.advice(records(scale))


def test_nothing_is_advised_without_an_estimate_or_a_batch():
    assert noise.advice([]) is None
    assert noise.advice(records(1000.0, steps=1)) is None
    assert noise.advice(records(-3.0)) is None
    assert noise.advice([{**r, "noise_scale_tokens": None} for r in records(1.0)]) is None


def test_the_batch_is_that_of_the_last_steps():
    grown = [*records(1000.0, batch=10), {**records(1000.0)[0], "step": 5, "tokens": 2030}]
    assert "25% fewer steps" in noise.advice(grown)


def test_the_report_says_it(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in records(1000.0))
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert noise.advice(records(1000.0)) in report.render(tmp_path)
