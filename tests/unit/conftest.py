"""Property tests draw the same examples in every run and know no time: a suite that fails has found a defect.

``pytest tests/unit --hypothesis-profile=default`` draws others; ``first_failure`` does not look for the smallest one.
"""

import os

from hypothesis import HealthCheck, Phase, settings

# The tensors of these tests are small: torch's threads would only wait for each other, the longer the busier a machine.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("first_failure", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")
