"""verl's advantage step on a real TransferQueue, under our trainer: what reaches the queue, by row key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from contract_tools import (
    EOS,
    EPISODES,
    PARTITION,
    Episode,
    advance,
    batch_of,
    fill,
    nested,
    output,
    put,
    read,
    registered,
    rejecting,
    row,
    write,
)
from naive.common import turns_of
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_turnkey.advantage import RecordError, make_record, make_step
from verl_turnkey.losses.turns import turn_ids
from verl_turnkey.plugins.credit.metrics import episode_metrics
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.trainer import rollout_metrics
from verl_turnkey.plugins.trainer.advantage_step import OF_GROUPS
from verl_turnkey.plugins.trainer.worker_setup import NOT_FOR_WORKERS, WorkerCalls


def forget_records(batch: KVBatchMeta) -> None:
    """Make the rows look like those of a loop that knows nothing of us."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["extra_fields"])
    plain = [{k: v for k, v in extra.items() if k != "turnkey"} for extra in data.pop("extra_fields").tolist()]
    fields = list_of_dict_to_tensordict([{"extra_fields": extra} for extra in plain])
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)


# --- the expectation, from the formulas, without a line of ours -------------------------------------------------------


def naive_gigpo(
    episodes: dict[str, list[Episode]], gamma: float = 0.95, kl: Callable[[str], float] = lambda key: 0.0
) -> dict[str, float]:
    """GiGPO by row key: (R - mean)/std over episodes, plus the same over steps from one state, minus the penalty.

    ``kl``: more reward.
    """
    advantages: dict[str, float] = {}
    for group, sessions in episodes.items():
        score: dict[int, float] = {}
        returns: dict[str, float] = {}
        anchors: dict[str, list[str]] = {}
        for session, episode in enumerate(sessions):
            if isinstance(episode, str):
                continue
            keys = [f"{group}_{session}_{t}" for t in range(len(episode))]
            rewards = [step["reward"] + kl(key) for key, step in zip(keys, episode, strict=True)]
            score[session] = sum(rewards)
            for t, (key, step) in enumerate(zip(keys, episode, strict=True)):
                returns[key] = sum(gamma**k * reward for k, reward in enumerate(rewards[t:]))
                advantages[key] = -step.get("penalty", 0.0)
                anchors.setdefault(step["anchor"], []).append(key)
        mean, std = np.mean([*score.values()]), np.std([*score.values()], ddof=1)
        for keys in anchors.values():
            values = [returns[key] for key in keys]
            for key in keys:
                step_level = 0.0
                if len(values) > 1 and max(values) > min(values):
                    step_level = (returns[key] - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
                advantages[key] += (score[int(key.split("_")[1])] - mean) / (std + 1e-6) + step_level
    return advantages


def check_against(batch: KVBatchMeta, expected: dict[str, float], mask: dict[str, list[float]] | None = None) -> None:
    """Each real row carries its credit on each of its (unmasked) tokens; all other rows carry nothing."""
    mask = mask or read(batch, "response_mask")
    advantages = read(batch, "advantages")
    assert set(expected) <= set(advantages)
    for key, tokens in advantages.items():
        wanted = [expected.get(key, 0.0) * m for m in mask[key]]
        assert tokens == pytest.approx(wanted, abs=1e-5), key


def test_advantages_by_row_key_with_a_failed_row_first(queue, trainer):
    batch = fill(EPISODES)
    assert batch.keys[0] == "a_0_0"
    metrics: dict[str, Any] = {}
    after = advance(trainer(), batch, metrics)
    assert after.keys == batch.keys
    expected = naive_gigpo(EPISODES)
    assert len(set(np.round(list(expected.values()), 4))) > 6  # the expectation tells rows apart
    check_against(after, expected)
    assert metrics["episode/count"] == 6
    assert metrics["episode/failed"] == metrics["episode/failed/EnvironmentFailure"] == 1
    assert metrics["episode/length/mean"] == 2.0
    assert metrics["episode/composed_return/mean"] == pytest.approx((1 + 0.25 + 0 + 0.5 + 0) / 5)
    assert metrics["episode/invalid_rate"] == pytest.approx(1 / 10)
    assert metrics["credit/share_steps_in_anchor_groups"] == pytest.approx(9 / 10)


@pytest.mark.parametrize("seed", [0, 1])
def test_padding_and_order_change_nothing(queue, trainer, seed):
    batch = upsample_batch_to_divisible_size(fill(EPISODES), 7, EOS)
    assert len(batch) == 14
    assert sum(tag.get("is_padding", False) for tag in batch.tags) == 3
    batch.reorder(np.random.default_rng(seed).permutation(len(batch)).tolist())
    metrics: dict[str, Any] = {}
    after = advance(trainer(), batch, metrics)
    check_against(after, naive_gigpo(EPISODES))
    assert metrics["episode/count"] == 6
    # verl goes on with what the queue returns: the updates must still know the padding.
    assert [tag.get("is_padding", False) for tag in after.tags] == [tag.get("is_padding", False) for tag in batch.tags]


def test_both_names_and_parameters(queue, trainer):
    batch = fill(EPISODES)
    made = trainer("algorithm.adv_estimator=turnkey/gigpo", "turnkey.credit.gamma=0.5")
    check_against(advance(made, batch), naive_gigpo(EPISODES, gamma=0.5))


def test_returns_are_written_for_a_critic(queue, trainer):
    batch = advance(trainer(), fill(EPISODES))
    returns = read(batch, "returns")
    assert returns["a_1_0"] == pytest.approx([0.95**2] * len(returns["a_1_0"]))
    assert returns["a_1_1"] == pytest.approx([0.95 - 0.1] * len(returns["a_1_1"]))


def test_kl_in_the_reward_belongs_to_its_step(queue, trainer):
    made = trainer("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_penalty=kl")
    batch = fill(EPISODES)
    gap = {key: 0.01 * (1 + i) for i, key in enumerate(batch.keys)}
    length = dict(zip(batch.keys, (tag["response_len"] for tag in batch.tags), strict=True))
    write(batch, "ref_log_prob", lambda key, i: -1.0 - gap[key] * (i + 1))
    metrics: dict[str, Any] = {}
    after = advance(made, batch, metrics)

    def penalty(key: str) -> float:
        return -0.5 * gap[key] * sum(range(1, length[key] + 1))

    expected = naive_gigpo(EPISODES, kl=penalty)
    assert expected != pytest.approx(naive_gigpo(EPISODES), abs=1e-2)
    check_against(after, expected)
    rewards = read(after, "token_level_rewards")
    assert sum(rewards["a_1_2"]) == pytest.approx(1.0 + penalty("a_1_2"))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert metrics["episode/composed_return/mean"] == pytest.approx(
        (1 + 0.25 + 0 + 0.5 + 0) / 5
    )  # without the KL penalty


def test_rollout_correction_weights_and_rejection(queue, trainer):
    correction = ["rollout_is=token", "rollout_is_threshold=1.5", "rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0"]
    made = trainer(*(f"algorithm.rollout_correction.{setting}" for setting in correction))
    batch = fill(EPISODES)
    rejected = {("a_1_2", 0), ("b_0_0", 0), ("b_1_1", 0)}
    ratio = {"a_2_0": 1.2, "a_3_0": 1.8}

    def drifted(key: str, i: int) -> float:
        return -1.0 + (3.0 if (key, i) in rejected else float(np.log(ratio.get(key, 1.0))))

    before = read(batch, "response_mask")
    metrics: dict[str, Any] = {}
    after = advance(made, batch, metrics, drifted)
    mask = read(after, "response_mask")
    for key, tokens in before.items():
        assert mask[key] == [0 if (key, i) in rejected else m for i, m in enumerate(tokens)], key
    assert sum(map(sum, before.values())) - sum(map(sum, mask.values())) == 3
    check_against(after, naive_gigpo(EPISODES), mask)
    weights = read(after, "rollout_is_weights")
    assert weights["a_2_0"] == pytest.approx([1.2] * len(weights["a_2_0"]))
    assert weights["a_3_0"] == pytest.approx([1.5] * len(weights["a_3_0"]))  # cut at the threshold
    assert any(name.startswith("rollout_corr/") for name in metrics)


def test_rejected_tokens_neither_split_nor_remove_a_turn(queue, trainer):
    """Rows of whole trajectories: turns are counted in the mask that the agent loop wrote."""
    episodes: dict[str, list[Episode]] = {
        "w": [
            [{"reward": 0.0, "anchor": "s"}, {"reward": 1.0, "anchor": "t"}],
            [{"reward": 0.0, "anchor": "s"}, {"reward": 0.0, "anchor": "u"}],
        ]
    }
    for session, episode in enumerate(episodes["w"]):
        assert isinstance(episode, list)
        steps = [{"step": t, **step} for t, step in enumerate(episode)]
        put("w", session, [row("11100111", steps, episode[-1]["reward"])])
    rejected = {("w_0_0", 1), ("w_1_0", 5), ("w_1_0", 6), ("w_1_0", 7)}  # inside a turn, and all of a turn
    after = rejecting(trainer, rejected)
    credit = naive_gigpo(episodes)
    advantages = read(after, "advantages")
    for session in range(2):
        first, second = credit[f"w_{session}_0"], credit[f"w_{session}_1"]
        assert abs(first - second) > 0.01
        wanted = [first, first, first, 0.0, 0.0, second, second, second]
        wanted = [0.0 if (f"w_{session}_0", i) in rejected else value for i, value in enumerate(wanted)]
        assert advantages[f"w_{session}_0"] == pytest.approx(wanted, abs=1e-5)


# --- verl's own estimators on step rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [True, False])
def test_stock_grpo_on_rows_with_and_without_records(queue, trainer, records):
    """verl takes each episode's last row for its score; rows of verl's own loops have no records."""
    metrics: dict[str, Any] = {}
    batch = fill(EPISODES)
    if not records:
        forget_records(batch)
    batch = advance(trainer("algorithm.adv_estimator=grpo", recipe="base"), batch, metrics)
    counts = (metrics.get("episode/count"), metrics.get("episode/failed"))
    assert counts == ((6, 1) if records else (None, None))  # the records are there for anybody
    expected = {}
    for group, sessions in EPISODES.items():
        scores = {i: sum(step["reward"] for step in e) for i, e in enumerate(sessions) if not isinstance(e, str)}
        mean, std = np.mean([*scores.values()]), np.std([*scores.values()], ddof=1)
        for session, score in scores.items():
            for t in range(len(sessions[session])):
                expected[f"{group}_{session}_{t}"] = (score - mean) / (std + 1e-6)
    check_against(batch, expected)


WON, LOST = [{"reward": 1.0}], [{"reward": 0.0}]


@pytest.fixture
def verls(queue, trainer) -> Callable[..., dict[str, list[float]]]:
    """``verls(estimator, g=[...])``: the advantages by an estimator of verl's, of these episodes by group."""

    def advantages(estimator: str, **sessions: list[Episode]) -> dict[str, list[float]]:
        made = trainer(f"algorithm.adv_estimator={estimator}", recipe="base")
        return read(advance(made, fill(sessions)), "advantages")

    return advantages


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_a_failed_episode_enters_no_statistic_of_verls_estimators(verls, estimator):
    """Three that won and one that timed out: none is better than another."""
    for key, values in verls(estimator, g=["timeout", WON, WON, WON]).items():
        assert values == pytest.approx([0.0] * len(values), abs=1e-5), key


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_a_single_survivor_of_a_group_has_nobody_to_be_compared_with(verls, estimator):
    advantages = verls(estimator, g=["timeout", WON], h=[WON, LOST, LOST])
    assert not any(advantages["g_1_0"])
    assert any(advantages["h_0_0"])


def test_a_group_of_a_single_rollout_keeps_what_verl_gives_it(verls):
    assert max(verls("rloo", g=[WON], h=["timeout", WON, LOST])["g_0_0"]) == pytest.approx(1.0)


@pytest.mark.parametrize("recipe", ["base", "gigpo"])
def test_the_kl_of_a_batch_is_the_mean_over_played_rows(queue, trainer, recipe):
    """A failed episode has no token, which verl counts as a row whose KL is 0, for its adaptive controller as well."""
    switches = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl", "algorithm.kl_ctrl.type=adaptive"]
    made = trainer(*switches, *(["algorithm.adv_estimator=grpo"] if recipe == "base" else []), recipe=recipe)
    won, lost = [{"reward": 1.0, "anchor": "s"}], [{"reward": 0.0, "anchor": "s"}]
    batch = fill({"g": ["timeout", "timeout", won, lost]})
    write(batch, "old_log_probs", lambda key, i: -1.0)
    write(batch, "ref_log_prob", lambda key, i: -1.5)
    metrics: dict[str, Any] = {}
    controller, calls = made.kl_ctrl_in_reward, []
    update = controller.update
    controller.update = lambda current_kl, n_steps: (calls.append((current_kl, n_steps)), update(current_kl, n_steps))
    advance(made, batch, metrics)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5, abs=1e-5)
    assert calls == [(pytest.approx(0.5, abs=1e-5), 2)]


