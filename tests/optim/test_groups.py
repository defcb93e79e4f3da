import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.optim import build, groups
from jaxlm.optim.config import AdamW, Optimizer, Sgd
from tests.optim.arms import extra_args

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "stack": {
        "norm": {"scale": ("layers", "embed")},
        "query": {
            "weight": ("layers", "embed", "heads", "head_dim"),
            "bias": ("layers", "heads", "head_dim"),
        },
    },
}


def test_matrices_and_tables_decay_but_biases_and_stacked_vectors_do_not():
    plan = groups.assign(AdamW(), AXES)
    assert {path for path, group in plan.items() if group.decays} == {
        "embedding/table",
        "stack/query/weight",
    }
    assert len(plan) == 4


def test_a_pattern_takes_the_decay_away_and_another_scales_the_rate():
    plan = groups.assign(AdamW(no_decay=("embedding/*",), lr_scale=("*/query/*=0.25",)), AXES)
    assert plan["embedding/table"] == groups.ParamGroup(False, 1.0)
    assert plan["stack/query/weight"] == groups.ParamGroup(True, 0.25)


def test_a_pattern_without_a_match_is_refused_with_the_leaves_named():
    with pytest.raises(ConfigError, match="stack/query/weight"):
        groups.assign(AdamW(no_decay=("embeding/*",)), AXES)


def test_a_leaf_in_two_groups_is_refused():
    with pytest.raises(ConfigError, match="two groups of lr_scale"):
        groups.assign(AdamW(lr_scale=("stack/*=0.5", "*/weight=0.1")), AXES)


LAYERED = {
    "embedding": {"table": ("vocab", "embed")},
    "heads": {"0": {"block": {"0": {"up": {"weight": ("layers", "embed", "mlp")}}}}},
    "prefix": {"0": {"up": {"weight": ("prefix", "embed", "mlp")}}},
    "stack": {
        "0": {"up": {"weight": ("layers", "embed", "mlp")}},
        "1": {"norm": {"scale": ("layers", "embed")}, "up": {"weight": ("layers", "embed", "mlp")}},
    },
    "unembedding": {"weight": ("embed", "vocab")},
}
SIZES = {"vocab": 6, "embed": 4, "prefix": 1, "layers": 2, "mlp": 3}


def drawn(seed=0):
    """Parameters of four or five layers, all numbers negative zeros but for a few."""
    draw = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda axes: draw.normal(size=tuple(SIZES[axis] for axis in axes)).astype(np.float32),
        LAYERED,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    values["embedding"]["table"][0] = -0.0
    return values


def moved(config, grads, **options):
    """The update of the parameters at a learning rate of 1."""
    optimizer = build.build(config, lambda _: jnp.float32(1.0), LAYERED, **options)
    return tree.leaves(optimizer.update(grads, optimizer.init(drawn()), drawn())[0])


@pytest.mark.slow
def test_layers_learn_the_slower_the_earlier_they_are():
    shapes = jax.eval_shape(drawn)
    grads = drawn(1)
    config = Sgd(layer_decay=0.5, clip_norm=None, lr_scale=("stack/1/norm/*=3",))
    updates = moved(config, grads, shapes=shapes)
    # Layer 1 of 5 is the prefix; those of the stack are of two kinds by turns.
    rates = {
        "embedding/table": [0.5**6],
        "heads/0/block/0/up/weight": [1, 1],
        "prefix/0/up/weight": [0.5**5],
        "stack/0/up/weight": [0.5**4, 0.5**2],
        "stack/1/up/weight": [0.5**3, 0.5**1],
        "stack/1/norm/scale": [3 * 0.5**3, 3 * 0.5**1],
        "unembedding/weight": [1],
    }
    for path, grad in tree.leaves(grads).items():
        scale = np.reshape(rates[path], (-1, *(1,) * (grad.ndim - 1)))
        np.testing.assert_allclose(updates[path], -scale * grad, rtol=1e-6, err_msg=path)


def test_a_group_is_clipped_together_before_all_are():
    grads = drawn(1)
    together = ("stack/0/up/weight", "stack/1/up/weight")
    config = Sgd(clip_groups=("stack/*/up/weight=0.5", "embedding/*=1e9"), clip_norm=1.0)
    norm = np.sqrt(sum((tree.leaves(grads)[path] ** 2).sum() for path in together))
    expected = {
        path: grad * (0.5 / norm if path in together else 1)
        for path, grad in tree.leaves(grads).items()
    }
    whole = np.sqrt(sum((grad**2).sum() for grad in expected.values()))
    assert norm > 0.5 < whole
    for path, update in moved(config, grads).items():
        np.testing.assert_allclose(update, -expected[path] / whole, rtol=1e-5, err_msg=path)


def test_decay_is_scaled_by_path_and_matrices_of_layers_learn_by_their_width():
    grads = jax.tree.map(np.zeros_like, drawn())
    config = Sgd(weight_decay=0.1, decay_scale=("embedding/*=0.5",))
    updates, start = moved(config, grads), tree.leaves(drawn())
    np.testing.assert_allclose(updates["embedding/table"], -0.05 * start["embedding/table"])
    wide = moved(config, grads, width_ratio=4.0)
    for path, update in updates.items():  # what decay takes stays
        np.testing.assert_allclose(wide[path], update, rtol=1e-6)
    ones = jax.tree.map(np.ones_like, drawn())
    bare = moved(Sgd(clip_norm=None), ones, width_ratio=4.0)
    assert {path: -float(update.min()) for path, update in bare.items()} == {
        path: 0.25 if path.endswith("up/weight") else 1.0 for path in bare
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("arm", typing.get_args(Optimizer), ids=lambda arm: arm().name)
def test_what_is_frozen_has_no_state_and_keeps_every_bit(arm):
    config = arm(freeze=("embedding/*", "stack/0/*"))
    held = groups.frozen(config, LAYERED)
    optimizer = build.build(config, lambda _: jnp.float32(1.0), LAYERED)
    params, grads = drawn(), tree.drop_leaves(drawn(1), held)
    state = optimizer.init(params)
    assert not [path for path in tree.leaves(state) if any(each in path for each in held)]
    build.state_axes(config, optimizer, jax.eval_shape(drawn), LAYERED)  # each leaf has its place
    updates, _ = optimizer.update(grads, state, params, **extra_args(config, grads, 1))
    after = tree.leaves(optax.apply_updates(params, updates))
    for path, before in tree.leaves(params).items():
        is_same = np.asarray(after[path]).tobytes() == before.tobytes()
        assert is_same == (path in held), path


def test_freezing_all_or_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        groups.frozen(AdamW(freeze=("*",)), LAYERED)
    with pytest.raises(ConfigError, match="matches no parameter"):
        groups.frozen(AdamW(freeze=("embeding/*",)), LAYERED)
    with pytest.raises(ConfigError, match="two groups of clip_groups"):
        groups.clip_groups(AdamW(clip_groups=("stack/*=1", "*/up/weight=2")), LAYERED)


@pytest.mark.parametrize("entry", ["embedding/*", "=0.5", "a=-1", "a=nan", "a=fast"])
def test_a_malformed_scale_is_a_problem(entry):
    assert [field for field, _, _ in AdamW(lr_scale=(entry,)).problems()] == ["lr_scale"]
