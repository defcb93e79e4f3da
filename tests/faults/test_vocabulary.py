"""Line E7: tokenizer, data and model must speak of the same ids."""

import json

import pytest

from jaxlm.cli.main import main
from jaxlm.data.tokenizer import Bytes
from tests.faults import harness


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return harness.write_config(tmp_path_factory.mktemp("texts"))


def test_e7_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_both_numbers(
    config, tmp_path, capsys
):
    words = harness.words(config, tmp_path / "run", "--config.model.vocab=64")
    assert main(words) == 2
    output = capsys.readouterr().err
    assert "the tokenizer has 296 ids and the model only 64" in output
    assert "--config.model.vocab=auto" in output
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
def test_e7_filling_up_to_a_multiple_is_allowed_and_said(config, tmp_path):
    words = harness.words(config, tmp_path / "run", "--stop_at=1")
    assert main(words) == 0
    assert "320 ids (296 in use)" in (tmp_path / "run/log.txt").read_text()


@pytest.fixture(scope="module")
def shards(config, tmp_path_factory):
    """Token shards of characters, and shards with one of the characters replaced."""
    folder = tmp_path_factory.mktemp("shards")
    words = ["data", "tokenize", f"--config={config}", "--quiet"]
    assert main([*words, f"--out={folder / 'own'}", "--config.data.tokenizer=characters"]) == 0
    tokenizer = json.loads((folder / "own/train/tokenizer").read_text())
    tokenizer["characters"] = tokenizer["characters"][:-1] + "\u00e9"
    (folder / "other.json").write_text(json.dumps(tokenizer))
    other = f"--config.data.tokenizer={folder / 'other.json'}"
    assert main([*words, f"--out={folder / 'other'}", other]) == 0
    return folder


def digest(folder):
    return json.loads((folder / "manifest.json").read_text())["tokenizer"]


def refused(config, run, capsys, train, validation, tokenizer):
    """Return the error text of training that ends before it makes anything of the data.

    Args:
      config: the config of the run.
      run: the directory of the run.
      capsys: the output of this process.
      train, validation: the data.
      tokenizer: the value of data.tokenizer.
    """
    capsys.readouterr()
    flags = (
        f"--config.data.train={train}",
        f"--config.data.validation={validation}",
        *([f"--config.data.tokenizer={tokenizer}"] if tokenizer else []),
    )
    assert main(harness.words(config, run, *flags)) == 2
    assert not (run / "metrics.jsonl").exists()
    return capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("tokenizer", ["bytes", "{folder}/other.json"])
def test_e7_a_tokenizer_is_told_from_that_of_the_shards_by_its_digest(
    config, shards, tmp_path, capsys, tokenizer
):
    original, other = shards / "own/train", shards / "other/train"
    asked = tokenizer.format(folder=shards)
    output = refused(config, tmp_path / "run", capsys, original, shards / "own/val", asked)
    expected = Bytes().digest if tokenizer == "bytes" else digest(other)
    ids = len(json.loads((original / "tokenizer").read_text())["characters"]) + 40
    assert (
        f"that of {original} has {ids} ids and the digest {digest(original)[:12]}, this one has"
        in output
    )
    assert f"ids and the digest {expected[:12]}\n" in output
    assert (f"this one has {ids} ids" in output) == (tokenizer != "bytes"), "sizes may be equal"
    assert f"fix    --config.data.tokenizer={original}/tokenizer\n" in output


@pytest.mark.slow
def test_e7_validation_shards_of_another_tokenizer_are_refused_as_those_for_training_are(
    config, shards, tmp_path, capsys
):
    original, other = digest(shards / "own/train")[:12], digest(shards / "other/train")[:12]
    assert original != other
    train, run = shards / "own/train", tmp_path / "run"
    output = refused(config, run, capsys, train, shards / "other/val", "characters")
    assert f"where  data.validation (val) = {shards / 'other/val'}\n" in output
    assert f"the digest is {other}, that of the run {original}" in output
    output = refused(config, run, capsys, f"{train},{shards}/other/train", "()", "characters")
    assert f"the digests are {original} and {other}" in output


@pytest.mark.few(1)
@pytest.mark.parametrize("tokenizer", ["sentencepiece:512", "bpe:512", "wordpiece:512"])
def test_e7_a_tokenizer_to_be_trained_is_refused_over_shards_that_have_another(
    config, shards, tmp_path, capsys, tokenizer
):
    folder = shards / "own/train"
    output = refused(config, tmp_path / "run", capsys, folder, shards / "own/val", tokenizer)
    assert f"data.tokenizer = {tokenizer}" in output
    assert digest(folder)[:12] in output
    stats = ["data", "stats", f"--config.data.train={folder}", "--config.data.validation=()"]
    assert main([*stats, f"--config.data.tokenizer={tokenizer}"]) == 2
    output = capsys.readouterr().err
    assert main([*stats, output.rpartition("fix    ")[2].strip()]) == 0


def test_e7_the_default_reads_the_shards_own_tokenizer_and_says_so(shards, capsys):
    folder = shards / "own/train"
    stats = ["data", "stats", f"--config.data.train={folder}", "--config.data.validation=()"]
    for more in ([], ["--config.data.tokenizer=characters"]):
        capsys.readouterr()
        assert main([*stats, *more]) == 0
        output = capsys.readouterr().out
        assert "the tokenizer is that of the token shards: " in output
        assert f"the digest {digest(folder)[:12]}\n" in output


def test_e7_a_tokenizer_without_special_ids_gets_ours(config, tmp_path):
    """A tokenizer.json with letters alone: begin, end and padding get ids that jaxlm reserves."""
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    model = {"type": "BPE", "vocab": letters, "merges": [], "byte_fallback": False}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    from jaxlm.data import tokenizer_file

    loaded = tokenizer_file.load(path.read_bytes(), str(path))
    special = {*loaded.before, *loaded.after, loaded.pad}
    assert len(special) == 3
    assert max(special) < 40 <= min(loaded.encode_many(["abc"])[0])
