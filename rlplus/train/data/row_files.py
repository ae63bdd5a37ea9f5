"""Rows of JSONL and Parquet files, here or on the hub (`hf://owner/name/split`), and columns by dotted name."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlplus.common.errors import hint
from rlplus.train.config import HUB_PREFIX, check_data_files, split_hub_path
from rlplus.train.config.folders import DATA_SUFFIXES

Row = dict[str, Any]
_PARQUET = "refs/convert/parquet"  # the branch on which the hub keeps every data set as Parquet
_SURROGATE = re.compile("[\ud800-\udfff]")  # json accepts "\\ud800" alone, though no valid text contains it


def read_rows(paths: Sequence[str], columns: Sequence[str] | None, limit: int | None) -> Iterator[tuple[str, Row]]:
    """The first `limit` rows of all files together, each with its place ("train.jsonl:12") for messages.

    paths: files, or splits on the hub (`local_files`). columns: those to read from Parquet files; None = all.
    ValueError for a missing file, an unknown kind of file, a malformed line, and a column that a Parquet file lacks.
    """
    check_data_files(paths, "data.path")  # must precede reading: a run must not fail at its last file after minutes

    def rows() -> Iterator[tuple[str, Row]]:
        for path in chain.from_iterable(map(local_files, paths)):
            yield from _jsonl(path) if path.suffix == ".jsonl" else _parquet(path, columns)

    return islice(rows(), limit)


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.rstrip().decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: invalid JSON: {error.msg} at column {error.colno}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: want UTF-8 text; got {error}") from error
            except ValueError as error:  # an integer of thousands of digits
                raise ValueError(f"{where}: invalid JSON: {error}") from error
            except RecursionError:
                raise ValueError(f"{where}: invalid JSON: nested too deeply") from None
            if rb"\ud" in line.lower() and (sign := _SURROGATE.search(json.dumps(row, ensure_ascii=False))):
                raise ValueError(f"{where}: want text that UTF-8 can hold; got the lone surrogate {sign[0]!r}")
            if not isinstance(row, dict):
                raise ValueError(f"{where}: want a JSON object; got {type(row).__name__}")
            yield where, row


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            for column in columns or ():
                if not _in_schema(schema, column):
                    raise MissingColumn(str(path), column, _schema_names(schema))
            heads = [column if column in schema.names else column.split(".")[0] for column in columns or schema.names]
            for batch in file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(heads))):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after row {number}: want UTF-8 text; got {error}") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file: {error}") from error


def _in_schema(schema: Any, column: str) -> bool:
    if column in schema.names:
        return True
    fields = {field.name: field for field in schema}
    kind = None
    for part in column.split("."):
        if part not in fields:
            return False
        kind = fields[part].type
        fields = {field.name: field for field in kind.fields} if pa.types.is_struct(kind) else {}
    return True


def _schema_names(schema: Any) -> list[str]:
    names = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{inner.name}" for inner in field.type.fields]
    return names


def required_column(where: str, row: Row, column: str) -> Any:
    """The column's value; `MissingColumn` without it."""
    try:
        return get_column(row, column)
    except KeyError:
        raise MissingColumn(where, column, row_names(row)) from None


def row_names(row: Row) -> list[str]:
    """The names that `get_column` accepts for this row, two levels deep."""
    names = []
    for name, value in row.items():
        names.append(name)
        if isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in value]
    return names


def get_column(row: Row, column: str) -> Any:
    """The value under a dotted name, None inside a null; KeyError if there is no such column."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(column)
        value = value[part]
    return value


class MissingColumn(ValueError):
    """A row or a file without the column."""

    def __init__(self, where: str, column: str, names: Sequence[str]) -> None:
        super().__init__(f"{where}: want a column {column!r}; got {', '.join(names) or 'none'}{hint(column, names)}")
        self.column = column


def local_files(path: str) -> list[Path]:
    """The files of a data path: itself, or the files of a split on the hub, which are downloaded first.

    hf://owner/name/split, hf://owner/name/configuration/split, or hf://owner/name/ and a file of the repository.
    ValueError if the data set or split does not exist, or its download fails.
    """
    if not path.startswith(HUB_PREFIX):
        return [Path(path)]
    name, rest = split_hub_path(path)
    from huggingface_hub import snapshot_download

    file = rest.endswith(DATA_SUFFIXES)
    pattern = rest if file else f"{rest}/*.parquet" if "/" in rest else f"*/{rest}/*.parquet"
    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=None if file else _PARQUET, allow_patterns=[pattern]
        )
    except Exception as error:  # its classes come from several libraries
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"want {path}; {name} could not be loaded from the hub: {reason}") from error
    found = sorted(Path(folder).glob(pattern))
    if len(configurations := sorted({file.parent.parent.name for file in found})) > 1:
        raise ValueError(
            f"want {HUB_PREFIX}{name}/CONFIGURATION/{rest}, as it has several: {', '.join(configurations)}"
        )
    if not found:
        have = sorted({str(file.parent.relative_to(folder)) for file in Path(folder).glob("*/*/*.parquet")})
        came = f"; loaded before: {', '.join(have)}" if have else ""
        raise ValueError(f"want {path}: {name} has no {'file' if file else 'split'} {rest!r}{came}")
    return found
