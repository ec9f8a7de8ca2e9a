"""Reading the data set's files so that a broken one becomes a finding and the rest is still read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Listing:
    """What the manifest says of one file."""

    rows: int
    sha256: str


def read_manifest(folder: Path) -> tuple[dict[str, Listing], str]:
    """The files that the manifest lists, and what is wrong with it ("" if nothing)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: Listing(entry["rows"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return {}, "missing"
    except UnicodeDecodeError:
        return {}, "not text"
    except json.JSONDecodeError:
        return {}, "not JSON"
    except (KeyError, TypeError, AttributeError):
        return {}, "has no files with rows and sha256"
    return files, ""


def read_table(path: Path, schema: pa.Schema) -> tuple[pa.Table | None, str]:
    """The columns of `schema` in a parquet file and what is wrong ("" if nothing).

    None for a file that cannot be read. A column that is absent or of another type comes back all null.
    `image` comes back dictionary-encoded, because rows share pictures.
    """
    if not path.is_file():
        return None, "missing"
    try:
        with pq.ParquetFile(path, read_dictionary=["image"]) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        return None, f"cannot be read: {' '.join(str(error).split())}"
    problems, columns = [], []
    for field in schema:
        if field.name not in table.column_names:
            problems.append(f"has no column {field.name}")
        elif _type_text(table.schema.field(field.name).type) != _type_text(field.type):
            found = _type_text(table.schema.field(field.name).type)
            problems.append(f"column {field.name} is {found}, not {_type_text(field.type)}")
        else:
            columns.append(table[field.name])
            continue
        columns.append(pa.nulls(table.num_rows, field.type))
    return pa.table(columns, names=schema.names), "; ".join(problems)


def file_rows(path: Path, listed: dict[str, Listing], table: pa.Table | None, problem: str) -> dict[str, Any]:
    """The row of one file in the frame of files."""
    entry = listed.get(path.name)
    rows = 0 if table is None else table.num_rows
    return {
        "file": path.name,
        "problem": problem,
        "rows": rows,
        "is_listed": entry is not None,
        "has_the_listed_rows": entry is None or entry.rows == rows,
        "has_the_listed_hash": entry is None or (path.is_file() and entry.sha256 == _sha256(path)),
    }


def iter_rows(table: pa.Table) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """Each row without its picture, and the picture (one object for all rows that share it)."""
    image = table["image"].combine_chunks()
    if not isinstance(image, pa.DictionaryArray):
        image = image.dictionary_encode()
    distinct = image.dictionary.to_pylist()
    indices = image.indices.to_pylist()
    for row, index in zip(table.drop_columns(["image"]).to_pylist(), indices, strict=True):
        yield row, None if index is None else distinct[index]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _type_text(kind: pa.DataType) -> str:
    """A type as text, without what makes no difference to a reader: encoding, offset width, nullability."""
    if pa.types.is_dictionary(kind):
        return _type_text(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type_text(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_type_text(field.type)}' for field in kind)}>"
    return str(kind).removeprefix("large_")
