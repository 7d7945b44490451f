"""Log-probabilities of the policy's own tokens under a prompt with a further text, and where that text comes from.

A source of your own::

    from verl_turnkey.plugins.teacher import TeacherRow, register_teacher_source
"""

from verl_turnkey.plugins.teacher.sources import (
    TeacherEpisode,
    TeacherRow,
    TeacherSource,
    read_source,
    register_teacher_source,
    teacher_sources,
)

__all__ = ["TeacherEpisode", "TeacherRow", "TeacherSource", "read_source", "register_teacher_source", "teacher_sources"]
