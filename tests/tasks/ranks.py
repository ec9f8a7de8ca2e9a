"""Two ranks for test_launch.py: `python -m tests.tasks.ranks LAUNCH|fail|sleep FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tasks.launch import _end_with_launcher, run_ranks


def main(what: str, folder: Path) -> None:
    if "RANK" not in os.environ:
        run_ranks([sys.executable, "-m", "tests.tasks.ranks", what, str(folder)], 2)
        return
    _end_with_launcher()
    (folder / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    if what == "fail" and os.environ["RANK"] == "1":
        sys.exit(3)
    if what != "end":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
