"""Merges consecutive steps of an episode into one row, wherever the prompt of a step extends the step before it.

A step extends the one before if its prompt begins, id by id, with the prompt and the response of that one. One row of T
turns then trains the same tokens in the same contexts as T rows, at the cost of the last row alone. Ids are compared,
not messages: the same messages may have other ids when they are rendered again (the template drops thoughts, a word
was sampled as other tokens than the tokenizer's).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import make_record
from verl_turnkey.plugins.credit.rows import BREAK, CACHED, OBSERVED, record_of

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

SUMMED = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
LISTED = ("turn_scores", "tool_rewards", CACHED, OBSERVED)
"""extra fields with one entry per turn"""


def merge_rows(outputs: Iterable[AgentLoopOutput], max_response_length: int | None = None) -> list[AgentLoopOutput]:
    """Merge the outputs of one episode: steps that extend each other become one row. The arguments are not changed.

    Nothing is cut: the rows hold the same steps in the same order, with the same ids under their masks. Tokens that the
    prompt of a step adds to the row so far (an observation, the generation prompt) are masked, with log-probability 0.
    A row has the images, the number of turns and the reward score of its last step, the range of the weight versions of
    all its steps, and the sum of their seconds.

    ``extra_fields["turnkey_break"]`` of each row states why it does not extend the row before:

    =========== ========================================================================================
    first       it is the episode's first
    empty       this step, or the one before, has no token of the model
    gap         the runs of ones in a mask are not the steps of its record, so that turns could not be told apart
    prefix      the prompt does not begin with the row so far; a ``turnkey_break`` that the step brings replaces it
    nothing     no masked token would separate the turns
    images      the row's images are not the first ones of this step, although the ids agree
    budget      the response would have more than ``max_response_length`` tokens
    columns     the row before has columns that cannot be joined, or only one of the two has log-probabilities
    branch      it is of another branch of the rollout
    role        it is of another role than the step before, as ``turnkey_break`` of that step says
    =========== ========================================================================================

    Args:
        outputs: with a record each (:mod:`verl_turnkey.advantage.record`), in the order of the episode. Failed ones,
            those with routed experts or a teacher's columns, and those without a record are returned as they are.
        max_response_length: ``data.max_response_length``, the budget of a row; None: no limit.

    Raises:
        ValueError: the mask or the log-probabilities of an output are not as many as its response ids.
    """
    rows: list[_Row | AgentLoopOutput] = []
    for index, output in enumerate(outputs):
        if not _mergeable(output):
            rows.append(output)
            continue
        _check_lengths(index, output)
        before = rows[-1] if rows and isinstance(rows[-1], _Row) else None
        if before is None:
            rows.append(_Row(output, "columns" if rows else "first"))
        elif why := before.why_not(output, max_response_length):
            rows.append(_Row(output, why))
        else:
            before.add(output)
    return [row.build() if isinstance(row, _Row) else row for row in rows]


class _Row:
    """A row to which steps are added; ``why``: why it does not extend the row before."""

    def __init__(self, first: AgentLoopOutput, why: str) -> None:
        self.last, self.why, self.flaw = first, why, _flaw(first)
        self.metrics, self.extra_fields = [first.metrics], [first.extra_fields]
        self.prompt = first.prompt_ids
        self.ids = first.prompt_ids + first.response_ids
        self.mask = list(first.response_mask)
        self.log_probs = None if first.response_logprobs is None else list(first.response_logprobs)

    def why_not(self, step: AgentLoopOutput, budget: int | None) -> str | None:
        """Why ``step`` begins a new row; None: it extends this one."""
        for flaw in ("empty", "gap"):
            if flaw in (_flaw(step), self.flaw):
                return flaw
        length = len(self.ids)
        if _branch(self.last) != _branch(step):
            return "branch"
        if step.prompt_ids[:length] != self.ids:
            return step.extra_fields.get(BREAK) or "prefix"
        if len(step.prompt_ids) == length and self.mask[-1] and step.response_mask[0]:
            return "nothing"
        if not _same_media(self.last, step):
            return "images"
        response_length = len(step.prompt_ids) - len(self.prompt) + len(step.response_ids)
        if budget is not None and response_length > budget:
            return "budget"
        return "columns" if (self.log_probs is None) != (step.response_logprobs is None) else None

    def add(self, step: AgentLoopOutput) -> None:
        """Append a step that extends this row."""
        between = step.prompt_ids[len(self.ids) :]
        self.last = step
        self.metrics.append(step.metrics)
        self.extra_fields.append(step.extra_fields)
        self.ids += between + step.response_ids
        self.mask += [0] * len(between) + step.response_mask
        if self.log_probs is not None:
            self.log_probs += [0.0] * len(between) + (step.response_logprobs or [])

    def build(self) -> AgentLoopOutput:
        if len(self.metrics) == 1:
            return self.last.model_copy(update={"extra_fields": {**self.last.extra_fields, BREAK: self.why}})
        fields: dict[str, Any] = {} if self.log_probs is None else {"response_logprobs": self.log_probs}
        return self.last.model_copy(
            update={
                "prompt_ids": self.prompt,
                "response_ids": self.ids[len(self.prompt) :],
                "response_mask": self.mask,
                "metrics": _summed(self.metrics),
                "extra_fields": {**_joined(self.extra_fields), BREAK: self.why},
                **fields,
            }
        )


def _mergeable(output: AgentLoopOutput) -> bool:
    record = record_of(output.extra_fields)
    has_steps = isinstance(record, Mapping) and record.get("failed") is None and bool(record.get("steps"))
    # Both have an entry for each token of one sequence.
    teacher = {"teacher_ids", "teacher_logprobs"} & {*output.extra_fields}
    return has_steps and output.routed_experts is None and not teacher


def _check_lengths(index: int, output: AgentLoopOutput) -> None:
    for name in ("response_mask", "response_logprobs"):
        values = getattr(output, name)
        if values is not None and len(values) != len(output.response_ids):
            raise ValueError(
                f"merge_rows: outputs[{index}].{name}: expected {len(output.response_ids)} numbers, one for each of "
                f"response_ids, got {len(values)}"
            )


def _flaw(output: AgentLoopOutput) -> str | None:
    """Why the turns of an output cannot share a row with others; None if they can."""
    mask = bytes(map(bool, output.response_mask))
    runs = mask.count(b"\0\1") + mask.startswith(b"\1")
    if not runs:
        return "empty"
    return None if runs == len(output.extra_fields["turnkey"]["steps"]) else "gap"


def _branch(output: AgentLoopOutput) -> int:
    return output.extra_fields["turnkey"].get("branch", 0)


def without_steps(rows: Sequence[AgentLoopOutput], before: int) -> list[AgentLoopOutput]:
    """The rows of a branch without the steps that another one trains, whose number is below ``before``.

    A row with only such steps is dropped. In other rows they become context: masked, with log-probability 0.
    """
    kept_rows = []
    for row in rows:
        steps = row.extra_fields["turnkey"]["steps"]
        shared = sum(step["step"] < before for step in steps)
        if shared < len(steps):
            kept_rows.append(_masked(row, shared) if shared else row)
    return kept_rows


def _masked(row: AgentLoopOutput, turns: int) -> AgentLoopOutput:
    """``row`` with its first ``turns`` turns, each a run of ones in its mask, turned into context."""
    turns_so_far, end = 0, 0
    for end, trained in enumerate(row.response_mask):
        turns_so_far += bool(trained) and (end == 0 or not row.response_mask[end - 1])
        if turns_so_far > turns:
            break
    fields = dict(row.extra_fields)
    for name in LISTED:
        if fields.get(name):
            fields[name] = fields[name][turns:]
    record = fields["turnkey"]
    fields["turnkey"] = make_record(record["steps"][turns:], branch=record.get("branch", 0))
    logged = {} if row.response_logprobs is None else {"response_logprobs": [0.0] * end + row.response_logprobs[end:]}
    mask = [0] * end + row.response_mask[end:]
    return row.model_copy(update={"response_mask": mask, "extra_fields": fields, **logged})


def _same_media(before: AgentLoopOutput, step: AgentLoopOutput) -> bool:
    """Whether the images, videos and audios of the row so far are the first ones of ``step``; ids do not show it."""
    if before.mm_processor_kwargs != step.mm_processor_kwargs:
        return False
    now = step.multi_modal_data or {}
    for kind, media in (before.multi_modal_data or {}).items():
        still = list(now.get(kind) or ())[: len(media or ())]
        if len(still) != len(media or ()) or not all(map(_same_medium, media or (), still)):
            return False
    return True


def _same_medium(first: Any, second: Any) -> bool:
    if first is second:
        return True
    from PIL.Image import Image

    return isinstance(first, Image) and isinstance(second, Image) and bool(first == second)


def _summed(metrics: Sequence[AgentLoopMetrics]) -> AgentLoopMetrics:
    preempted = [metric.num_preempted for metric in metrics]
    return metrics[-1].model_copy(
        update={
            **{
                name: sum(getattr(metric, name) for metric in metrics)
                for name in ("generate_sequences", "tool_calls", "compute_score")
            },
            "num_preempted": -1 if min(preempted) < 0 else sum(preempted),  # -1: not known
        }
    )


def _joined(fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The extra fields of a row: later steps override earlier ones; versions, counts, lists and the record add up."""
    joined: dict[str, Any] = {}
    for step_fields in fields:
        joined |= step_fields
    for name, choose in (("min_global_steps", min), ("max_global_steps", max)):
        if versions := [step_fields[name] for step_fields in fields if step_fields.get(name) is not None]:
            joined[name] = choose(versions)
    for name in SUMMED:
        if name in joined:
            joined[name] = sum(step_fields.get(name, 0) for step_fields in fields)
    for name in LISTED:
        if name in joined:
            joined[name] = [number for step_fields in fields for number in step_fields.get(name) or ()]
    steps = [step for step_fields in fields for step in step_fields["turnkey"]["steps"]]
    joined["turnkey"] = make_record(steps, branch=fields[0]["turnkey"].get("branch", 0))
    return joined
