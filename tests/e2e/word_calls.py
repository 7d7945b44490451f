"""Calls of BFCL's tools by a model that knows no JSON, but the words of MiniGrid's actions."""

import json
import re

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

CALLS = {"go": ("pwd", {}), "forward": ("ls", {"a": True})}


class BfclCalls(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        calls = [CALLS[word] for word in re.findall(r"\w+", text) if word in CALLS]
        return text, [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls]
