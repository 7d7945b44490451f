"""Which tokens of a turn are its switch, its subgoal and its action: as the agent loop records them."""

from __future__ import annotations

import real_tokenizers

from verl_turnkey.envs.prompting.actions import STREAMS
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout.token_spans import STREAM_COLUMNS, stream_columns

TURNS = [
    "<switch>SWITCH</switch><subgoal>find the key</subgoal><action>look</action>",
    "Hm. <switch>KEEP</switch>\n<subgoal>find the key</subgoal> <action>win</action>",
]


def part(text: str, stream: str) -> str:
    return text[text.index(f"<{stream}>") : text.index(f"</{stream}>") + len(stream) + 3]


def test_the_record_says_which_tokens_are_whose(play, tokenizer):
    options = ["turnkey.rollout.action_format=hiper", "turnkey.rollout.max_tokens_per_turn=120"]
    outputs, _ = play(TURNS, Task("contract/Awkward-v0", 3), *options, "data.max_response_length=512")
    extras = [step["extra"] for row in outputs for step in row.extra_fields["turnkey"]["steps"]]
    assert [extra["switch"] for extra in extras] == [1, 0]
    for extra, row, text in zip(extras, outputs, TURNS, strict=True):
        for stream in STREAMS:
            own = row.response_ids[extra[f"from_{stream}"] : extra[f"to_{stream}"]]
            assert tokenizer.decode(own) == part(text, stream)
            assert extra[f"has_{stream}"] == 1


def test_a_token_that_two_decisions_share_is_in_both():
    tokenizer = real_tokenizers.tokenizer("qwen3")
    for text in TURNS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        columns = stream_columns(ids, text, tokenizer)
        assert columns.keys() == {*STREAM_COLUMNS}
        for stream in STREAMS:
            first, behind = columns[f"from_{stream}"], columns[f"to_{stream}"]
            assert part(text, stream) in tokenizer.decode(ids[first:behind])
            for fewer in (ids[first + 1 : behind], ids[first : behind - 1]):
                assert part(text, stream) not in tokenizer.decode(fewer)
    shared = stream_columns(tokenizer.encode(TURNS[0]), TURNS[0], tokenizer)
    assert shared["from_subgoal"] == shared["to_switch"] - 1


def test_an_absent_decision_has_no_token(tokenizer):
    text = "look"
    columns = stream_columns(tokenizer.encode(text), text, tokenizer)
    expected = dict.fromkeys(STREAM_COLUMNS, 0) | {"has_action": 1, "to_action": len(tokenizer.encode(text))}
    assert columns == expected
    assert stream_columns([], "", tokenizer) == dict.fromkeys(STREAM_COLUMNS, 0)
