"""Holds the trainer's first step after the first one in a phase, so that a test can kill a process in it.

Loaded through ``turnkey.modules``. ``$TURNKEY_PHASE``: the trainer's method; ``$TURNKEY_PHASE_FOLDER``: where the file
``reached`` says that the phase began; it goes on once the file ``go`` is there.
"""

import functools
import os
import time
from pathlib import Path

from verl_turnkey.plugins.verl_api.import_hooks import when_imported

PHASE, FOLDER = os.environ["TURNKEY_PHASE"], Path(os.environ["TURNKEY_PHASE_FOLDER"])


def hold(trainer):
    method = getattr(trainer.TurnkeyTrainerSync, PHASE)

    @functools.wraps(method)
    def held(self, *arguments, **named):
        if self.global_steps == 2:
            (FOLDER / "reached").touch()
            while not (FOLDER / "go").exists():
                time.sleep(0.05)
        return method(self, *arguments, **named)

    setattr(trainer.TurnkeyTrainerSync, PHASE, held)


when_imported("verl_turnkey.plugins.trainer.trainer", hold)
