"""`jaxlm export --out=FILE.gguf`: what llama.cpp's own conversion would write, or nothing."""

import json
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxlm.checkpoint.store import Store
from jaxlm.cli.main import main
from jaxlm.data.tokenizer import Bytes
from jaxlm.data.vocabularies import gguf_tokens
from jaxlm.models.families.gemma import Gemma, Gemma2, Gemma3
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mistral, Mixtral
from jaxlm.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from jaxlm.nn.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.checkpoint import ggufs
from tests.checkpoint.quantized import pack
from tests.cli.test_exchange import call
from tests.cli.test_quantized_folders import stored_numbers
from tests.data.vocabularies.test_gguf_tokens import of_byte_pairs
from tests.faults import harness
from tests.parity import weights

pytestmark = pytest.mark.usefixtures("one_device")

VOCAB = 512
SIZES = dict(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=2, hidden=48, max_positions=64)
FAMILIES = {
    "llama": Llama(**SIZES, tied=True, rope_theta=5e5),
    "llama, scaling of 3.1": Llama(**SIZES, rope_scaling=Llama3Scaling(factor=8.0, original=32)),
    "llama, one that another computes": Llama(
        **SIZES, rope_scaling=Llama3Scaling(factor=8.0, original=33)
    ),
    "llama, linear": Llama(**SIZES, rope_scaling=LinearScaling(factor=4.0)),
    "llama, yarn": Llama(**SIZES, rope_scaling=YarnScaling(factor=4.0, original=16, fast=16.0)),
    "mixtral": Mixtral(**SIZES, experts=4, top_k=2),
    "qwen2": Qwen2(**SIZES),
    "qwen3": Qwen3(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3Moe(**SIZES, experts=4, top_k=2),
    "gemma": Gemma(**SIZES, head_dim=16),
    "gemma2": Gemma2(**SIZES, window=8, attention_softcap=20.0, logit_softcap=10.0),
    "gemma3": Gemma3(**SIZES | dict(depth=7), window=8),
}
ODD = Llama3Scaling(factor=8.0, original=32, high=7.0)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def written(tmp_path, family):
    """A folder with these weights and a tokenizer as Llama 3 has one."""
    source = tmp_path / "source"
    source.mkdir()
    weights.write(source, family)
    content, settings = gguf_tokens.as_json(of_byte_pairs("llama-bpe"), "here")
    (source / "tokenizer.json").write_bytes(content)
    (source / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return source


def imported(tmp_path, capsys, family):
    """A run of such a folder."""
    source, run = written(tmp_path, family), tmp_path / "run"
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert code == 0, answer
    return run


def read(path):
    """Tensors and metadata by the package's own reader."""
    reader = gguf.GGUFReader(path)
    tensors = {each.name: each for each in reader.tensors}
    return tensors, {name: field.contents() for name, field in reader.fields.items()}


def numbers(tensor):
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return tensor.data.view(ml_dtypes.bfloat16)
    return tensor.data


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_and_settings_are_those_of_llama_cpps_conversion(name, capsys, tmp_path):
    """The reference is a file that the tests write by the definition, tensor by tensor."""
    family, out = FAMILIES[name], tmp_path / "model.gguf"
    run = imported(tmp_path, capsys, family)
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert code == 0, answer
    assert answer["parity"]["is_bit_identical"]
    assert answer["parity"]["largest_difference"] <= answer["parity"]["tolerance"]
    assert json.loads((tmp_path / "model.parity.json").read_text()) == answer["parity"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.gguf",
        "model.parity.json",
        "run",
        "source",
    ]
    ggufs.write(tmp_path / "expected.gguf", family)
    (ours, settings), (theirs, expected) = read(out), read(tmp_path / "expected.gguf")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_allclose(
            ours[key].data, tensor.data, rtol=1e-6 if key == "rope_freqs.weight" else 0, err_msg=key
        )
    for key, value in expected.items():
        if not key.startswith(("GGUF.", "tokenizer.")) and key != "general.name":
            assert settings[key] == pytest.approx(value), key
    assert settings["general.name"] == "run"
    assert settings["tokenizer.chat_template"] == TEMPLATE
    assert settings["tokenizer.ggml.pre"] == "llama-bpe"
    assert settings["tokenizer.ggml.add_bos_token"] is True
    assert len(settings["tokenizer.ggml.tokens"]) == VOCAB


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_rounded_and_vectors_are_not(dtype, capsys, tmp_path):
    family, out = FAMILIES["qwen3_moe"], tmp_path / "model.gguf"
    run = imported(tmp_path, capsys, family)
    words = ("export", f"--workdir={run}", f"--out={out}", f"--dtype={dtype}")
    code, answer, _ = call(capsys, *words)
    assert code == 0, answer
    assert answer["parity"]["is_bit_identical"]
    assert answer["parity"]["largest_difference_by_rounding"] > 1e-4
    as_type = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    tensors, settings = read(out)
    for name, array in ggufs.tensors(family).items():
        is_whole = array.ndim == 1 or "ffn_gate_inp" in name
        rounded = numbers(tensors[name]).reshape(array.shape)
        assert rounded.dtype == (np.float32 if is_whole else as_type), name
        np.testing.assert_array_equal(rounded, array.astype(rounded.dtype), err_msg=name)
    assert settings["general.file_type"] == {"bfloat16": 32, "float16": 1}[dtype]


@pytest.mark.slow
def test_what_is_imported_again_says_and_computes_the_same(capsys, tmp_path):
    run, out, second = (
        imported(tmp_path, capsys, FAMILIES["gemma2"]),
        tmp_path / "a/model.gguf",
        tmp_path / "again",
    )
    assert call(capsys, "export", f"--workdir={run}", f"--out={out}")[0] == 0
    assert call(capsys, "import", f"--from={out}", f"--workdir={second}")[0] == 0
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 40)
    answers = []
    for workdir in (run, second):
        words = ("eval", f"--workdir={workdir}", f"--text={tmp_path / 'text.txt'}", "--batch=4")
        code, answer, _ = call(capsys, *words)
        assert code == 0, answer
        answers.append(answer["loss_nats"])
    assert answers[0] == pytest.approx(answers[1], rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "why"),
    [
        (GPT2(vocab=VOCAB, width=32, depth=2, heads=4, max_positions=64), "it is a gpt2"),
        (Mistral(**SIZES, window=8), "sliding_window = 8 is read back as None"),
        (Llama(**SIZES, activation="gelu"), "hidden_act"),
        (Llama(**SIZES, head_dim=16, rope_theta=50.0, rope_scaling=ODD), "not Llama 3.1's scaling"),
        (Gemma2(**SIZES, window=8, query_scale=20), "query_pre_attn_scalar = 20"),
        (Qwen3Moe(**SIZES, experts=4, top_k=2, normalize_top_k=False), "norm_topk_prob = False"),
    ],
)
def test_a_model_that_no_file_can_say_is_refused_before_anything_is_read_or_written(
    family, why, capsys, tmp_path, monkeypatch
):
    run = imported(tmp_path, capsys, family)
    monkeypatch.setattr(Store, "restore_part", lambda *_: pytest.fail("weights are read"))
    before = sorted(tmp_path.iterdir())
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={tmp_path / 'm.gguf'}")
    assert code == 2, answer
    assert why in answer["error"]["why"]
    assert "--to=hf" in answer["error"]["fix"]
    assert sorted(tmp_path.iterdir()) == before


