"""A file in blocks reads back what was written and nothing else."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from jaxlm.data.blocks import BLOCK, BlockReader, BlockWriter, Damage


def _written(path: Path, size: int) -> tuple[bytes, BlockWriter]:
    content = random.Random(size).randbytes(size)
    writer = BlockWriter(path)
    values = np.frombuffer(content, np.uint8)
    for part in np.array_split(values, 7):
        writer.write(part)
    writer.close()
    return content, writer


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 50 * BLOCK + 17])
def test_any_part_of_a_file_is_read_back(tmp_path: Path, size: int) -> None:
    content, writer = _written(tmp_path / "a", size)
    assert (tmp_path / "a").read_bytes() == content
    assert len(writer.checks) == -(-size // BLOCK)
    reader = BlockReader(tmp_path / "a", size, writer.checks)
    draw = random.Random(0)
    for _ in range(50):
        start, stop = sorted(draw.choices(range(size + 1), k=2))
        assert reader.read(start, stop) == content[start:stop]
    with pytest.raises(Damage, match="were requested"):
        reader.read(0, size + 1)


def test_a_flipped_bit_fails_every_read_of_its_block_and_no_other(tmp_path: Path) -> None:
    path, size = tmp_path / "a", 3 * BLOCK
    content, writer = _written(path, size)
    bad = bytearray(content)
    bad[BLOCK + 5] ^= 1
    path.write_bytes(bad)
    reader = BlockReader(path, size, writer.checks)
    assert reader.read(0, BLOCK) == content[:BLOCK]
    assert reader.read(2 * BLOCK, size) == content[2 * BLOCK :]
    for start, stop in ((BLOCK - 1, BLOCK + 1), (2 * BLOCK - 1, 2 * BLOCK), (0, size)):
        with pytest.raises(Damage, match=f"bytes {BLOCK} to {2 * BLOCK - 1} differs"):
            reader.read(start, stop)


def test_a_file_truncated_or_removed_while_open_is_detected(tmp_path: Path) -> None:
    path, size = tmp_path / "a", 3 * BLOCK
    _, writer = _written(path, size)
    reader = BlockReader(path, size, writer.checks)
    os.truncate(path, BLOCK + 1)
    with pytest.raises(Damage, match=f"truncated after byte {BLOCK + 1}"):
        reader.read(BLOCK, BLOCK + 1)
    path.unlink()
    with pytest.raises(Damage, match="removed or replaced"):
        reader.read(0, 1)
    with pytest.raises(Damage, match="cannot be opened"):
        BlockReader(path, size, writer.checks)
