"""The first prompt of a task as the model gets it, and its number of tokens."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.answers import Info
from verl_turnkey.envs.prompting.actions import CALLS, TOOLS, instruction_of
from verl_turnkey.envs.prompting.prompts import (
    Examples,
    Memory,
    PromptHistory,
    build_messages,
    fit_prompt,
    load_template,
)
from verl_turnkey.plugins.checks.resources import PROCESSORS
from verl_turnkey.plugins.config.schema import TurnkeyConfig, load_examples


def measure(config: DictConfig, turnkey: TurnkeyConfig, observation: str, info: Info) -> tuple[str, int] | None:
    """The first prompt as text, and its number of tokens; None if the tokenizer is not a plain local one."""
    model = config.actor_rollout_ref.model
    path = Path(model.path).expanduser()
    special = any(model.get(key) for key in ("tokenizer_path", "trust_remote_code", "custom_chat_template"))
    if not path.is_dir() or special:
        return None  # not a plain local tokenizer: the agent loop measures each prompt anyway
    from transformers import AutoTokenizer

    from verl_turnkey.plugins.rollout.token_spans import check_spaces

    tokenizer = AutoTokenizer.from_pretrained(path)
    check_spaces(tokenizer)
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    tools, fmt = None, turnkey.rollout.action_format
    if fmt in CALLS:
        from verl_turnkey.plugins.rollout.action_reader import ACT, check_tool_template

        check_tool_template(tokenizer, fmt, **kwargs)
        tools = info.get("tools") if fmt == TOOLS else [ACT]
    # With images the workers check, which have a processor.
    if not any((path / name).is_file() for name in PROCESSORS):
        from verl_turnkey.plugins.rollout.turn_tail import learn
        from verl_turnkey.plugins.verl_api.builders import builder_of

        model_type = json.loads(read_text(path / "config.json", only_utf8=True)).get("model_type")
        builder = builder_of(config, tokenizer, None, model_type)
        if turnkey.rollout.prompt == "conversation":
            learn(builder, tokenizer, tools, turnkey.rollout.observation_role)

    options, goal, instruction = turnkey.rollout, info["task"], instruction_of(fmt)
    template, turns = load_template(options.template), load_examples(options.examples)
    examples = Examples(turns, fmt, template, instruction, options.prompt == "conversation")
    text = options.system_of((info.get("extra") or {}).get("role"))
    system = [{"role": "system", "content": text}] if text else []

    def encode(past: PromptHistory) -> list[int]:
        now = build_messages(
            template=template,
            task=goal,
            history=past.turns,
            observation=observation,
            admissible=info["admissible"],
            instruction=instruction,
            examples=examples.text,
        )
        messages = [*system, *examples.messages(goal), *now]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, tools=tools, **kwargs
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, _ = fit_prompt(encode, Memory(0), config.actor_rollout_ref.rollout.prompt_length)
    return tokenizer.decode(ids, skip_special_tokens=False), len(ids)
