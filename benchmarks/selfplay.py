"""Self-play of one tabular softmax policy with the credit of each method: how far from optimal play does it end?

    python benchmarks/selfplay.py run      # about two minutes on one core; writes benchmarks/results/selfplay.json
    python benchmarks/selfplay.py pages    # the table, in benchmarks/results/README.md

Environments and estimators are those of this package; a policy has a row of logits for each information state. Each
role is paid its own outcome on its last turn, as in training. Kuhn poker is measured by exploitability (half of what
the best answers to the policy gain in both roles together, 0 for an equilibrium), nim by the probability of an optimal
move, averaged over all states in which another move loses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyspiel
from page_tables import cell, packages

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.openspiel import ROLES

RESULTS = Path(__file__).parent / "results"
GAMES = {"kuhn_poker": "kuhn_poker", "nim": "nim(pile_sizes=2;3;4,is_misere=false)"}
MIXED = "grpo_steps, roles mixed"
METHODS = ("marshal", "rae", "grpo_steps", "gigpo", MIXED)
RATE, SEEDS = 1.0, (0, 1, 2)
UPDATES, EVERY, GROUPS, ROLLOUTS = 200, 100, 8, 8
BEGIN, END = "<!-- selfplay: written by benchmarks/selfplay.py pages -->", "<!-- /selfplay -->"

Logits = dict[str, np.ndarray]
"""information state -> logits of its legal actions"""


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def state_of(observation: str, info: Mapping[str, Any]) -> str:
    """What the role that moves knows."""
    return f"{info['extra']['role']} {observation}"


def episode(env: Any, logits: Logits, seed: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Steps of one game, each role paid on its last."""
    observation, info = env.reset(seed=seed)
    steps, over = [], False
    while not over:
        state, role = state_of(observation, info), info["extra"]["role"]
        row = logits.setdefault(state, np.zeros(len(info["admissible"])))
        action = int(rng.choice(len(row), p=softmax(row)))
        steps.append({"state": state, "action": action, "role": role, "anchor": info["state_key"], "reward": 0.0})
        observation, _, over, _, info = env.step(info["admissible"][action])
    for role, outcome in info["outcome"].items():
        last = max((t for t, step in enumerate(steps) if step["role"] == role), default=None)
        if last is not None:
            steps[last]["reward"] = outcome
    for step in steps:
        step["outcome"] = info["outcome"][step["role"]]
    return steps


def train(game: str, method: str, seed: int) -> list[float]:
    """The measure of ``game`` before training and after each ``EVERY`` updates."""
    env, rng, logits = make("turnkey/OpenSpiel-v0", {"game": GAMES[game]}), np.random.default_rng(seed), Logits()
    measured, memory = [measure(game, logits)], None
    for update in range(1, UPDATES + 1):
        rows = []
        for group, rollout in product(range(GROUPS), range(ROLLOUTS)):
            steps = episode(env, logits, GROUPS * (UPDATES * seed + update) + group, rng)
            rows += [(group, group * ROLLOUTS + rollout, t, step) for t, step in enumerate(steps)]
        of_steps = [step for *_, step in rows]
        roles = {} if method == MIXED else {"role": [step["role"] for step in of_steps]}
        batch = StepBatch(
            group=[group for group, *_ in rows],
            trajectory=[trajectory for _, trajectory, *_ in rows],
            step=[t for *_, t, _ in rows],
            reward=[step["reward"] for step in of_steps],
            anchor=[step["anchor"] for step in of_steps],
            action=[str(step["action"]) for step in of_steps],
            extra={**roles, **({"role_outcome": [step["outcome"] for step in of_steps]} if roles else {})},
        )
        credit = compute_credit(method.partition(",")[0], batch, state=memory)
        memory = credit.state
        gradient = {step["state"]: np.zeros_like(logits[step["state"]]) for step in of_steps}
        for step, advantage in zip(of_steps, credit.advantage, strict=True):
            gradient[step["state"]] -= advantage * softmax(logits[step["state"]])
            gradient[step["state"]][step["action"]] += advantage
        for state, of_state in gradient.items():
            logits[state] = logits[state] + RATE * of_state / (GROUPS * ROLLOUTS)
        if update % EVERY == 0:
            measured.append(measure(game, logits))
    return measured


# --- measures ---------------------------------------------------------------------------------------------------------


