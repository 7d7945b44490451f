"""A process reward model next to the policy: it scores the turns of each batch, and learns from how episodes end.

Two passes make one optimizer step. The first gives the model's number of each turn; an objective maps those of the
whole batch to a loss (:mod:`verl_turnkey.losses.objectives`). The second has the derivatives of this loss as
coefficients of the model's outputs, so its gradient is exact however pairs are cut over micro-batches and ranks.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.metric import reduce_metrics

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.losses.objectives import Gradient, ObjectiveParams, Trajectories, gradient, objective_spec
from verl_turnkey.losses.turns import like
from verl_turnkey.plugins import cpu
from verl_turnkey.plugins.config.recipe_files import rule_words
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.config.scorers import COEFFICIENT, OUT, PRM_FOLDER, SCORE, TURN_SCORE
from verl_turnkey.plugins.credit.rows import EXTRA_FIELDS, Rows, listed_per_turn, pop_extra_fields, read_rows
from verl_turnkey.plugins.prm.worker import SHIFT, PrmWorker, of_response, own_tokens, worker_config
from verl_turnkey.plugins.trainer.worker_setup import WorkerCalls
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of

REFERENCES = {"old": "old_log_probs", "rollout": "rollout_log_probs", "ref": "ref_log_prob"}
"""``turnkey.prm.reference`` -> field of the queue"""


class ProcessReward:
    """Writes the scores of a batch into the queue; without ``turnkey.prm.kind`` it does nothing."""

    def __init__(self, trainer: PPOTrainer, turnkey: TurnkeyConfig) -> None:
        self._trainer, self._options = trainer, turnkey.prm
        self._kind = self._options.kind or "implicit"
        self._config: Any = trainer.config
        self._calls: WorkerCalls | None = None
        self._learnt = False
        """whether the model may have other weights than at the start of the run"""
        prm = self._options
        beta = prm.beta if self._kind == "implicit" else 1.0
        self._params = ObjectiveParams(beta, prm.over, prm.weigh, prm.positive)
        self._objective: Any = prm.objective
        if prm.kind is not None and ":" in prm.objective:
            self._objective = load_function(prm.objective, "turnkey.prm.objective")
        elif prm.kind is not None:
            self._objective = objective_spec(prm.objective).fn

    def joined(self, pools: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        """verl's workers of each resource pool, with the model's worker added to the actor's processes."""
        if self._options.kind is not None:
            config = worker_config(self._config, self._options, offload=self._options.offload and not cpu.opted_in())
            vocabulary, actors = config.model_config.tokenizer.get_vocab(), self._trainer.tokenizer.get_vocab()
            if vocabulary != actors:
                path = self._options.path
                raise ConfigError(rule_words("prm-vocabulary", path=path, own=len(vocabulary), actors=len(actors)))
            pool = internals.training_pool(self._trainer)
            pools[pool][PRM_FOLDER] = RayClassWithInitArgs(cls=ray.remote(PrmWorker), config=config)
        return pools

    @property
    def _group(self) -> Any:
        """The worker group: the processes of the actor with the methods of the model's worker."""
        if self._calls is None:
            group = self._trainer.actor_rollout_wg.spawn({PRM_FOLDER})[PRM_FOLDER]
            self._calls = WorkerCalls(group, also=frozenset({COEFFICIENT}))
        return self._calls

    def save(self, folder: Path) -> None:
        """Write weights and optimizer below ``folder``, if they change in training."""
        if self._options.trains:
            limit = self._config.trainer.get("max_actor_ckpt_to_keep")
            step = self._trainer.global_steps
            self._group.save_checkpoint(str(folder / PRM_FOLDER), None, step, max_ckpt_to_keep=limit)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` has written; the checks have refused a checkpoint without it."""
        if self._options.trains:
            self._learnt = True
            self._group.load_checkpoint(str((folder / PRM_FOLDER).absolute()))

    def before_advantage(self, batch: KVBatchMeta) -> dict[str, float]:
        """Let the model learn from ``batch`` and score its turns; returns metrics."""
        if self._options.kind is None:
            return {}
        info = batch.extra_info
        try:
            return self._score(batch)
        finally:
            batch.extra_info, batch.fields = info, None  # an earlier selection would hide the new fields

    def _score(self, batch: KVBatchMeta) -> dict[str, float]:
        started, prm = perf_counter(), self._options
        implicit = self._kind == "implicit"
        reference_field = [REFERENCES[prm.reference]] if implicit and prm.reference in REFERENCES else []
        data = partition_of(batch).read(batch.keys, [*EXTRA_FIELDS, "response_mask", "rm_scores", *reference_field])
        rows, learnt = self._tables(batch, data)
        mask = data["response_mask"]
        reference = data[reference_field[0]].values() if reference_field else 0.0
        if implicit and prm.reference == "base":
            reference = self._forward(batch, mask, no_lora_adapter=True).values()
        own = own_tokens(rows.turns, self._kind)

        def outputs() -> torch.Tensor:
            """The summands of each turn's number by token, 0 for other tokens: jagged float64."""
            difference = self._forward(batch, mask).values().double() - reference
            return like(torch.where(own.values(), difference, 0.0), mask)

        numbers = outputs()
        if self._untouched:
            numbers = like(torch.zeros_like(numbers.values()), mask)
        derivative = self._gradient(numbers, learnt)
        metrics: dict[str, float] = {}
        if derivative is not None:
            of_objective = {f"prm/{name}": float(value) for name, value in derivative.metrics.items()}
            metrics = {"prm/loss": derivative.loss, **of_objective}
        metrics |= {"prm/updates": 0.0, "timing_s/prm_score": perf_counter() - started}
        if derivative is not None and self._is_due:
            started = perf_counter()
            metrics |= self._update(batch, learnt, derivative)
            metrics |= {"prm/updates": 1.0, "timing_s/prm_update": perf_counter() - started}
            if prm.scores == "after":
                started, numbers = perf_counter(), outputs()
                after = self._gradient(numbers, learnt)
                assert after is not None
                metrics |= {"prm/loss_after": after.loss}
                metrics |= {f"prm/{name}_after": value for name, value in after.metrics.items() if name != "pairs"}
                metrics["timing_s/prm_score"] += perf_counter() - started
        tokens = numbers.values() * self._params.beta
        scores = rows.turns.sum(like(tokens, mask)).numpy()
        if prm.normalise == "max" and len(scores):
            largest = np.abs(scores).max() + 1e-6
            tokens, scores = tokens / largest, scores / largest
        partition_of(batch).write(batch.keys, {SCORE: like(tokens.float(), mask)})
        return metrics | self._score_metrics(scores, rows)

    def _tables(self, batch: KVBatchMeta, data: TensorDict) -> tuple[Rows, Rows]:
        """The steps of the batch, and the steps to learn from: without the branches of a rollout that forked."""
        extra_fields = pop_extra_fields(data)
        lists = listed_per_turn(self._config.actor_rollout_ref.rollout)

        def read(tags: list[Any]) -> Rows:
            columns = {"scores": data.get("rm_scores"), "lists": lists}
            return read_rows(batch.keys, tags, extra_fields, data["response_mask"], **columns)

        rows = read(batch.tags)
        if TURN_SCORE.removeprefix("extra.") in rows.steps.extra and self._options.use == "column":
            raise ConfigError(
                "the records of this batch have extra.turn_score, which turnkey.prm computes, too: remove it, or set "
                "turnkey.prm.kind=null"
            )
        forked = {*rows.row[rows.branch > 0].tolist()}
        tags = [{**tag, "is_padding": True} if i in forked else tag for i, tag in enumerate(batch.tags)]
        return rows, read(tags) if forked else rows

    def _gradient(self, numbers: torch.Tensor, rows: Rows) -> Gradient | None:
        return gradient(self._objective, rows.turns.sum(numbers), rows.steps, self._params)

    @property
    def _untouched(self) -> bool:
        """Whether reference and model have the same weights: their log-ratios are only rounding errors."""
        trainer, model = self._trainer, self._config.actor_rollout_ref.model
        if self._learnt or not self._options.starts_as_reference(model.path, model.get("lora_adapter_path")):
            return False
        fixed = self._options.reference in ("ref", "base")
        return fixed or (trainer.global_steps == 1 and trainer.local_trigger_step == 0)

    @property
    def _is_due(self) -> bool:
        trainer, every = self._trainer, self._options.every
        number = (trainer.global_steps - 1) * trainer.parameter_sync_step + trainer.local_trigger_step + 1
        return every > 0 and number % every == 0

    def _forward(self, batch: KVBatchMeta, mask: torch.Tensor, **info: Any) -> torch.Tensor:
        """The model's outputs of the response tokens: jagged (B, L)."""
        self._call(batch, calculate_entropy=False, compute_loss=False, **info)
        ray.get(self._group.infer_batch(batch).futures)
        return of_response(partition_of(batch).read(batch.keys, [OUT])[OUT], mask, SHIFT[self._kind])

    def _update(self, batch: KVBatchMeta, rows: Rows, derivative: Gradient) -> dict[str, float]:
        """One optimizer step on the whole batch."""
        self._learnt = True
        coefficients = rows.to_tokens(derivative.coefficients.numpy())
        own = own_tokens(rows.turns, self._kind).values()
        partition_of(batch).write(batch.keys, {COEFFICIENT: like(coefficients.values() * own, coefficients)})
        batches = {"num_mini_batch": 1, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        self._call(batch, compute_loss=True, calculate_entropy=False, global_batch_size=len(batch), **batches)
        output = self._group.train_mini_batch(batch).get()
        metrics = reduce_metrics(dict(output["metrics"]))
        return {f"prm/{name}": float(metrics[name]) for name in ("grad_norm", "lr") if name in metrics}

    def _call(self, batch: KVBatchMeta, **info: Any) -> None:
        """Prepare a call: all fields, and only this model's settings."""
        temperature = self._config.actor_rollout_ref.rollout.temperature
        batch.fields, batch.extra_info = None, {"temperature": temperature, **info}

    def _score_metrics(self, scores: np.ndarray, rows: Rows) -> dict[str, float]:
        """Of the turns with tokens; others have no score."""
        of = Trajectories.of(torch.from_numpy(scores), rows.steps, self._params)
        has_tokens = rows.steps.tokens > 0
        scores, tokens = scores[has_tokens], rows.steps.tokens[has_tokens]
        if not len(scores):
            return {}
        good = of.positive.numpy()[rows.steps.trajectory[has_tokens]]
        metrics = {"mean": scores.mean(), "std": scores.std(), "max_abs": np.abs(scores).max()}
        if good.any() and not good.all():
            metrics["success_minus_failure"] = scores[good].mean() - scores[~good].mean()
        if scores.std() > 0 and tokens.std() > 0:
            metrics["tokens_correlation"] = np.corrcoef(scores, tokens)[0, 1]
        return {f"prm/score/{name}": float(value) for name, value in metrics.items()}
