import dataclasses

import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.core.span import Span
from jaxlm.optim.average_config import Ema, NoAverage, Swa
from jaxlm.optim.schedule_config import Constant
from jaxlm.recipes.config import Run
from jaxlm.recipes.train import resume
from jaxlm.recipes.train.api import ResumeOptions
from jaxlm.recipes.train.checkpointing import Rewind
from jaxlm.recipes.train.resume import StartRecord
from jaxlm.training.rundir import STARTS_FILE, RunDir


def start(step, name, rewinds=0, reset=False):
    return StartRecord(
        step=step,
        rewinds=rewinds,
        reset_optimizer=reset,
        cast=False,
        config={"name": name},
        data={},
        versions={},
    )


def shown(rows):
    return [(each.step, each.config["name"], each.reset_optimizer) for each in rows]


def test_a_later_start_does_the_steps_behind_it_again():
    begun = [start(0, "a"), start(8, "b"), start(4, "c"), start(6, "c", reset=True)]
    assert shown(resume.lineage(begun, [])) == [
        (0, "a", False),
        (4, "c", False),
        (6, "c", True),
    ]
    assert shown(resume.lineage([*begun, start(0, "d")], [])) == [(0, "d", False)]


def test_a_rewind_goes_on_under_the_config_of_its_process():
    made = [Rewind(21, 14, 16, 24), Rewind(31, 5, 6, 8)]
    begun = [start(0, "a"), start(10, "b", reset=True), start(20, "c", rewinds=1)]
    assert shown(resume.lineage(begun, made)) == [(0, "a", False), (5, "c", False)]
    # The optimizer's state was reset at 10; the save at 14 is from after that.
    assert shown(resume.lineage(begun, made[:1])) == [
        (0, "a", False),
        (10, "b", True),
        (14, "b", False),
        (20, "c", False),
    ]
    assert shown(resume.lineage(begun, [])) == [(0, "a", False), (10, "b", True)]
    back = [Rewind(21, 8, 16, 24)]
    assert shown(resume.lineage(begun[:2], back)) == [(0, "a", False), (8, "b", True)]


def test_what_was_noted_is_read_back_and_a_torn_line_is_none(tmp_path):
    begun = [start(0, "a"), start(3, "b", reset=True)]
    for each in begun:
        with open(tmp_path / STARTS_FILE, "ab") as file:
            file.write(b'{"step": 7, "rew')
        resume.append_start(RunDir(tmp_path), each)
    assert resume.read_starts(tmp_path) == begun
    assert begun[1].options.reset_optimizer
    assert resume.read_starts(tmp_path / "elsewhere") == []


def test_a_line_that_is_no_start_is_damage(tmp_path):
    resume.append_start(RunDir(tmp_path), start(0, "a"))
    with open(tmp_path / STARTS_FILE, "a") as file:
        file.write('{"step": 1}\n')
    with pytest.raises(DataError, match=r"starts\.jsonl is damaged"):
        resume.read_starts(tmp_path)


def test_more_passes_over_the_data_need_more_steps():
    """A run that resumes has the steps that it began with, so that it would be complete."""
    saved = Run().changed({"train.epochs": 1.5, "train.steps": 40})
    flags = "--config.train.steps=54 --allow_change=train.epochs,train.steps"
    for epochs, fix in ((2.0, flags), (1.0, "--allow_change=train.epochs")):
        with pytest.raises(ConfigError) as caught:
            resume.check(saved, saved.changed({"train.epochs": epochs}), ResumeOptions(), 40)
        assert caught.value.fix.splitlines()[1] == fix


@pytest.mark.parametrize(
    ("average", "is_free"),
    [
        (NoAverage(), True),
        (Ema(), True),  # from the first update on: 0% of any number
        (Ema(begin=Span.parse("50%")), False),
        (Swa(begin=Span.parse(75)), False),  # a cycle is 1% of the steps
        (Swa(begin=Span.parse(75), every=Span.parse(1)), True),
    ],
)
def test_more_steps_are_allowed_if_they_move_neither_the_schedule_nor_the_average(average, is_free):
    """An average that began at update 50 would begin again at 100, with the parameters there."""
    schedule = Constant(warmup=Span.parse(10))
    saved = dataclasses.replace(Run(), schedule=schedule, average=average)
    saved = saved.changed({"train.steps": 100})
    more = saved.changed({"train.steps": 200})
    if is_free:
        (change,) = resume.check(saved, more, ResumeOptions(), 100)
        assert change.path == "train.steps"
        return
    with pytest.raises(ConfigError, match="1 setting differs") as caught:
        resume.check(saved, more, ResumeOptions(), 100)
    assert "--allow_change=train.steps" in caught.value.fix
