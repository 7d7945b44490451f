"""The plain loop computes what verl computes, the plan chooses before it reports, and the page has the kept lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lines
import loop
import minimal_loop
import numpy as np
import pytest
import studies
import tables
import torch
from demos import Planner
from forks import Forks
from loop import Loop
from players import Player, Step, columns, trained
from tasks import TASKS
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.core_algos import (
    compute_policy_loss_vanilla,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_value_loss,
)
from verl.workers.config import ActorConfig

from verl_turnkey.advantage import StepBatch
from verl_turnkey.envs.prompting.actions import ParsedAction
from verl_turnkey.envs.prompting.prompts import history_text
from verl_turnkey.plugins.cli.tables import between
from verl_turnkey.plugins.rollout.strategies import read_strategy

ROOT = Path(__file__).parents[3]


DOORKEY = replace(TASKS["doorkey"], prompt_tokens=1000)  # the model of these tests has a token for each byte
ROWS = [((5, 6, 7), (8, 9, 2)), ((5, 6), (8, 2)), ((5, 6, 7), (8, 9, 2)), ((5, 6, 7, 8), (4,))]


@pytest.fixture(scope="module")
def model(model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_the_loss_of_rows_taken_together_is_verls_of_each():
    rng = np.random.default_rng(0)
    now = torch.tensor(rng.normal(0, 1, (6, 3)), dtype=torch.float64, requires_grad=True)
    old = torch.tensor(rng.normal(0, 1, (6, 3)))
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.1, 3.0, -1.0], dtype=torch.float64)[:, None]
    mask = torch.tensor(rng.random((6, 3)) < 0.8)
    sizes = {"dp_size": 1, "batch_num_tokens": 100, "global_batch_size": 1, "loss_scale_factor": None}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, global_batch_info=sizes)
    # The same six rows twice, with opposite advantages as well: as twelve rows for verl, as six for the loop.
    verls, _ = compute_policy_loss_vanilla(
        torch.cat([old, old]),
        torch.cat([now, now]),
        torch.cat([advantage, -advantage / 2]).expand(12, 3),
        torch.cat([mask, mask]),
        config=config,
    )
    up = advantage.clamp(min=0) + (-advantage / 2).clamp(min=0)
    down = (-advantage).clamp(min=0) + (advantage / 2).clamp(min=0)
    ours = (loop.policy_loss(torch.exp(now - old), up, down) * mask).sum() / 100
    assert float(ours.detach()) == pytest.approx(float(verls.detach()))
    gradients = [torch.autograd.grad(loss, now)[0].numpy() for loss in (ours, verls)]
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-12)
    assert np.abs(gradients[0]).max() > 0


def test_the_critics_loss_is_verls():
    rng = np.random.default_rng(0)
    now = torch.tensor(rng.normal(0, 1, (6, 3)), requires_grad=True)
    before = torch.tensor(rng.normal(0, 1, (6, 3)))
    target = torch.tensor(rng.normal(0, 1, (6, 1)))
    mask = torch.tensor(rng.random((6, 3)) < 0.8)
    verls, _ = compute_value_loss(now, target.expand(6, 3), before, mask, loop.CLIP_VALUE, batch_num_tokens=100)
    ours = (loop.value_loss(now, before, target) * mask).sum() / 100
    assert float(ours.detach()) == pytest.approx(float(verls.detach()))
    np.testing.assert_allclose(*(torch.autograd.grad(loss, now)[0].numpy() for loss in (ours, verls)), atol=1e-12)


def test_what_is_sampled_has_the_probabilities_of_the_model(model, model_dir: Path):
    torch.manual_seed(0)
    prompts = [prompt for prompt, _ in ROWS] * 3
    responses = minimal_loop.Sampler(model, AutoTokenizer.from_pretrained(model_dir), 4)(prompts)
    rows = [(prompt, response.ids) for prompt, response in zip(prompts, responses, strict=True)]
    log_probs, inside = minimal_loop.log_probs(model, rows)
    assert len({response.ids for response in responses}) > 3
    for row, response in enumerate(responses):
        assert len(response.ids) <= 4
        assert log_probs[row, inside[row]].tolist() == pytest.approx(response.log_probs, abs=1e-4)


def test_log_probs_are_those_of_each_row_alone(model):
    log_probs, inside = minimal_loop.log_probs(model, ROWS)
    for row, (prompt, response) in enumerate(ROWS):
        scores = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0], dim=-1)
        alone = [scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]
        assert log_probs[row, inside[row]].tolist() == pytest.approx(alone, abs=1e-5)


def test_micro_batches_hold_every_row_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(minimal_loop, "MICRO_BATCH_TOKENS", 12)
    batches = [[ROWS[i] for i in batch] for batch in minimal_loop.micro_batches(ROWS)]
    assert sorted(row for batch in batches for row in batch) == sorted(ROWS)
    assert len(batches) > 1
    assert all(len(batch) * max(len(p) + len(r) for p, r in batch) <= 12 for batch in batches)


def few(method: str) -> studies.Variant:
    """Two groups of two in a step."""
    return replace(studies.variant(method, "doorkey"), tasks=2, rollouts=2)


class Scripted:
    """The shortest way of the quickstart's planner in every second episode, nonsense in the others."""

    def __init__(self, made: Loop) -> None:
        self.made, self.ways, self.queue, prompt = made, {}, [], made._prompt
        made._prompt = lambda player: self.queue.append(player) or prompt(player)

    def __call__(self, prompts: list[tuple[int, ...]]) -> list[minimal_loop.Response]:
        responses, self.queue = [self._response(self._text(player)) for player in self.queue], []
        assert len(responses) == len(prompts)
        return responses

    def _text(self, player: Player) -> str:
        if player.rollout % 2:
            return " no \n way " * 20
        if not player.past:
            self.ways[id(player)] = Planner(player.env.unwrapped.grid_env)
        return self.ways[id(player)].best()[0]

    def _response(self, text: str) -> minimal_loop.Response:
        ids = tuple(self.made.tokenizer(text).input_ids)
        return minimal_loop.Response(ids, (-0.5,) * len(ids), 0.7)