def test_a_group_that_failed_as_a_whole_gets_nothing_from_verls_estimators(verls):
    advantages = verls("rloo", f=["timeout", "timeout"], g=[WON, LOST])
    largest = {key: round(max(values, key=abs), 6) for key, values in advantages.items()}
    assert largest == {"f_0_0": 0.0, "f_1_0": 0.0, "g_0_0": 1.0, "g_1_0": -1.0}


def test_stock_gae_on_step_rows(queue, trainer):
    """With gamma = lam = 1 a token's return is its row's score, and its advantage (whitened) follows return - value."""
    batch = fill(EPISODES)
    write(batch, "values", lambda key, i: 0.1 * i + 0.01 * len(key))
    made = trainer("algorithm.adv_estimator=gae", recipe="base")
    assert made.use_critic
    after = advance(made, batch)
    returns, advantages, mask = (read(after, name) for name in ("returns", "advantages", "response_mask"))
    values = read(after, "values")
    raw, trained = [], []
    for group, sessions in EPISODES.items():
        for session, episode in enumerate(sessions):
            for t in range(0 if isinstance(episode, str) else len(episode)):
                key = f"{group}_{session}_{t}"
                score = sum(step["reward"] for step in episode)
                assert returns[key] == pytest.approx([score] * len(mask[key]), abs=1e-5)
                raw += [score - value for value in values[key]]
                trained += advantages[key]
    whitened = (np.array(raw) - np.mean(raw)) / np.std(raw, ddof=1)
    assert trained == pytest.approx(whitened.tolist(), abs=1e-4)


