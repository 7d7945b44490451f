"""A trajectory log of version 1, as its writer left it: ``tests/data/log_version_1.json`` as parquet files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = Path(__file__).parents[1] / "data" / "log_version_1.json"
SEGMENT = "20260101T000000_0000"


def write(run: Path) -> Path:
    """Write ``RUN/turnkey_log``; returns that folder."""
    held, folder = json.loads(SOURCE.read_text(encoding="utf-8")), run / "turnkey_log"
    for name, table in held["tables"].items():
        columns = {
            column: pa.array([row[i] for row in table["rows"]], pa.type_for_alias(kind))
            for i, (column, kind) in enumerate(table["columns"].items())
        }
        (folder / name / "step=000001").mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / name / "step=000001" / f"{SEGMENT}-0-0.parquet")
    (folder / "run.json").write_text(json.dumps(held["run.json"]), encoding="utf-8")
    return folder