def test_episodes_are_played_and_tabled_as_the_agent_loop_does(model_dir: Path):
    made = Loop(DOORKEY, model_dir, few("gigpo"), 1e-3, seed=0, n_val=2)
    made.sampler = Scripted(made)
    players = made.play([3, 3, 4, 4], 2)
    won = [player.info["success"] for player in players]
    assert won == [True, False, True, False]
    episodes, steps = zip(*trained(players), strict=True)
    batch = loop.table(players, DOORKEY.max_turns)
    assert batch.n_groups == 2
    assert "extra.next_anchor" in batch.given
    assert batch.extra["next_anchor"].tolist() == [str(step.next_anchor) for step in steps]
    for episode in range(4):
        rows = [row for row, other in enumerate(episodes) if other == episode]
        last = rows[-1]
        assert [steps[row].number for row in rows] == list(range(len(rows)))
        assert batch.reward[rows].tolist() == [0.0] * (len(rows) - 1) + [float(won[episode])]
        assert batch.terminated[rows].tolist() == [False] * (len(rows) - 1) + [bool(won[episode])]
        assert batch.truncated[rows].tolist() == [False] * (len(rows) - 1) + [not won[episode]]
        assert set(batch.success[rows]) == {won[episode]}
        assert set(batch.penalty[rows]) == {0.0 if won[episode] else loop.PENALTY}
        assert [steps[row].next_anchor for row in rows[:-1]] == [steps[row].anchor for row in rows[1:]]
        assert (steps[last].next_anchor == steps[last].anchor) == (not won[episode])
    assert episodes.count(1) == DOORKEY.max_turns
    text = " no \n way " * 20
    assert players[1].past[0].action == history_text(ParsedAction(None, "no action"), text, whole=False)