def test_episodes_that_left_no_row_are_counted(queue, trainer, caplog):
    made = trainer("actor_rollout_ref.rollout.n=4")  # 4 prompts x 4 rollouts were asked for
    metrics: dict[str, Any] = {}
    advance(made, fill(EPISODES), metrics)
    assert metrics["episode/missing"] == 16 - 6
    assert "left no row" in caplog.text


def test_a_prompt_may_say_how_many_rollouts_it_is_to_have(queue, trainer):
    """verl reads ``__rollout_n__``. One of c's two left no row, nor did d's only one, whose prompt is all there was."""
    made = trainer()

    def play(prompts: TensorDict) -> None:
        fill({"a": [EPISODES["a"][1]] * 3, "b": [EPISODES["a"][1]], "c": [EPISODES["a"][2]]})
        for uid, status in zip(prompts["uid"], ("finished", "finished", "failure", "failure"), strict=True):
            tq.kv_put(key=uid, partition_id=PARTITION, tag={"status": status})

    made.agent_loop_manager = SimpleNamespace(generate_sequences=play)
    for again in range(2):  # the second time as after a resume: what the prompts said is not known
        rollouts = {"a": 3, "b": 1, "c": 2, "d": 1}
        prompts = list_of_dict_to_tensordict([{"uid": uid, "__rollout_n__": n} for uid, n in rollouts.items()])
        if again:
            tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}] * 4
            tq.kv_batch_put(keys=list("abcd"), partition_id=PARTITION, tags=tags)
            play(prompts)
        else:
            made._submit_batch_to_rollout(prompts)
        batch, _ = made.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=4)
        metrics: dict[str, Any] = {}
        advance(made, batch, metrics)
        assert metrics["episode/count"] == 5
        assert metrics["episode/missing"] == (0 if again else 2)


