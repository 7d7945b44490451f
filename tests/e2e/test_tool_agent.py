"""verl's stock tool loop, which knows nothing of this package, under Turn-PPO: turns, a critic, a ratio per turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from launch import Run, critic, questions, train

TOOL = Path(__file__).with_name("corridor_tool.py")
STEPS = 5
GAMMA, LAM = 0.99, 0.9


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    return train(
        out,
        model,
        "+turnkey=turn_gae",
        "+turnkey/loss=turn_ratio",
        "turnkey.loss.ratio=product",
        *questions(out, "corridor", "A door is 6 steps away. Walk up to it, then open it.", rows=8),
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.multi_turn.format=corridor",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={TOOL}",
        f"reward.custom_reward_function.path={TOOL}",
        *critic(model, lr=1e-3),
        "critic.ppo_mini_batch_size=4",
        steps=STEPS,
        mini_batch=8,
        lr=1e-4,
    )


def naive_turns(mask: list[int]) -> list[int]:
    """Where each run of ones begins."""
    return [i for i, m in enumerate(mask) if m and (i == 0 or not mask[i - 1])]


def test_every_turn_has_the_advantage_of_the_formula(run: Run) -> None:
    """From the masks, rewards and values in the queue; the trainer's table takes no part."""
    lengths = []
    for step in range(1, STEPS + 1):
        seen = run.seen(step)
        expected: dict[tuple[int, int], float] = {}
        longest = 0
        for row, padding in enumerate(seen["padding"]):
            mask, scores, values = (seen[name][row].tolist() for name in ("mask", "rm_scores", "values"))
            starts = [] if padding else naive_turns(mask)
            longest = max(longest, len(starts))
            later = following = 0.0
            for start, end in zip(reversed(starts), [len(mask), *reversed(starts[1:])], strict=True):
                later = sum(scores[start:end]) + GAMMA * following - values[start] + GAMMA * LAM * later
                following = values[start]
                expected[row, start] = later
        raw = np.array(list(expected.values()))
        for (row, start), value in expected.items():
            mask, advantages = seen["mask"][row].tolist(), seen["advantages"][row].tolist()
            wanted = (value - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
            for i in range(start, len(mask)):
                if not mask[i]:
                    break
                assert advantages[i] == pytest.approx(wanted, abs=1e-4), (step, row, i)
        assert run.metrics[step]["episode/length/max"] == longest
        lengths.append(longest)
    assert max(lengths) > 1, "no tool was ever called"


def test_the_critic_learns_from_the_targets_of_turns(run: Run) -> None:
    losses = [run.metrics[step]["critic/vf_loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < 0.5 * losses[0], losses


def test_the_first_update_is_on_policy_turn_by_turn(run: Run) -> None:
    """One optimizer step per batch: the policy is still the one that wrote the turns."""
    for step in range(1, STEPS + 1):
        assert run.metrics[step]["actor/ratio/min"] == pytest.approx(1, abs=1e-3)
        assert run.metrics[step]["actor/ratio/max"] == pytest.approx(1, abs=1e-3)
        assert run.metrics[step]["actor/grad_norm"] > 0


def test_nothing_is_reported_that_verls_loop_does_not_say(run: Run) -> None:
    episode = {name for name in run.metrics[1] if name.startswith("episode/")}
    assert episode == {
        f"episode/{name}"
        for name in ("count", "failed", "missing", "length/mean", "length/max", "composed_return/mean")
    }
    assert run.metrics[1]["episode/count"] == 32
    assert 1 <= run.metrics[1]["episode/composed_return/mean"] <= 2
