"""One file per modifier of other estimators; importing this package registers them."""

from verl_turnkey.advantage.modifiers import (  # noqa: F401  importing a modifier registers it
    a_grae,
    copo,
    dynamo_modulation,
    empg,
    length_gate,
    shrinkage,
    tool_gate,
    unlikeliness,
)
