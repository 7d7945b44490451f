"""verl's advantage step and ours share their trips to the queue, whatever else we write."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transfer_queue as tq
from contract_tools import EOS, EPISODES, PARTITION, TwoRanks, advance, fill, read, write
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from typer.testing import CliRunner
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tokenizer.continuous_token_wiring import infer_continuous_token_model_family

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.verl_api import builders
from verl_turnkey.plugins.verl_api.queue import READ, OneTrip

KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl"]
LOSS = ["+turnkey/loss=segment_mask", "turnkey.update.weight_by=episode"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """What is read from the queue and written to it from now on."""
    calls: list[tuple[str, set[str]]] = []

    def noting(name: str, of: Callable[[dict[str, Any]], Any]) -> None:
        original = getattr(tq, name)

        def call(**arguments: Any) -> Any:
            calls.append((name, set(of(arguments))))
            return original(**arguments)

        monkeypatch.setattr(tq, name, call)

    noting("kv_batch_get", lambda arguments: arguments.get("select_fields", ()))
    noting("kv_batch_put", lambda arguments: arguments["fields"].keys())
    return calls


@pytest.mark.parametrize("method", ["gigpo", "turn_gae", "grpo"])
def test_a_batch_is_read_once_and_written_once(queue, trainer, tmp_path, calls, method):
    """Fails where a verl reads other fields than ours asks for in its place, or reads or writes more often."""
    log = f"turnkey.log.trajectories={tmp_path}"
    own = ["algorithm.adv_estimator=grpo"] if method == "grpo" else []
    made = trainer(log, *KL, *LOSS, *own, recipe="base" if own else method)
    batch = fill(EPISODES)
    for name in ("ref_log_prob", "old_log_probs", *(["values"] if made.use_critic else [])):
        write(batch, name, lambda key, i: -1.0)
    calls.clear()
    batch = made._compute_advantage(batch, {})
    (_, fields), (_, written) = calls
    assert [name for name, _ in calls] == ["kv_batch_get", "kv_batch_put"]
    assert fields >= {*READ} - {"uid"}
    assert ("uid" in fields) == (method == "grpo")
    assert written >= {"advantages", "returns", "token_level_rewards", "turnkey_weight", "turnkey_turn_in_row"}
    assert written <= set(batch.fields)


def test_the_mask_that_was_dealt_is_not_read_again(queue, trainer, calls):
    """It is that of the rows in the queue, in their order and with verl's padding."""
    made = trainer()
    made.actor_rollout_wg, made.tokenizer = TwoRanks(), SimpleNamespace(eos_token_id=EOS)
    batch = made._balance_batch(fill(EPISODES), {})
    assert any(tag.get("is_padding") for tag in batch.tags)
    keys, mask = made.batching.mask
    assert dict(zip(keys, (row.long().tolist() for row in mask.unbind()), strict=True)) == read(batch, "response_mask")
    for reads in (False, True):
        calls.clear()
        advance(made, batch)
        fields = next(names for name, names in calls if name == "kv_batch_get")
        assert ("response_mask" in fields) == reads
    made._balance_batch(batch, {})
    assert made.batching.dealt_mask(KVBatchMeta(keys=keys[:4], tags=batch.tags[:4], partition_id=PARTITION)) == {}
    assert made.batching.mask == ([], None)


def test_verls_own_estimators_get_the_names_of_the_groups(queue, trainer, monkeypatch):
    seen: list[Any] = []
    original = trainer_base.compute_advantage_for_multi_trajectories

    def noting(data: Any, **arguments: Any) -> Any:
        seen.append(data.non_tensor_batch["uid"].tolist())
        return original(data, **arguments)

    monkeypatch.setattr(trainer_base, "compute_advantage_for_multi_trajectories", noting)
    batch = fill(EPISODES)
    groups = [key.split("_")[0] for key in batch.keys]
    advance(trainer("algorithm.adv_estimator=grpo", recipe="base"), batch)
    advance(trainer(), batch)
    played = [key.split("_")[0] for key in batch.keys if key != "a_0_0"]  # which failed: verl's do not see it
    assert seen == [played, [int(group == "b") for group in groups]]


def test_other_rows_and_other_fields_are_the_queues(queue):
    batch = fill(EPISODES)
    write(batch, "old_log_probs", lambda key, i: -1.0)
    trip = OneTrip(batch, ["extra_fields", "response_mask"], {"uid": torch.arange(len(batch))})
    assert set(trip.data.keys()) == {"extra_fields", "response_mask"}
    where = {"partition_id": PARTITION, "keys": batch.keys}
    with trip.for_verl():
        inside = trainer_base.tq
        fields = inside.kv_batch_get(
            keys=batch.keys[:1], partition_id=PARTITION, select_fields=["uid", "old_log_probs"]
        )
        assert fields.get("uid").tolist() == ["a"]
        assert "num_turns" in inside.kv_batch_get(**where, select_fields=["num_turns"])
        columns = inside.kv_batch_get(**where, select_fields=["uid", "ref_log_prob"])
        assert set(columns.keys()) == {"uid"}
        assert columns["uid"].tolist() == list(range(len(batch)))
        again = inside.kv_batch_get(**where, select_fields=["uid"])
        assert again.get("uid").tolist() == [key.split("_")[0] for key in batch.keys]
        column = torch.arange(len(batch)).float()
        inside.kv_batch_put(
            keys=batch.keys[:1], partition_id=PARTITION, fields=TensorDict({"mine": column[:1]}, batch_size=1)
        )
        assert inside.kv_batch_put(**where, fields=TensorDict({"all": column}, batch_size=len(batch))) is batch
        assert "mine" in tq.kv_batch_get(keys=batch.keys[:1], partition_id=PARTITION)
        assert "all" not in tq.kv_batch_get(keys=batch.keys[:1], partition_id=PARTITION)
        assert set(inside.kv_list(PARTITION)[PARTITION]) == set(batch.keys)
    assert trainer_base.tq is tq
    trip.written["further"] = column
    trip.put()
    assert read(batch, "all") == read(batch, "further") == {key: float(i) for i, key in enumerate(batch.keys)}


def test_verls_module_has_its_queue_back_after_an_error(queue):
    with pytest.raises(ZeroDivisionError), OneTrip(fill(EPISODES), ["extra_fields"], {}).for_verl():
        raise ZeroDivisionError
    assert trainer_base.tq is tq


# --- builders of prompts: what verl says while it makes them ----------------------------------------------------------


LOGGER = builders.continuous_token_wiring.logger.name


def test_a_fallback_is_logged_once_for_each_kind_of_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        for model_type in ("unheard_of", "unheard_of", "another"):
            infer_continuous_token_model_family(hf_model_type=model_type)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "'unheard_of'" in messages[0]
    assert "'another'" in messages[1]


def test_verls_variable_silences_it(caplog: pytest.LogCaptureFixture) -> None:
    """It is ERROR in these tests, and in ``turnkey check`` and ``turnkey eval``."""
    with caplog.at_level(logging.INFO):
        infer_continuous_token_model_family(hf_model_type="a_third")
    assert not caplog.records


@pytest.mark.parametrize(("before", "after"), [({}, "ERROR"), ({"VERL_LOGGING_LEVEL": "WARN"}, "WARN")])
def test_an_evaluation_silences_it_unless_the_user_sets_the_variable(before: dict[str, str], after: str) -> None:
    with patch.dict(os.environ, before):
        if not before:
            del os.environ["VERL_LOGGING_LEVEL"]
        CliRunner().invoke(app, ["eval"])
        assert os.environ["VERL_LOGGING_LEVEL"] == after