@pytest.mark.parametrize("method", ["gigpo", "turn_gae", studies.REINFORCE])
def test_a_step_moves_the_model_towards_what_won(method: str, model_dir: Path):
    made = Loop(DOORKEY, model_dir, few(method), 1e-3, seed=0, n_val=4)
    assert (made.critic is None) == (method != "turn_gae")
    made.sampler = Scripted(made)
    values = [] if made.critic is None else [weight.clone() for weight in made.critic.parameters()]
    players = made.play([3, 3, 4, 4], 2)
    winning, losing = (
        [step.row for player in players if player.info["success"] == won for step in player.own]
        for won in (True, False)
    )

    def chance(rows: list[minimal_loop.Row]) -> float:
        log_probs, inside = minimal_loop.log_probs(made.model, rows)
        return float(log_probs[inside].mean().detach())

    before = chance(winning) - chance(losing)
    torch.manual_seed(0)
    metrics = made.step(1)
    assert metrics["episode/success_rate"] == 0.5
    assert metrics["episode/count"] == 4
    assert metrics["credit/advantage/share_nonzero"] > 0.5
    assert chance(winning) - chance(losing) > before
    if made.critic:
        assert any(not torch.equal(now, then) for now, then in zip(made.critic.parameters(), values, strict=True))


def test_a_critic_learns_at_its_own_rate(model_dir: Path):
    with_critic = replace(few("turn_gae"), critic_lr=3e-3)
    made = Loop(DOORKEY, model_dir, with_critic, 1e-4, seed=0, n_val=2)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (made.optimizer, made.critic_optimizer)]
    assert rates == [1e-4, 3e-3]


def test_a_run_is_validated_before_between_and_after(model_dir: Path, tmp_path: Path):
    made = Loop(DOORKEY, model_dir, few("gigpo"), 1e-3, seed=0, n_val=2)
    made.sampler = Scripted(made)
    metrics = dict(made.run(3, 2, tmp_path / "first.pt"))
    assert list(metrics) == [0, 1, 2, 3]
    name = "val-core/doorkey/acc/mean@1"
    assert [metrics[step].get(name) for step in metrics] == [0.5, None, 0.5, 0.5]


def test_a_method_that_finds_the_first_validation_goes_on_as_one_that_made_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short = replace(DOORKEY, max_turns=2)
    runs = []
    for first in (tmp_path / "a.pt", tmp_path / "a.pt", tmp_path / "b.pt"):
        runs.append(dict(Loop(short, model_dir, few("gigpo"), 1e-3, seed=0, n_val=2).run(1, 1, first)))
        if first.name == "a.pt":
            monkeypatch.setattr(Loop, "validate", lambda made: {})  # which draws nothing: seen only where it is called
    times = [rounds[1].pop("timing_s/step") for rounds in runs]
    assert len(times) == 3
    assert runs[0][0] == runs[1][0] != runs[2][0]
    drawn = [{name: value for name, value in rounds[1].items() if not name.startswith("val-")} for rounds in runs]
    assert drawn[0] == drawn[1] != drawn[2]


def test_reinforce_is_verls_where_every_episode_is_one_step():
    rng = np.random.default_rng(0)
    outcome, tokens = rng.normal(size=6), [1, 3, 2, 2, 1, 3]
    batch = StepBatch(
        group=list("aaabbb"),
        trajectory=range(6),
        step=[0] * 6,
        reward=outcome,
        penalty=[0.5, *[0.0] * 5],
        tokens=tokens,
    )
    mask = torch.arange(3) < torch.tensor(tokens)[:, None]
    rewards = torch.zeros((6, 3), dtype=torch.float64)
    rewards[:, 0] = torch.tensor(outcome)
    verls, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, np.array(list("aaabbb")))
    ours = loop.reinforce(batch).advantage + batch.penalty
    np.testing.assert_allclose(ours, verls[:, 0].numpy(), rtol=1e-6)


