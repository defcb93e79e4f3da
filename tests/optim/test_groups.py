import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.optim import groups
from jaxlm.optim.config import AdamW

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
    assert plan["embedding/table"] == groups.Group(False, 1.0)
    assert plan["stack/query/weight"] == groups.Group(True, 0.25)


def test_a_pattern_without_a_match_is_refused_with_the_leaves_named():
    with pytest.raises(ConfigError, match="stack/query/weight"):
        groups.assign(AdamW(no_decay=("embeding/*",)), AXES)


def test_a_leaf_in_two_groups_is_refused():
    with pytest.raises(ConfigError, match="two learning-rate groups"):
        groups.assign(AdamW(lr_scale=("stack/*=0.5", "*/weight=0.1")), AXES)


@pytest.mark.parametrize("entry", ["embedding/*", "=0.5", "a=-1", "a=nan", "a=fast"])
def test_a_malformed_scale_is_a_problem(entry):
    assert [field for field, _, _ in AdamW(lr_scale=(entry,)).problems()] == ["lr_scale"]
