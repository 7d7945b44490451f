"""Keys of states: equal where only times, addresses, process ids and temporary folders differ."""

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import EnvironmentFailure, ModuleImportError
from verl_turnkey.plugins.gateway import states
from verl_turnkey.plugins.gateway.messages import Message, Request, ToolCall
from verl_turnkey.plugins.gateway.states import FORMS, FUNCTIONS, History, View, normal_form, state_key

PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider test_a.py"
TEST = "import time\ndef test_a():\n    time.sleep(0.01)\ndef test_b(tmp_path):\n    assert (tmp_path, object()) == 1\n"
COMMANDS = {
    "pwd": "pwd",
    "date": "date",
    "date of a mail": "date -R",
    "date of ISO 8601": "date -Iseconds",
    "address": f"{sys.executable} -c 'print(object())'",
    "pid": "echo pid: $$, process $$",
    "uuid": "cat /proc/sys/kernel/random/uuid",
    "pytest": f"{PYTEST} | tail -30",
    "temporary files": "mktemp; mktemp -d",
    "listing": "touch a; ls -l --time-style='+%b %d %H:%M' a",
}


def run(command: str, folder: Path) -> str:
    (folder / "test_a.py").write_text(TEST)
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HOME": str(folder),
        "TZ": "UTC",
    }
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, env=env).stdout


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_two_runs_of_a_command_are_equal_in_normal_form(command: str):
    outputs = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            outputs.append(run(command, Path(folder)))
    assert outputs[0].strip()
    forms = [normal_form(output) for output in outputs]
    assert forms[0] == forms[1]
    assert re.search("<[a-z]+>", forms[0])


def test_runs_that_end_otherwise_differ():
    with tempfile.TemporaryDirectory() as folder:
        whole = run(PYTEST, Path(folder))
        first = run(f"{PYTEST}::test_a", Path(folder))
    assert "1 failed, 1 passed" in whole
    assert normal_form(whole) != normal_form(first)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("<a.B object at 0x7f3a5c2d1e80>", "<a.B object at <address>>"),
        ("0xff", "0xff"),
        ("id 6F9619FF-8B86-D011-B42D-00CF4FC964FF.", "id <uuid>."),
        ("2026-11-26 07:04:12,123 INFO ready", "<time> INFO ready"),
        ("at 2026-11-26T07:04Z and 2026-11-26T07:04:12.5+01:00", "at <time> and <time>"),
        ("due 2026-11-26", "due 2026-11-26"),
        ("Thu Nov 26 07:04:12 UTC 2026", "<date>"),
        ("Thu 26 Nov 2026 07:04:12 AM UTC", "<date>"),
        ("Date: Thu, 26 Nov 2026 07:04:12 +0000", "Date: <date>"),
        ("-rw-r--r-- 1 a a 6 Nov  6 07:04 b", "-rw-r--r-- 1 a a 6 <date> b"),
        ("[12:03:11.5] go", "[<time>] go"),
        ("3 passed in 0.12s, 40 ms", "3 passed in <duration>, <duration>"),
        ("3 settings", "3 settings"),
        ("PID=17 pid: 4 process 9", "<pid> <pid> <pid>"),
        ("cd /tmp/tmpab12_x9z/b /tmp/tmp.Ab3dEf6hIj", "cd /tmp/<tmp>/b /tmp/<tmp>"),
        ("/var/x/turnkey-agent-abcdefgh/app", "/var/x/<tmp>/app"),
        ("/tmp/pytest-of-root/pytest-3/test_b0", "/tmp/<tmp>/test_b0"),
        ("/tmp/run-17/out /tmp/work/out", "/tmp/<tmp>/out /tmp/work/out"),
        (" a\n\n b\t", "a b"),
    ],
)
def test_normal_form(text: str, form: str):
    assert normal_form(text) == form


def test_each_form_is_of_use():
    rows = yaml.safe_load(FORMS.read_text(encoding="utf-8"))
    assert all(set(row) == {"form", "pattern", "becomes"} for row in rows)
    assert len({row["form"] for row in rows}) == len(rows)


