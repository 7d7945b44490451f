"""One file per modifier of other estimators; importing this package registers them."""

from verl_turnkey.advantage.modifiers import (  # noqa: F401  importing a modifier registers it
    a_grae,
    agent_opsd,
    copo,
    dynamo_modulation,
    empg,
    grsd,
    hcapo,
    length_gate,
    opid,
    rank_shaping,
    rlsd,
    shrinkage,
    tool_gate,
    trace,
    trial,
    unlikeliness,
)
