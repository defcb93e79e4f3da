"""Rows of a Parquet file, in bounded memory whatever it unpacks to."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.core.errors import not_installed

# A column of a row group that is packed tighter than any text, and large, was made to fill a memory. Repeated text
# that is real packs to a hundredth.
TIGHTEST = 1000
MOST_UNPACKED = 2**28  # bytes; below it a column may pack as tightly as it likes
ROWS = 16  # made into Python's objects at once: one value of a dictionary can stand in each of a thousand rows


class Row(NamedTuple):
    """A row, and the share of the file's rows up to its end."""

    fields: dict[str, Any]
    share: float


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Where each row group begins, in bytes, and its rows.

    Raises:
      InputMissing: where pyarrow is not there.
      Exception: pyarrow's own, where the file is damaged.
    """
    with _opened(path, str(path)) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    return [(_begin(group), group.num_rows) for group in groups]


def _begin(group: Any) -> int:
    """The first byte of a row group; its own field for that is left 0 by some writers."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return min(c.dictionary_page_offset or c.data_page_offset for c in columns)


def rows(
    source: Path | IO[bytes],
    name: str,
    column: str | None = None,
    groups: range | None = None,
) -> Iterator[Row]:
    """Every row, or those of some row groups, with this column alone where there is one of that name.

    A page says itself what it unpacks to, and is held whole: one that lies about it may take up to 2 GiB, the most
    that the format can say.

    Raises:
      InputMissing: where pyarrow is not there.
      ValueError: where a column unpacks to far more than text does, before it is.
    """
    with _opened(source, name) as file:
        columns = [column] if column and column in file.schema_arrow.names else None
        all_of_them = range(file.metadata.num_row_groups)
        groups = all_of_them if groups is None else all_of_them[groups.start : groups.stop]
        _refuse_bombs(file.metadata, columns, groups)
        count, read = max(file.metadata.num_rows, 1), 0
        for batch in file.iter_batches(batch_size=1024, columns=columns, row_groups=[*groups]):
            for start in range(0, len(batch), ROWS):
                part = batch.slice(start, ROWS)
                read += len(part)
                for fields in part.to_pylist():
                    yield Row(fields, read / count)


def _opened(source: Path | IO[bytes], name: str) -> Any:
    try:
        import pyarrow.parquet as parquet
        import pyarrow.types as types
    except ImportError as error:
        raise not_installed("reading Parquet", "pyarrow", "parquet", where=name) from error
    schema = parquet.ParquetFile(source).schema_arrow
    # Kept as indices, what is said once is held once.
    texts = [field.name for field in schema if types.is_string(field.type)]
    return parquet.ParquetFile(source, read_dictionary=texts)


def _refuse_bombs(metadata: Any, columns: list[str] | None, groups: range) -> None:
    for group in groups:
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            if columns and chunk.path_in_schema not in columns:
                continue
            packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
            if unpacked > MOST_UNPACKED and unpacked > TIGHTEST * packed:
                raise ValueError(
                    f"column {chunk.path_in_schema!r} of row group {group} unpacks from {packed:,} to {unpacked:,} bytes"
                )
