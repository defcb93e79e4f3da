"""Numbers of a GGUF equal those of the format's own package; damaged files are refused."""

import resource
import struct
import sys
import time
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxlm.checkpoint import gguf_file
from jaxlm.checkpoint.gguf_file import STORAGES, GGUFFile
from jaxlm.core.errors import DataError, InputMissing
from tests import machine
from tests.checkpoint import ggufs
from tests.parity.weights import FAMILIES

COLUMNS, ROWS = 512, 37
QUANTIZED = [each for each in STORAGES.values() if each.numbers > 1]
DRAW = np.random.default_rng(0)


def blocks(name: str, rows: int = ROWS) -> np.ndarray:
    """Rows as they are stored."""
    return ggufs.quantised(DRAW.normal(size=(rows, COLUMNS)).astype(np.float32), name)


def write(path: Path, **tensors: tuple[str, np.ndarray]) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, array) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=lambda each: each.name)
def test_rows_are_those_of_the_formats_own_dequantiser(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "CHUNK", 5 * COLUMNS)  # the last part is a short one
    stored = blocks(storage.name)
    file = write(
        tmp_path / "x.gguf", first=("F32", np.ones(3, np.float32)), x=(storage.name, stored)
    )
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[storage.name])
    assert np.isfinite(expected).all()
    assert np.ptp(expected) > 1
    entry = file.tensors["x"]
    assert entry.shape == (ROWS, COLUMNS)
    order = DRAW.permutation(ROWS)
    for rows in (slice(None), slice(3, 20), slice(5, 5), order):
        np.testing.assert_array_equal(file.rows(entry, rows).astype(np.float32), expected[rows])


