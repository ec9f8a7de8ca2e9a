"""A Prefect server for the time of one process, where none is configured.

Prefect starts one by itself, but as a child in the terminal's process group: Ctrl-C ends it before the flow
has reported its end, which then retries for minutes, and after SIGKILL it stays for ever. This one runs
behind a guard (tasks/process_group.py): it outlives Ctrl-C, and ends when this process does, however that
happens. Not earlier, since Prefect sends its last logs when the interpreter exits.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.env import offline_environment
from tasks.process_group import Guarded

# A temporary server on a busy machine, and one that should be there already.
STARTUP_S, CONFIGURED_S = 120.0, 15.0


class ServerError(Exception):
    """There is no healthy server; one line with what to do."""


@contextmanager
def prefect_server() -> Iterator[float]:
    """Flows in the `with` block use the configured server (PREFECT_API_URL), or else a temporary one.

    The temporary server starts in the background. Call `wait_for_server` before the first flow, with the
    number of seconds that this yields.
    """
    if PREFECT_API_URL.value():
        yield CONFIGURED_S
        return
    port = _free_port()
    api = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # The pages ask port 4200 unless told otherwise.
    env = {**os.environ, **offline_environment(), "PREFECT_UI_API_URL": api}
    Guarded(command, env, quiet=True)
    with temporary_settings({PREFECT_API_URL: api}):
        yield STARTUP_S


def wait_for_server(patience_s: float) -> None:
    """Return as soon as the server at PREFECT_API_URL is healthy.

    Raises:
        ServerError: it is not after `patience_s` seconds.
    """
    url = f"{PREFECT_API_URL.value()}/health"
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"no Prefect server at {url} ({error}); start one with `prefect server start`, or unset "
                    "PREFECT_API_URL to use a temporary one"
                ) from None
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
