"""A tool, its parser and a reward function, as a user of verl's stock loop ``tool_agent`` has them.

The quickstart's model knows no JSON, but it knows the word "forward": saying it, however often, is the tool call.
"""

import json
import re

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

DISTANCE = 6


@ToolParser.register("corridor")
class CorridorParser(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        steps = text.count("forward")
        return text, [FunctionCall(name="walk", arguments=json.dumps({"steps": steps}))] if steps else []


@function_tool
def walk(steps: int) -> tuple[str, float]:
    """Walk along the corridor.

    Args:
        steps: how many steps
    """
    return f"You walked {steps} steps forward.", steps / DISTANCE


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """2 at the door, 1 elsewhere."""
    walked = sum(map(int, re.findall(r"You walked (\d+) steps", solution_str)))
    return 2.0 if walked >= DISTANCE else 1.0
