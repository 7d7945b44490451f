"""A trajectory log without a trainer: an invented household, a policy that learns, and GiGPO's credit in numpy.

::

    python tests/unit/synthetic_run.py RUN [--episodes 2000] [--turns 50] [--steps 10] [--seed 0] [--hostile]

Written with pyarrow straight from ``plugins/log/schema.py``. Good actions become likelier from step to step; states
repeat within a group; some episodes fail, some prompts are cut. ``--hostile``: texts that try to break a page.
"""

import argparse
import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_turnkey.plugins.log.schema import SCHEMA_VERSION, TABLES, schema

THINGS = ("potato", "plate", "cup", "apple", "book", "lamp", "spoon", "towel")
PLACES = ("fridge", "cupboard", "drawer", "desk", "shelf", "cabinet")
DISCOUNT = 0.95
HOSTILE = (
    "<script>window.broken = 1</script>",
    "</script><img src=x onerror='window.broken = 1'>",
    "<!-- <script>",
    "nul \x00 escape \x1b[31mred\x1b[0m bell \x07",
    "right to left \u202egnp.exe\u202c and \u2066isolated\u2069",
    "line and paragraph \u2028 \u2029 ends",
    "javascript:window.broken=1",
    "surrogate \ud800 alone",
    "{{constructor.constructor('window.broken=1')()}} ${window.broken=1}",
    "x" * 1_000_000,
)
THOUGHTS = (
    "I am at the {at} and I hold {held}.",
    "The task asks for the {thing}, which should be in the {place}.",
    "So far {done} of {chores} chores are done.",
    "If that does not work I can still look around and try another place.",
    "The last observation did not show anything new, so I should not repeat what I did.",
    "It is best to keep the number of steps small, since every step counts.",
    "A closed place has to be opened before anything can be taken out of it.",
    "The table is where everything has to end up.",
)


class House:
    """Things lie in closed places; each has to be brought to the table."""

    def __init__(self, chores: list[tuple[str, str]]) -> None:
        self.chores, self.done, self.at, self.open, self.held = chores, 0, "table", False, False

    def key(self) -> str:
        holding = self.chores[self.done][0] if self.held else "nothing"
        return f"{self.done} done, at the {self.at}{', open' if self.open else ''}, holding {holding}"

    def good(self) -> str:
        thing, place = self.chores[self.done]
        if self.held:
            return f"put {thing}" if self.at == "table" else "go to table"
        if self.at != place:
            return f"go to {place}"
        return f"take {thing}" if self.open else f"open {place}"

    def act(self, action: str) -> str:
        thing, place = self.chores[self.done]
        verb, _, what = action.partition(" ")
        if verb == "go":
            self.at, self.open = what.removeprefix("to "), False
            return f"You walk to the {self.at}." + (" It is closed." if self.at in PLACES else "")
        if verb == "open" and what == self.at:
            self.open = True
            return f"You open the {what}." + (f" In it you see a {thing}." if self.at == place else " It is empty.")
        if verb == "take" and self.open and self.at == place and not self.held:
            self.held = True
            return f"You take the {thing}."
        if verb == "put" and self.held and self.at == "table":
            self.done, self.held = self.done + 1, False
            return f"The {thing} is on the table. {len(self.chores) - self.done} to go."
        return "Nothing happens."


