"""One ad-hoc SELECT in a process of its own: run as a script, with no part of Lanterne imported.

stdin: JSON {"sql", "folder", "rows", "memory_bytes", "seconds"}; stdout: {"columns", "rows", "truncated"} or
{"error"}. The process may use so much memory and CPU and no more; DuckDB sees the Parquet files of
``folder`` as views of their names and nothing else of the machine.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

ANSWER_BYTES_MAX = 8 << 20


def _limit(memory_bytes: int, seconds: int) -> None:
    """``memory_bytes`` come on top of the address space that the interpreter and DuckDB have reserved by now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    bound = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(v) for v in value]
    return str(value)


def run(sql: str, folder: str, rows: int, memory_bytes: int, seconds: int) -> dict[str, Any]:
    """Execute and fetch at most ``rows`` rows."""
    import duckdb

    connection = duckdb.connect(
        ":memory:", config={"threads": 1, "memory_limit": f"{memory_bytes // 2 >> 20}MiB", "temp_directory": ""}
    )
    _limit(memory_bytes, seconds)
    quoted = folder.replace("'", "''")
    connection.execute(f"SET allowed_directories = ['{quoted}/']")
    connection.execute("SET enable_external_access = false")
    for file in sorted(Path(folder).glob("*.parquet")):
        connection.execute(f"CREATE VIEW {file.stem} AS SELECT * FROM read_parquet('{quoted}/{file.name}')")
    connection.execute("SET lock_configuration = true")
    statements = duckdb.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        return {"error": "exactly one SELECT is taken"}
    cursor = connection.execute(statements[0])
    columns = [str(d[0]) for d in cursor.description or ()]
    found = cursor.fetchmany(rows + 1)
    return {"columns": columns, "rows": [[_plain(v) for v in r] for r in found[:rows]], "truncated": len(found) > rows}


def main() -> int:
    try:
        answer = run(**json.load(sys.stdin))
    except MemoryError:
        answer = {"error": "the query needs more memory than it may have"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    text = json.dumps(answer)
    if len(text) > ANSWER_BYTES_MAX:
        text = json.dumps({"error": f"the answer is larger than {ANSWER_BYTES_MAX} bytes; ask for less"})
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
