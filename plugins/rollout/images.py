"""Images of an environment, for the model."""

from __future__ import annotations

from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.plugins.verl_api import builders


async def processed(loop: Any, arrays: list[Any]) -> list[Any] | None:
    """Arrays of (height, width, 3) bytes as verl's processor takes them; None for none.

    Args:
        loop: the agent loop, whose model is to see them.

    Raises:
        EnvironmentFailure: the model cannot take them.
    """
    if not arrays:
        return None
    from PIL import Image

    content = [{"type": "image", "image": Image.fromarray(array)} for array in arrays]
    try:
        builders.check_takes_images(loop)
        media = await loop.process_multi_modal_info([{"role": "user", "content": content}])
    except Exception as error:  # the model's processor raises its own errors; the message is passed on
        raise EnvironmentFailure(
            "images",
            f"the environment gives images, and this model cannot take them: {type(error).__name__}: {error}",
        ) from error
    return media["images"]