def test_ids_that_no_file_can_give_are_refused_before_weights_are_read(
    capsys, tmp_path, monkeypatch
):
    run = imported(tmp_path, capsys, FAMILIES["llama"])
    (run / "tokenizer").write_bytes(Bytes().serialize())
    monkeypatch.setattr(Store, "restore_part", lambda *_: pytest.fail("weights are read"))
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={tmp_path / 'm.gguf'}")
    assert code == 2, answer
    assert answer["error"]["why"] == "it has no merges, which llama.cpp requires"


def test_a_file_that_is_there_stays_as_it_is(capsys, tmp_path):
    out = tmp_path / "model.gguf"
    out.write_bytes(b"mine")
    code, answer, _ = call(capsys, "export", f"--workdir={tmp_path / 'run'}", f"--out={out}")
    assert (code, out.read_bytes()) == (2, b"mine")
    assert answer["error"]["fix"] == f"--out={tmp_path / 'model-2.gguf'}"


def test_without_the_package_the_extra_is_named(capsys, tmp_path, monkeypatch):
    run = imported(tmp_path, capsys, FAMILIES["llama"])
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, answer, _ = call(
        capsys, "export", f"--workdir={run}", "--to=gguf", f"--out={tmp_path / 'x'}"
    )
    assert code == 66
    assert "jaxlm[gguf]" in answer["error"]["fix"]
    assert not list(tmp_path.glob("x*"))


