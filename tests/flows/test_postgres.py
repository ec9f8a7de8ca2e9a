"""Risk of a setting that nobody has tried: a team's database that only half of the services use."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.databases import MLFLOW_DATABASE, PREFECT_DATABASE, VARIABLE, DatabaseError, resolve_databases
from tests.flows.conftest import Team, free_port, make_project

POSTGRES = shutil.which("postgres")


@pytest.fixture
def postgres() -> Iterator[str]:
    """Address of a PostgreSQL server with nothing in it. PostgreSQL refuses to run as root."""
    assert POSTGRES is not None
    programs = Path(POSTGRES).resolve().parent
    owner = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="toolplan-postgres-"))
    (folder / "password").write_text("secret")
    if owner is not None:
        for path in (folder, folder / "password"):
            shutil.chown(path, owner)
    data, port = folder / "data", free_port()
    initdb = [programs / "initdb", "-D", data, "-U", "toolplan", "--auth=scram-sha-256", "--no-sync"]
    subprocess.run(
        [*initdb, f"--pwfile={folder / 'password'}"], user=owner, check=True, capture_output=True, cwd=folder
    )
    settings = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-p", str(port), "-k", str(folder)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, *settings], user=owner, cwd=folder, stderr=log
        )
    try:
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-q"]
        deadline = time.monotonic() + 30
        while subprocess.run(ready, check=False).returncode != 0:
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"postgresql://toolplan:secret@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)


def rows(server: str, database: str, table: str) -> int:
    import asyncpg

    async def count() -> int:
        connection = await asyncpg.connect(f"{server}/{database}")
        try:
            return int(await connection.fetchval(f"SELECT count(*) FROM {table}"))
        finally:
            await connection.close()

    return asyncio.run(count())


@pytest.mark.skipif(POSTGRES is None, reason="no `postgres` on PATH: install Debian's package postgresql")
@pytest.mark.skipif(
    importlib.util.find_spec("psycopg2") is None, reason="no psycopg2: install the extra [team]"
)
def test_one_setting_puts_both_stores_into_postgresql(postgres: str, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    ports = {name: free_port() for name in ("prefect", "mlflow", "optuna")}
    team = Team(make_project(tmp_path / "project"), tmp_path / "state", ports, postgres)
    try:
        done = team.services("up")
        assert done.returncode == 0, done.stderr
        run = team.submit("pipeline/nightly")
        assert team.ended(run) == "Completed"
        assert rows(postgres, PREFECT_DATABASE, "flow_run") >= 1
        assert rows(postgres, MLFLOW_DATABASE, "runs") == 1
        assert not list(tmp_path.rglob("*.db"))
    finally:
        team.services("down")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("mysql://localhost", "must look like postgresql://"),
        ("postgresql://toolplan@localhost/mlflow", "with no database"),
    ],
)
def test_an_address_that_cannot_work_is_one_line(
    address: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(DatabaseError, match=said) as caught:
        resolve_databases(tmp_path, tmp_path)
    assert "\n" not in str(caught.value)
