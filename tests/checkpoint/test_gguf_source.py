"""A GGUF gives the settings and the tensors that the same model has as a folder of Hugging Face."""

import dataclasses
from collections import Counter

import gguf
import numpy as np
import pytest

from jaxlm.checkpoint import gguf_file, hub_architecture
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.models.families.gemma import Gemma, Gemma2, Gemma3
from jaxlm.recipes.exchange import import_model
from tests.checkpoint import ggufs
from tests.parity import weights

VOCAB = 300
FAMILIES = {
    name: dataclasses.replace(family, vocab=VOCAB)
    for name, family in weights.FAMILIES.items()
    if type(family) in ggufs.NAMES and name != "qwen3_moe"  # which sums to one, in llama.cpp
} | {
    "gemma2": Gemma2(
        **weights.GROUPED | dict(vocab=VOCAB),
        head_dim=12,
        window=5,
        query_scale=12,
        attention_softcap=2.0,
        logit_softcap=3.0,
    ),
    "gemma3": Gemma3(
        **weights.GROUPED | dict(vocab=VOCAB, depth=7), head_dim=12, window=5, query_scale=12
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_has_the_settings_and_tensors_of_the_folder(name, tmp_path):
    family = FAMILIES[name]
    ggufs.write(tmp_path / "model.gguf", family)
    source = Gguf(tmp_path / "model.gguf")
    read, dtype = hub_architecture.read_family(source, lambda _: None)
    assert read.build() == family.build()
    assert dtype == "float32"
    shapes = {each.name: each.shape for each in weights.tensors(family)}
    assert {key: shape for key, (_, shape) in source.tensors().items()} == shapes
    close = dict(rtol=0, atol=1e-6) if isinstance(family, Gemma) else dict(rtol=0, atol=0)
    with source.opened() as fetch:
        for key, shape in shapes.items():
            expected = weights.weight(key, shape)
            part = tuple(slice(size // 3, size - size // 4) for size in shape)
            for within in (tuple(slice(0, size) for size in shape), part):
                tensor = fetch(key, within)
                assert tensor.dtype == np.float32
                np.testing.assert_allclose(tensor, expected[within], **close, err_msg=key)


LLAMA = FAMILIES["llama"]


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_quantised_rows_are_put_in_the_order_of_transformers_and_cut_where_asked(storage, tmp_path):
    family = dataclasses.replace(LLAMA, width=256, depth=1, hidden=256)
    kind = gguf.GGMLQuantizationType[storage]
    stored = ggufs.write(tmp_path / "model.gguf", family, storage=storage)
    source = Gguf(tmp_path / "model.gguf")
    with source.opened() as fetch:
        for name, heads in (("q", 4), ("k", 2), ("v", None)):
            whole = gguf.quants.dequantize(stored[f"blk.0.attn_{name}.weight"], kind)
            if heads:  # neighbours of a head become its halves
                pairs = whole.reshape(heads, -1, 2, 256)
                whole = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(-1, 256)
            for columns in (slice(3, 200), slice(70, 90), slice(128, 256), slice(None)):
                part = (slice(5, 70), columns)
                tensor = fetch(f"model.layers.0.self_attn.{name}_proj.weight", part)
                assert np.ptp(tensor) > 0.1
                np.testing.assert_array_equal(tensor, whole[part])


def test_only_the_blocks_that_hold_the_columns_are_dequantised(tmp_path, monkeypatch):
    ggufs.write(
        tmp_path / "model.gguf",
        dataclasses.replace(LLAMA, width=256, depth=1, hidden=256),
        storage="Q8_0",
    )
    read, seen = gguf_file._dequantize, []

    def dequantised(rows, name, path):
        seen.append(rows.shape)
        return read(rows, name, path)

    monkeypatch.setattr(gguf_file, "_dequantize", dequantised)
    with Gguf(tmp_path / "model.gguf").opened() as fetch:
        fetch("model.layers.0.self_attn.v_proj.weight", (slice(0, 9), slice(70, 130)))
    assert seen == [(9, 3 * 34)]  # columns 64 to 159, of 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_logit_scale(2.0), "logit_scale = 2.0 is not known"),
        (lambda w: w.add_sliding_window(7), "attention.sliding_window = 7 is not known"),
        (
            lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
            "rope.scaling.type = 'longrope'",
        ),
        (
            lambda w: w.add_float32("llama.rope.scaling.attn_factor", 2.0),
            "rope.scaling.attn_factor = 2.0",
        ),
        (lambda w: w.add_string("odd.key", "x"), "odd.key = 'x' is not known"),
        (lambda w: w.add_bool("tokenizer.ggml.clever", True), "'tokenizer.ggml.clever' is unknown"),
        (lambda w: w.add_uint16("split.count", 3), "one part of a split model"),
        (lambda w: w.add_string("general.type", "adapter"), "an adapter"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.full(4, 2.5, np.float32)),
            "not Llama 3.1's scaling",
        ),
    ],
)
def test_metadata_that_changes_the_function_and_is_not_understood_is_refused(
    change, message, tmp_path
):
    ggufs.write(tmp_path / "model.gguf", LLAMA, change=change)
    with pytest.raises(DataError) as caught:
        Gguf(tmp_path / "model.gguf")
    assert message in f"{caught.value.what} {caught.value.why}"


def test_everything_that_is_not_understood_is_told_at_once(tmp_path):
    def change(writer):
        writer.add_logit_scale(2.0)
        writer.add_clamp_kqv(8.0)

    ggufs.write(tmp_path / "model.gguf", LLAMA, change=change)
    with pytest.raises(DataError, match="2 attributes of a GGUF's metadata") as caught:
        Gguf(tmp_path / "model.gguf")
    assert "clamp_kqv" in caught.value.why
    assert "logit_scale" in caught.value.why


def test_what_changes_nothing_is_taken(tmp_path):
    def change(writer):
        writer.add_author("a")
        writer.add_quantization_version(2)
        writer.add_string("quantize.imatrix.file", "x")
        writer.add_eot_token_id(2)
        writer.add_add_space_prefix(False)

    ggufs.write(tmp_path / "model.gguf", LLAMA, change=change)
    read, _ = hub_architecture.read_family(Gguf(tmp_path / "model.gguf"), lambda _: None)
    assert read.build() == LLAMA.build()


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path):
    ggufs.write(tmp_path / "model.gguf", LLAMA, change=lambda writer: writer.add_eot_token_id(7))
    tokenizer = import_model.read_tokenizer(Gguf(tmp_path / "model.gguf"))
    assert tokenizer.eos != 7
    assert tokenizer.ends == (tokenizer.eos, 7)


@pytest.mark.parametrize(
    ("storage", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")]
)
def test_numbers_are_called_what_the_matrices_are_kept_as(storage, dtype, tmp_path):
    ggufs.write(tmp_path / "model.gguf", dataclasses.replace(LLAMA, hidden=64), storage=storage)
    assert hub_architecture.read_family(Gguf(tmp_path / "model.gguf"), lambda _: None)[1] == dtype


def test_a_header_with_changed_bytes_is_read_or_refused_and_nothing_else(tmp_path):
    path = tmp_path / "model.gguf"
    ggufs.write(path, LLAMA)
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    end = whole.index(b"blk.2.ffn_down.weight")  # about where the header ends
    codes = Counter[int]()
    for _ in range(150):
        content = bytearray(whole)
        for place in draw.integers(0, end, draw.integers(1, 4)):
            content[place] = draw.choice([0, 1, 8, 9, 255, draw.integers(256)])
        path.write_bytes(content)
        try:
            source = Gguf(path)
            hub_architecture.read_family(source, lambda _: None)
            import_model.read_tokenizer(source)
            codes[0] += 1
        except JaxlmError as error:
            codes[error.code] += 1
    assert codes.keys() <= {0, 2, 65}
    assert min(codes[0], codes[65]) > 10, codes
