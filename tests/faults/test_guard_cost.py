"""Line H7: what the guard costs in every step."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.token_nll import token_nll
from jaxlm.optim import build as optimizers
from jaxlm.optim import schedules
from jaxlm.optim.config import AdamW, Constant
from jaxlm.train import guard as guards
from jaxlm.train import state as states
from jaxlm.train import step as steps
from jaxlm.train.config import GuardConfig

CONFIG = GuardConfig()
FAMILY = Llama(vocab=4096, width=256, depth=4, heads=4, kv_heads=2, hidden=688, tied=True)


def compiled(batch):
    blueprint = Blueprint(FAMILY.build(), Precision.float32())
    schedule = schedules.build(Constant(), lr=1e-3, total=1000, tokens_per_step=1)
    optimizer = optimizers.build(AdamW(lr=1e-3), schedule, blueprint.axes)

    def loss(params, batch, key):
        return token_nll(blueprint.merge(params), batch, key, LossConfig())

    step = steps.build(
        loss,
        optimizer,
        schedule,
        key=jax.random.key(1),
        precision=Precision.float32(),
        guard=CONFIG,
        axes=blueprint.axes,
        is_measured=lambda completed: completed % 10 == 0,
    )
    state = jax.jit(lambda: states.fresh(blueprint.init(jax.random.key(0)), optimizer, CONFIG))()
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile(), state


@pytest.mark.slow
@pytest.mark.alone
def test_h7_the_guard_costs_at_most_three_percent_of_a_step(monkeypatch, capsys):
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 4096, (8, 257)).astype(np.int32)
    ones = np.ones((8, 256), np.int32)
    batch = jax.tree.map(
        jnp.asarray,
        Tokens(
            ids[:, :-1],
            ids[:, 1:],
            ones.astype(np.float32),
            ones,
            np.tile(np.arange(256, dtype=np.int32), (8, 1)),
        ),
    )
    runs = {"guarded": compiled(batch)}
    with monkeypatch.context() as without:
        always = jnp.bool_(True)
        without.setattr(guards, "judge", lambda guard, *_: (always, jnp.int32(0), guard))
        without.setattr(guards, "select", lambda _, new, old: new)
        without.setattr(steps, "_layer_norms", lambda *_: {})
        runs["bare"] = compiled(batch)

    def seconds(name: str, count: int = 4) -> float:
        step, state = runs[name]
        begun = time.perf_counter()
        for _ in range(count):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        runs[name] = (step, state)
        return (time.perf_counter() - begun) / count

    for name in runs:
        seconds(name, 2)
    ratios = []
    for round_ in range(15):
        order = ("guarded", "bare") if round_ % 2 else ("bare", "guarded")
        took = {name: seconds(name) for name in order}
        ratios.append(took["guarded"] / took["bare"])
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(
            f"\nH7: a guarded step takes {ratio:.4f} of a bare one ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    assert ratio <= 1.03
