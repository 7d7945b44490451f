"""Property tests draw the same examples in every run and know no time: a suite that fails has found a defect.

``pytest tests/unit --hypothesis-profile=default`` draws others.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
