"""Where Prefect and MLflow keep their tables: files in the project, or PostgreSQL by one setting.

TOOLPLAN_DATABASE=postgresql://user:password@host:5432 serves both. Each gets a database of its own on that
server, made on first use: both keep a table `alembic_version`, which they cannot share.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

VARIABLE = "TOOLPLAN_DATABASE"
PREFECT_DATABASE, MLFLOW_DATABASE = "toolplan_prefect", "toolplan_mlflow"


class DatabaseError(Exception):
    """The database server cannot be used; one line with what to do."""


@dataclass(frozen=True)
class Databases:
    """SQLAlchemy addresses, as each program wants them."""

    prefect: str
    mlflow: str


def resolve_databases(root: Path, state: Path) -> Databases:
    """The stores of both programs; on PostgreSQL the databases are created if they are not there.

    Raises:
        DatabaseError: the setting is no PostgreSQL address, its server refuses, or the driver is missing.
    """
    server = os.environ.get(VARIABLE)
    if not server:
        return Databases(f"sqlite+aiosqlite:///{state / 'prefect.db'}", f"sqlite:///{root / 'mlflow.db'}")
    address = urlsplit(server)
    if address.scheme not in {"postgresql", "postgres"} or address.path.strip("/"):
        raise DatabaseError(
            f"{VARIABLE}: must look like postgresql://user:password@host:5432, with no database"
        )
    if importlib.util.find_spec("psycopg2") is None:
        raise DatabaseError(
            f"{VARIABLE} is set, but MLflow's driver is missing: pip install -c constraints.txt -e '.[team]'"
        )
    asyncio.run(_create_databases(f"postgresql://{address.netloc}"))
    return Databases(
        f"postgresql+asyncpg://{address.netloc}/{PREFECT_DATABASE}",
        f"postgresql://{address.netloc}/{MLFLOW_DATABASE}",
    )


async def _create_databases(server: str) -> None:
    import asyncpg

    where = f"{VARIABLE}: {urlsplit(server).hostname}"
    try:
        connection = await asyncpg.connect(f"{server}/postgres", timeout=10)
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise DatabaseError(f"{where}: {error}; is the server running, and is the password right?") from None
    try:
        for name in (PREFECT_DATABASE, MLFLOW_DATABASE):
            if await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", name) is None:
                await connection.execute(f'CREATE DATABASE "{name}"')
    except asyncpg.PostgresError as error:
        raise DatabaseError(
            f"{where}: {error}; let an administrator run `createdb {PREFECT_DATABASE}` and "
            f"`createdb {MLFLOW_DATABASE}`"
        ) from None
    finally:
        await connection.close()