def test_the_numbers_of_prompts_whose_groups_were_dropped_are_forgotten(monkeypatch):
    monkeypatch.setattr(rollout_metrics, "REMEMBERED", 3)
    counter = rollout_metrics.RolloutCounter(SimpleNamespace(), 2, 4)
    for uids in ("ab", "cd"):
        counter.submit(list_of_dict_to_tensordict([{"uid": uid, "__rollout_n__": 2} for uid in uids]))
    assert [*counter._of_prompt] == ["b", "c", "d"]


# --- what is wrong is named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": "much"}, "c_0_0: reward: expected a float from -1e18 to 1e18"),
        ({"anchro": 1}, "c_0_0: anchro: unknown field.*'anchor'"),
        ({"step": -1}, "c_0_0: step: expected an int >= 0"),
    ],
)
def test_a_malformed_record_is_named_by_row_and_field(queue, trainer, change, words):
    record = make_record([make_step(step=0, reward=1.0)])
    record["steps"][0].update(change)
    put("c", 0, [output(record, 2, 1.0)])
    with pytest.raises(RecordError, match=words):
        advance(trainer(), fill({"a": EPISODES["a"]}))


def test_a_column_that_nobody_filled_is_asked_for(queue, trainer):
    batch = fill({"a": [[{"reward": 1.0}], [{"reward": 0.0}]]})
    with pytest.raises(ValueError, match=r"anchor.*state_key"):
        advance(trainer(), batch)


