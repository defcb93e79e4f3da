"""Rows of a Parquet file, in bounded memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.core.errors import not_installed

# A large column of a row group with a higher compression ratio than any text is a decompression
# bomb. Real repetitive text compresses to a hundredth.
TIGHTEST = 1000
MOST_UNPACKED = 2**28  # bytes; a smaller column may have any compression ratio
ROWS = 16  # converted at once: a dictionary value can occur in each of a thousand rows


class Row(NamedTuple):
    """A row, and the share of the file's rows read so far."""

    fields: dict[str, Any]
    share: float


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Return offset in bytes and number of rows of each row group.

    Raises:
      InputMissing: pyarrow is not installed.
      Exception: pyarrow's own, for a damaged file.
    """
    with _opened(path, str(path)) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    return [(_begin(group), group.num_rows) for group in groups]


def _begin(group: Any) -> int:
    """Return the offset of a row group; some writers leave its own field 0."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return min(c.dictionary_page_offset or c.data_page_offset for c in columns)


def rows(
    source: Path | IO[bytes],
    name: str,
    column: str | None = None,
    groups: range | None = None,
) -> Iterator[Row]:
    """Yield every row, or those of some row groups; only `column` if it exists.

    A page states its own unpacked size and is held whole: a false one can take up to 2 GiB, the
    limit of the format.

    Raises:
      InputMissing: pyarrow is not installed.
      ValueError: a column would unpack to far more than text does; raised before it does.
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
    # Read as indices, a repeated text is held once.
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
                    f"column {chunk.path_in_schema!r} of row group {group} unpacks from"
                    f" {packed:,} to {unpacked:,} bytes"
                )
