"""Self-play of one policy with the credit of each method: how far from optimal play does it end up?

    python benchmarks/selfplay.py run      # about two minutes on one core; writes benchmarks/results/selfplay.json
    python benchmarks/selfplay.py neural   # a transformer; adds a line per run to results/selfplay_neural.jsonl
    python benchmarks/selfplay.py neural kuhn_poker marshal 0  # one such run
    python benchmarks/selfplay.py pages    # the tables, in benchmarks/results/README.md

Environments and estimators are those of this package. The tabular softmax policy has a row of logits for each
information state; the transformer reads the words of the state. ``neural`` skips finished runs. Each
role is paid its own outcome on its last turn, as in training. Kuhn poker is measured by exploitability (half of what
the best answers to the policy gain in both roles together, 0 for an equilibrium), nim by the probability of an optimal
move, averaged over all states in which another move loses.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyspiel
import torch
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
NEURAL = METHODS[:-1]
NEURAL_RATE, NEURAL_UPDATES, NEURAL_EVERY, WIDTH, ENTROPY = 5e-4, 200, 25, 32, 0.05
NEURAL_FILE = RESULTS / "selfplay_neural.jsonl"
BEGIN, END = "<!-- selfplay: written by benchmarks/selfplay.py pages -->", "<!-- /selfplay -->"

Batch = list[tuple[str, int, float]]
"""information state, index of the action taken, advantage"""


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


class Table(dict[str, np.ndarray]):
    """Information state -> logits of its legal actions."""

    def probabilities(self, state: str, actions: Sequence[str]) -> np.ndarray:
        return softmax(self.setdefault(state, np.zeros(len(actions))))

    def update(self, batch: Batch) -> None:
        gradient = {state: np.zeros_like(self[state]) for state, *_ in batch}
        for state, action, advantage in batch:
            gradient[state] -= advantage * softmax(self[state])
            gradient[state][action] += advantage
        for state, of_state in gradient.items():
            self[state] = self[state] + RATE * of_state / (GROUPS * ROLLOUTS)


class Transformer(torch.nn.Module):
    """One layer over the words of an information state, and a logit for each action name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = torch.nn.Embedding(256, WIDTH, padding_idx=0)
        self.places = torch.nn.Embedding(64, WIDTH)
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        # States differ by a word or two. Without this, the first updates raise the same action in all states.
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False, momentum=0.5)
        self.head = torch.nn.Linear(WIDTH, 32, bias=False)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=NEURAL_RATE)
        self._vocabulary: dict[str, int] = {"": 0}
        self._names: dict[str, int] = {}
        self._actions: dict[str, list[int]] = {}
        self._known: dict[str, np.ndarray] = {}
        """probabilities since the last update"""

    def probabilities(self, state: str, actions: Sequence[str]) -> np.ndarray:
        self._actions[state] = [self._names.setdefault(name, len(self._names)) for name in actions]
        self.norm.eval()
        if state not in self._known:
            with torch.no_grad():
                self._known[state] = self._log_probabilities([state])[0][: len(actions)].double().exp().numpy()
                self._known[state] /= self._known[state].sum()
        return self._known[state]

    def update(self, batch: Batch) -> None:
        states = list(dict.fromkeys(state for state, *_ in batch))
        self.norm.train()
        rows = self._log_probabilities(states)
        weights = torch.zeros_like(rows)
        for state, action, advantage in batch:
            weights[states.index(state), action] -= advantage / (GROUPS * ROLLOUTS)
        self.optimizer.zero_grad()
        finite = rows.masked_fill(rows == -torch.inf, 0.0)
        visits = torch.bincount(torch.tensor([states.index(state) for state, *_ in batch])) / (GROUPS * ROLLOUTS)
        entropy = -(visits[:, None] * rows.exp() * finite).sum()
        ((weights * finite).sum() - ENTROPY * entropy).backward()
        self.optimizer.step()
        self._known.clear()

    def _log_probabilities(self, states: Sequence[str]) -> torch.Tensor:
        """(states, most actions) for the legal actions in order; -inf after the last."""
        words = [re.findall(r"\w+|[^\w\s]", state) for state in states]
        length, most = max(map(len, words)), max(len(self._actions[state]) for state in states)
        known, padding = self._vocabulary, [""] * length
        codes = torch.tensor([[known.setdefault(w, len(known)) for w in (row + padding)[:length]] for row in words])
        hidden = self.layer(self.words(codes) + self.places.weight[:length], src_key_padding_mask=codes == 0)
        pooled = (hidden * (codes > 0)[..., None]).sum(dim=1) / (codes > 0).sum(dim=1, keepdim=True)
        logits = self.head(self.norm(pooled))
        legal = torch.tensor([self._actions[state] + [-1] * (most - len(self._actions[state])) for state in states])
        chosen = logits.gather(1, legal.clamp(min=0)).masked_fill(legal < 0, -torch.inf)
        return torch.log_softmax(chosen, dim=1)