WIDE = Llama(**SIZES | dict(width=256, depth=4, hidden=256), tied=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "scheme", "storages"),
    [
        # The experts' hidden of 48 is no multiple of 32.
        (FAMILIES["qwen3_moe"], "q5_1", {"Q5_1": 13, "Q6_K": 0, "Q8_0": 1, "F16": 2, "F32": 11}),
        (WIDE, "q4_k_m", {"Q4_K": 24, "Q6_K": 5, "F32": 9}),
    ],
    ids=["q5_1", "q4_k_m"],
)
def test_a_scheme_is_read_back_bit_for_bit(family, scheme, storages, capsys, tmp_path):
    run, out = imported(tmp_path, capsys, family), tmp_path / "model.gguf"
    words = ("export", f"--workdir={run}", f"--out={out}", f"--scheme={scheme}", "--dtype=float16")
    code, answer, _ = call(capsys, *words)
    assert code == 0, answer
    assert answer["parity"]["is_bit_identical"]
    assert answer["parity"]["largest_difference"] <= answer["parity"]["tolerance"]
    tensors, settings = read(out)
    assert answer["storages"] == {name: count for name, count in storages.items() if count}
    assert answer["bytes"] == out.stat().st_size
    assert settings["general.file_type"] == {"q5_1": 9, "q4_k_m": 15}[scheme]
    assert settings["general.quantization_version"] == 2
    for name, array in ggufs.tensors(family).items():
        kind = tensors[name].tensor_type
        if array.ndim == 1 or "ffn_gate_inp" in name:
            assert kind.name == "F32"
        if kind.name == "Q5_1":
            expected = gguf.quants.quantize(array, kind)
            np.testing.assert_array_equal(tensors[name].data.reshape(expected.shape), expected)
    output = tensors.get("output.weight", tensors["token_embd.weight"])
    assert output.tensor_type.name == ("Q8_0" if family.width < 256 else "Q6_K")


def test_the_line_of_a_model_names_the_scheme_that_stores_it(capsys, tmp_path):
    run = imported(tmp_path, capsys, Llama(**SIZES))
    words = ("export", f"--workdir={run}", f"--out={tmp_path / 'm.gguf'}", "--scheme=q8_0")
    assert main([*words]) == 0
    assert "parameters in q8_0" in capsys.readouterr().out


@pytest.mark.few(1)
def test_a_text_searches_scales_and_the_bytes_are_the_same_again(capsys, tmp_path):
    family = Qwen3Moe(**SIZES | dict(hidden=64), experts=4, top_k=2)
    run, files = imported(tmp_path, capsys, family), [tmp_path / f"{n}.gguf" for n in range(3)]
    (tmp_path / "text.txt").write_text("a text of some length, and then more.\n" * 40)
    flags = "--scheme=q4_0", "--calibration_tokens=256"
    for out in files:
        text = [f"--calibration={tmp_path}/text.txt"] if out != files[2] else []
        words = ("export", f"--workdir={run}", f"--out={out}", *flags, *text)
        code, answer, log = call(capsys, *words)
        assert (code, answer["parity"]["is_bit_identical"]) == (0, True), answer
        assert ("calibration" in answer) == bool(text)
        if text:
            assert answer["without_importance"] == ["token_embd.weight", "output.weight"]
            assert "importance of inputs: 14 of 16 tensors in blocks" in log
    assert sorted(each.name for each in tmp_path.glob("*.gguf")) == ["0.gguf", "1.gguf", "2.gguf"]
    assert files[0].read_bytes() == files[1].read_bytes()
    searched, plain = read(files[0])[0], read(files[2])[0]
    for name, tensor in searched.items():
        is_same = np.array_equal(tensor.data, plain[name].data)
        is_searched = tensor.tensor_type.name == "Q4_0" and name.startswith("blk.")
        assert is_same != is_searched, name


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("--scheme=q8_0", "jaxlm export --workdir=r --out=m.gguf --to=gguf --scheme=q8_0 --step=3"),
        ("", "--scheme=q4_k_m"),
        ("--to=peft", "--scheme=q4_k_m"),
        ("--to=hf --scheme=q4_0", "--to=gguf"),
    ],
)
def test_a_text_that_nothing_reads_is_refused_at_once(flags, fix, capsys):
    words = ("export", "--workdir=r", "--out=m.gguf", "--step=3", "--calibration=train")
    code, answer, _ = call(capsys, *words, *flags.split())
    assert (code, answer["error"]["fix"]) == (2, fix)