# --- rows and tokens, both layouts ------------------------------------------------------------------------------------


def random_rows(rng: np.random.Generator, layout: str) -> tuple[list[str], list[dict[str, Any]], torch.Tensor]:
    """Keys, extra fields and a padded response mask; in ``trajectories`` a row holds several turns with gaps."""
    keys, fields, masks = [], [], []
    for episode in range(6):
        steps = [make_step(step=t, reward=float(rng.normal()), anchor=0) for t in range(rng.integers(1, 5))]
        for index, held in enumerate([[step] for step in steps] if layout == "steps" else [steps]):
            mask: list[int] = [0] * int(rng.integers(0, 3) if layout == "trajectories" else 0)
            for step in held:
                mask += [1] * int(rng.integers(1, 4)) + [0] * int(layout == "trajectories" and rng.integers(1, 4))
                assert step
            keys.append(f"g{episode % 2}_{episode}_{index}")
            fields.append({"turnkey": make_record(held)})
            masks.append(mask)
    width = max(map(len, masks))
    return keys, fields, torch.tensor([mask + [0] * (width - len(mask)) for mask in masks])


@pytest.mark.parametrize("layout", ["steps", "trajectories"])
@pytest.mark.parametrize("seed", range(5))
def test_round_trip_between_rows_and_steps(layout, seed):
    rng = np.random.default_rng(seed)
    keys, fields, mask = random_rows(rng, layout)
    values = torch.from_numpy(rng.normal(size=mask.shape)).float()
    kl = torch.from_numpy(rng.normal(size=mask.shape)) * mask
    rows = read_rows(keys, [{}] * len(keys), fields, nested(mask), kl=nested(kl), values=nested(values))

    position = 0
    per_step = rng.normal(size=len(rows.row))
    expected = torch.zeros(mask.shape)
    for i, key in enumerate(keys):
        runs = turns_of(mask[i].tolist())
        steps = fields[i]["turnkey"]["steps"]
        assert len(runs) == len(steps)
        assert turn_ids(mask)[i].unique().tolist() == [-1] * (0 in mask[i]) + list(range(len(runs)))
        for turn, (run, step) in enumerate(zip(runs, steps, strict=True)):
            assert rows.steps.ids["trajectory"][rows.steps.trajectory[position]] == key.rpartition("_")[0]
            assert rows.steps.ids["group"][rows.steps.group[position]] == key.partition("_")[0]
            assert (rows.row[position], rows.turn[position]) == (i, turn)
            assert rows.steps.tokens[position] == len(run)
            assert rows.steps.value[position] == values[i, run[0]].item()
            assert rows.steps.reward[position] == pytest.approx(step["reward"] + kl[i, run].sum().item())
            assert rows.reward_before_kl[position] == step["reward"]
            expected[i, run] = float(np.float32(per_step[position]))
            position += 1
    assert position == len(per_step)
    torch.testing.assert_close(rows.to_tokens(per_step).to_padded_tensor(0.0), expected)


