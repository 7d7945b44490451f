"""What an example turn does for a small model: valid first actions in 24 tasks, with and without one.

``python benchmarks/example_turns.py MODEL`` plays the first turn of 24 errands greedily on the CPU, with the package's
own prompts: a conversation without examples, with one real example turn, and with the same turn as text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.actions import INSTRUCTIONS, parse_action
from verl_turnkey.envs.prompting.prompts import Examples, ExampleTurn, build_messages, load_template

EXAMPLE = ExampleTurn(
    task="Zoe wants the vase from the pantry. Bring it to the hall.",
    observation="You are in the hall.",
    action="go pantry",
)
TASKS = 24


def prompts(fmt: str, kind: str) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The environment at its start, and the messages of its first prompt."""
    template = load_template("default")
    turns = [EXAMPLE] if kind != "none" else []
    examples = Examples(turns, fmt, template, INSTRUCTIONS[fmt], conversation=kind == "turn")
    for seed in range(TASKS):
        env = make("turnkey/Errands-v0")
        observation, info = env.reset(seed=seed)
        now = build_messages(
            system=None,
            template=template,
            task=info["task"],
            history=(),
            observation=observation,
            admissible=None,
            instruction=INSTRUCTIONS[fmt],
            examples=examples.text,
        )
        yield env, [*examples.messages(info["task"]), *now]


def valid(env: Any, text: str, fmt: str) -> bool:
    action = parse_action(text, fmt, None).action
    return action is not None and not env.step(action)[4]["invalid"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    for fmt in ("plain", "tags"):
        for kind in ("none", "text", "turn"):
            number, last = 0, ""
            for env, messages in prompts(fmt, kind):
                ids = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                out = model.generate(**ids, max_new_tokens=args.tokens, do_sample=False)
                last = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
                number += valid(env, last, fmt)
            print(
                f"{fmt:6} example: {kind:5} {number} of {TASKS} first actions valid; the last turn: {last!r}",
                flush=True,
            )


if __name__ == "__main__":
    main()
