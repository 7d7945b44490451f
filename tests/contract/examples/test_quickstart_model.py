"""The quickstart's players, tokenizer and model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.cli.main import app

QUICKSTART = str(Path(__file__).parents[3] / "examples" / "quickstart")
LEVEL = "MiniGrid-DoorKey-5x5-v0"


@pytest.fixture
def quickstart(monkeypatch):
    """Import the scripts' modules the way the scripts do, and forget them afterwards: their names are common words."""
    names = ("demos", "model", "models", "play", "teaching", "training")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(QUICKSTART)
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("game", [None, "errands", "three_errands", "service"])
def test_its_tasks_fit_its_line(quickstart, tmp_path, game):
    """``game``: of a chat model; None: the tiny one's."""
    models, job = quickstart("models"), quickstart("training").Job
    setup = models.TINY if game is None else models.GAMES[game]("a/model")
    tasks = ["tasks", f"{tmp_path}/tasks", "--env", setup.env, "--kwargs", json.dumps(setup.kwargs)]
    assert CliRunner().invoke(app, [*tasks, "--train", "8", "--val", "4"], catch_exceptions=False).exit_code == 0
    _, *words = job(out=tmp_path, method="gigpo", seed=0, steps=setup.steps, **setup.job).command("/tmp/ray")
    done = CliRunner().invoke(app, [*words, "--print"], catch_exceptions=False)
    assert done.stdout.startswith("python -m verl"), done.output


@pytest.mark.parametrize("level", [LEVEL, "MiniGrid-DoorKey-6x6-v0"])
def test_the_planner_finds_the_way_from_anywhere(quickstart, level):
    planner_class = quickstart("demos").Planner
    rng = random.Random(0)
    for seed in range(10):
        env = make("turnkey/MiniGrid-v0", {"level": level})
        env.reset(seed=seed)
        planner, taken, won = planner_class(env.unwrapped.grid_env), 0, False
        for _ in range(40):  # drop the key, close the door, walk about
            if not won:
                won = env.step(rng.choice(list(ACTIONS)))[2]
        while not won:
            won, taken = env.step(rng.choice(planner.best()))[4]["success"], taken + 1
            assert taken < 40


def test_the_planner_is_optimal(quickstart):
    planner_class = quickstart("demos").Planner
    lengths = []
    for seed in range(3):
        env = make("turnkey/MiniGrid-v0")
        env.reset(seed=seed)
        planner, steps, won = planner_class(env.unwrapped.grid_env), 0, False
        while not won:
            won, steps = env.step(planner.best()[0])[4]["success"], steps + 1
        lengths.append(steps)
    assert lengths == [11, 7, 13]  # what breadth-first search over the environment itself finds


def test_players_differ_in_quality_and_repeat_with_the_seed(quickstart):
    collect = quickstart("demos").collect
    demos = collect(LEVEL, range(60), history=1, max_turns=20, seed=0)
    good, mediocre, random_player = demos.won
    assert good == 1.0
    assert good > mediocre > random_player
    assert all(len(demo.history) <= 1 for demo in demos.steps)
    assert collect(LEVEL, range(60), history=1, max_turns=20, seed=0) == demos


def test_tokenizer_and_model_survive_their_files(quickstart, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    demos = quickstart("demos").collect(LEVEL, range(20), history=1, max_turns=20, seed=0)
    teaching, model_module, play = quickstart("teaching"), quickstart("model"), quickstart("play")
    tokenizer = model_module.build_tokenizer((teaching.text_of(demo) for demo in demos.steps), ACTIONS)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    template = load_template("minigrid")
    for demo in demos.steps[:50]:
        arguments = (template, demo.task, demo.history, demo.observation)
        ids = play.render(tokenizer, *arguments)
        assert play.render(loaded, *arguments) == ids
        assert len(ids) < 64
        text = loaded.decode(ids)
        assert text.startswith("<|im_start|>user\nTask: ")
        assert text.endswith(f"{demo.observation}<|im_end|>\n<|im_start|>assistant\n")
    assert {action: len(loaded(action).input_ids) for action in ACTIONS} == {a: len(a.split()) for a in ACTIONS}
    for odd in ("Ünïcode ☃ \x00 {x}", "go to the red ball", "a\n\n b"):
        assert loaded.decode(loaded(odd).input_ids) == odd
    assert loaded.pad_token_id != loaded.eos_token_id == loaded.convert_tokens_to_ids("<|im_end|>")

    torch.manual_seed(0)
    model = model_module.build_model(loaded)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([ids])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000

    players = play.play(model, loaded, LEVEL, [1, 2], history=1, max_turns=2)
    summary = play.summarize(players)
    assert summary["turns"] == 2
    assert summary["invalid"] > 0  # nothing has been learned yet


def test_a_turn_without_an_action_is_shown_as_the_agent_loop_shows_it(quickstart, monkeypatch):
    teaching, model_module, play = quickstart("teaching"), quickstart("model"), quickstart("play")
    demos = quickstart("demos").collect(LEVEL, range(20), history=1, max_turns=20, seed=0)
    tokenizer = model_module.build_tokenizer((teaching.text_of(demo) for demo in demos.steps), ACTIONS)
    pieces = {"fly over  the\n wall": ["fly over  the\n wall"], "": [""], "<|im_end|>": ["<|im_", "end|>"]}
    responses = [[token for piece in parts for token in tokenizer(piece).input_ids] for parts in pieces.values()]
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses] == list(pieces)
    monkeypatch.setattr(play, "_sample", lambda *_: [[*ids, tokenizer.eos_token_id] for ids in responses])
    players = play.play(None, tokenizer, LEVEL, [1, 2, 3], history=1, max_turns=2)
    for player, action in zip(players, ("fly over the wall", "(nothing)", "< |im_end|>"), strict=True):
        first, second = (tokenizer.decode(prompt) for prompt in player.prompts)
        assert second == first.replace(
            player.observation, f"{player.observation}\nAction: {action}\n{player.observation}"
        )


def test_training_lowers_the_loss_of_the_answers_only(quickstart):
    import torch

    demos = quickstart("demos").collect(LEVEL, range(20), history=1, max_turns=20, seed=0).steps[:128]
    teaching, model_module = quickstart("teaching"), quickstart("model")
    tokenizer = model_module.build_tokenizer((teaching.text_of(demo) for demo in demos), ACTIONS)
    ids, labels = teaching._batch(teaching.samples_of(tokenizer, demos)[:8], tokenizer.pad_token_id)
    labeled = labels != teaching.IGNORE
    assert torch.equal(ids[labeled], labels[labeled])
    assert {tokenizer.decode(row[mask]) for row, mask in zip(ids, labeled, strict=True)} <= {
        f"{action}<|im_end|>" for action in ACTIONS
    }
    torch.manual_seed(0)
    model = model_module.build_model(tokenizer)
    before = model(ids, labels=labels).loss.item()
    teaching.train(model, tokenizer, demos, epochs=3, lr=3e-3, seed=0, batch_size=16)
    assert model(ids, labels=labels).loss.item() < before - 1
