import jax.numpy as jnp
import pytest

from jaxlm.monitor.config import ProfileConfig
from jaxlm.monitor.profile import Trace


def run(trace, steps):
    for step in range(steps):
        trace.before(step)
        jnp.ones(8).sum().block_until_ready()
    trace.close()


def test_the_window_leaves_a_trace_and_says_so_once(tmp_path):
    said = []
    run(Trace(ProfileConfig(steps="2:4"), tmp_path, lambda: said.append(1)), 6)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert said == [1]


def test_a_run_that_ends_inside_the_window_still_leaves_one(tmp_path):
    run(Trace(ProfileConfig(steps="2:52"), tmp_path), 4)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_no_steps_trace_nothing(tmp_path):
    run(Trace(ProfileConfig(), tmp_path), 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["3", "5:5", "6:5", ":5", "5:", "a:b", "-1:3", "1:2:3", ""])
def test_a_window_without_a_step_is_refused_and_explained(text):
    ((name, problem, fix),) = ProfileConfig(steps=text).problems()
    assert name == "steps"
    assert repr(text) in problem
    assert fix == "jaxlm config explain profile.steps"
