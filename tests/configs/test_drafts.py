"""`configs/distill/draft.py`: a draft of an eighth of the size of a run."""

import json
from pathlib import Path

import pytest

from jaxlm.core import config
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import Bytes
from jaxlm.models.cost import model_cost
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.qwen import Qwen3
from jaxlm.recipes.config import Run

FILE = str(Path(__file__).parents[2] / "configs/distill/draft.py")
TARGETS = {
    "a grouped one": Qwen3(vocab=1024, width=256, depth=4, heads=4, kv_heads=2),
    "one with a named MLP": Llama(vocab=512, width=512, depth=8, heads=8, kv_heads=8, hidden=1408),
    "GPT-2": GPT2(vocab=512, width=768, depth=12, heads=12),
    "one of few layers": Llama(vocab=512, width=512, depth=1, heads=8, kv_heads=4),
}


@pytest.fixture(params=TARGETS)
def target(request, tmp_path):
    """The directory of a run, without its checkpoints."""
    raw = {"model": config.to_json(TARGETS[request.param]), "optim": {"name": "lion", "lr": 0.01}}
    run = config.from_json(Run, raw, where="test")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config.to_json(run)))
    (tmp_path / "tokenizer").write_bytes(Bytes().serialize())
    return tmp_path, run


def test_a_draft_has_an_eighth_of_the_parameters_and_learns_from_the_run(target):
    workdir, run = target
    draft = config.load(Run, f"{FILE}:{workdir}").value
    sizes = [model_cost.parameters(each.model.build()) for each in (run, draft)]
    assert 1 / 16 < sizes[1] / sizes[0] <= 1 / 8
    assert draft.model.family == run.model.family
    assert draft.model.vocab == run.model.vocab
    assert draft.model.width // draft.model.heads == run.model.width // run.model.heads
    assert (draft.objective.name, draft.objective.teacher) == ("distill", str(workdir))
    assert draft.objective.weight == 1.0
    assert draft.data.tokenizer == str(workdir / "tokenizer")
    assert (draft.optim, draft.schedule) == (run.optim, run.schedule)


def test_a_draft_asks_for_its_run():
    with pytest.raises(ConfigError, match="not named") as caught:
        config.load(Run, FILE)
    assert caught.value.fix == "--config=distill/draft:runs/a"
