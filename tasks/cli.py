"""What every `python -m tasks.<name>` shares: known errors become one line, everything else stays loud."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from tasks.params import PROJECT_ROOT, ParamsError
from tasks.tracking_store import TrackingError

log = logging.getLogger(__name__)

# What libraries say when the disk is full and the errno is lost on the way (torch.save, sqlite, arrow).
_DISK_FULL_TEXTS = ("No space left on device", "disk is full", "PytorchStreamWriter failed writing file")


def run_main(main: Callable[[], int | None], *known: type[Exception]) -> NoReturn:
    """Run a command's `main` and exit: 0 (or what it returned), 2 for bad parameters, 1 for a known error.

    Known are ParamsError, TrackingError, OSError (missing file, full disk) and the classes in `known`: they
    print their message to stderr, one line per mistake, and their traceback goes to `outputs/logs/`.
    Ctrl-C exits with 130. Any other exception keeps its traceback.
    """
    expected: tuple[type[Exception], ...] = (TrackingError, *known)
    _configure_logging()
    try:
        code = main()
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on from the last checkpoint", 130)
    except ParamsError as error:
        _fail(str(error), 2)
    except expected as error:
        _fail(_disk_full(error) or str(error), 1)
    except OSError as error:
        _fail(_disk_full(error) or _os_error_line(error), 1)
    except Exception as error:
        line = _disk_full(error)
        if line is None:
            raise
        _fail(line, 1)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> NoReturn:
    log.debug("exit %d", code, exc_info=True)
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def _os_error_line(error: OSError) -> str:
    name = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{name}"


def _disk_full(error: BaseException) -> str | None:
    """One line if a full disk is at the bottom of `error`, else None."""
    for cause in _chain(error):
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or any(text in str(cause) for text in _DISK_FULL_TEXTS):
            name = getattr(cause, "filename", None) or PROJECT_ROOT
            return f"no space left on the disk of {name}: free some, then run the same command again"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


class _QuietFileHandler(logging.FileHandler):
    """A log file that can't be written (full disk) must not hide the error that is being logged."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: stderr already has the message."""


def _configure_logging() -> None:
    """Messages to stderr, everything of ours down to debug to `outputs/logs/<command>.log`."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name if spec is not None else Path(sys.argv[0]).stem
    console = logging.StreamHandler()
    console.setLevel(logging.INFO)
    console.setFormatter(logging.Formatter("%(message)s"))
    handlers: list[logging.Handler] = [console]
    folder = PROJECT_ROOT / "outputs" / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _QuietFileHandler(folder / f"{name}.log", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    except OSError as error:
        print(f"warning: no log file: {_os_error_line(error)}", file=sys.stderr)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in ("flows", "tasks", "models", "environments", "tools"):
        logging.getLogger(package).setLevel(logging.DEBUG)
