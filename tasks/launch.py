"""Starting a training stage once per GPU: the stage's own command starts its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tasks.params import Params


def start_ranks(module: str, arguments: Sequence[str], params: Params) -> bool:
    """Run `python -m module` once per rank under torchrun, if this process should; returns whether it did.

    With `params.sft.processes` 1, or inside a rank already, the caller goes on itself.

    Raises:
        RuntimeError: a rank failed; its own output says why.
    """
    if params.sft.processes == 1 or "RANK" in os.environ:
        return False
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={params.sft.processes}", "-m", module, *arguments]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise RuntimeError(f"{module}: a rank ended with exit code {code}; its output is above")
    return True
