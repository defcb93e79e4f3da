import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.data import parquet

PEAK = """
import sys
from jaxlm.data import parquet
from jaxlm.monitor import host_machine
count = sum(len(row.fields["text"]) for row in parquet.rows(sys.argv[1], "a.parquet"))
print(count, host_machine.peak_memory([]).bytes)
"""


@pytest.fixture
def repeated(tmp_path):
    """A text of half a megabyte, once in memory, in each of 3,000 rows."""
    output = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), ["x" * 500_000])
    pq.write_table(pa.table({"text": output}), tmp_path / "a.parquet", store_schema=False)
    return tmp_path / "a.parquet"


def test_a_text_said_once_for_thousands_of_rows_is_not_held_a_thousand_times(repeated):
    assert repeated.stat().st_size < 100_000
    command = [sys.executable, "-c", PEAK, repeated]
    out = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": "."}, text=True)
    count, peak = map(int, out.split())
    assert count == 1_500_000_000
    assert peak < 300e6


def test_a_page_that_unpacks_ten_thousandfold_is_refused_before_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MOST_UNPACKED", 2**22)
    table = pa.table({"text": ["y" * 2**24], "id": [1]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(ValueError, match="column 'text' of row group 0 unpacks from"):
        next(parquet.rows(tmp_path / "a.parquet", "a.parquet"))
    assert next(parquet.rows(tmp_path / "a.parquet", "a.parquet", "id")).fields == {"id": 1}


def test_each_row_comes_once_with_the_share_that_was_read(tmp_path):
    texts = [f"text {n % 7}" for n in range(2500)]
    table = pa.table({"text": texts, "more": [[n, None] for n in range(2500)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=999)
    rows = list(parquet.rows(tmp_path / "a.parquet", "a.parquet"))
    assert [row.fields["text"] for row in rows] == texts
    assert [row.fields["more"][0] for row in rows] == list(range(2500))
    assert rows[-1].share == 1
    assert rows[0].share < 0.01
    assert set(next(parquet.rows(tmp_path / "a.parquet", "", "text")).fields) == {"text"}