Policy = Table | Transformer


def state_of(observation: str, info: Mapping[str, Any]) -> str:
    """What the role that moves knows."""
    return f"{info['extra']['role']} {observation}"


def episode(env: Any, policy: Policy, seed: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Steps of one game, each role paid on its last."""
    observation, info = env.reset(seed=seed)
    steps, over = [], False
    while not over:
        state, role = state_of(observation, info), info["extra"]["role"]
        chances = policy.probabilities(state, info["admissible"])
        action = int(rng.choice(len(chances), p=chances))
        steps.append({"state": state, "action": action, "role": role, "anchor": info["state_key"], "reward": 0.0})
        observation, _, over, _, info = env.step(info["admissible"][action])
    for role, outcome in info["outcome"].items():
        last = max((t for t, step in enumerate(steps) if step["role"] == role), default=None)
        if last is not None:
            steps[last]["reward"] = outcome
    for step in steps:
        step["outcome"] = info["outcome"][step["role"]]
    return steps


def train(game: str, method: str, seed: int, policy: Policy, updates: int, every: int) -> list[float]:
    """The measure of ``game`` before training and at intervals of ``every`` updates."""
    env, rng = make("turnkey/OpenSpiel-v0", {"game": GAMES[game]}), np.random.default_rng(seed)
    measured, memory = [measure(game, policy)], None
    for update in range(1, updates + 1):
        rows = []
        for group, rollout in product(range(GROUPS), range(ROLLOUTS)):
            steps = episode(env, policy, GROUPS * (updates * seed + update) + group, rng)
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
        credited = zip(of_steps, credit.advantage, strict=True)
        policy.update([(step["state"], step["action"], float(advantage)) for step, advantage in credited])
        if update % every == 0:
            measured.append(measure(game, policy))
    return measured


# --- measures ---------------------------------------------------------------------------------------------------------


def measure(game: str, policy: Policy) -> float:
    return exploitability(policy) if game == "kuhn_poker" else optimal_share(policy)


def _known(policy: Policy, env: Any) -> np.ndarray:
    """The policy's probabilities in the state of ``env``."""
    result = env._now()
    return policy.probabilities(f"{result.extra['role']} {result.observation}", result.admissible)


def exploitability(policy: Policy) -> float:
    """Exploitability in Kuhn poker, exact: it tries all deterministic answers in each role."""
    env: Any = make("turnkey/OpenSpiel-v0", {"game": "kuhn_poker"}).unwrapped
    env.reset(seed=0)
    bets: dict[str, float] = {}

    def collect(state: Any) -> None:
        if not state.is_terminal() and not state.is_chance_node():
            env._state = state
            bets[state.information_state_string(state.current_player())] = float(_known(policy, env)[1])
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


def optimal_share(policy: Policy) -> float:
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
        shares[key] = float(_known(policy, env)[best].sum()) if not best.all() else np.nan
        todo += [state.child(action) for action in state.legal_actions()]
    return float(np.nanmean(list(shares.values())))


# --- results ----------------------------------------------------------------------------------------------------------


def run() -> None:
    lines = []
    for game, method in product(GAMES, METHODS):
        trained = [train(game, method, seed, Table(), UPDATES, EVERY) for seed in SEEDS]
        curves = [[round(number, 4) for number in curve] for curve in trained]
        lines.append({"game": game, "method": method, "curves": curves})
        print(game, method, [curve[-1] for curve in curves], flush=True)
    settings = {"updates": UPDATES, "every": EVERY, "episodes": GROUPS * ROLLOUTS, "rate": RATE, "seeds": SEEDS}
    versions = {**packages(), "open-spiel": version("open-spiel")}
    content = {"packages": versions, "settings": settings, "games": GAMES, "roles": ROLES, "results": lines}
    (RESULTS / "selfplay.json").write_text(json.dumps(content, indent=1) + "\n")


def neural(*chosen: str) -> None:
    """Train the transformer; ``chosen``: game, method and seed of one run; none: all runs without a line."""
    torch.set_num_threads(1)
    kept = {tuple(line[key] for key in ("game", "method", "seed")) for line in _neural_lines()}
    runs = [(chosen[0], chosen[1], int(chosen[2]))] if chosen else product(GAMES, NEURAL, SEEDS)
    for game, method, seed in runs:
        if (game, method, seed) in kept:
            continue
        began = time.monotonic()
        curve = train(game, method, seed, Transformer(seed), NEURAL_UPDATES, NEURAL_EVERY)
        line = {"game": game, "method": method, "seed": seed, "curve": [round(number, 4) for number in curve]}
        settings = {
            "updates": NEURAL_UPDATES,
            "every": NEURAL_EVERY,
            "rate": NEURAL_RATE,
            "width": WIDTH,
            "entropy": ENTROPY,
        }
        with NEURAL_FILE.open("a") as file:
            file.write(json.dumps({**line, "settings": settings, "packages": packages()}) + "\n")
        print(line, f"{time.monotonic() - began:.0f} s", flush=True)


def _neural_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in NEURAL_FILE.read_text().splitlines()] if NEURAL_FILE.is_file() else []


