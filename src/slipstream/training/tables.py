"""Tables: records as Parquet, for whoever analyses traffic with other tools; needs pyarrow (the extra `train`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError
from slipstream.training.logs import LogError, record_of, row_of
from slipstream.training.records import Record, RecordError

ROWS = 1024
"""Records of a row group."""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow: pip install '.[train]' in Slipstream's folder; or use .jsonl"
        ) from error
    return pyarrow


def write_parquet(records: Iterable[Record], path: Path) -> int:
    """One row a record; returns how many. Raises UsageError without pyarrow."""
    arrow = _pyarrow()
    numbers, words = arrow.list_(arrow.uint32()), ("target", "template", "tag", "key", "request")
    columns = [("tokens", numbers), ("spans", arrow.list_(arrow.list_(arrow.int32()))), ("steps", numbers)]
    columns += [("settings", arrow.map_(arrow.string(), arrow.float64())), ("time", arrow.float64())]
    schema = arrow.schema(columns + [(name, arrow.string()) for name in words])
    count = 0
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        for record in records:
            rows.append(row_of(record) | {"settings": list(record.settings.items())})
            if len(rows) == ROWS:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                count, rows = count + len(rows), []
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema))
    return count + len(rows)


def read_parquet(path: Path) -> Iterator[Record]:
    """Raises LogError for a file that is none of ours."""
    arrow = _pyarrow()
    try:
        file = arrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(ROWS):
            for row in batch.to_pylist():
                yield record_of(row | {"settings": dict(row.get("settings") or ())})
    except (OSError, arrow.ArrowInvalid, KeyError, TypeError, ValueError, RecordError) as error:
        if isinstance(error, SlipstreamError) and not isinstance(error, RecordError):
            raise
        raise LogError(f"{path}: is no table of records: {error}") from error
