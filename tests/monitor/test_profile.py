import jax.numpy as jnp

from jaxlm.monitor.config import ProfileConfig
from jaxlm.monitor.profile import Trace


def run(trace, steps):
    for step in range(steps):
        trace.before(step)
        jnp.ones(8).sum().block_until_ready()
    trace.close()


def test_the_window_leaves_a_trace_and_says_so_once(tmp_path):
    said = []
    run(Trace(ProfileConfig(start=2, steps=2), tmp_path, lambda: said.append(1)), 6)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert said == [1]


def test_a_run_that_ends_inside_the_window_still_leaves_one(tmp_path):
    run(Trace(ProfileConfig(start=2, steps=50), tmp_path), 4)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_no_steps_trace_nothing(tmp_path):
    run(Trace(ProfileConfig(steps=0), tmp_path), 20)
    assert list(tmp_path.iterdir()) == []
