"""Lines H7 and C9: the cost per step of guarding and watching a run, and of repeated steps."""

import collections
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.data import shards
from jaxlm.monitor.watchdog import Watchdog
from jaxlm.recipes.train.checkpointing import CheckpointSaver
from jaxlm.recipes.train.programs import CompiledStep
from jaxlm.training import guard as guards
from jaxlm.training import step as steps
from jaxlm.training.signals import StopRequest
from tests.faults import harness

BLOCK, WARM = 4, 6  # steps in a row with or without; and before anything is measured
SETTINGS = {
    "data.sequence": 256,
    "data.prefetch": 1,
    "model.vocab": 4096,
    "model.width": 256,
    "model.depth": 4,
    "model.hidden": 688,
    "model.dropout": 0.0,
    "train.steps": WARM + 24 * BLOCK + 1,
    "log.every": 10,
    "checkpoint.every": "100%",
    "watch.step": "10m",  # the last one is twenty
}


class Unread(np.ndarray):
    """Ids of a shard that are not read before they are used."""

    def max(self, *_):
        return 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("one_device")
def test_h7_c9_what_guards_a_run_costs_at_most_three_percent_of_a_step(
    tmp_path, monkeypatch, record_property
):
    """Compare steps of one run with and without the guard, by turns.

    The guard consists of the finite and spike tests, their selection and the norms by layer; the
    watch and its phases; the polls for a signal and for an error of a save; the range check of ids.

    Then ten steps are computed twice, which at one in a hundred may cost two percent.

    Times are the processor's, of all threads. The best of each are compared, and the median of the
    pairs: other programs use the machine too.
    """
    taken = collections.defaultdict(list)
    state_of = {"number": 0, "on": True, "since": 0.0, "bare": None}

    def is_on():
        return state_of["on"]

    def optional(owner, name, instead):
        whole = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kw: whole(*args, **kw) if is_on() else instead(*args)
        )

    optional(Watchdog, "enter", lambda *_: None)
    optional(Watchdog, "overdue_message", lambda *_: "")
    optional(CheckpointSaver, "check", lambda *_: None)
    optional(StopRequest, "enter", lambda *_: None)
    read = np.frombuffer
    monkeypatch.setattr(
        shards.np,
        "frombuffer",
        lambda *args: read(*args) if is_on() else read(*args).view(Unread),
    )
    step = CompiledStep.__call__

    def bare(self, state, batch):
        """The step without its guard, compiled in addition to the other."""
        always = jnp.bool_(True)
        with monkeypatch.context() as without:
            without.setattr(guards, "judge", lambda guard, *_, **__: (always, jnp.int32(0), guard))
            without.setattr(guards, "select", lambda _, new, old: new)
            without.setattr(steps, "_layer_norms", lambda *_: {})
            jax.clear_caches()
            return self._programs.step.lower(state, batch, self._scale_input).compile()

    def timed(self, state, batch):
        number = state_of["number"] = state_of["number"] + 1
        if number == 1:
            moved = step(self, state, batch)
            state_of["bare"] = bare(self, *jax.tree.map(jnp.copy, (moved[0], batch)))
            return moved
        block, inside = divmod(number - WARM, BLOCK)
        if inside == 0:
            jax.block_until_ready(state)
            now = time.process_time()
            if block > 0:
                taken[is_on()].append((now - state_of["since"]) / BLOCK)
            # In the order on, off, off, on: a machine that slows down is slower for both.
            state_of["on"], state_of["since"] = block % 4 in (0, 3), time.process_time()
        if is_on():
            return step(self, state, batch)
        moved, metrics = state_of["bare"](state, batch, self._scale_input)
        return moved, metrics | {"layers": {}}

    def twice(self, state, batch):
        """The last step, once it is known what one costs: what it costs to compute it twice."""
        if state_of["number"] == SETTINGS["train.steps"] - 1:
            compiled = self._steps[batch.tokens.shape]
            for _ in range(10):
                jax.block_until_ready(state)
                begun = time.process_time()
                state, metrics = self._repeated(compiled, state, (batch, self._scale_input))
                jax.block_until_ready(state)
                taken["twice"].append(time.process_time() - begun)
            return state, metrics
        return timed(self, state, batch)

    monkeypatch.setattr(CompiledStep, "__call__", twice)
    config = harness.write_config(tmp_path, SETTINGS)
    assert main(harness.words(config, tmp_path / "run")) == 0
    on, off = taken[True], taken[False]
    assert len(on) == len(off) == 12
    pairs = [a / b for a, b in zip(on, off, strict=True)]
    ratio, plain = min(on) / min(off), min(off)
    repeated = (min(taken["twice"]) - plain) / 100 / plain
    middle = statistics.median(pairs)
    record_property(
        "H7",
        f"a guarded step takes {ratio:.4f} of a bare one of {plain:.3f} s "
        f"(pairs {min(pairs):.3f} to {max(pairs):.3f}, median {middle:.3f})",
    )
    record_property("C9", f"one step repeated in a hundred adds {repeated:.4f}")
    assert ratio <= 1.03
    assert middle <= 1.03
    assert len(taken["twice"]) == 10
    assert 0 < repeated <= 0.02