def test_what_a_loop_composed_counts_in_the_place_of_the_environments_reward():
    """Also beside a row of a loop that composes nothing; the KL penalty is in neither of the two that are kept."""
    steps = [make_step(step=0, reward=3.0, composed_reward=0.0), make_step(step=0, reward=3.0)]
    fields = [{"turnkey": make_record([step])} for step in steps]
    mask, kl = nested(torch.ones(2, 4)), nested(torch.full((2, 4), -0.25))
    rows = read_rows(["g_0_0", "g_1_0"], [{}, {}], fields, mask, kl=kl)
    assert rows.reward_before_kl.tolist() == [0.0, 3.0]
    assert rows.steps.reward.tolist() == [-1.0, 2.0]
    metrics = episode_metrics(rows)
    assert (metrics["episode/composed_return/mean"], metrics["episode/env_return/mean"]) == (1.5, 3.0)


def test_texts_of_a_record_become_the_text_column():
    extras = [{"text": f"room {i}", "weight": 0.5} for i in range(2)]
    fields = [{"turnkey": make_record([make_step(step=0, reward=0.0, extra=extra)])} for extra in extras]
    steps = read_rows(["g_0_0", "g_1_0"], [{}, {}], fields, nested(torch.ones(2, 3))).steps
    assert steps.text.tolist() == ["room 0", "room 1"]
    assert steps.extra.keys() == {"weight"}


@pytest.fixture
def echo_value() -> Iterator[str]:
    """An estimator whose credit is the critic's value before the turn."""
    with registered(lambda batch: batch.value, contract_echo=("value",)):
        yield "contract_echo"


def test_values_of_the_critic_reach_the_table(queue, trainer, echo_value):
    """Both layouts in one batch: a row per step, and one row with two turns around an observation."""
    batch = fill({"a": EPISODES["a"]})
    put("b", 0, [row("110011", [{"step": t, "reward": 0.5, "anchor": "s"} for t in range(2)], 1.0)])
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    number = {key: n for n, key in enumerate(batch.keys)}
    write(batch, "values", lambda key, i: 10.0 * number[key] + i)
    made = trainer("critic.enable=true", f"algorithm.adv_estimator={echo_value}", recipe="base")
    advantages = read(advance(made, batch), "advantages")
    start = 10.0 * number["b_0_0"]
    assert advantages.pop("b_0_0") == [start, start, 0.0, 0.0, start + 4, start + 4]
    assert advantages.pop("a_0_0") == [0.0]
    for key, tokens in advantages.items():
        assert tokens == [10.0 * number[key]] * len(tokens)


# --- a fixed number of optimizer steps --------------------------------------------------------------------------------


