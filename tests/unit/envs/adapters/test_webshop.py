"""WebShop's adapter and server over a tiny shop with its interface: in process, and from another interpreter."""

import ast
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from shop import Shop

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters.webshop import server as webshop_server
from verl_turnkey.envs.http import ServerError, post_json

ID = "turnkey/WebShop-v0"
SCRIPT = Path(webshop_server.__file__)
LOCAL = {"factory": "shop:Shop"}


@pytest.fixture(scope="module")
def url():
    """The script as WebShop's users run it, in a folder with a shop."""
    command = [sys.executable, str(SCRIPT), "--port", "0", "--factory", "shop:Shop", "--limit", "40"]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.kill()


@pytest.fixture(params=["in process", "over HTTP"])
def kwargs(request):
    return LOCAL if request.param == "in process" else {"url": request.getfixturevalue("url")}


def plan(session: int) -> list[str]:
    shop = Shop()
    shop.reset(session=session)
    return shop.plan()


def test_a_purchase(kwargs):
    env = make(ID, kwargs)
    observation, info = env.reset(seed=61)  # 60 goals: goal 1
    assert info["task"].startswith("i want a ")
    assert info["admissible"] is None
    assert observation == "Search\nsearch[words]"
    answers = []
    for action in plan(1):
        admissible = info["admissible"]
        assert admissible is None or action.lower() in admissible
        answers.append(env.step(action))
        info = answers[-1][4]
        assert not info["invalid"]
    assert "Instruction" not in answers[0][0]
    assert answers[0][0].startswith("Back to Search [SEP] Page 1 (Total results: ")
    assert [answer[1] for answer in answers] == [0.0] * (len(answers) - 1) + [1.0]
    assert answers[-1][2:4] == (True, False)
    assert info["success"]
    with pytest.raises(EpisodeOverError):
        env.step("click[buy now]")


def test_instructions_of_a_product_are_not_the_task():
    env = make(ID, {"factory": "shop:CareShop"})
    env.reset(seed=1)
    *before, last = [env.step(action)[0] for action in plan(1)]
    assert last.startswith("Thank you for shopping with us!")
    assert last.endswith("Care Instruction: wash cold [SEP] Bye")
    assert not any("Instruction" in page for page in before)


def test_gymnasium_accepts_it(kwargs):
    check_env(make(ID, kwargs).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("reward", "expected"), [("score", 0.5), ("success", 0.0)])
def test_the_wrong_options_earn_a_part(kwargs, reward, expected):
    env = make(ID, {**kwargs, "reward": reward})
    env.reset(seed=1)
    for action in plan(1):
        if action not in [f"click[{value}]" for value in ("red", "blue", "green", "small", "large")]:
            _, earned, over, _, info = env.step(action)
    assert (earned, over, info["success"]) == (expected, True, False)


def test_chosen_options_are_part_of_the_state_though_the_page_reads_the_same(kwargs):
    env = make(ID, kwargs)

    def after(*clicks):
        env.reset(seed=1)
        env.step(plan(1)[0])
        for name in (plan(1)[1][6:-1], *clicks):
            observation, *_, info = env.step(f"click[{name}]")
            assert not info["invalid"]
        return observation, info["state_key"]

    page, plain = after()
    assert after("red") == after("blue", "red") != after("blue")
    assert after("red")[0] == page
    assert after("red")[1] != plain
    assert after("red", "large") == after("large", "red")
    assert after("description", "< prev")[1] == plain
    env.reset(seed=2)
    *_, other = env.step(plan(1)[0])
    env.reset(seed=1)
    *_, info = env.step(plan(1)[0])
    assert info["state_key"] != other["state_key"]  # same results, another wish