def test_reinforce_takes_each_episode_once():
    batch = StepBatch(
        group=["a", "a", "a"], trajectory=[0, 0, 1], step=[0, 1, 0], reward=[0.0, 1.0, 0.0], tokens=[1, 1, 2]
    )
    assert loop.reinforce(batch).advantage.tolist() == pytest.approx([3**0.5 / 2, 3**0.5 / 2, -(3**0.5) / 2])


# --- plan and lines ---------------------------------------------------------------------------------------------------


def _line(variant: str, lr: float, seed: int, success: list[float], **further) -> lines.Line:
    about = {"task": "doorkey", "variant": variant, "lr": lr, "seed": seed, "overrides": [], "warm_start": f"of {seed}"}
    steps = {
        4 * i: {"val-core/doorkey/acc/mean@1": value, "episode/success_rate": value, "episode/count": 64.0}
        | {"episode/failed": 0.0, "episode/length/mean": 10.0, "rows/trained_tokens": 1000.0}
        for i, value in enumerate(success)
    }
    return {**lines.line(about, steps), **further}


def _tuned(variant: str = "gigpo", **last: float) -> list[lines.Line]:
    """Runs of all tuning seeds that end at these successes, by place of the rate: ``r2=0.9``."""
    return [
        _line(variant, studies.RATES[int(place[1:])], seed, [0.4, value])
        for place, value in last.items()
        for seed in studies.SEEDS["doorkey"].tuning
    ]


FOUND = {"r1": 0.3, "r2": 0.9, "r3": 0.6}


def test_rates_are_chosen_on_seeds_of_their_own_before_anything_is_reported():
    first = list(studies.methods([]))
    assert {planned.lr for planned in first} == set(studies.MIDDLE)
    assert len(first) == len({planned.key for planned in first})
    for task, seeds in studies.SEEDS.items():
        assert not set(seeds.tuning) & set(seeds.reported)
        mine = [planned for planned in first if planned.task == task]
        names = {*studies.METHODS, *(studies.STRATEGIES if task in ("doorkey", "rooms") else ())}
        assert {planned.seed for planned in mine} == set(seeds.tuning)
        assert {planned.name for planned in mine} == names
        assert len(mine) == len(names) * len(studies.MIDDLE) * len(seeds.tuning)
    reported = studies.SEEDS["doorkey"].reported
    then = [planned for planned in studies.methods(_tuned(**FOUND)) if planned.seed in reported]
    assert [(planned.task, planned.name, planned.seed) for planned in then] == [
        ("doorkey", "gigpo", seed) for seed in reported
    ]
    assert {planned.lr for planned in then} == {studies.RATES[2]}


@pytest.mark.parametrize(
    ("tried", "following"),
    [
        ({"r2": 0.9, "r3": 0.6}, 1),
        ({"r2": 0.6, "r3": 0.9}, 4),
        ({"r2": 0.6, "r3": 0.7, "r4": 0.8}, 5),
        ({"r1": 0.9, "r2": 0.6, "r3": 0.5}, 0),
        ({"r2": 0.6, "r3": 0.7, "r4": 0.8, "r5": 0.9}, None),
        (FOUND, None),
    ],
)
def test_rates_are_tried_outwards_until_the_best_is_not_at_an_end(tried: dict[str, float], following: int | None):
    kept = _tuned(**tried)
    plan = [planned for planned in studies.methods(kept) if (planned.task, planned.name) == ("doorkey", "gigpo")]
    further = {planned.lr for planned in plan if planned.seed in studies.SEEDS["doorkey"].tuning}
    further -= {line["lr"] for line in kept}
    if following is None:
        assert not further
        assert studies.best_rate(kept, "doorkey", "gigpo") is not None
    else:
        assert further == {studies.RATES[following]}
        assert studies.best_rate(kept, "doorkey", "gigpo") is None