class Recorder:
    """Stands in the place of a Ray worker group: keeps a copy of what a call got."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], dict[str, Any]]] = []
        self.world_size = 1

    def __getattr__(self, name: str) -> Callable[[KVBatchMeta], Any]:
        def call(batch: KVBatchMeta) -> Any:
            self.calls.append((name, list(batch.fields), dict(batch.extra_info)))
            return self

        return call

    def get(self) -> dict[str, Any]:
        return {"metrics": {"mfu": 0.0}}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.get()[name]


@pytest.mark.parametrize("known_fields", [False, True])
def test_worker_calls_choose_fields_and_mini_batches(queue, trainer, known_fields):
    batch = upsample_batch_to_divisible_size(fill(EPISODES), 2, EOS)
    real = sum(not tag.get("is_padding", False) for tag in batch.tags)
    assert (real, len(batch)) == (11, 12)
    if known_fields:  # as a batch that verl has written to before
        batch = tq.kv_batch_put(
            keys=batch.keys, partition_id=PARTITION, fields=TensorDict({"novel": torch.ones(12, 1)}, batch_size=12)
        )
    made = trainer("critic.ppo_mini_batch_size=1", "critic.enable=true")
    recorder = Recorder()
    made.actor_rollout_wg = made.critic_wg = WorkerCalls(recorder, made.actor_update.before_call)
    made.batching.parts = 4
    made.advantage_step.real_rows = real - 1  # one failed episode
    made._update_critic(batch, {})
    made._update_actor(batch, {})
    made.actor_rollout_wg.compute_log_prob(batch)
    assert [name for name, _, _ in recorder.calls] == ["train_mini_batch", "update_actor", "compute_log_prob"]
    for _, fields, _ in recorder.calls:
        assert {"input_ids", "responses", "response_mask", "rm_scores", "rollout_log_probs", "uid"} <= set(fields)
        assert "multi_modal_inputs" in fields
        assert not set(fields) & NOT_FOR_WORKERS
        assert ("novel" in fields) == known_fields
    critic, actor = recorder.calls[0][2], recorder.calls[1][2]
    for extra_info, updates in ((critic, 4), (actor, 2)):  # train_batch_size 4 / mini batch of 1 or 2
        assert "mini_batch_size" not in extra_info
        assert extra_info["num_mini_batch"] == updates
        assert extra_info["global_batch_size"] == pytest.approx((real - 1) / updates)
    assert made.actor_rollout_wg.world_size == 1


MICRO_BATCHES = [
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=5",
]


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ([], 2 * 2 * 3),  # 4 tasks in mini-batches of 2, on 2 ranks; 11 rows of which at most 6 are in a mini-batch
        (["turnkey.update.mini_batches=3"], 2 * 3 * 2),
        (["critic.enable=true", "critic.ppo_mini_batch_size=1"], 2 * 4 * 2),
        (["trainer.critic_warmup=2"], 2 * 6),  # at step 1 no actor update yet
        (["trainer.critic_warmup=1"], 2 * 2 * 3),
        (
            MICRO_BATCHES,
            2 * 2 * 6,
        ),  # whole micro-batches of 3; of the rows of both mini-batches, forward passes in fours
        ([*MICRO_BATCHES, "actor_rollout_ref.actor.use_kl_loss=true"], 2 * 2 * 30),  # the reference in fives
        ([*MICRO_BATCHES, "trainer.critic_warmup=5"], 2 * 8),
        ([*MICRO_BATCHES, "critic.enable=true", "critic.ppo_mini_batch_size=1"], 2 * 4 * 3),
        ([*MICRO_BATCHES, "actor_rollout_ref.actor.use_dynamic_bsz=true"], 2 * 2 * 3),
    ],
)
def test_batches_are_padded_to_mini_and_micro_batches_and_not_to_rollouts(queue, trainer, overrides, rows):
    made = trainer(*overrides)
    made.tokenizer = SimpleNamespace(eos_token_id=EOS)
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    metrics: dict[str, float] = {}
    batch = made._balance_batch(fill(EPISODES), metrics)
    assert len(batch) == rows
    assert metrics["dealing/padding"] == pytest.approx((rows - 11) / rows)
