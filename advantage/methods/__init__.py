"""One file per method; importing this package registers them. What several share begins with an underscore."""

from verl_turnkey.advantage.methods import (  # noqa: F401  importing a method registers it
    gigpo,
    grpo_steps,
    hdpo,
    hgpo,
    proxmo,
    rebn,
    salt,
    seeupo,
    turn_gae,
    vc_gae,
)
