"""vLLM's own command line, with the patches for a machine without a GPU where they were asked for.

The patches are applied when the module is imported, for vLLM's engine is a process that imports it anew.
"""

from __future__ import annotations

import ctypes
import signal

from verl_turnkey.plugins import cpu

if cpu.opted_in():
    cpu.activate()

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # Ends with the evaluation, also where that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    from vllm.entrypoints.cli.main import main

    main()
