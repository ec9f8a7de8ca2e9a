"""Risks of a server of our own: it dies before the flow has reported, or it never dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from flows.temporary_server import ServerError, wait_for_server
from tasks.params import PROJECT_ROOT

CODE = """
from prefect.settings import PREFECT_API_URL
from flows.temporary_server import prefect_server, wait_for_server
import time
with prefect_server() as patience_s:
    wait_for_server(patience_s)
    try:
        print(PREFECT_API_URL.value(), flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        wait_for_server(1)
        print("still there", flush=True)
    time.sleep(600)
"""


def test_the_server_outlives_ctrl_c_and_not_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    owner = subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    address = owner.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    os.killpg(owner.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert owner.stdout.readline().strip() == "still there"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except urllib.error.URLError:
            return
        except (ConnectionError, TimeoutError):
            pass  # it died, or is busy dying, after it took the question: ask again
        time.sleep(0.2)
    pytest.fail("the server is still there")


def test_a_configured_server_that_is_away_is_one_line() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(ServerError, match="start one with `prefect server start`") as caught,
    ):
        wait_for_server(0.5)
    assert "\n" not in str(caught.value)