def test_weights_that_are_not_finite_and_rows_of_no_block_are_refused(capsys, tmp_path):
    odd = Llama(**SIZES | dict(width=36, hidden=36, heads=2, kv_heads=2))
    run = imported(tmp_path, capsys, odd)
    words = ("export", f"--workdir={run}", f"--out={tmp_path / 'm.gguf'}", "--scheme=q8_0")
    code, answer, _ = call(capsys, *words)
    assert (code, answer["error"]["why"]) == (
        2,
        "no matrix has rows that the blocks of q8_0 divide",
    )
    code, answer, _ = call(capsys, *words, "--to=hf")
    assert (code, answer["error"]["fix"]) == (2, "--to=gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "storage"),
    [
        ("int4_zero --block=32", "Q4_1"),
        ("int4_zero --block=64", "Q4_1"),  # of 96 inputs the last block has 32
        ("int4 --block=64", "Q4_0"),
        ("int8", "Q8_0"),
        ("int4 --block=32", "Q4_0"),
        ("w4a8", "Q4_0"),
        ("w8a8", "Q8_0"),
        ("nf4_double", "F32"),
        ("int4 --block=16", "F32"),
        ("fp8", "F32"),
    ],
)
def test_a_quantized_run_keeps_its_codes_if_a_storage_has_them(scheme, storage, capsys, tmp_path):
    run = imported(tmp_path, capsys, Llama(**SIZES | dict(width=64, hidden=96), tied=True))
    codes, out = tmp_path / "codes", tmp_path / "model.gguf"
    (tmp_path / "text.txt").write_text("a text of some length, and then more.\n" * 40)
    words = f"quantize --workdir={run} --out={codes} --text={tmp_path}/text.txt --scheme={scheme}"
    assert call(capsys, *words.split(), "--allow=loss:100%")[0] == 0
    code, answer, log = call(capsys, "export", f"--workdir={codes}", f"--out={out}")
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True), answer
    assert ("keep their codes" in log) == (storage != "F32")
    assert ("dequantized to float32" in log) == (storage == "F32")
    assert ("round their inputs" in log) == scheme.endswith("a8")
    tensors, _ = read(out)
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    is_compared = scheme.startswith(("nf4", "fp8"))  # by the logits above
    check_codes(codes, tensors, storage, is_compared=is_compared)


def check_codes(codes, tensors, storage, *, is_compared=False):
    """Require the storage of three matrices, and their numbers unless these were compared."""
    for name, path in (
        ("blk.1.attn_v", "attention/value"),
        ("blk.1.attn_output", "attention/out"),
        ("blk.0.ffn_down", "mlp/down"),
    ):
        tensor = tensors[f"{name}.weight"]
        assert tensor.tensor_type.name == storage
        if is_compared:
            continue
        (full,) = {
            key.removeprefix("params/").removesuffix("_codes")
            for key in harness.store(codes).arrays(0)
            if key.endswith(f"{path}/weight_codes")
        }
        stored = stored_numbers(codes, full, int(name[4]))
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # A scale, and the number of code 0, are rounded to float16.
        largest = np.abs(stored).max() * (2 if storage == "Q4_1" else 1)
        assert np.abs(numbers - stored).max() <= largest * (2**-11 if storage != "F32" else 1e-7)


def test_codes_of_an_import_are_those_of_the_file(capsys, tmp_path):
    source = written(tmp_path, Llama(**SIZES | dict(width=64, hidden=96), tied=True))
    pack(source, "awq", size=32)
    run, out = tmp_path / "run", tmp_path / "model.gguf"
    assert call(capsys, "import", f"--from={source}", f"--workdir={run}")[0] == 0
    code, answer, log = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True), answer
    assert "keep their codes" in log
    check_codes(run, read(out)[0], "Q4_1")


@pytest.mark.slow
def test_a_scheme_rounds_the_numbers_of_codes_again(capsys, tmp_path):
    run = imported(tmp_path, capsys, Llama(**SIZES | dict(width=64, hidden=96), tied=True))
    codes, out = tmp_path / "codes", tmp_path / "model.gguf"
    (tmp_path / "text.txt").write_text("a text of some length, and then more.\n" * 40)
    words = f"quantize --workdir={run} --out={codes} --text={tmp_path}/text.txt --scheme=nf4"
    assert call(capsys, *words.split(), "--allow=loss:100%")[0] == 0
    words = ("export", f"--workdir={codes}", f"--out={out}", "--scheme=q5_1")
    code, answer, log = call(capsys, *words)
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True), answer
    assert "the matrices of nf4 are dequantized, and rounded again to q5_1" in log
    assert read(out)[0]["blk.0.attn_v.weight"].tensor_type.name == "Q5_1"
