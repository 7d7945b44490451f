"""HiPER's credit on tokens: a turn's action, its subgoal and its decision to switch have advantages of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from verl_turnkey.advantage import (
    ConfigError,
    Credit,
    Modification,
    StepBatch,
    Tokens,
    ValueHead,
    compute_credit,
    estimators,
)
from verl_turnkey.advantage.group_ops import Floats, Ints
from verl_turnkey.losses.turns import like
from verl_turnkey.plugins.credit import trainer_columns
from verl_turnkey.plugins.credit.metrics import (
    agent_metrics,
    decision_metrics,
    episode_metrics,
    reward_metrics,
    row_metrics,
    signal_metrics,
    warn_of_branches,
    warn_of_turn_limit,
)
from verl_turnkey.plugins.credit.rows import REPLAYED, Rows, jagged, needs_record, read_rows, record_of
from verl_turnkey.plugins.credit.trainer_columns import head_values

STREAMS = {"switch": "switch_advantages", "subgoal": "subgoal_advantages", "action": None}
"""decision -> the column of ``Credit.extra`` with its advantages; None: ``Credit.advantage``"""


def stream_advantages(credit: Credit, batch: StepBatch, step: Ints) -> Floats | None:
    """Advantages of the tokens, (T,), of which ``step`` (T,) is the row of ``batch`` in written order.

    A token of no decision, such as a thought, has 0; one that two share has the later decision's. None: the credit has
    one stream alone, or the rollout did not say which tokens are whose (``turnkey.rollout.action_format=hiper`` does).

    Raises:
        ConfigError: a modifier of tokens has changed the credit already.
    """
    columns = [f"{word}_{stream}" for word in ("from", "to") for stream in STREAMS]
    if not all(f"extra.{name}" in batch.given for name in columns) or "subgoal_advantages" not in credit.extra:
        return None
    if credit.tokens is not None:
        raise ConfigError(
            "hae gives the tokens of each decision of a turn their own advantages, and turnkey.credit.modify changes "
            "those of single tokens: drop its modifiers of tokens"
        )
    order = np.argsort(step, kind="stable")
    place = np.empty(len(step), dtype=np.int64)
    place[order] = np.arange(len(step)) - np.searchsorted(step[order], step[order])
    result = np.zeros(len(step))
    for stream, name in STREAMS.items():
        advantage = credit.advantage if name is None else credit.extra[name]
        first, behind = (np.nan_to_num(batch.extra[f"{word}_{stream}"])[step] for word in ("from", "to"))
        result = np.where((first <= place) & (place < behind), advantage[step], result)
    return result


@dataclass
class CreditStep:
    """The inputs of one advantage step, and its results."""

    params: Any
    keys: Sequence[str]
    tags: Sequence[Mapping[str, Any]]
    extra_fields: Sequence[Mapping[str, Any]]
    response_mask: torch.Tensor
    """jagged, as the agent loop wrote it: a rejection by rollout correction masks tokens, it does not merge turns"""
    scores: torch.Tensor | None = None
    """jagged rewards before KL, when ``algorithm.use_kl_in_reward``"""
    values: torch.Tensor | None = None
    """jagged: the critic's"""
    heads: Sequence[ValueHead] = ()
    """those of the critic, with fields of :func:`.trainer_columns.value_field` in ``data``; none: it has one value"""
    lists: Sequence[str] = ()
    """names of the lists in verl's extra fields with one number per turn, read where there are no records"""
    data: Mapping[str, Any] = field(default_factory=dict)
    """verl's fields of all rows, of which columns are made that no record gives (:mod:`.trainer_columns`)"""
    state: Mapping[str, float] = field(default_factory=dict)
    """``Credit.state`` of the batch before, and after ``run`` that of this one"""
    scored: str = "column"
    """``turnkey.prm.use``: what the scores of a process reward model are for"""
    modify: Sequence[Modification] = ()
    """what modifies the estimator's credit"""
    training_step: int = 1
    """of the trainer, from 1"""
    metrics: dict[str, float] = field(default_factory=dict)
    rows: Rows | None = None
    """the table of steps, once it has been read"""
    tokens: Tokens | None = None
    """of the steps of the table, where a teacher has scored them and the method reads it"""
    credit: Credit | None = None
    """of the steps of the table; None with an estimator of verl's"""

    @property
    def has_records(self) -> bool:
        """Whether every row has a record. verl's own agent loops write none."""
        rows = [fields for fields, tag in zip(self.extra_fields, self.tags, strict=True) if not tag.get("is_padding")]
        return all(record_of(fields) is not None for fields in rows)

    @property
    def untaught(self) -> torch.Tensor | None:
        """Jagged advantages by token without what modifiers that read the teacher made of them; None: there are none.

        OPID and HCAPO add the gap, so the sign of the result would depend on it.
        """
        taught = {entry.spec.name for entry in self.modify if trainer_columns.OF_TEACHER & {*entry.columns}}
        if not taught or self.credit is None or self.rows is None:
            return None
        parts = [part for name, part in self.credit.parts.items() if name not in taught]
        return self.rows.to_tokens(np.sum(parts, axis=0))

    def read(
        self,
        scores: torch.Tensor | None = None,
        kl: torch.Tensor | None = None,
        needs: Sequence[str] = (),
        before: Collection[str] = (),
    ) -> Rows:
        """Build the table of steps, and the metrics of the episodes that were played in this step.

        ``needs``: the columns that are needed; the others are as in :func:`rows.read_rows`.
        """

        def table(tags: Sequence[Mapping[str, Any]]) -> Rows:
            return read_rows(
                self.keys,
                tags,
                self.extra_fields,
                self.response_mask,
                scores=scores,
                kl=kl,
                values=self.values,
                lists=self.lists,
                supply=trainer_columns.supply(needs, self.data),
                heads=partial(head_values, self.heads, self.data) if self.heads else None,
                before=before,
            )

        self.rows = played = table(self.tags)
        if any(tag.get(REPLAYED) for tag in self.tags):
            # Padding is left out, and so are episodes of earlier steps, which were counted in theirs.
            played = table([{**tag, "is_padding": True} if tag.get(REPLAYED) else tag for tag in self.tags])
        self.metrics = (
            episode_metrics(played)
            | signal_metrics(played)
            | decision_metrics(played)
            | reward_metrics(played, self.keys, self.extra_fields)
            | row_metrics(played, self.tags, self.extra_fields)
            | agent_metrics(played, self.keys, self.extra_fields)
        )
        warn_of_branches(self.metrics)
        return self.rows

    def _rewarded(self, rows: Rows) -> Rows:
        """With the scores of a process reward model in the rewards, where they are for that."""
        if self.scored == "column":
            return rows
        score = trainer_columns.turn_score(self.data, rows.turns, rows.row)
        reward = rows.steps.reward + score
        if self.scored == "redistribute":
            reward -= rows.reward_before_kl
        self.rows = replace(rows, steps=rows.steps.replaced(reward=reward))
        return self.rows

    def run(
        self, name: str, token_level_rewards: torch.Tensor, response_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns, (B, L) float32 each; the metrics stay in this object.

        The arguments are verl's, (B, L), too. Padding takes no part in the computation.

        Every token of a turn gets the turn's return as its target: the critic learns to predict it from each prefix of
        the turn. Estimators read only the value before the first token, but a target there alone would need a value
        loss of our own, since verl's has no mask but the response mask. The price: with ``weight_by=token`` turns
        weigh by their length in the critic's loss, as they do in the actor's token-mean.

        Raises:
            ConfigError: the rows have no records, and the estimator needs what only a record can say; or it needs what
                verl does not compute in this configuration.
        """
        scores, kl = self.scores, None
        if scores is not None:  # verl subtracted beta * KL from the reward of every token
            kl = like(jagged(token_level_rewards, scores).values() - scores.values(), scores)
        elif not self.has_records:
            scores = jagged(token_level_rewards, self.response_mask)
        spec = estimators().get(name)
        needs, before = (spec.columns(self.params, self.modify), spec.names_before(self.modify)) if spec else ((), ())
        rows = self._rewarded(self.read(scores, kl, needs, before))
        lacking = [column for column in needs if column not in rows.steps.given and column != "value"]
        trainer_columns.check_supplied([name, *(modification.spec.name for modification in self.modify)], lacking)
        if lacking and not rows.recorded:
            raise ConfigError(needs_record(name, lacking))
        by_token = any(modification.by_token for modification in self.modify)
        self.tokens = trainer_columns.tokens_of(self.data, rows.turns, self.training_step, by_token)
        context = {"state": self.state, "modify": self.modify, "tokens": self.tokens}
        credit = compute_credit(name, rows.steps, **context, **asdict(self.params))
        self.metrics |= {f"credit/{key.removeprefix('credit/')}": value for key, value in credit.metrics.items()}
        warn_of_turn_limit(credit.metrics, getattr(self.params, "prior", None) in (None, "averaged"))
        self.credit, self.state = credit, credit.state

        rejected = int(response_mask.sum()) < int(self.response_mask.values().sum())

        def padded(jagged: torch.Tensor) -> torch.Tensor:
            tokens = jagged.to_padded_tensor(0.0, output_size=tuple(response_mask.shape))
            return tokens.mul_(response_mask) if rejected else tokens

        step = rows.turns.index.values()
        tokens = stream_advantages(credit, rows.steps, step[step < rows.turns.n].numpy())
        tokens = credit.tokens if tokens is None else tokens
        of_tokens = rows.to_tokens(credit.advantage) if tokens is None else rows.tokens_of_steps(tokens)
        advantages = padded(of_tokens)
        return advantages, advantages if credit.returns is None else padded(rows.to_tokens(credit.returns))


_current: ContextVar[CreditStep | None] = ContextVar("turnkey_credit_step", default=None)


@contextmanager
def credit_step(step: CreditStep) -> Iterator[CreditStep]:
    """Make ``step`` the current one, which our estimators read while verl's advantage step runs."""
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)


def verl_estimator(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The function that verl's registry holds under ``name``."""

    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = _current.get()
        if step is None:
            raise RuntimeError(
                f"advantage estimator {name!r} needs the steps of each episode, which this trainer does not hand over: "
                "start verl.trainer.main_ppo, with trainer.v1.trainer_mode=turnkey_sync (or turnkey_colocate_async, "
                "turnkey_separate_async)"
            )
        return step.run(name, token_level_rewards, response_mask)

    estimator.__qualname__ = f"verl_estimator({name})"
    estimator.turnkey = True
    return estimator
