"""transformers opens a folder of `jaxlm export`: model, tokenizer and end of text."""

import json
import logging

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.recipes.use import load
from tests.cli.test_exchange import write
from tests.faults import harness
from tests.recipes.train.test_reference import SETTINGS

pytestmark = pytest.mark.parity
TEXT = "def caf\u00e9(x):\n    return '\U0001f600' * x\n"


@pytest.fixture(params=["imported", "trained"])
def exported(request, tmp_path):
    """A run, and the folder that was exported of it."""
    run, out = tmp_path / "run", tmp_path / "out"
    begin = ["import", f"--from={write(tmp_path / 'source')}", f"--workdir={run}"]
    if request.param == "trained":
        begin = harness.words(harness.write_config(tmp_path), run, "--stop_at=2")
    assert main(begin) == 0
    assert main(["export", f"--workdir={run}", f"--out={out}", "--quiet"]) == 0
    return run, out


@pytest.fixture
def complaints(caplog):
    """Collect the warnings of transformers in `records`."""
    import transformers

    transformers.logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    transformers.logging.disable_propagation()


def test_an_export_opens_in_transformers_with_the_same_ids_logits_and_text(
    exported, complaints, capsys
):
    import torch
    import transformers

    run, out = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ends = transformers.GenerationConfig.from_pretrained(out)
    ours = load.load_run(run)
    ids = [*ours.tokenizer.before, *ours.tokenizer.encode(TEXT)]
    assert tokenizer(TEXT).input_ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT == ours.tokenizer.decode(ids)
    assert ends.eos_token_id == tokenizer.eos_token_id == ours.tokenizer.eos
    assert ends.pad_token_id == model.config.pad_token_id == ours.tokenizer.pad

    @jax.jit
    def logits(params, tokens):
        model = ours.model.blueprint.merge(params)
        return model(tokens)

    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
    actual = logits(ours.params, np.array([ids], np.int32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
    capsys.readouterr()
    words = [
        "generate",
        f"--workdir={run}",
        f"--prompt={TEXT}",
        "--temperature=0",
        "--max_tokens=9",
    ]
    assert main([*words, "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    prompt = tokenizer(TEXT, return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, len(ids) :].tolist()
    assert sample["ids"] == text
    assert not [record.getMessage() for record in complaints.records]


def test_a_reward_model_has_the_same_scores_in_transformers(tmp_path):
    import torch
    import transformers

    pairs = [{"prompt": f"{n}", "chosen": f"{n + 1}", "rejected": f"{n - 3}!"} for n in range(60)]
    text = "".join(json.dumps(each) + "\n" for each in pairs)
    (tmp_path / "pairs.jsonl").write_text(text)
    settings = {"data.train": (f"{tmp_path}/pairs.jsonl",), "objective.name": "reward"}
    settings |= {"optim.lr": 0.01, "train.batch": 8}  # as many rows as devices
    config = harness.write_config(tmp_path, SETTINGS | settings)
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(harness.words(config, run)) == 0
    assert main(["export", f"--workdir={run}", f"--out={out}", "--quiet"]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    ours = load.load_run(run)
    ids = np.array([[5, 9, 17, 33, 6]])
    with torch.no_grad():
        score = model(torch.tensor(ids)).logits.numpy()

    @jax.jit
    def scores(params, tokens):
        module = ours.model.blueprint.merge(params)
        positions = jax.numpy.arange(tokens.shape[1])[None]
        return module.reward(module.hidden(tokens, positions=positions).values)

    actual = np.asarray(scores(ours.params, jax.numpy.asarray(ids, jax.numpy.int32)))
    assert score.shape == (1, 1)
    np.testing.assert_allclose(score[0, 0], actual[0, -1], rtol=1e-4, atol=1e-6)
