"""What an environment may answer; hosts, ``env-check`` and the driver's probe read by these rules."""

import io

import numpy as np
import pytest
from PIL import Image

from verl_turnkey.envs.answers import Answer, Fault, read_reset, read_step
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.host import fingerprint
from verl_turnkey.envs.hosting.runner import EnvRunner


def step(observation="a room", reward=0.0, terminated=False, truncated=False, info=None, **more) -> tuple:
    return observation, reward, terminated, truncated, {**(info or {}), **more}


def test_what_is_right_comes_out_in_plain_types():
    answer = read_step(
        step(
            np.str_("a room"),
            np.float32(0.5),
            np.bool_(True),
            np.bool_(False),
            state_key=np.int64(7),
            admissible=np.array(["go", "stay"]),
            success=np.bool_(True),
            invalid=np.bool_(False),
            extra={"n": np.int64(3)},
        )
    )
    assert isinstance(answer, Answer)
    assert answer.faults == []
    assert (answer.observation, answer.reward, answer.terminated, answer.truncated) == ("a room", 0.5, True, False)
    assert [type(part) for part in (answer.observation, answer.reward, answer.terminated)] == [str, float, bool]
    assert answer.info == {
        "state_key": 7,
        "admissible": ["go", "stay"],
        "success": True,
        "invalid": False,
        "task": "",
        "extra": {"n": 3},
    }
    assert type(answer.info["state_key"]) is int
    assert answer.info["success"] is True


@pytest.mark.parametrize("answer", [None, "a room", ("a room",), ["a room", {}], ("a room", {}, 1)])
def test_a_reset_of_another_form(answer):
    fault = read_reset(answer)
    assert isinstance(fault, Fault)
    assert "reset must return (observation, info)" in fault.message


@pytest.mark.parametrize(
    ("answer", "property", "message"),
    [
        (step(observation=5), "observation", "an observation must be text, not int 5"),
        (step(reward=None), "reward", "a reward must be a finite number, not NoneType None"),
        (step(reward=-1e308), "reward", "a reward must be at most 1e18 in size, not float -1e+308"),
        (step(reward="1.0"), "reward", "not str '1.0'"),
        (step(reward=float("nan")), "reward", "not float nan"),
        (step(reward=float("inf")), "reward", "not float inf"),
        (step(reward=np.zeros(2)), "reward", "not ndarray"),
        (step(reward=10**400), "reward", "not int 1000"),
        (step(terminated=1), "flags", "terminated must be a bool, not int 1"),
        (step(truncated="no"), "flags", "truncated must be a bool, not str 'no'"),
        (step(terminated=None), "flags", "terminated must be a bool, not NoneType"),
        (("a room", 0.0, False, False, None), "info", "info must be a dict, not NoneType None"),
        (step(state_key=(1, 2)), "state_key", "must be a str or an int, not tuple (1, 2)"),
        (step(state_key=True), "state_key", "not bool True"),
        (step(state_key=0.5), "state_key", "not float 0.5"),
        (step(admissible="go"), "info", "info['admissible'] must be a list of str, not str 'go'"),
        (step(admissible=["go", 3]), "info", "info['admissible'] must be a list of str"),
        (step(admissible={"go"}), "info", "info['admissible'] must be a list of str, not set"),
        (step(success="False"), "info", "info['success'] must be a bool, not str 'False'"),
        (step(success=1), "info", "info['success'] must be a bool, not int 1"),
        (step(won="False"), "info", "info['won'] must be a bool, not str 'False'"),
        (step(won=1), "info", "info['won'] must be a bool, not int 1"),
        (step(success=True, won=False), "info", "info['success'] is True and info['won'] is False, two names for"),
        (step(success=False, won=np.bool_(True)), "info", "info['success'] is False and info['won'] is True"),
        (step(invalid="no"), "info", "info['invalid'] must be a bool, not str 'no'"),
        (step(task=3), "info", "info['task'] must be text, not int 3"),
        (step(extra=[1]), "info", "info['extra'] must be a dict, not list [1]"),
        (step(extra={"x": float("nan")}), "info", "must hold finite numbers"),
        (step(extra={"x": 10**400}), "info", "must hold finite numbers"),
        (step(images=["a painting"]), "info", "info['images'] must hold"),
    ],
)
def test_what_is_wrong_is_named(answer, property, message):
    result = read_step(answer)
    assert isinstance(result, Answer)
    assert [fault.property for fault in result.faults] == [property]
    assert message in result.faults[0].message


@pytest.mark.parametrize(
    ("flags", "success"),
    [
        ({}, None),
        ({"success": True}, True),
        ({"success": False}, False),
        ({"won": True}, True),
        ({"won": np.bool_(False)}, False),
        ({"success": None, "won": True}, True),
        ({"success": False, "won": None}, False),
        ({"success": np.bool_(True), "won": True}, True),
    ],
)
def test_success_may_be_called_won(flags, success):
    answer = read_step(step(**flags))
    assert isinstance(answer, Answer)
    assert answer.faults == []
    assert answer.info["success"] is success
    assert "won" not in answer.info


