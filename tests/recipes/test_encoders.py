"""Encoders by the command line: trained, evaluated, imported, exported, and refusals."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm.cli.main import main
from tests.cli.test_exchange import write_tokenizer
from tests.faults import harness
from tests.parity import weights

pytestmark = pytest.mark.usefixtures("one_device")

SMALL = [
    "--config.model.width=32",
    "--config.model.depth=2",
    "--config.model.heads=4",
    "--config.model.hidden=48",
    "--config.model.max_positions=64",
]
MASKED = ["--config.objective.name=masked", "--config.objective.rate=0.3"]
SETTINGS = {"train.steps": 4, "eval.batches": 1, "checkpoint.every": "100%", "data.sequence": 48}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


def call(capsys, *words):
    capsys.readouterr()
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    flags = [*SMALL, *MASKED, "--config.model.family=roberta"]
    assert main(harness.words(config, run, *flags)) == 0
    return run


@pytest.mark.slow
def test_an_encoder_learns_what_is_hidden_and_does_not_go_on(trained, capsys):
    records = harness.records(trained)
    first, *_, last = (r["loss_nats"] for r in records if r["split"] == "train")
    assert last < first
    assert [r["split"] for r in records].count("val") == 1
    code, answer = call(capsys, "generate", f"--workdir={trained}", "--prompt=one")
    assert code == 2
    assert "cannot continue a text" in answer["error"]["what"]


@pytest.mark.slow
def test_an_encoder_goes_to_transformers_and_back(trained, tmp_path, capsys):
    out, returned = tmp_path / "out", tmp_path / "again"
    code, answer = call(capsys, "export", f"--workdir={trained}", f"--out={out}")
    assert (code, answer["architecture"]) == (0, "RobertaForMaskedLM")
    assert answer["parity"]["is_bit_identical"]
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == 0
    write_tokenizer(out)
    code, answer = call(capsys, "import", f"--from={out}", f"--workdir={returned}")
    assert (code, answer["ignored"]) == (0, [])
    learnt = json.loads((returned / "config.json").read_text())["objective"]["name"]
    assert learnt == "masked"


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_cannot_learn_to_go_on_and_is_told_what_can(config, capsys, family):
    flags = [f"--config={config}", *SMALL, f"--config.model.family={family}"]
    code, answer = call(capsys, "config", "validate", *flags)
    assert code == 2
    error = answer["error"]
    assert f"{family} cannot be trained by" in error["why"]
    for fix in error["fix"].splitlines():
        assert main(["config", "validate", f"--config={config}", *flags[1:], fix]) == 0


def test_older_names_are_understood_and_heads_of_other_tasks_are_told_and_left(tmp_path, capsys):
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    weights.write(source, weights.FAMILIES["bert"])
    settings = {"cls_token": "<s>", "sep_token": "</s>"}
    write_tokenizer(source)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    attributes = json.loads((source / "config.json").read_text()) | {"vocab_size": 320}
    (source / "config.json").write_text(json.dumps(attributes))
    stored = load_file(source / "model.safetensors")
    table, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    stored[table], stored[bias] = np.zeros((320, 32), np.float32), np.zeros(320, np.float32)
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in older.items():
        stored = {name.replace(new, old): array for name, array in stored.items()}
    stored["bert.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    save_file(stored, source / "model.safetensors")
    capsys.readouterr()
    assert main(["import", f"--from={source}", f"--workdir={run}", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["ignored"] == ["bert.pooler.dense.weight"]
    assert "BertForMaskedLM has no such part: bert.pooler.dense.weight" in output.err
    arrays = harness.store(run).arrays(0)
    (scale,) = [leaf for path, leaf in arrays.items() if path.endswith("embedding_norm/scale")]
    np.testing.assert_array_equal(scale, weights.weight("bert.embeddings.LayerNorm.weight", (32,)))