def write(
    run: Path,
    *,
    episodes: int = 240,
    turns: int = 14,
    steps: int = 6,
    seed: int = 0,
    hostile: bool = False,
    skill: float = 0.42,
    method: str = "gigpo",
    validate: bool = True,
    more: Callable[[], str] = str,
    lost: int | None = None,
) -> Path:
    """Write ``RUN/turnkey_log`` with about ``episodes`` episodes of at most ``turns`` turns; returns that folder.

    ``more`` makes a text that the next response has in front. From step ``lost`` on the policy does one thing only.
    """
    rng = np.random.default_rng(seed)
    folder = run / "turnkey_log"
    per_step = episodes / steps
    for step in range(1, steps + 1):
        tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
        learned = min(0.97, skill + 0.38 * (step - 1) / max(1, steps - 1))
        stuck = lost is not None and step >= lost
        learned = 0.03 if stuck else learned
        played = 0
        while played < per_step:
            size = int(rng.integers(8, 17))
            _group(
                tables,
                rng,
                step,
                size,
                turns,
                learned,
                hostile and not played,
                int(rng.integers(1000)),
                False,
                more,
                stuck,
            )
            played += size
        _credit(tables, step, rng, row=0)
        if validate and step % 3 == 0:
            for task in range(8):
                _group(tables, rng, step, 2, turns, learned, False, 2000 + task, True, more, stuck)
        tables["steps"] = _metrics(tables, step, 1.0 if stuck else learned, rng)
        _save(folder, tables, step)
    info = {
        "schema": SCHEMA_VERSION,
        "method": method,
        "params": {"step_weight": 1.0, "gamma": DISCOUNT},
        "config": {"algorithm": {"adv_estimator": method}, "data": {"seed": seed}, "trainer": {"total": steps}},
        "modify": [],
        "loss": "vanilla",
    }
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def draw(run: Path) -> None:
    """Give each turn of a log a picture of its state, 8 x 8 pixels of one color, but for one name in an odd form."""
    from PIL import Image

    from verl_turnkey.plugins.rollout.trajectory_log import picture_name, png

    for path in sorted(run.glob("turnkey_log/turns/*/*.parquet")):
        table = pq.read_table(path, partitioning=None)
        images = [
            Image.new("RGB", (8, 8), f"#{hashlib.sha1(key.encode()).hexdigest()[:6]}")
            for key in table["anchor"].to_pylist()
        ]
        names = [picture_name(image) for image in images]
        cells = pa.array([f"../../{names[0]} {names[0]}", *names[1:]])
        pq.write_table(table.set_column(table.column_names.index("images"), "images", cells), path)
        by_name = {name: png(image) for name, image in zip(names, images, strict=True)}
        place = path.parents[2] / "pictures" / path.parent.name
        place.mkdir(parents=True)
        columns = {"picture": [*by_name], "png": [*by_name.values()]}
        pq.write_table(pa.table(columns, schema=schema("pictures")), place / path.name)


