"""A corridor whose commands are tools, and the parser by which the quickstart's model calls them.

The model knows no JSON, but the words of MiniGrid's actions: "go forward" looks and walks, "turn right" makes a note.
"""

import json
import re
from typing import ClassVar

import gymnasium
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from verl_turnkey.envs import StepResult, ToolEnv, ToolError, tool

CALLS = {"go": ("look", {}), "forward": ("walk", {"steps": 1}), "right": ("note", {"text": "right"}), "up": ("fly", {})}
"""``note`` is a tool of an MCP server, and no one can fly"""


class WordCalls(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        calls = [CALLS[word] for word in re.findall(r"\w+", text) if word in CALLS]
        return text, [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]


class Corridor(ToolEnv):
    """A door three steps ahead."""

    metadata: ClassVar = {**ToolEnv.metadata, "thread_safe": True, "memory_mb": 1}

    def begin(self, seed):
        self.at = seed % 2
        return self.result("You are in a corridor."), "Walk to the door."

    @tool
    def look(self) -> str:
        """See how far the door is."""
        return f"{3 - self.at} steps"

    @tool
    def walk(self, steps: int) -> str:
        """Walk ahead."""
        if steps < 1:
            raise ToolError("walk ahead")
        self.at += steps
        self.ended = self.at >= 3
        return f"walked to {self.at}"

    def result(self, observation):
        return StepResult(
            observation, f"{self.at}", reward=float(self.ended), terminated=self.ended, success=self.ended
        )


gymnasium.register("e2e/Corridor-v0", entry_point=Corridor)