def test_lines_are_kept_in_order_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "RESULTS", tmp_path)
    made = [_line("gigpo", 5e-4, seed, [0.4, 0.123456789]) for seed in (1, 0)]
    for line in (*made, _line("gigpo", 5e-4, 0, [0.4, 0.123456789])):  # the last one again
        lines.add("some", line)
    kept = lines.load("some")
    assert [line["seed"] for line in kept] == [0, 1]
    assert lines.validations(kept[0]) == ([0, 4], [0.4, 0.12346])
    assert len((tmp_path / "some.json").read_text().splitlines()) == 2 + len(made)
    run = lines.as_run(kept[0], {})
    assert run.interactions().tolist() == [640, 1280]


def test_the_table_reports_the_chosen_rate_alone_and_each_difference_by_seed():
    kept = [*_tuned(**FOUND), *_tuned("grpo_steps", **FOUND)]
    kept += [_line("gigpo", studies.RATES[2], seed, [0.4, *[0.8] * 6]) for seed in range(4)]
    kept += [_line("gigpo", studies.RATES[3], 0, [0.0] * 7)]
    lost = [0.4, 0.6, 0.9, 0.9, 0.1, 0.1, 0.1]
    kept += [_line("grpo_steps", studies.RATES[2], seed, lost) for seed in range(4)]
    table = tables.methods(kept)
    [row] = [
        row for row in table.splitlines() if row.startswith("| gigpo | 0.00025 | 4 | 4480 | 0.800 | 0.800 to 0.800 |")
    ]
    assert "| +0.292 (p 0.125) | 1.00 |" in row
    [row] = [row for row in table.splitlines() if row.startswith("| grpo_steps | 0.00025 | 4 | 4480 | 0.100 |")]
    assert row.endswith("| - | - | 4 of 4, median 1920 | 4 |"), "all fell below half of their best"


@pytest.mark.parametrize(("other", "what"), [({"warm_start": "another"}, "warm_start"), ({}, "steps")])
def test_runs_that_cannot_be_compared_are_not(other: dict, what: str):
    kept = [_line("gigpo", 5e-4, 0, [0.5]), _line("hgpo", 5e-4, 0, [0.5] if other else [0.5, 0.5], **other)]
    with pytest.raises(ValueError, match=f"differ in {what}"):
        tables.check(kept)


@pytest.mark.parametrize("name", list(tables.CONTENTS))
def test_the_page_has_the_tables_of_the_kept_lines(name: str):
    page = tables.PAGE.read_text(encoding="utf-8")
    begin, end = between(page, name)
    assert page[begin:end] == f"{tables.CONTENTS[name]()}\n"


# --- episodes of the plain loop that fork -----------------------------------------------------------------------------


class Random:
    """Draws a move for each prompt, in tokens that are less likely the later they come."""

    def __init__(self, made: Loop) -> None:
        self.made, self.draw, self.written = made, np.random.default_rng(0), 0

    def __call__(self, prompts: list[tuple[int, ...]]) -> list[minimal_loop.Response]:
        responses = []
        for _ in prompts:
            ids = tuple(self.made.tokenizer(self.draw.choice(["turn left", "go forward", "toggle"])).input_ids)
            self.written += 1
            responses.append(minimal_loop.Response(ids, (-0.001 * self.written,) * len(ids), 0.7))
        return responses


