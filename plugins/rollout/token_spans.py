"""Where a text is among tokens: an observation in a prompt, HiPER's decisions in a turn; and whether spaces are kept.

Imports nothing of verl, since the driver's checks need it, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import STREAMS, stream_spans, switches

MARK = "\ue000"
"""a text that no environment writes"""


def marked(seen: Answer) -> Iterator[Answer]:
    """``seen`` with :data:`MARK` in the place of its observation, or of the results of its calls one by one."""
    results = list(seen.info.get("results", ()))
    for i, result in enumerate(results):
        changed = [*results[:i], {**result, "content": MARK}, *results[i + 1 :]]
        yield replace(seen, info={**seen.info, "results": changed})
    if not results:
        yield replace(seen, observation=MARK)


def spans(tokenizer: Any, ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Where ``ids`` differ from each of ``others``, in which one text is another: (first, end), counted from the end.

    A token with letters of the template is the template's. Whitespace around a text does not matter: templates strip
    it, and tokens begin with it. A text of whitespace alone has no span.
    """

    def length(tokens: int) -> int:
        """Characters of the first ``tokens`` ids."""
        return len(_decode(tokenizer, ids[:tokens]))

    whole, number, result = _decode(tokenizer, ids), range(len(ids) + 1), []
    for other in (_decode(tokenizer, variant) for variant in others):
        start = common_start(whole, other)
        end = len(whole) - common_start(whole[start:][::-1], other[start:][::-1])
        text = whole[start:end]
        start, end = start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
        if start >= end:
            continue
        # Of a character in several tokens the first ones are decoded as one, too: hence the last of equal lengths.
        first, last = (bisect_right(number, bound, key=length) - 1 for bound in (start, end))
        first += bool(whole[length(first) : start].strip())
        last += length(last) < end and not whole[end : length(last + 1)].strip()
        if first < last:
            result.append((first - len(ids), last - len(ids)))
    return result


def common_start(first: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters or ids both have in common at the beginning."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


STREAM_FORMAT = "hiper"
STREAM_COLUMNS = ("switch", *(f"{word}_{stream}" for word in ("has", "from", "to") for stream in STREAMS))
"""``from_...`` and ``to_...``: the first token of a decision within the turn, and the first one behind it"""


def stream_columns(ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, int]:
    """:data:`STREAM_COLUMNS` of the turn ``ids``, whose decoded text is ``text``."""
    numbers, spans = range(1, len(ids) + 1), stream_spans(text)

    def length(tokens: int) -> int:
        """Characters of the first ``tokens`` ids, which are decoded only where a search looks."""
        return len(tokenizer.decode(list(ids[:tokens]), skip_special_tokens=True))

    columns = {"switch": int(switches(text))}
    for stream in STREAMS:
        start, end = spans.get(stream, (0, 0))
        # A token that two decisions share belongs to both.
        first = bisect_right(numbers, start, key=length) if end else 0
        behind = bisect_left(numbers, end, key=length) + 1 if end else 0
        columns |= {f"has_{stream}": int(end > 0), f"from_{stream}": first, f"to_{stream}": min(behind, len(ids))}
    return columns


SAMPLE = "go to the red door"


def check_spaces(tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer joins words, since the model would read them so.

    transformers 5 does this without a warning if ``tokenizer_config.json`` names a class that ``tokenizer.json`` is
    not made for: ``LlamaTokenizerFast`` for DeepSeek's tokenizer, in a model of another family.
    """
    text = tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False))
    if text == SAMPLE.replace(" ", ""):
        raise ConfigError(
            f"the model's tokenizer loses spaces: {SAMPLE!r} comes back as {text!r}. transformers loaded it as "
            f'{type(tokenizer).__name__}, which its tokenizer.json is not made for: set "tokenizer_class" to '
            '"PreTrainedTokenizerFast" in the tokenizer_config.json of the model (or of '
            "actor_rollout_ref.model.tokenizer_path)"
        )