def q4_k(block: np.ndarray) -> list[float]:
    """The 256 numbers of a block of Q4_K, one by one, in float64 (ggml-common.h, block_q4_K)."""
    scale, least = block[:4].view(np.float16).astype(np.float64)
    packed, quants = [int(byte) for byte in block[4:16]], [int(byte) for byte in block[16:]]
    values = []
    for group in range(8):
        if group < 4:
            s, m = packed[group] & 63, packed[group + 4] & 63
        else:
            s = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            m = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            byte = quants[32 * (group // 2) + i]
            values.append(scale * s * (byte >> 4 if group % 2 else byte & 15) - least * m)
    return values


def q6_k(block: np.ndarray) -> list[float]:
    """The same of Q6_K (block_q6_K)."""
    low, high = [int(b) for b in block[:128]], [int(b) for b in block[128:192]]
    scales, scale = block[192:208].view(np.int8), block[208:].view(np.float16).astype(np.float64)[0]
    values = []
    for at in range(256):
        half, rest = divmod(at, 128)
        quarter, i = divmod(rest, 32)
        byte = low[64 * half + 32 * (quarter % 2) + i]
        nibble = byte >> 4 if quarter > 1 else byte & 15
        bits = high[32 * half + i] >> 2 * quarter & 3
        values.append(scale * int(scales[at // 16]) * ((nibble | bits << 4) - 32))
    return values


@pytest.mark.parametrize(("name", "one"), [("Q4_K", q4_k), ("Q6_K", q6_k)])
def test_numbers_of_a_block_are_those_of_the_formats_definition(name, one, tmp_path):
    stored = blocks(name, rows=2)
    file = write(tmp_path / "x.gguf", x=(name, stored))
    expected = [one(block) for block in stored.reshape(4, -1)]
    numbers = file.rows(file.tensors["x"], slice(None)).reshape(4, -1)
    np.testing.assert_allclose(numbers, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", QUANTIZED, ids=lambda each: each.name)
def test_changed_blocks_are_read_as_finite_numbers_or_refused(storage, tmp_path):
    """Scales that are not finite, among all others that random bytes are."""
    path, draw = tmp_path / "x.gguf", np.random.default_rng(0)
    stored = draw.integers(0, 256, (400, storage.bytes)).astype(np.uint8)
    file = write(path, other=("F32", np.ones(8, np.float32)), x=(storage.name, stored))
    refused = []
    for row in range(len(stored)):
        try:
            assert np.isfinite(file.rows(file.tensors["x"], slice(row, row + 1))).all()
        except DataError as error:
            refused.append(error.what)
    assert set(refused) == {"the tensor x is damaged"}
    assert 5 < len(refused) < 100  # an exponent of float16 is that of infinity in 1 of 32


def test_plain_numbers_keep_their_dtype(tmp_path):
    stored = blocks("BF16")
    file = write(tmp_path / "x.gguf", x=("BF16", stored))
    numbers = file.rows(file.tensors["x"], slice(0, 2))
    assert numbers.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(numbers, stored[:2].view(ml_dtypes.bfloat16))


def test_rows_of_a_large_tensor_take_the_memory_of_the_result_alone(tmp_path):
    rows = 20_000  # of 512 numbers: 41 MB as float32, a tenth is read
    one = blocks("Q8_0")
    file = write(tmp_path / "x.gguf", x=("Q8_0", np.tile(one, (rows // ROWS + 1, 1))))
    file.rows(file.tensors["x"], slice(0, 10))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file.rows(file.tensors["x"], slice(0, rows // 10))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KB


def test_the_header_of_a_large_file_takes_no_more_memory_than_what_it_says(tmp_path):
    file = write(tmp_path / "x.gguf", x=("F32", np.ones(4, np.float32)))
    with file.path.open("r+b") as longer:
        longer.truncate(2**28)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert GGUFFile(file.path).tensors.keys() == {"x"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KB


def test_quantised_numbers_without_the_package_are_refused_with_the_way_out(tmp_path, monkeypatch):
    file = write(tmp_path / "x.gguf", x=("Q8_0", blocks("Q8_0")))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputMissing, match="reading Q8_0 needs gguf") as caught:
        file.rows(file.tensors["x"], slice(None))
    assert caught.value.fix == f"{sys.executable} -m pip install 'jaxlm[gguf]'"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    ggufs.write(path, FAMILIES["llama"])
    return path.read_bytes()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*parts: bytes, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def info(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**60
PAIR = text(b"a") + struct.pack("<I", 4) + struct.pack("<I", 7)
DAMAGES = {
    "nothing": (b"", "it is empty"),
    "a pickle": (b"\x80\x04\x95" + b"x" * 100, "does not begin with GGUF"),
    "four bytes": (b"GGUF", "it ends"),
    "another version": (header(version=1), "its version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge count of tensors": (header(tensors=HUGE), "it claims 1,152,921,504,606,846,976 tensors"),
    "huge count of settings": (header(pairs=HUGE), "settings, but 0 bytes are left"),
    "huge text": (header(struct.pack("<Q", HUGE) + b"x" * 99, pairs=1), "bytes of a text"),
    "huge list": (
        header(text(b"a") + struct.pack("<IIQ", 9, 4, HUGE), pairs=1),
        "it claims 1,152,921,504,606,846,976 a",
    ),
    "huge list of texts": (
        header(text(b"a") + struct.pack("<IIQ", 9, 8, HUGE), pairs=1),
        "it claims 1,152,921,504,606,846,976 a",
    ),
    "lists in lists": (
        header(text(b"a") + struct.pack("<IIQ", 9, 9, 1), b"\0" * 50, pairs=1),
        "list of type 9",
    ),
    "unknown type": (header(text(b"a") + struct.pack("<I", 99), pairs=1), "unknown type 99"),
    "a name that is no text": (header(text(b"\xff\xfe") + b"\0" * 9, pairs=1), "invalid text"),
    "a name twice": (header(PAIR, PAIR, pairs=2), "'a' is set twice"),
    "alignment": (
        header(text(b"general.alignment") + struct.pack("<II", 4, 3), pairs=1),
        "not a power of two",
    ),
    "many dimensions": (header(info(b"x", (1,) * 9), tensors=1), "9 dimensions"),
    "no dimensions": (header(info(b"x", ()), b"\0" * 99, tensors=1), "0 dimensions"),
    "a dimension of none": (header(info(b"x", (0, 4)), tensors=1), "has the shape [4, 0]"),
    "broken blocks": (header(info(b"x", (31,), kind=8), tensors=1), "the shape [31] in Q8_0"),
    "far beyond the end": (header(info(b"x", (HUGE, 4)), tensors=1), "would span bytes"),
    "a far offset": (
        header(info(b"x", (4,), offset=2**63), tensors=1),
        "would span bytes",
    ),
    "not aligned": (header(info(b"x", (4,), offset=7), b"\0" * 99, tensors=1), "would span"),
    "a tensor twice": (header(info(b"x", (1,)) * 2, b"\0" * 99, tensors=2), "'x' occurs twice"),
    "one on another": (
        header(info(b"x", (16,)), info(b"y", (16,), offset=32), b"\0" * 200, tensors=2),
        "'x' and 'y' overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_at_once(damage, tmp_path):
    content, output = DAMAGES[damage]
    (tmp_path / "x.gguf").write_bytes(content)
    begun = time.process_time()
    with pytest.raises(DataError) as caught:
        GGUFFile(tmp_path / "x.gguf")
    assert output in caught.value.why
    machine.require_processor(time.process_time() - begun, 1)


def test_a_file_that_is_cut_off_anywhere_is_refused(whole, tmp_path):
    path = tmp_path / "x.gguf"
    cuts = np.random.default_rng(0).integers(0, len(whole) - 32, 60)
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError):
            GGUFFile(path)
    path.write_bytes(whole)
    assert len(GGUFFile(path).tensors) == 30


def test_a_tensor_whose_numbers_are_kept_in_a_way_that_is_not_known_is_named(tmp_path):
    content = header(info(b"x", (4,), kind=77), b"\0" * 64, tensors=1)
    (tmp_path / "x.gguf").write_bytes(content)
    assert GGUFFile(tmp_path / "x.gguf").unread == {"x": (77, (4,))}


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputMissing, match=r"nowhere\.gguf"):
        GGUFFile(tmp_path / "nowhere.gguf")