@pytest.mark.parametrize(
    ("name", "episodes", "measured"),
    # Of each of two rollouts: forks before turns 1 and 2; as many trajectories as a group may have; two before turns 0
    # and 3, cut after two turns.
    [("tree", 2 * 4, 0), ("entropy_branch", 6, 0), ("vine", 2, 2 * 4)],
)
def test_each_turn_of_forked_episodes_is_trained_once_from_the_state_of_the_fork(
    name: str, episodes: int, measured: int, model_dir: Path
):
    strategy = {
        "tree": {"first": 1, "every": 1, "depth": 2},
        "entropy_branch": {"trajectories": 6, "branches": 3, "vocabulary": 2},
        "vine": {"rollouts": 2, "every": 3, "turns": 2},
    }[name]
    variant = studies.Variant("gigpo", {}, {"name": name, **strategy}, tasks=1, rollouts=2)
    made = Loop(replace(DOORKEY, max_turns=6), model_dir, variant, 1e-3, seed=0, n_val=2)
    made.sampler = Random(made)
    players = made.play([3, 3], 2, Forks(made.strategy, 2))
    kept = [player for player in players if player.trained]
    branches = [player for player in players if not player.trained]
    assert (len(kept), len(branches)) == (episodes, measured)
    steps = [step for _, step in trained(players)]
    assert len(steps) + sum(len(player.own) for player in branches) == made.sampler.written
    assert len({id(step) for step in steps}) == len(steps)
    batch = loop.table(players, made.task.max_turns, None, made.strategy)
    assert batch.extra["parent"].tolist()[:2] == ["start", "0.0.1"]
    at = dict.fromkeys(batch.extra["parent"].tolist(), None)
    for player in players:
        assert len(player.steps) == (min(6, player.begins + 2) if not player.trained else 6)
        assert [step.next_anchor for step in player.steps[:-1]] == [step.anchor for step in player.steps[1:]]
        if player.branch:
            [origin] = [source for source in kept if source.branch == player.made_by[player.begins - 1]
                        and source.rollout == player.rollout and player.steps[0] is source.steps[0]]  # fmt: skip
            assert player.steps[: player.begins] == origin.steps[: player.begins]
    for parent, anchor in zip(batch.extra["parent"].tolist(), batch.anchor.tolist(), strict=True):
        assert at[parent] in (None, anchor), "what goes on from one path begins in one state"
        at[parent] = anchor
    if name == "vine":
        assert batch.extra["value_rollouts"].tolist() == [2, 0, 0, 2, 0, 0] * 2


def act(player: Player, reward: float) -> None:
    t, response = len(player.steps), minimal_loop.Response((1,), (-3.0,), 0.0)
    step = Step(0, 0, t, (1,), response, f"s{t}", f"s{t + 1}", "", "go", True, reward, False, False)
    player.steps.append(step)
    player.made_by.append(player.branch)


@pytest.mark.parametrize("strategy", [{"name": "vine", "every": 2}, {"name": "spo_chain", "every": 2}])
def test_a_value_is_the_mean_return_from_the_state_on(strategy: dict):
    """Two branches from the state before turn 2 earn 3 and 5; rewards paid before the fork do not count."""
    strategy_read = read_strategy({**strategy, "rollouts": 2})
    assert strategy_read is not None
    forks, trunk = Forks(strategy_read[1], 1), Player(env=None)
    players = [trunk]
    for reward in (0.5, 1.0, 2.0, 4.0):
        branches = forks.before([trunk]) + forks.written([trunk], [minimal_loop.Response((1,), (-3.0,), 0.0)])
        for more, branch in zip((3.0, 5.0), branches, strict=False):
            act(branch, more - 1.0)
            act(branch, 1.0)
        players += branches
        act(trunk, reward)
    extra = columns(players, strategy_read[1])
    first = (
        0 if strategy["name"] == "vine" else 1
    )  # before the first and the third turn, or before the second and fourth
    assert extra["value_rollouts"] == ([2.0, 0.0, 2.0, 0.0] if first == 0 else [0.0, 2.0, 0.0, 2.0])
    assert extra["turn_value"][first] == extra["turn_value"][first + 2] == 4.0
    assert extra["parent"] == ["start", "0.0.1", "0.0.2", "0.0.3"]


def test_each_rollout_may_be_a_tree_of_its_own():
    strategy = read_strategy({"name": "tree", "first": 1, "depth": 1, "roots": "own"})
    assert strategy is not None
    forks, trunk = Forks(strategy[1], 1), Player(env=None, rollout=3)
    act(trunk, 0.0)
    players = [trunk, *forks.before([trunk])]
    for player in players:
        act(player, 1.0)
    assert columns(players, strategy[1])["parent"] == ["3", "3.0.1", "3.0.1"]
