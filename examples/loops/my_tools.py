"""verl's tool loop with a record, so that every method works on its turns (docs/record.md)."""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop

from verl_turnkey.loops import make_record, make_step


class RecordedTools(ToolAgentLoop):
    """A step per response: its action the calls in it, its reward what their tools returned."""

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        # What the model knows: the task and the last answer. Responses of a group with equal anchors are compared.
        anchor = json.dumps([agent_data.messages[0], agent_data.messages[-1]], sort_keys=True, default=str)
        agent_data.tool_calls = []
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        calls = json.dumps([[call.name, call.arguments] for call in agent_data.tool_calls])
        step = {"anchor": anchor, "action": calls if agent_data.tool_calls else None, "reward": 0.0}
        agent_data.extra_fields.setdefault("steps", []).append(step)
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        before = len(agent_data.tool_rewards)
        state = await super()._handle_processing_tools_state(agent_data)
        agent_data.extra_fields["steps"][-1]["reward"] += sum(agent_data.tool_rewards[before:])
        return state

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        steps = output.extra_fields.pop("steps")
        total = sum(step["reward"] for step in steps)
        won = total >= 1.0
        steps[-1]["terminated"] = True
        output.extra_fields["turnkey"] = make_record(
            [make_step(step=t, success=won, **step) for t, step in enumerate(steps)]
        )
        output.reward_score = total  # what verl's metrics and validation see
        output.extra_fields["reward_extra_info"] = {"acc": float(won), "failed": 0.0}
        return output
