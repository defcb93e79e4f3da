"""Damaged files of every kind that is read raise the typed error, for every change.

The mutations here know JSON and digests; atheris finds the bytes that reach new code. `scripts/soak
--fuzz` does both.
"""

import base64
import copy
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath
from safetensors.numpy import save

from jaxlm.checkpoint import hub_architecture, hub_tokenizer_files, quantized_folder
from jaxlm.checkpoint import record as records
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.hub_folder import Folder, ModelSource
from jaxlm.core import config
from jaxlm.core.errors import JaxlmError
from jaxlm.data import chat, tokenizer_file, train_tokenizer
from jaxlm.data.shards import TokenShards
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.data.vocabularies import byte_pairs as pairs
from jaxlm.models.families.llama import Llama
from jaxlm.monitor import host_machine
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.use import generate
from tests import machine
from tests.checkpoint import ggufs
from tests.data.vocabularies import test_byte_pairs, test_word_pieces
from tests.faults.conftest import ROOT
from tests.faults.test_tokenizer_files import byte_pairs
from tests.parity import weights

MUTATIONS = 2000  # of each kind, however little time there is
FEWER = {"chat template": 50}  # each is rendered in a process of its own
VALUES = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, -(2**70), 0.5, -0.0, 1e308, 1e-320),
    *("", "0", "a", "auto", "None", "../../etc/passwd", "\u0000", "\u202e", "x" * 5000, "1e9999"),
    *([], {}, [[]], {"": {}}, ["a", 1], {"name": "adamw"}, {"a": {"b": []}}),
)
RAW = (
    b"NaN",
    b"Infinity",
    b"1e999",
    b"\xff\xfe",
    b"\\ud800",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\x00",
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON value."""
    paths = [path]
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        paths += places(each, (*path, key))
    return paths


def mutated(value: Any, draw: random.Random) -> bytes:
    """JSON with one to three values changed, removed, renamed or repeated, or damaged bytes."""
    content = json.dumps(changed(value, draw)).encode()
    return damaged(content, draw) if draw.random() < 0.4 else content


def changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with one to three values changed, removed, renamed or repeated."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.randint(1, 3)):
        if not (inside := places(value)[1:]):
            break
        *parents, last = draw.choice(inside)
        inner = value
        for key in parents:
            inner = inner[key]
        if not isinstance(inner, dict | list):
            continue
        match draw.randrange(5):
            case 0 | 1:
                inner[last] = copy.deepcopy(draw.choice(VALUES))
            case 2:
                del inner[last]
            case 3 if isinstance(inner, dict):
                inner[draw.choice(("x", "name", "", str(last) + "s"))] = inner.pop(last)
            case _:
                inner[last] = [inner[last], inner[last]]
    return value


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes with one to four places flipped, cut out, cut off, or with others put in."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) or 1)
        match draw.randrange(8):
            case 0 | 1 if data:
                data[at] ^= 1 << draw.randrange(8)
            case 2 | 3:
                del data[at : at + draw.randint(1, 40)]
            case 4 | 5:
                data[at:at] = draw.choice(RAW)
            case 6:
                data[at:at] = draw.randbytes(draw.randint(1, 20))
            case _:
                del data[at:]
    return bytes(data)


def of_config(folder: Path, content: bytes) -> None:
    """Loads the config, as every verb does."""
    (folder / "config.json").write_bytes(content)
    config.load(Run, str(folder / "config.json"), [("train.steps", "7")])


def of_manifest(folder: Path, content: bytes) -> None:
    """Opens the shards, compares their digests, and reads them all."""
    (folder / "shards/manifest.json").write_bytes(content)
    opened = TokenShards.open(folder / "shards")
    opened.verify()
    for document in range(min(opened.documents, 3)):
        opened.read(document, 0, 10)
        opened.origin(document)


def of_files(folder: Path, content: bytes) -> None:
    """Look up the sources of documents."""
    (folder / "shards/files.json").write_bytes(content)
    TokenShards.open(folder / "shards").origin(0)


def of_tokenizer(folder: Path, content: bytes) -> None:
    """Opens a tokenizer file, encodes and decodes."""
    (folder / "tokenizer.json").write_bytes(content)
    use(tokenizer_file.read(folder / "tokenizer.json"))


def use(made: Tokenizer) -> None:
    """Encodes and decodes."""
    ids = made.encode("aab ba\u6f22 <0x0A>" + "a" * 300)
    assert all(i >= 0 for i in ids)
    made.decode(i for i in ids if i < made.size)
    assert len(made.token_bytes) == made.size


def of_record(folder: Path, content: bytes) -> None:
    """Reads the record of a checkpoint and compares the digests in it."""
    (folder / "checkpoint/digests.json").write_bytes(content)
    step = epath.Path(folder / "checkpoint")
    records.problems(step, records.read(step).files)


def of_signed_manifest(folder: Path, content: bytes) -> None:
    """A manifest with a right digest, as by a forger who can compute one."""
    value = json.loads(content)
    if isinstance(value, dict):
        value.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        value["sha256"] = digest
    of_manifest(folder, json.dumps(value).encode())


def of_signed_record(folder: Path, content: bytes) -> None:
    """Its last field hashes what comes before, as the reader does."""
    value = json.loads(content)
    if isinstance(value, dict):
        value.pop("self", None)
        content = records.add_digest(json.dumps(value, indent=1)).encode()
    of_record(folder, content)


def of_safetensors(folder: Path, content: bytes) -> None:
    """Opens a model's folder, and reads every tensor of it."""
    fetch_all(model_of(folder, {"model.safetensors": content}))


def of_codes(folder: Path, content: bytes) -> None:
    """Dequantizes every matrix of a folder of GPTQ."""
    described = {"config.json": json.dumps({"quantization_config": GPTQ}).encode()}
    opened = model_of(folder, described | {"model.safetensors": content})
    fetch_all(quantized_folder.open_quantized(opened))


def of_code_settings(folder: Path, content: bytes) -> None:
    """Dequantizes every matrix of a folder of compressed-tensors, by its settings."""
    files = {"config.json": content, "model.safetensors": save(packed_codes())}
    fetch_all(quantized_folder.open_quantized(model_of(folder, files)))


def gptq_codes() -> dict[str, np.ndarray]:
    """A matrix of GPTQ, of 16 inputs and 8 outputs."""
    return {
        "a.qweight": np.arange(16, dtype=np.int32).reshape(2, 8),
        "a.qzeros": np.arange(2, dtype=np.int32).reshape(2, 1),
        "a.scales": np.ones((2, 8), np.float16),
        "a.g_idx": np.arange(16, dtype=np.int32) // 8,
    }


def packed_codes() -> dict[str, np.ndarray]:
    """A matrix of compressed-tensors, of 16 inputs and 8 outputs."""
    return {
        "a.weight_packed": np.arange(16, dtype=np.int32).reshape(8, 2),
        "a.weight_scale": np.ones((8, 2), np.float32),
        "a.weight_zero_point": np.arange(2, dtype=np.int32).reshape(1, 2),
        "a.weight_shape": np.array([8, 16], np.int64),
    }


def of_gguf(folder: Path, content: bytes) -> None:
    """Open a model of one file, build its model, use its tokenizer, and read every tensor."""
    (folder / "model.gguf").write_bytes(content)
    opened = Gguf(folder / "model.gguf")
    family, _ = hub_architecture.read_family(opened, lambda _: None)
    family.build()
    use(hub_tokenizer_files.read_tokenizer(opened))
    fetch_all(opened)


def fetch_all(opened: ModelSource) -> None:
    """Reads every tensor but those that an import would refuse by their dtype."""
    with opened.opened() as fetch:
        for name, (dtype, shape) in opened.tensors().items():
            if not dtype.startswith("GGML's "):
                fetch(name, tuple(slice(0, size) for size in shape))


def of_hub_tokenizer(folder: Path, files: dict[str, bytes]) -> None:
    """Use the tokenizer of a model, in the folder of its config."""
    described = {
        "config.json": json.dumps({"model_type": "gpt2"}).encode(),
        "model.safetensors": save({"a": np.ones(2, np.float32)}),
    }
    use(hub_tokenizer_files.read_tokenizer(model_of(folder, described | files)))


def from_ranks(folder: Path, content: bytes) -> None:
    """Ranks of tiktoken, which name no token that ends a document: the settings name it."""
    ends = {str(len(RANKS)): {"content": hub_tokenizer_files.GPT2_END, "special": True}}
    settings = json.dumps({"added_tokens_decoder": ends}).encode()
    of_hub_tokenizer(folder, {"tokenizer.model": content, "tokenizer_config.json": settings})


def of_merges(folder: Path, content: bytes) -> None:
    """Byte pairs, whose vocabulary is whole."""
    vocabulary, _ = pairs.from_ranks(RANKS)
    vocabulary |= {hub_tokenizer_files.GPT2_END: len(vocabulary)}
    files = {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": content}
    of_hub_tokenizer(folder, files)


def of_template(folder: Path, content: bytes) -> None:
    """Renders a conversation by the template that came with a model."""
    place = folder / import_model.FOLDER
    place.mkdir(exist_ok=True)
    (place / "chat_template.jinja").write_bytes(content)
    output = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    chat.render_chat([output, []], generate.template_of(folder))


def of_index(folder: Path, content: bytes) -> None:
    """Opens a model's folder of several files."""
    part = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    model_of(folder, {"part.safetensors": part, "model.safetensors.index.json": content})


def of_attributes(folder: Path, content: bytes) -> None:
    """Reads what a config.json describes, and builds it."""
    files = {"config.json": content, "model.safetensors": save({"a": np.ones(2, np.float32)})}
    family, _ = hub_architecture.read_family(model_of(folder, files), lambda _: None)
    family.build()


def model_of(folder: Path, files: dict[str, bytes]) -> Folder:
    place = folder / "model"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, content in ({"config.json": b"{}"} | files).items():
        (place / name).write_bytes(content)
    return Folder(place)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False},
            "input_activations": None,
        }
    },
    "sparsity_config": {"format": "dense"},
}
RANKS = test_byte_pairs.trained("low lower lowest low low aab aab", 8)
TEMPLATE = """{% for message in messages %}{% if message['role'] == 'user' and loop.first %}
<|{{ message.role }}|> {{ message['content'] | trim }}{{ '\n' * 2 }}
{% else %}{{ message.content[:10] ~ '</s>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture
def folder(shards: Path, tiny_run: Any, tmp_path: Path) -> Path:
    """Copies of what is damaged."""
    shutil.copytree(shards, tmp_path / "shards")
    shutil.copytree(tiny_run.workdir / "checkpoints/4", tmp_path / "checkpoint")
    return tmp_path


def sound(kind: str, folder: Path) -> Any:
    """Contents of each kind of file without damage: JSON, or bytes."""
    match kind:
        case "sentencepiece":
            words = (" ".join(f"w{n * m}" for n in range(200)) for m in range(50))
            return train_tokenizer.train("sentencepiece:512", words).serialize()
        case "config":
            return config.to_json(Run())
        case "manifest" | "signed manifest":
            return json.loads((folder / "shards/manifest.json").read_text())
        case "files":
            return json.loads((folder / "shards/files.json").read_text())
        case "tokenizer":
            return byte_pairs(normalizer={"type": "NFC"})
        case "imported tokenizer":
            content = json.dumps(byte_pairs(normalizer={"type": "NFC"}))
            ids = {"before": [], "after": [1], "ends": [1]}
            return {"kind": "imported", **ids, "content": content}
        case "codes of gptq":
            return save(gptq_codes())
        case "settings of codes":
            return {"quantization_config": COMPRESSED}
        case "safetensors":
            return save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)})
        case "index":
            return {
                "metadata": {"total_size": 40},
                "weight_map": dict.fromkeys("ab", "part.safetensors"),
            }
        case "attributes":
            return weights.FAMILIES["gemma3"].to_hub() | {"model_type": "gemma3_text"}
        case "gguf":
            family = Llama(
                vocab=280, width=32, depth=1, heads=2, kv_heads=2, hidden=32, max_positions=32
            )
            ggufs.write(folder / "sound.gguf", family, storage="Q8_0")
            return (folder / "sound.gguf").read_bytes()
        case "ranks":
            lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items())
            return b"".join(lines)
        case "merges":
            lines = [f"{a} {b}" for a, b in pairs.from_ranks(RANKS)[1]]
            return "\n".join(["#version: 0.2", *lines]).encode()
        case "word pieces":
            return "\n".join(test_word_pieces.PIECES).encode()
        case "chat template":
            return TEMPLATE.encode()
        case "tokenizer of ours":
            return {"kind": "characters", "characters": "ab c"}
        case "record":
            return (folder / "checkpoint/digests.json").read_bytes()
        case _:
            return json.loads((folder / "checkpoint/digests.json").read_text())


def sound_bytes(kind: str, folder: Path) -> bytes:
    """The same as the bytes of a file."""
    whole = sound(kind, folder)
    return whole if isinstance(whole, bytes) else json.dumps(whole).encode()


KINDS: dict[str, Callable[[Path, bytes], None]] = {
    "config": of_config,
    "manifest": of_manifest,
    "files": of_files,
    "tokenizer": of_tokenizer,
    "tokenizer of ours": of_tokenizer,
    "sentencepiece": of_tokenizer,
    "imported tokenizer": of_tokenizer,
    "ranks": from_ranks,
    "merges": of_merges,
    "word pieces": lambda folder, content: of_hub_tokenizer(folder, {"vocab.txt": content}),
    "chat template": of_template,
    "gguf": of_gguf,
    "safetensors": of_safetensors,
    "codes of gptq": of_codes,
    "settings of codes": of_code_settings,
    "index": of_index,
    "attributes": of_attributes,
    "record": of_record,
    "signed manifest": of_signed_manifest,
    "signed record": of_signed_record,
}


def outcome_of(read: Callable[[Path, bytes], None], folder: Path, content: bytes) -> int | str:
    """The exit code that reading the content leads to, or the exception if it is not ours."""
    try:
        read(folder, content)
    except JaxlmError as error:
        return error.code
    except BaseException as error:  # a panic of Rust is no Exception
        return f"{type(error).__name__}: {error}"
    return 0


def fuzz(kind: str, folder: Path, minutes: float, seed: int) -> tuple[Counter[int], int]:
    """Counts of the outcomes of reading, and the peak memory of this process in bytes."""
    draw = random.Random(f"{kind} {seed}")
    whole = sound(kind, folder)
    content = sound_bytes(kind, folder)
    assert outcome_of(KINDS[kind], folder, content) == 0, "else nothing is shown of a damaged one"
    outcomes: Counter[int] = Counter()
    deadline = time.monotonic() + minutes * 60
    while outcomes.total() < FEWER.get(kind, MUTATIONS) or time.monotonic() < deadline:
        if isinstance(whole, bytes):
            content = damaged(whole, draw)
        elif kind.startswith("signed"):  # bytes that are no JSON would show nothing new
            content = json.dumps(changed(whole, draw)).encode()
        else:
            content = mutated(whole, draw)
        begun = time.process_time()
        outcome = outcome_of(KINDS[kind], folder, content)
        number = outcomes.total()
        assert isinstance(outcome, int), f"mutation {number}, {outcome}: {content[:3000]!r}"
        machine.require_processor(time.process_time() - begun, 5)
        outcomes[outcome] += 1
    return outcomes, host_machine.peak_memory([]).bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_s13_v20_a_damaged_file_gives_the_typed_error_or_works(
    kind: str, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """In a process of its own, whose end would be seen and whose memory is its own.

    The number and the bytes of what broke it are in the failure. For longer: `scripts/soak --fuzz`.
    """
    minutes, seed = (os.environ.get(f"JAXLM_FUZZ_{name}", 0) for name in ("MINUTES", "SEED"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as apart:
        outcomes, peak = apart.submit(fuzz, kind, folder, float(minutes), int(seed)).result()
    figures = f"{kind}: {outcomes.total()} files, {dict(outcomes)}, {peak >> 20} MiB"
    print(f"\nS13: {figures}")
    record_property("S13", figures)
    assert outcomes.total() >= FEWER.get(kind, MUTATIONS)
    assert set(outcomes) <= {0, 2, 65, 66}
    if not kind.startswith(
        "signed"
    ):  # another name or another number is as good where the digest is right
        assert outcomes[0] < outcomes.total() * 0.8, outcomes
    assert peak <= 2**30


@pytest.mark.atheris
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "kind", [k for k in KINDS if not k.startswith("signed") and k not in FEWER]
)
def test_s13_what_atheris_makes_of_a_file_gives_the_typed_error_or_works(
    kind: str, folder: Path
) -> None:
    """The digest is not made right again: atheris could not guess it, and a file has no process."""
    minutes, seed = (os.environ.get(f"JAXLM_FUZZ_{name}") for name in ("MINUTES", "SEED"))
    seconds = round(60 * float(minutes or 0.2))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.faults.fuzz.guided"),
            *(kind, str(folder), str(seconds), str(int(seed or 0) + 1)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = int(re.findall(r"^Done (\d+) runs", done.stderr, re.MULTILINE)[0])
    covered = [int(n) for n in re.findall(r" cov: (\d+) ", done.stderr)]
    print(f"\nS13: {kind}: {runs} files, coverage {covered[0]} to {covered[-1]}")
    assert runs >= 100
    assert covered[-1] > covered[0]
