"""Objectives of an imported model: with the marks of its tokenizer, or with added ones."""

import json
import re
import shlex

import numpy as np
import pytest
import tokenizers

from jaxlm.cli.main import main
from jaxlm.data.corrupt import fim, masked
from jaxlm.data.corrupt.rows import RowKey
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.models.families.bert import BERT
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import LossConfig, Masked
from tests.cli.test_exchange import call
from tests.faults import harness
from tests.parity import weights

pytestmark = pytest.mark.usefixtures("one_device")


def write_model(folder, family, special, **sizes):
    """A model of a byte-level tokenizer whose special tokens are behind the 256 bytes."""
    folder.mkdir()
    vocab = 256 + len(special)
    model = family(vocab=vocab, width=32, depth=2, heads=4, hidden=48, max_positions=128, **sizes)
    weights.write(folder, model, "float32")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: number for number, piece in enumerate(alphabet)}, [])
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(list(special))
    built.save(str(folder / "tokenizer.json"))
    named = {"eos_token": special[1], "bos_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def imported(capsys, source, run, *words):
    code, answer, output = call(capsys, "import", f"--from={source}", f"--workdir={run}", *words)
    assert code == 0, (answer, output)
    return run


def flags(folder, run, objective):
    """Flags of a run that continues from an imported one, on a text of words."""
    (folder / "text.txt").write_text(" ".join(f"the {n}th of many words" for n in range(3000)))
    data = (f"--config.data.train={folder / 'text.txt'}", "--config.data.validation=tail:10%")
    short = ("--config.data.sequence=64", "--config.train.batch=8", "--config.train.steps=1")
    return [
        f"--config={run / 'config.json'}",
        *data,
        *short,
        f"--config.objective.name={objective}",
    ]


def peeked(capsys, *words):
    capsys.readouterr()
    assert main(["data", "peek", *words, "--rows=1"]) == 0
    return capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", masked.MASK_TOKENS)
def test_an_imported_encoder_reads_its_own_mask(mask, tmp_path, capsys):
    source = write_model(tmp_path / "source", BERT, ("[CLS]", "[SEP]", mask))
    run = imported(capsys, source, tmp_path / "run")
    assert mask in peeked(capsys, *flags(tmp_path, run, "masked"))


@pytest.mark.slow
def test_an_imported_encoder_goes_on(tmp_path, capsys):
    source = write_model(tmp_path / "source", BERT, ("[CLS]", "[SEP]", "[MASK]"))
    run = imported(capsys, source, tmp_path / "run")
    more = ("--config.eval.batches=1", f"--init_from={run}", "--quiet")
    words = ["train", *flags(tmp_path, run, "masked"), *more]
    assert main([*words, f"--workdir={tmp_path / 'further'}"]) == 0
    assert harness.records(tmp_path / "further")[-1]["loss_nats"] > 0


def test_what_is_hidden_is_text_and_so_is_what_stands_for_it(tmp_path):
    """Special ids of an imported model are its last, and the first forty are text."""
    write_model(tmp_path / "source", BERT, ("[CLS]", "[SEP]", "[MASK]"))
    content = (tmp_path / "source" / "tokenizer.json").read_bytes()
    tokenizer = ImportedTokenizer(content, before=[256], after=[257])
    settings = Masked(rate=0.5, hidden=0.4, random=0.5)
    read = build(settings, LossConfig()).prepare(tokenizer, 64)
    ids = np.tile(np.array([256, *range(256), 257], np.int32), 4)
    seen, predicted = [], []
    for row in range(64):
        (piece,) = read.train.change([ids], 0, RowKey(0, 0, row))
        drawn = piece.weights > 0
        assert (piece.tokens[~drawn] == piece.targets[~drawn]).all()
        seen.append(piece.tokens[drawn & (piece.tokens != piece.targets)])
        predicted.append(piece.targets[drawn])
    assert set(np.concatenate(predicted)) == set(range(256))
    assert set(np.concatenate(seen)) == {*range(256), 258}


def of_llama(folder, special):
    return write_model(folder, Llama, special, kv_heads=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", fim.FIM_TOKENS, ids=lambda form: form[0])
def test_an_imported_model_infills_between_its_own_marks(form, tmp_path, capsys):
    source = of_llama(tmp_path / "source", ("<s>", "</s>", *form))
    run = imported(capsys, source, tmp_path / "run")
    shown = peeked(capsys, *flags(tmp_path, run, "fim"), "--config.objective.rate=1")
    places = [shown.index(mark) for mark in form]
    assert places[0] < places[1]
    assert places[0] < places[2]


@pytest.mark.few(1)
@pytest.mark.parametrize("objective", ["masked", "fim", "span", "blank", "ul2"])
def test_without_marks_the_two_ways_that_are_shown_both_work(objective, tmp_path, capsys):
    source = of_llama(tmp_path / "source", ("<s>", "</s>"))
    run = imported(capsys, source, tmp_path / "run")
    words = flags(tmp_path, run, objective)
    code, answer, _ = call(capsys, "data", "peek", *words)
    assert code == answer["error"]["code"] == 2
    other, second = answer["error"]["fix"].splitlines()
    peeked(capsys, *words, other)
    more = tmp_path / "more"
    tokens = shlex.split(" ".join(re.findall(r"--add_token='[^']+'", second)))
    words_of_import = ["import", f"--from={source}", f"--workdir={more}", *tokens, "--quiet"]
    assert main(words_of_import) == 0
    peeked(capsys, *flags(tmp_path, more, objective))
