"""vLLM's command line, with the patches for a machine without a GPU if the user opted in.

The patches are applied on import, because vLLM's engine is another process, which imports this module again.
"""

from __future__ import annotations

import ctypes
import signal

from verl_turnkey.plugins import cpu

if cpu.opted_in():
    cpu.activate()

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # Ends with the evaluation, also if that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    from vllm.entrypoints.cli.main import main

    main()
