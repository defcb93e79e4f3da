"""Errors of models that take a training to meet in `tests/house/test_fix_lines.py`, where the
lines are pasted, in the slow tier."""

from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.models.build import Blueprint
from jaxlm.models.families.gemma import Gemma2
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.config import Reward
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import reward_head
from jaxlm.recipes.use import prune
from jaxlm.tune import surgery
from jaxlm.tune.config import Lora

SIZES = dict(width=32, depth=2, heads=4, kv_heads=2, hidden=64)


def test_the_head_of_a_tied_model_is_trained_by_its_table():
    family = Llama(vocab=64, tied=True, **SIZES)
    model = Blueprint(family.build(), Precision.of(PrecisionConfig()))
    with pytest.raises(ConfigError, match="'unembedding/\\*' matches no parameter") as refused:
        surgery.base_paths(Lora(also=("unembedding/*",)), model)
    assert refused.value.fix == "--config.tune.also=embedding/table"
    frozen = surgery.base_paths(Lora(also=("embedding/table",)), model)
    assert "embedding/table" not in frozen
    assert frozen


@pytest.mark.parametrize(("keep", "is_refused"), [((1,), True), ((0,), False), ((0, 1), False)])
def test_layers_of_kinds_that_do_not_repeat_are_refused(keep, is_refused):
    run = Run(model=Gemma2(window=8, **SIZES))
    options = prune.PruneOptions(
        workdir=Path("run"), out=Path("out"), keep=",".join(map(str, keep))
    )
    if not is_refused:
        student = prune._student(run, run.decoder(64), keep, options)
        assert student.decoder(64).layers == run.decoder(64).layers[: len(keep)]
        return
    with pytest.raises(ConfigError, match="no model of these layers") as refused:
        prune._student(run, run.decoder(64), keep, options)
    assert refused.value.fix == "--keep=0,1"


@pytest.mark.parametrize(
    ("family", "fix"),
    [(Llama, "--to=hf "), (Gemma2, "jaxlm eval --workdir=run ")],
    ids=["llama", "gemma2"],
)
def test_a_reward_model_is_no_gguf(family, fix):
    run = Run(model=family(), objective=Reward())
    with pytest.raises(ConfigError, match="a reward model cannot be exported") as refused:
        reward_head.check(run, Path("run"), "gguf")
    assert refused.value.fix.startswith(fix)