def test_several_faults_are_all_named():
    answer = read_step(step(observation=5, reward="much", success="yes"))
    assert isinstance(answer, Answer)
    assert [fault.property for fault in answer.faults] == ["observation", "info", "reward"]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("turnkey/NoSuch-v0", {}, "NoSuch"),
        ("turnkey/FrozenLake-v0", {"sise": 4}, "sise"),
        ("turnkey/FrozenLake-v0", {"size": "four"}, "size must be"),
    ],
)
def test_an_environment_that_cannot_be_made_is_a_failure_of_its_own_kind(env_id, kwargs, message):
    with pytest.raises(EnvironmentFailure, match=message) as raised:
        EnvRunner().start(env_id, kwargs, 0)
    assert raised.value.kind == "make"
    assert "Traceback" not in raised.value.message


# --- what tells states apart ------------------------------------------------------------------------------------------
def picture(brightness: int, shape: tuple[int, int, int] = (4, 6, 3)) -> np.ndarray:
    return np.full(shape, brightness, np.uint8)


def state(**info) -> Answer:
    answer = read_reset(("you see:", info))
    assert isinstance(answer, Answer)
    assert answer.faults == []
    return answer


def test_states_shown_as_images_are_told_apart_by_their_content():
    dark, bright, both = (state(images=[picture(value) for value in values]) for values in ([0], [9], [0, 9]))
    reshaped, text = state(images=[picture(0, (6, 4, 3))]), state()
    anchors = [answer.anchor for answer in (dark, bright, both, reshaped, text)]
    assert len(set(anchors)) == 5
    assert text.anchor == "you see:"
    assert state(images=[picture(0)]).anchor == dark.anchor
    assert state(images=[picture(9), picture(0)]).anchor != both.anchor
    dark, bright = (state(images=[picture(value)], state_key=7) for value in (0, 9))
    assert dark.anchor == bright.anchor == 7
    assert dark.observation_key != bright.observation_key
    dark, bright = (state(images=[picture(value)]) for value in (0, 9))
    assert fingerprint("you see:", dark.info) != fingerprint("you see:", bright.info)
    assert fingerprint("you see:", dark.info) == fingerprint("you see:", state(images=[picture(0)]).info)


def encoded(image: Image.Image, form: str) -> bytes:
    held = io.BytesIO()
    image.save(held, form)
    return held.getvalue()


def test_images_in_every_form_are_the_same_pixels(tmp_path):
    red = Image.new("RGBA", (6, 4), (200, 0, 0, 255))
    (tmp_path / "red.png").write_bytes(encoded(red, "PNG"))
    array = np.asarray(red.convert("RGB"))
    forms = [array, np.asfortranarray(array), red, encoded(red, "PNG"), tmp_path / "red.png", str(tmp_path / "red.png")]
    seen = state(images=forms).info["images"]
    assert [(image.shape, image.dtype, image.flags.c_contiguous) for image in seen] == [((4, 6, 3), np.uint8, True)] * 6
    assert len({state(images=[form]).images_key for form in forms}) == 1
    (gray,) = state(images=[encoded(Image.new("L", (8, 8), 77), "JPEG")]).info["images"]
    assert np.ptp(gray) == 0
    assert abs(int(gray[0, 0, 0]) - 77) < 3


def test_an_image_is_what_it_was_when_the_environment_gave_it():
    canvas = picture(1)
    (seen,) = state(images=[canvas]).info["images"]
    canvas[:] = 9
    assert seen.max() == 1


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (picture(0).astype(float), "must hold uint8 arrays of shape"),
        (picture(0)[..., 0], "not ndarray uint8 (4, 6)"),
        (picture(0)[..., :2], "not ndarray uint8 (4, 6, 2)"),
        (picture(0)[:0], "not ndarray uint8 (0, 6, 3)"),
        (b"GIF89a", "cannot identify image file"),
        ("nowhere/else.png", "No such file or directory: 'nowhere/else.png'"),
        (encoded(Image.new("L", (500, 500)), "PNG")[:-40], "PNG and JPEG files: "),
        (encoded(Image.new("1", (8193, 8193)), "PNG"), "at most 67108864 pixels together; one has 8193 x 8193"),
        (np.broadcast_to(picture(0, (1, 1, 3)), (8193, 8193, 3)), "one has 8193 x 8193"),
    ],
)
def test_what_is_no_image_is_a_fault(images, message):
    answer = read_reset(("you see:", {"images": [images]}))
    assert isinstance(answer, Answer)
    (fault,) = answer.faults
    assert message in fault.message
    assert (fault.property, "images" in answer.info) == ("info", False)


@pytest.mark.parametrize("images", ["a.png", b"PNG", Image.new("L", (2, 2)), 7])
def test_images_must_be_a_list(images):
    answer = read_reset(("you see:", {"images": images}))
    assert isinstance(answer, Answer)
    assert "info['images'] must be a list" in answer.faults[0].message


def test_the_pixels_of_all_images_of_an_answer_count():
    wide = np.broadcast_to(picture(0, (1, 1, 3)), (8192, 4097, 3))
    answer = read_reset(("you see:", {"images": [wide, wide]}))
    assert isinstance(answer, Answer)
    assert "pixels together; one has 4097 x 8192" in answer.faults[0].message