def measure(game: str, logits: Logits) -> float:
    return exploitability(logits) if game == "kuhn_poker" else optimal_share(logits)


def _known(logits: Logits, env: Any) -> np.ndarray:
    """The policy's probabilities in the state of ``env``; uniform in one that it has never seen."""
    result = env._now()
    row = logits.get(f"{result.extra['role']} {result.observation}")
    return softmax(np.zeros(len(result.admissible)) if row is None else row)


def exploitability(logits: Logits) -> float:
    """Exploitability in Kuhn poker, exact: it tries all deterministic answers in each role."""
    env: Any = make("turnkey/OpenSpiel-v0", {"game": "kuhn_poker"}).unwrapped
    env.reset(seed=0)
    bets: dict[str, float] = {}

    def collect(state: Any) -> None:
        if not state.is_terminal() and not state.is_chance_node():
            env._state = state
            bets[state.information_state_string(state.current_player())] = float(_known(logits, env)[1])
        for action in () if state.is_terminal() else state.legal_actions():
            collect(state.child(action))

    def value(state: Any, bet: Callable[[str], float]) -> float:
        if state.is_terminal():
            return state.returns()[0]
        if state.is_chance_node():
            return sum(p * value(state.child(action), bet) for action, p in state.chance_outcomes())
        p = bet(state.information_state_string(state.current_player()))
        passed = (1 - p) * value(state.child(0), bet) if p < 1 else 0.0
        return passed + (p * value(state.child(1), bet) if p > 0 else 0.0)

    root, gains = pyspiel.load_game("kuhn_poker").new_initial_state(), 0.0
    collect(root)
    for player, sign in enumerate((1, -1)):
        own = [state for state in bets if len(state) % 2 == 1 - player]
        answers = [dict(zip(own, chosen, strict=True)) for chosen in product((0.0, 1.0), repeat=len(own))]
        gains += max(sign * value(root, {**bets, **answer}.__getitem__) for answer in answers)
    return gains / 2


def optimal_share(logits: Logits) -> float:
    """The probability of an optimal move in nim, averaged over the states where another one loses."""
    env: Any = make("turnkey/OpenSpiel-v0", {"game": GAMES["nim"]}).unwrapped
    env.reset(seed=0)
    shares: dict[str, float] = {}
    todo = [env._state]
    while todo:
        state = env._state = todo.pop()
        key = str(state)
        if state.is_terminal() or key in shares:
            continue
        best = np.array(list((env.policy() or {}).values())) > 0
        shares[key] = float(_known(logits, env)[best].sum()) if not best.all() else np.nan
        todo += [state.child(action) for action in state.legal_actions()]
    return float(np.nanmean(list(shares.values())))


# --- results ----------------------------------------------------------------------------------------------------------


def run() -> None:
    lines = []
    for game, method in product(GAMES, METHODS):
        curves = [[round(number, 4) for number in train(game, method, seed)] for seed in SEEDS]
        lines.append({"game": game, "method": method, "curves": curves})
        print(game, method, [curve[-1] for curve in curves], flush=True)
    settings = {"updates": UPDATES, "every": EVERY, "episodes": GROUPS * ROLLOUTS, "rate": RATE, "seeds": SEEDS}
    versions = {**packages(), "open-spiel": version("open-spiel")}
    content = {"packages": versions, "settings": settings, "games": GAMES, "roles": ROLES, "results": lines}
    (RESULTS / "selfplay.json").write_text(json.dumps(content, indent=1) + "\n")


def pages() -> None:
    content = json.loads((RESULTS / "selfplay.json").read_text())
    every, updates = content["settings"]["every"], content["settings"]["updates"]
    steps = range(0, updates + 1, every)
    table = [
        f"| game | method | {' | '.join(f'after {step}' for step in steps)} |",
        "|---" * (2 + len(steps)) + "|",
    ]
    for line in content["results"]:
        cells = [cell([curve[n] for curve in line["curves"]], 3) for n in range(len(steps))]
        table.append(f"| {line['game']} | {line['method']} | {' | '.join(cells)} |")
    file = RESULTS / "README.md"
    before, _, rest = file.read_text().partition(BEGIN)
    file.write_text("\n".join([before + BEGIN, *table, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    {"run": run, "pages": pages}[sys.argv[1]]()