def _table(steps: Sequence[int], curves: Mapping[tuple[str, str], Sequence[Sequence[float]]]) -> list[str]:
    """Lines of a table: the measure after each number of updates in ``steps``, the points of a curve to show."""
    every = steps[1] if len(steps) > 1 else 1
    rows = [
        f"| {game} | {method} | {' | '.join(cell([c[step // every] for c in of_seeds], 3) for step in steps)} |"
        for (game, method), of_seeds in curves.items()
    ]
    return [f"| game | method | {' | '.join(f'after {n}' for n in steps)} |", "|---" * (2 + len(steps)) + "|", *rows]


def pages() -> None:
    content = json.loads((RESULTS / "selfplay.json").read_text())
    every, updates = content["settings"]["every"], content["settings"]["updates"]
    curves = {(line["game"], line["method"]): line["curves"] for line in content["results"]}
    table = _table(range(0, updates + 1, every), curves)
    of_neural: dict[tuple[str, str], list[list[float]]] = {}
    for line in _neural_lines():  # every other evaluation
        of_neural.setdefault((line["game"], line["method"]), []).append(line["curve"][::2])
    if of_neural:
        table += ["", "The transformer:", "", *_table(range(0, NEURAL_UPDATES + 1, 2 * NEURAL_EVERY), of_neural)]
    file = RESULTS / "README.md"
    before, _, rest = file.read_text().partition(BEGIN)
    file.write_text("\n".join([before + BEGIN, *table, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    {"run": run, "neural": neural, "pages": pages}[sys.argv[1]](*sys.argv[2:])
