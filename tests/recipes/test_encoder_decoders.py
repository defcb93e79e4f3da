"""An encoder-decoder by the command line: trained with spans, evaluated, sampled, exported."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError
from jaxlm.models.families.t5 import T5
from jaxlm.recipes import language_model
from jaxlm.recipes.use import load as opening
from jaxlm.recipes.use.llm_judge import YesNoModel
from tests.cli.test_import_tokenizers import FORMS
from tests.cli.test_import_tokenizers import write as with_tokenizer
from tests.faults import harness
from tests.recipes.test_encoders import call

pytestmark = pytest.mark.usefixtures("one_device")

SMALL = [
    "--config.model.family=t5",
    "--config.model.width=32",
    "--config.model.depth=2",
    "--config.model.heads=4",
    "--config.model.hidden=48",
]
SPANS = ["--config.objective.name=span", "--config.objective.rate=0.3"]
DENOISERS = ["--config.objective.name=ul2"]
SCALED = {"scale": ["--budget=1e15"]}
SETTINGS = {
    "train.steps": 4,
    "data.sequence": 48,
    "eval.batches": 1,
    "checkpoint.every": "100%",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"), SETTINGS)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    assert main(harness.words(config, run, *SMALL, *SPANS)) == 0
    return run


@pytest.mark.slow
def test_an_encoder_decoder_learns_what_was_cut_out_and_writes(trained, capsys):
    records = harness.records(trained)
    first, *_, last = (r for r in records if r["split"] == "train")
    assert last["loss_nats"] < first["loss_nats"]
    assert first["flops_per_second"] > 0
    assert [r["split"] for r in records].count("val") == 1
    assert " a step, " in (trained / "log.txt").read_text()
    asked = asking(trained)
    ids = written(capsys, trained)
    code, answer = call(capsys, *asked, "--max_tokens=5", "--kv_cache_dtype=int8")
    assert code == 0
    assert answer["samples"][0]["ids"][0] == ids[0]
    code, answer = call(capsys, *asked, "--chat")
    assert code == 2
    assert "encoder-decoder" in answer["error"]["what"]


@pytest.mark.slow
def test_an_encoder_decoder_has_no_probabilities_of_a_text(trained):
    with pytest.raises(ConfigError, match="no probabilities of a text"):
        language_model.load(trained).score("one two")
    with pytest.raises(ConfigError, match="no probabilities of a text"):
        YesNoModel(str(trained), "--judge")


@pytest.mark.slow
def test_one_that_learns_by_denoisers_is_stopped_evaluated_replayed_and_asked(
    config, tmp_path, capsys
):
    run = tmp_path / "run"
    flags = [*SMALL, *DENOISERS, "--config.train.steps=6", "--config.eval.batches=all"]
    assert main(harness.words(config, run, *flags, "--stop_at=3")) == 0
    assert main(harness.words(config, run, *flags)) == 0
    records = harness.records(run)
    trained = [r for r in records if r["split"] == "train"]
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5, 6]
    (logged,) = (r for r in records if r["split"] == "val")
    assert logged["loss_nats"] < trained[0]["loss_nats"]
    code, evaluated = call(capsys, "eval", f"--workdir={run}")
    assert (code, evaluated["tokens"]) == (0, logged["tokens"])
    assert evaluated["loss_nats"] == pytest.approx(logged["loss_nats"], rel=1e-6)
    code, answer = call(capsys, "replay", f"--workdir={run}", "--step=5")
    assert (code, answer["is_as_logged"]) == (0, True)
    written(capsys, run)


def asking(run):
    return ("generate", f"--workdir={run}", "--prompt=one two", "--temperature=0")


def written(capsys, run):
    """The likeliest ids by which a run continues a text."""
    code, answer = call(capsys, *asking(run), "--max_tokens=5")
    assert code == 0
    ids = answer["samples"][0]["ids"]
    assert ids
    assert ids == likeliest(run, "one two", ids)
    return ids


def likeliest(run, prompt, ids):
    """The likeliest id after each of these, from one pass over all of them."""
    opened = opening.load_run(run)
    tokenizer = opened.tokenizer
    source = jnp.asarray([[*tokenizer.before, *tokenizer.encode(prompt), *tokenizer.after]])
    known = np.arange(opened.model.blueprint.config.vocab)
    text = np.isin(known, np.flatnonzero(tokenizer.token_bytes > 0)) | (known == tokenizer.eos)
    tokens = jnp.asarray([[0, *ids[:-1]]])

    @jax.jit
    def scores(params):
        model = opened.model.blueprint.merge(params)
        return model(tokens, source=source)[0]

    with jax.set_mesh(opened.model.mesh):
        permitted = np.where(text[None], scores(opened.params), -np.inf)
    return permitted.argmax(-1).tolist()


@pytest.mark.slow
def test_an_encoder_decoder_goes_to_transformers_and_is_evaluated_on_any_text(
    trained, tmp_path, capsys
):
    code, answer = call(capsys, "export", f"--workdir={trained}", f"--out={tmp_path}/out")
    assert (code, answer["architecture"]) == (0, "T5ForConditionalGeneration")
    assert answer["parity"]["is_bit_identical"]
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 20)
    code, answer = call(capsys, "eval", f"--workdir={trained}", f"--text={text}")
    assert code == 0
    assert 0 < answer["tokens"] < 200


def test_what_an_encoder_decoder_cannot_do_is_refused_with_what_can(config, capsys):
    flags = [f"--config={config}", *SMALL]
    code, answer = call(capsys, "config", "validate", *flags)
    assert code == 2
    assert "trained by causal: an encoder-decoder needs pairs" in answer["error"]["why"]
    fixes = answer["error"]["fix"].splitlines()
    assert {*SPANS, *DENOISERS}.intersection(fixes) == {SPANS[0], *DENOISERS}
    for fix in fixes:
        assert main(["config", "validate", *flags, fix]) == 0
    mixture = ["--config.objective.name=mixture", "--config.objective.weights.ul2=1"]
    code, answer = call(capsys, "config", "validate", *flags, *mixture)
    assert code == 2
    assert "trained by mixture: an encoder-decoder needs pairs" in answer["error"]["why"]
    for setting in ("mup.base_width=16", "regularization.qk_clip=10"):
        code, answer = call(capsys, "config", "validate", *flags, *SPANS, f"--config.{setting}")
        assert code == 2
        assert setting.partition("=")[0] in answer["error"]["where"]
        assert "t5" in answer["error"]["why"]
    for verb in ("check", "scale"):
        code, answer = call(capsys, verb, *flags, *SPANS, *SCALED.get(verb, ()))
        assert code == 2
        assert "cannot be resized" in answer["error"]["what"]
    split = ["--config.mesh.pipe=1", "--config.mesh.context=2", "--config.mesh.data=1"]
    run = config.replace("config.py", "run")
    code, answer = call(capsys, *harness.words(config, run, *SMALL, *SPANS, *split))
    assert code == 2


@pytest.mark.slow
def test_both_sides_are_watched_layer_by_layer_and_regularised(config, tmp_path):
    watch = "--config.log.layers=('norms','activations','attention','noise')"
    more = ["--config.log.every=2", "--config.train.steps=2", "--config.average.name=ema"]
    drops = [
        f"--config.regularization.{name}=0.3"
        for name in ("attention_dropout", "layer_drop", "embedding_noise")
    ]
    run = tmp_path / "run"
    assert main(harness.words(config, run, *SMALL, *SPANS, watch, *more, *drops)) == 0
    last = [each for each in harness.records(run) if each["split"] == "train"][-1]
    for side in ("encoder", "decoder"):
        for number in range(2):
            layer = f"layers/{side}/stack/{number}"
            for name in ("grad_norm", "stream_rms", "attention_entropy", "attention_logit_max"):
                assert last[f"{layer}/{name}"] > 0, (layer, name)
        assert last[f"layers/{side}/stack/0/attention/query/weight/grad_norm"] > 0
    assert last["layers/decoder/stack/0/cross/query/weight/grad_norm"] > 0
    # Of keys no more than there are slots, or half of them in the decoder's causal rows.
    assert last["layers/encoder/stack/0/attention_entropy"] < np.log(48)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("objective", [SPANS, DENOISERS], ids=["span", "ul2"])
def test_peek_shows_what_is_read_and_what_is_written(objective, config, capsys):
    capsys.readouterr()
    flags = [f"--config={config}", *SMALL, *objective, "--config.train.batch=32"]
    assert main(["data", "peek", *flags, "--rows=32"]) == 0
    output = capsys.readouterr().out
    pairs = re.findall("\u2039([^\u203a]*)\u203a\u00ab([^\u00bb]*)\u00bb", output)
    assert len(pairs) > 1
    have_spans = set()
    for read, written in pairs:
        have_spans.add("<|sentinel_0|>" in read)
        assert written.startswith("<|sentinel_0|>") == ("<|sentinel_0|>" in read)
        assert written.endswith("<|eos|>") or "<|sentinel_0|>" not in read
    assert have_spans == ({True} if objective is SPANS else {True, False})


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An imported T5, and flags of a run that continues from it."""
    folder = tmp_path_factory.mktemp("t5")
    files, settings, attributes, *_ = FORMS["t5"]
    family = T5(vocab=703, width=32, depth=1, heads=4, hidden=48)
    source = with_tokenizer(folder / "source", files, settings, family, **attributes)
    run = folder / "run"
    assert main(["import", f"--from={source}", f"--workdir={run}", "--quiet"]) == 0
    lines = ("low lower lowest and newer, the widest of them " * n for n in range(1, 60))
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    data = (f"--config.data.train={folder / 'text.jsonl'}", "--config.data.validation=10%")
    short = ("--config.data.sequence=48", "--config.train.batch=8", "--config.objective.rate=0.3")
    return run, (f"--config={run}/config.json", *data, *short)


@pytest.mark.slow
def test_an_imported_t5_goes_on_with_its_own_sentinels(imported, capsys):
    _, flags = imported
    capsys.readouterr()
    assert main(["data", "peek", *flags, "--rows=1"]) == 0
    output = capsys.readouterr().out
    read, written = re.search("\u2039([^\u203a]*)\u203a\u00ab([^\u00bb]*)\u00bb", output).groups()
    for number in range(3):
        assert f"<extra_id_{number}>" in read
    assert written.startswith("<extra_id_0>")
    assert written.endswith("</s>")


@pytest.mark.slow
def test_an_imported_t5_is_trained_further(imported, tmp_path):
    run, flags = imported
    more = ("--config.train.steps=1", "--config.eval.batches=1", f"--init_from={run}", "--quiet")
    assert main(["train", *flags, *more, f"--workdir={tmp_path / 'further'}"]) == 0
    assert harness.records(tmp_path / "further")[-1]["loss_nats"] > 0