def _group(tables, rng, step, size, limit, skill, hostile, task, validation, more, stuck) -> None:
    own = np.random.default_rng(task)
    chores = [(str(own.choice(THINGS)), str(own.choice(PLACES))) for _ in range(max(1, limit // 8))]
    uid = str(uuid.UUID(bytes=rng.bytes(16)))
    for session in range(size):
        house, key = House(chores), f"{uid}_{session}"
        failed = rng.random() < 0.015 and not validation
        names = " and ".join(f"the {thing}" for thing, _ in chores[:2])
        wish = f"Bring {names}{' and more' if len(chores) > 2 else ''} to the table"
        text = f"{wish}. You are in a small house: table, sink, {', '.join(PLACES)}."
        seen, total, turn, won = text, 0.0, 0, False
        while turn < limit and not (failed and turn == 2) and not won:
            state, good = house.key(), house.good()
            lucky = rng.random() < skill
            wanders = ("look", "go to sink", f"examine {house.at}", f"open {house.at}", f"go to {rng.choice(PLACES)}")
            action = good if lucky else wanders[1] if stuck else str(rng.choice(wanders))
            valid = bool(lucky or rng.random() > 0.12)
            thing, place = chores[house.done]
            held = f"the {thing}" if house.held else "nothing"
            lines = rng.choice(THOUGHTS, size=5, replace=False)
            facts = {"at": house.at, "held": held, "thing": thing, "place": place}
            thought = more() + " ".join(line.format(done=house.done, chores=len(chores), **facts) for line in lines)
            response = f"<think>{thought}</think>\n<action>{action}</action>" if valid else thought
            answer = house.act(action) if valid else "No action was found in your response."
            if hostile:
                response += HOSTILE[turn % len(HOSTILE)]
                answer += HOSTILE[(turn + session) % (len(HOSTILE) - 1)]
            won = house.done == len(chores)
            shaped = 0.1 if answer.endswith("to go.") and not won else 0.0
            reward = (1.0 if won else 0.0) + shaped
            tables["turns"].append(
                {
                    "episode": key, "turn": turn, "row": turn, "turn_in_row": 0, "anchor": state,
                    "action": (action if not hostile else action + HOSTILE[turn % 3]) if valid else None,
                    "valid": valid, "parse_note": None if valid else "no <action> tag",
                    "penalty": 0.0 if valid else 0.1, "reward": float(won), "composed_reward": reward,
                    "composed_reward.env": float(won), "composed_reward.chore": shaped,
                    "terminated": won, "truncated": not won and turn == limit - 1, "weights": step - 1,
                    "prompt_tokens": 180 + 60 * turn, "prompt_cut": turn > 40,
                    "response_tokens": len(response) // 4 % 400,
                    "seconds_model": float(rng.uniform(0.2, 2)), "seconds_env": float(rng.uniform(0, 0.05)),
                }
            )  # fmt: skip
            tables["texts"].append(
                {
                    "episode": key, "turn": turn, "prompt_tail": seen[-2000:], "response": response,
                    "observation": answer,
                    "task_text": None if turn else wish, "first_observation": None if turn else text,
                }
            )  # fmt: skip
            seen, total, turn = answer, total + reward, turn + 1
        tables["episodes"].append(
            {
                "episode": key, "group": uid, "split": "val" if validation else "train", "validation": validation,
                "global_step": step, "task": wish if not hostile else wish + HOSTILE[session % 4],
                "env": "example/Household-v0", "kwargs": json.dumps({"chores": len(chores)}), "seed": task,
                "package": "example 1.0", "weights_min": step - 1, "weights_max": step - 1, "host": "node-1",
                "started": 1.7e9 + 60.0 * step, "seconds_model": 1.1 * turn, "seconds_env": 0.02 * turn,
                "seconds_waiting": 0.1, "turns": turn, "env_return": float(won), "composed_return": total,
                "success": None if failed else won, "truncated": not won and not failed,
                "failed": f"step {turn} took longer than 30 s" if failed else None,
                "failed_kind": ("timeout" if session % 3 else "process") if failed else None,
            }
        )  # fmt: skip


def _credit(tables, step, rng, row) -> None:
    """GiGPO over the training episodes that did not fail."""
    turns_of = defaultdict(list)
    for turn in tables["turns"]:
        turns_of[turn["episode"]].append(turn)
    groups = defaultdict(list)
    for episode in tables["episodes"]:
        if episode["failed"] is None:
            groups[episode["group"]].append(episode)
    anchors = 0
    for number, members in enumerate(groups.values()):
        scores = np.array([episode["composed_return"] for episode in members])
        outcome = (scores - scores.mean()) / (scores.std() + 1e-6)
        same = defaultdict(list)
        rows = []
        for episode, level in zip(members, outcome, strict=True):
            ahead = 0.0
            for turn in reversed(turns_of[episode["episode"]]):
                ahead = turn["composed_reward"] + DISCOUNT * ahead
                rows.append((turn, ahead, float(level)))
                same[turn["anchor"]].append(ahead)
        code = {state: anchors + i for i, state in enumerate(same)}
        anchors += len(code)
        for turn, ahead, level in rows:
            others = np.array(same[turn["anchor"]])
            here = (ahead - others.mean()) / (others.std() + 1e-6) if len(others) > 1 and others.std() > 0 else 0.0
            lost = -turn["penalty"]
            tables["credit"].append(
                {
                    "episode": turn["episode"], "turn": turn["turn"], "train_step": step, "row_id": row,
                    "turn_in_row": 0, "advantage": level + here + lost, "part.episode_level": level,
                    "part.step_level": here, "part.penalty": lost, "group.episode_level": number,
                    "size.episode_level": len(rows),
                    "group.step_level": code[turn["anchor"]], "size.step_level": len(others), "value": None,
                    "value_target": ahead, "kl": float(rng.gamma(1, 0.002)),
                }
            )  # fmt: skip
            ratio = float(np.exp(rng.normal(0, 0.05)))
            tables["updates"].append(
                {
                    "train_step": step, "row_id": row, "turn_in_row": 0, "epoch": 0, "ratio": ratio,
                    "ratio_max": ratio * 1.3, "clip_share": float(rng.beta(1, 12)), "entropy": float(1.2 / step + 0.1),
                }
            )  # fmt: skip
            row += 1


def _metrics(tables, step, skill, rng) -> list[dict[str, Any]]:
    named = {
        "actor/entropy": 1.4 * (1.05 - skill),
        "actor/ppo_kl": 0.002 + 0.001 * rng.random(),
        "actor/pg_clipfrac": 0.02 + 0.02 * rng.random(),
        "actor/grad_norm": 0.5 + 0.1 * skill,
        "timing_s/gen": 12 + rng.random(),
        "timing_s/update_actor": 5 + rng.random(),
        "timing_s/adv": 0.3 + 0.1 * rng.random(),
        "timing_s/step": 19 + rng.random(),
    }
    return [{"train_step": step, "name": name, "value": float(value)} for name, value in named.items()]


def _save(folder: Path, tables: dict[str, list[dict[str, Any]]], step: int) -> None:
    for name in TABLES:
        rows = tables[name]
        if not rows:
            continue
        further = tuple(key for key in rows[0] if key.startswith(("composed_reward.", "part.", "group.", "size.")))
        shape = schema(name, further)
        columns = {field.name: [_clean(row.get(field.name)) for row in rows] for field in shape}
        where = folder / name / f"step={step:06d}"
        where.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns, schema=shape), where / "20260101T000000_0000-0-0.parquet", compression="zstd")


def _clean(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    for option, default in (("episodes", 2000), ("turns", 50), ("steps", 10), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--lost", type=int, help="step from which on the policy does one thing only")
    print(write(**vars(parser.parse_args())))