def test_what_a_page_does_not_offer_is_invalid_and_does_not_reach_the_shop(kwargs):
    env = make(ID, kwargs)
    observation, start = env.reset(seed=1)
    for action in (
        "", "buy", "click[buy now]", "click[search]", "search[]", "search[  ]", "search[[]]", "search[<r>]", "click[]",
        "search lamp", "x" * 100_000, "\x00", "search[a] click[b]x",
    ):  # fmt: skip
        seen, reward, over, _, info = env.step(action)
        assert (seen, reward, over, info["invalid"]) == (observation, 0.0, False, True), action
        assert info["state_key"] == start["state_key"]
    *_, info = env.step(" Search[ Oak  LAMP [x] ] ")
    assert not info["invalid"]
    assert env.step("search[oak]")[4]["invalid"]  # no search bar here
    *_, info = env.step("CLICK[ next  > ]")
    assert not info["invalid"]
    assert "click[< prev]" in info["admissible"]


def test_goals_and_seeds(kwargs):
    env = make(ID, {**kwargs, "goals": [10, 13], "max_steps": 2})
    tasks = [env.reset(seed=seed)[1]["task"] for seed in range(6)]
    assert tasks[:3] == tasks[3:]
    everything = make(ID, kwargs)
    assert tasks[1] == everything.reset(seed=11)[1]["task"]
    assert [env.step("nothing")[3] for _ in range(2)] == [False, True]


def test_shoppers_of_one_server_do_not_share_a_basket(url):
    def shop_alone(number):
        env = make(ID, {"url": url})
        rng = random.Random(number)
        seen = []
        for session in (1, 1, number % 60):
            env.reset(seed=session)
            for action in plan(session)[:-1]:
                seen.append(env.step(action)[4]["state_key"])
                if rng.random() < 0.5:
                    env.step("nonsense")
            seen.append(env.step("click[buy now]")[1])
        return seen

    numbers = range(30)
    with ThreadPoolExecutor(15) as threads:
        together = list(threads.map(shop_alone, numbers))
    assert together == [shop_alone(number) for number in numbers]
    assert all(answers[-1] == 1.0 for answers in together)


@pytest.mark.parametrize(
    ("path", "payload", "message"),
    [
        ("/reset", {"session": "3"}, "400: .*session must be an integer"),
        ("/reset", {"session": -1}, "400: .*session must be an integer"),
        ("/reset", {"session": 60}, "500: .*IndexError"),
        ("/step", {"id": "99", "action": "a"}, "404: .*no shopper '99'"),
        ("/step", {"id": "0"}, "400: .*action must be text"),
        ("/buy", {}, "404: .*no such call"),
        ("/info", [1], "404: .*JSON object"),
    ],
)
def test_bad_calls_of_the_server(url, path, payload, message):
    with pytest.raises(ServerError, match=message):
        post_json(url + path, payload, timeout=5.0, key="k")
    assert post_json(f"{url}/info", {}, timeout=5.0, key="k") == {"goals": 60}


def test_shoppers_beyond_the_limit_leave_the_oldest_out():
    shops = webshop_server.Shops(Shop, limit=2)
    ids = [shops.call("/reset", {"session": 0})["id"] for _ in range(2)]
    assert shops.call("/reset", {"session": 1, "id": ids[0]})["id"] == ids[0]
    shops.call("/reset", {"session": 0})
    shops.call("/step", {"id": ids[0], "action": "search[lamp]"})
    with pytest.raises(webshop_server.CallError, match="more than 2"):
        shops.call("/step", {"id": ids[1], "action": "search[lamp]"})


def test_a_shop_that_says_too_little_and_one_that_breaks():
    with pytest.raises(EnvironmentKwargsError, match="does not tell how many"):
        make(ID, {"factory": "shop:SilentShop"}).reset(seed=0)
    with pytest.raises(ValueError, match="observation_mode='text'"):
        make(ID, {"factory": "shop:SilentShop", "goals": [0, 9]}).reset(seed=0)
    env = make(ID, {"factory": "shop:BrokenShop"})
    env.reset(seed=0)
    with pytest.raises(IndexError):
        env.step("search[lamp]")


def test_the_server_runs_on_the_python_of_webshop():
    source = SCRIPT.read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    top = {name.partition(".")[0] for name in imported}
    assert top - set(sys.stdlib_module_names) == {"web_agent_site"}
