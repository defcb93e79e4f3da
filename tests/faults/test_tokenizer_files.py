"""A tokenizer file that is out to get us is refused in time: too large, too deep, without end."""

import json
import random
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxlm.cli.main import main
from jaxlm.data import hub_tokenizer, train_tokenizer
from jaxlm.data import tokenizer as tokenizers
from tests import machine
from tests.faults import harness
from tests.faults.conftest import ROOT


def test_s7_a_tokenizer_file_of_a_gigabyte_is_refused_before_it_is_read(tmp_path, capsys):
    for name in ("big.json", "big.model"):
        with open(tmp_path / name, "wb") as file:
            file.write(b"{")
            file.truncate(2**30)
        with harness.timing() as took:
            assert main(["tokenizer", "show", str(tmp_path / name)]) == 65
        assert "1,073,741,824 bytes" in capsys.readouterr().err
        machine.require_processor(took.processor, 1)
        took.require(10)


DEEP = 100_000
DEEP_JSON = {
    "list": '{"a":' + "[" * DEEP + "]" * DEEP + "}",
    "object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "open": '{"model":' * DEEP,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", DEEP_JSON)
def test_s7_json_of_a_hundred_thousand_levels_is_an_error_and_no_crash(
    kind, tiny_run, shards, tmp_path
):
    """Read it as a tokenizer, shard manifest, config and record; a crash ends only its process."""
    text = DEEP_JSON[kind]
    (tmp_path / "deep.json").write_text(text)
    shutil.copytree(shards, tmp_path / "shards")
    (tmp_path / "shards/manifest.json").write_text(text)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/digests.json").write_text(text)
    program = """
import sys
from etils import epath
from jaxlm.checkpoint import record
from jaxlm.cli.main import main
from jaxlm.core.errors import DataError
folder = sys.argv[1]
codes = [
    main(["tokenizer", "show", f"{folder}/deep.json"]),
    main(["data", "check", f"{folder}/shards"]),
    main(["config", "validate", f"--config={folder}/deep.json"]),
]
try:
    record.read(epath.Path(folder) / "checkpoint")
except DataError as error:
    codes.append(error.code)
print("codes", codes)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "codes [65, 65, 2, 65]" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def byte_pairs(**changes) -> dict:
    """A tokenizer.json of byte pairs over a few letters."""
    made = Tokenizer(
        models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "aa": 3}, merges=[("a", "a"), ("a", "b")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return json.loads(made.to_str()) | changes


LETTERS = 1_000_000


@pytest.fixture(scope="module")
def sentences():
    """A small SentencePiece model of jaxlm's own."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(400)]
    return train_tokenizer.train(
        "sentencepiece:512", (" ".join(draw.choices(words, k=200)) for _ in range(50))
    )


def test_s7_a_million_unbroken_characters_take_at_most_ten_seconds(sentences, record_property):
    kinds = {
        "bytes": tokenizers.Bytes(),
        "characters": tokenizers.Characters("ab"),
        "sentencepiece": sentences,
        "huggingface": hub_tokenizer.HuggingFace(json.dumps(byte_pairs()).encode()),
    }
    texts = ["a" * LETTERS, "".join(random.Random(0).choices("ab", k=LETTERS))]
    with harness.timing() as took:
        for kind in kinds.values():
            for text in texts:
                assert kind.decode(kind.encode(text)) == text
    assert len(kinds) * len(texts) == 8
    record_property("S7", f"8 texts of a million characters {took}")
    took.require(10)


HOSTILE = {
    "merges in a circle": byte_pairs(
        model={
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3},
            "merges": ["a b", "ab a", "ba b", "b ab"],
        }
    ),
    "a merge of nothing": byte_pairs(
        model={
            "type": "BPE",
            "vocab": {"a": 0, "ab": 1},
            "merges": ["a ab"],
            "continuing_subword_prefix": "####",
        }
    ),
    "a regex without end": byte_pairs(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "an id of four billion": byte_pairs(
        model={"type": "BPE", "vocab": {"a": 4_294_967_295}, "merges": []}
    ),
    "no model": byte_pairs(model=None),
    "a model of ours without characters": {"kind": "characters"},
    "characters that are a list": {"kind": "characters", "characters": ["a", 1]},
    "half a surrogate": {"kind": "characters", "characters": "a\ud800"},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", HOSTILE)
def test_s7_a_hostile_tokenizer_file_is_refused_or_works_within_ten_seconds(case, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(HOSTILE[case]))
    with harness.timing() as took:
        code = main(["tokenizer", "show", str(path), f"--text={'a' * 50_000}b", "--json"])
    assert code in (0, 65)
    took.require(10)
    answer = json.loads(capsys.readouterr().out)
    if code == 65:
        assert answer["error"]["kind"] == "data error"
    else:
        assert answer["size"] < 2**20
