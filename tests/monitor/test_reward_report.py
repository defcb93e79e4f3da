"""The report on rewards: curves with intervals, and samples of both ends of a large file."""

import json

from jaxlm.monitor import report, reward_report
from jaxlm.monitor.metric_warnings import (
    HeldOutRewardWarning,
    RedrawnSampleWarning,
)

SAMPLES = [
    {"document": 1, "prompt": "1+1=", "digest": "a", "reward": None},
    {"document": 2, "prompt": "2+1=", "digest": "b", "reward": 0.0},
]
CONTROLS = "\x1b\u202e"  # of a link of a terminal, and of another direction of text


def sample(step, document, reward, text):
    fields = {"step": step, "document": document, "prompt": f"{document}+1=", "text": text}
    return fields | {"reward": reward}


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def test_the_report_shows_the_best_the_worst_and_what_changed(tmp_path):
    """Both ends of a large file are read; texts of a model are no HTML."""
    filler = [sample(2, 99, 0, "x" * 2000) for _ in range(3000)]
    first = [sample(1, 1, 0, "wrong"), sample(1, 1, -1, "worse"), sample(1, 2, 1, "2")]
    last = [sample(3, 1, 1, "<script>alert(1)</script>" + CONTROLS)]
    last += [sample(3, 1, None, "lost")]
    last += [sample(3, 3, place / 10, f"p{place}") for place in range(9)]
    write(tmp_path / "rollouts.jsonl", [*first, *filler, *last])
    groups = dict(reward_report.samples(tmp_path))
    best, worst, changed = (groups[f"{name}, step 3"] for name in ("best", "worst", "changed"))
    assert [each["reward"] for each in best] == ["1", "0.8", "0.7"]
    assert [each["reward"] for each in worst] == ["0.2", "0.1", "0"]
    assert "step 1, reward 0: wrong" in changed[0]["text"]
    assert len(changed) == 1
    records = [
        {"step": step, "split": split, "reward": 0.1 * step, "reward_stderr": 0.01}
        | {"loss_nats": 0.0, "reward/number": 0.1, "reward/ended": 0.0}
        for step in (1, 2, 3)
        for split in ("train", "val")
    ]
    write(tmp_path / "metrics.jsonl", records)
    page = report.render(tmp_path)
    assert '<h2 id="rewards">' in page
    assert "Rewards by name" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert not set(CONTROLS) & set(page)


def test_a_run_without_rewards_has_no_such_part(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 1, "split": "train", "loss_nats": 1.0}])
    assert '<h2 id="rewards">' not in report.render(tmp_path)


def test_a_reward_that_rises_while_the_held_out_one_falls_is_named_once():
    lines: list[str] = []
    alarm = HeldOutRewardWarning(lambda text, **_: lines.append(text), [])

    def see(step, trained, held_out):
        alarm.check({"step": step, "split": "train", "reward": trained})
        alarm.check({"step": step, "split": "val", "reward": held_out, "reward_stderr": 0.02})

    see(1, 0.2, 0.5)
    see(2, 0.3, 0.46)  # within the error
    see(3, 0.1, 0.3)  # both fall
    assert lines == []
    see(4, 0.4, 0.3)
    see(5, 0.5, 0.2)
    assert len(lines) == 1
    assert "fell from 0.5 to 0.3 while that in training rose from 0.2 to 0.4" in lines[0]


def test_samples_of_a_resumed_run_that_differ_are_named_once():
    def warnings_of(*rollouts):
        """Return the warnings of rollouts of steps 3, 5, ..., which were all SAMPLES before."""
        lines: list[str] = []
        steps = range(3, 3 + 2 * len(rollouts), 2)
        before = [json.dumps({"step": step} | each) for step in steps for each in SAMPLES]
        alarm = RedrawnSampleWarning(
            lambda text, **_: lines.append(text), [*map(str.encode, before), b'{"step": 9, "re']
        )
        for step, rollout in zip(steps, rollouts, strict=True):
            alarm.check(step, rollout)
        return lines

    other = [SAMPLES[0], SAMPLES[1] | {"digest": "c"}]
    raised = [SAMPLES[0], SAMPLES[1] | {"reward": 0.5}]
    assert warnings_of(SAMPLES, SAMPLES) == []
    assert warnings_of(SAMPLES, other) == []  # after a step with another learning rate
    (line,) = warnings_of(other, other)
    assert line.startswith("step 3: the prompt '2+1=' has other samples than before")
    (line,) = warnings_of(SAMPLES, raised, raised)
    assert line.startswith("step 5: the reward of the prompt '2+1=' was 0.0 before")
    assert line.endswith("and is 0.5: draw from the argument `seed` alone")
