"""For agent loops and agent-loop managers of your own: records, rows, and the trajectory log (docs/record.md)."""

from verl_turnkey.advantage import make_record, make_step
from verl_turnkey.plugins.rollout.merging import merge_rows
from verl_turnkey.plugins.rollout.recorder import EpisodeRecorder, drain_log

__all__ = ["EpisodeRecorder", "drain_log", "make_record", "make_step", "merge_rows"]
