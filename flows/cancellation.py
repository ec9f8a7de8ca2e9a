"""A cancelled run ends as Cancelled, with its records closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment

from tasks.tracking import Terminated


@contextmanager
def cancellable() -> Iterator[None]:
    """Hand a SIGTERM on to Prefect after MLflow's runs have been closed.

    An open MLflow run takes the signal first (tasks/tracking.py). Started by a worker, Prefect has to get it
    too: it knows whether the run was cancelled, and would call any other exit a crash. A flow that somebody
    started by hand keeps the exit code of a terminated program.
    """
    try:
        yield
    except Terminated as error:
        if deployment.id is None:
            raise
        raise TerminationSignal(signal.SIGTERM) from error