SYSTEM, USER = Message("system", "Be brief."), Message("user", "Fix it. It is Thu Nov 26 07:04:12 UTC 2026")
CALL = Message("assistant", "", (ToolCall("sh", {"cmd": "pytest", "n": 1.0}, "call_a_0_0"),), "so", item_id="a_0")
RESULT = Message("tool", "1 passed in 0.1s", call_id="call_a_0_0")
PAST = (SYSTEM, USER, CALL, RESULT)
OTHER_CALL = Message("assistant", "", (ToolCall("sh", {"n": 1, "cmd": "pytest"}, "call_b_0_0"),), item_id="b_0")
OTHERWISE = (SYSTEM, replace(USER, text=USER.text.replace("07:04", "09:31")), OTHER_CALL,
             replace(RESULT, text="1 passed  in 2.5s\n", call_id="call_b_0_0"))  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_episodes_that_did_the_same_are_in_one_state(name: str):
    key = state_key(name)
    assert key(Request(PAST)) == key(Request(OTHERWISE))
    assert key(Request(PAST[:2])) == key(Request(OTHERWISE[:2])) != key(Request(PAST))


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        ((replace(SYSTEM, text="Be rude."), *PAST[1:]), {"history"}),
        ((SYSTEM, USER, replace(CALL, text="I run them."), RESULT), {"history", "call"}),
        ((SYSTEM, USER, replace(CALL, calls=(ToolCall("sh", {"cmd": "ls", "n": 1}, "call_a_0_0"),)), RESULT),
         {"history", "call"}),
        ((*PAST[:3], replace(RESULT, text="1 failed in 0.1s")), {"history", "observation", "call"}),
        ((*PAST[:3], replace(RESULT, error=True)), {"history", "observation", "call"}),
        ((*PAST, Message("user", "Go on.")), {"history", "observation", "call"}),
        ((USER, Message("assistant", "Hello."), *PAST), {"history"}),
        ((SYSTEM, USER, replace(CALL, reasoning="other"), RESULT), set()),
    ],
)  # fmt: skip
def test_what_tells_states_apart(changed: tuple[Message, ...], differ: set[str]):
    assert {name for name in FUNCTIONS if state_key(name)(Request(PAST)) != state_key(name)(Request(changed))} == differ


@pytest.mark.parametrize("name", FUNCTIONS)
def test_which_call_a_result_is_of_tells_states_apart(name: str):
    """Two calls at once: the same texts in the same order, each the result of the other call."""
    calls = Message("assistant", "", (ToolCall("sh", {"cmd": "a"}, "x"), ToolCall("sh", {"cmd": "b"}, "y")))
    results = [[Message("tool", text, call_id=id) for text, id in zip("st", ids, strict=True)] for ids in ("xy", "yx")]
    straight, crossed = (state_key(name)(Request((USER, calls, *of))) for of in results)
    assert straight != crossed


def test_images_tell_states_apart():
    from PIL import Image

    red, also_red, blue = (Request((replace(USER, images=(Image.new("RGB", (2, 2), color),)),))
                           for color in ("red", "red", "blue"))  # fmt: skip
    key = state_key("history")
    assert key(red) == key(also_red) != key(blue)


def test_a_view():
    view = View((*PAST, Message("assistant", "Done."), Message("user", "Sure?"), Message("user", "Well?")))
    assert (view.step, [call.name for call in view.calls]) == (2, ["sh"])
    assert [message.text for message in view.new] == ["Sure?", "Well?"]
    assert view.last == Message("assistant", "Done.")
    assert (View(PAST[:2]).new, View(PAST[:2]).last) == (PAST[:2], None)


def test_a_function_of_the_users_own(tmp_path: Path):
    (tmp_path / "my_states.py").write_text(
        "def files(view):\n    return None if view.files is None else ','.join(sorted(view.files))\n"
        "def number(view):\n    return view.step\n"
        "def broken(view):\n    return view.nothing\n"
        "def alone():\n    return ''\n"
    )
    path = tmp_path / "my_states.py"
    key = state_key(f"{path}:files")
    assert key(Request(PAST)) is None
    assert key(Request(PAST), {"b": "2", "a": "1"}) == "a,b"
    with pytest.raises(EnvironmentFailure, match=r"must return text or None, got int"):
        state_key(f"{path}:number")(Request(PAST))
    with pytest.raises(EnvironmentFailure, match=r"my_states.py:broken: AttributeError: .*nothing"):
        state_key(f"{path}:broken")(Request(PAST))
    with pytest.raises(ModuleImportError, match=r"turnkey.agent.state: cannot load .*:fils"):
        state_key(f"{path}:fils")
    with pytest.raises(ModuleImportError, match=r"state=.*:alone: expected a function of \(view\), got one of \(\)$"):
        state_key(f"{path}:alone")


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"turnkey.agent.state=histori: .*history, observation, call or module:func"):
        state_key("histori")


def test_a_history_that_goes_on_looks_at_new_messages_alone(monkeypatch: pytest.MonkeyPatch):
    """Its key is that of all messages, also where the client has changed what came before."""
    messages = [Message("system", "You look."), Message("user", "Where?")]
    requests = []
    for n in range(5):
        requests.append(Request(tuple(messages)))
        calls = tuple(ToolCall("look", {"at": n, "place": i}, f"call_{n}_{i}") for i in range(2))
        messages += [Message("assistant", f"I look, {n}.", calls)]
        messages += [Message("tool", f"nothing at {n}", call_id=call.id) for call in reversed(calls)]
    key, whole = state_key("history"), [state_key("history")(request) for request in requests]
    assert isinstance(key, History)
    seen: list[int] = []
    compared = states._compared
    monkeypatch.setattr(states, "_compared", lambda new, last=None: seen.append(len(new)) or compared(new, last))
    pairs = zip(whole, pairwise(requests), strict=False)
    assert [key.after(past, *pair) for past, pair in pairs] == whole[1:]
    assert seen == [3] * 4
    edited = Request((Message("system", "You listen."), *requests[1].messages[1:]))
    assert key.after(whole[0], requests[0], edited) == key(edited) != whole[1]
