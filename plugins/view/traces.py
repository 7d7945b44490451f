"""Episodes of a trajectory log as OpenTelemetry traces, by the semantic conventions for generative AI.

A trace per episode: ``invoke_agent`` over a ``chat`` span per turn and an ``execute_tool`` span per call; without tools
the environment is the tool. Each further column of the log is an attribute ``turnkey.<column>``, and scores are events
``gen_ai.evaluation.result``. Ids are hashes of the run, the step, the episode and the turn: a second export of the same
log is the same, byte for byte.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import json
import logging
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from queue import Queue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from verl_turnkey.advantage.text_files import whole_file
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.schema import holds_integers
from verl_turnkey.plugins.notices import logger, warn_once
from verl_turnkey.plugins.view.conversations import TEXTS, outcomes
from verl_turnkey.plugins.view.join import HAS_CREDIT, JOINED, REASONS, LoggedRun, frame, joined, placed, read
from verl_turnkey.plugins.view.terminal import plain

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext

SCOPE = "verl_turnkey.plugins.view.traces"
PATH = "/v1/traces"
"""of a receiver whose URL has no path"""
EVENT = "gen_ai.evaluation.result"
REQUEST_EPISODES = 16
"""most episodes of a request while a run plays"""
CONTENT = {"action", "parse_note", "anchor", "next_anchor", "extra", "task", "kwargs", "failed", "other_calls"}
"""columns that may hold what the model, the environment or a data set wrote"""
ELSEWHERE = {
    *("episode", "turn", "at", "reason", "trained_turn", "started", "seconds_model", "seconds_env", "prompt_tokens"),
    *("response_tokens", "step", *TEXTS),
}
"""columns whose values are other attributes, or times of the spans"""


def traces(
    run: LoggedRun, rows: np.ndarray, content: bool = True, texts_of: Callable[[int], pd.DataFrame] | None = None
) -> Iterator[list[ReadableSpan]]:
    """The spans of each episode in ``rows`` of ``run.episodes``, steps first, the root span at the front.

    Args:
        content: with the texts of model, environment and tasks.
        texts_of: gives the rows of ``texts`` of a step; None: the log does.
    """
    texts_of = texts_of or (lambda step: read(run.folder, "texts", [step]))
    of_run, outcome, at = _Run.of(run), outcomes(run), run.turns["at"].to_numpy()
    steps = run.episodes["step"].to_numpy()[rows]
    for step in np.unique(steps).tolist():
        texts = _texts(texts_of(step)) if content else {}
        places = rows[steps == step]
        turns: dict[int, list[dict[str, Any]]] = {place: [] for place in places.tolist()}
        for turn in _records(run.turns[np.isin(at, places)]):
            turns[turn["at"]].append(turn)
        for (place, of_episode), episode in zip(turns.items(), _records(run.episodes.iloc[places]), strict=True):
            with_texts = [{**turn, **texts.get((episode["episode"], turn["turn"]), {})} for turn in of_episode]
            yield _Trace(of_run, {**episode, "outcome": str(outcome[place])}, content).spans(with_texts)


def _texts(rows: pd.DataFrame) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["episode"], row["turn"]): {name: row[name] for name in TEXTS} for row in _records(rows)}


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain Python values, None for a missing one; numbers of 32 bits by their shortest spelling."""
    columns = {}
    for name in frame.columns:
        values = frame[name].to_numpy()
        if values.dtype == np.float32:
            values = np.array([float(str(value)) for value in values], np.float64)
        columns[name] = [None if value is None or value != value else value for value in values.tolist()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class _Run:
    """What the traces of a run share."""

    name: str
    model: str
    provider: str
    resource: Resource

    @classmethod
    def of(cls, run: LoggedRun) -> _Run:
        from opentelemetry.sdk.resources import Resource

        def configured(*names: str) -> Any:
            node: Any = run.about.get("config")
            for name in names:
                node = node.get(name) if isinstance(node, dict) else None
            return node

        project, experiment = (str(run.about.get(name) or "") for name in ("project", "experiment"))
        facts = {"service.name": experiment or run.name, "service.namespace": project}
        facts |= {f"turnkey.{name}": str(run.about.get(name) or "") for name in ("method", "loss")}
        model = configured("actor_rollout_ref", "model", "path")
        provider = configured("actor_rollout_ref", "rollout", "name")
        # A copy of the folder has another name, and the same ids.
        return cls(
            f"{project}/{experiment}",
            PurePath(str(model)).name if model else "unknown",
            str(provider or "verl"),
            Resource({name: _utf8(value) for name, value in facts.items() if value}),
        )


class _Trace:
    """The spans of an episode."""

    def __init__(self, run: _Run, episode: Mapping[str, Any], content: bool) -> None:
        self._run, self._episode, self._content = run, episode, content
        self._key = f"{run.name}/{episode['segment']}/{episode['step']}/{episode['episode']}"
        self._env = episode["env"] or "agent"

    def spans(self, turns: Sequence[Mapping[str, Any]]) -> list[ReadableSpan]:
        episode = self._episode
        times = list(self._times(turns))
        spans = [span for turn, start in times for span in self._turn(turn, start)]
        start = min([_nanoseconds(episode["started"]), *(start for _, start in times)])
        end = start + _nanoseconds(episode["seconds_waiting"]) + _nanoseconds(episode["seconds_env"])
        end = max((span.end_time or end for span in spans), default=end)  # without a turn: that of the start
        failed = episode["failed"] is not None
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self._env,
            "gen_ai.conversation.id": episode["episode"],
            **({"error.type": episode["failed_kind"] or "other"} if failed else {}),
            **self._columns(episode),
        }
        events = {} if failed else {"success": episode["success"], "composed_return": episode["composed_return"]}
        events["env_return"] = episode["env_return"]
        label = {"success": episode["outcome"]}
        root = self._span(
            "", f"invoke_agent {self._env}", start, end, attributes, events, labels=label,
            error=(episode["failed"] if self._content else episode["failed_kind"] or "failed") if failed else None,
        )  # fmt: skip
        return [root, *spans]

    def _times(self, turns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Each turn and its start; in logs without it one turn follows the other after the environment's start."""
        in_start = (self._episode["seconds_env"] or 0.0) - sum(turn["seconds_env"] or 0.0 for turn in turns)
        clock = sum(map(_nanoseconds, (self._episode["started"], self._episode["seconds_waiting"], max(0.0, in_start))))
        for turn in turns:
            clock = clock if turn["started"] is None else _nanoseconds(turn["started"])
            yield turn, clock
            clock += _nanoseconds(turn["seconds_model"]) + _nanoseconds(turn["seconds_env"])

    def _turn(self, turn: Mapping[str, Any], begin: int) -> Iterator[ReadableSpan]:
        t, run, listed = turn["turn"], self._run, calls(turn["action"], turn["extra"])
        middle = begin + _nanoseconds(turn["seconds_model"])
        end = middle + _nanoseconds(turn["seconds_env"])
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": run.provider,
            "gen_ai.request.model": run.model,
            "gen_ai.conversation.id": self._episode["episode"],
            "gen_ai.usage.input_tokens": turn["prompt_tokens"],
            "gen_ai.usage.output_tokens": turn["response_tokens"],
            "turnkey.turn": t,
            **self._columns(turn),
        }
        if turn["reason"] != HAS_CREDIT:
            attributes["turnkey.no_credit"] = REASONS[turn["reason"]]
        if self._content:
            attributes |= {
                "gen_ai.input.messages": _message("user", turn.get("prompt_tail")),
                "gen_ai.output.messages": _message("assistant", turn.get("response")),
                # The log has one answer per turn, which belongs to a call only where there is one call.
                "turnkey.opponents": turn.get("opponents"),
                "turnkey.observation": None if len(listed) == 1 else turn.get("observation"),
            }
        scores = {name: turn[name] for name in ("composed_reward", "advantage")}
        yield self._span(f"/{t}", f"chat {run.model}", begin, middle, attributes, scores, client=True)
        for n, (name, arguments) in enumerate(listed):
            name = name or self._env
            invalid = turn["valid"] is False
            attributes = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.conversation.id": self._episode["episode"],
                "turnkey.turn": t,
                **({"error.type": "invalid_action"} if invalid else {}),
            }
            if self._content:
                attributes["gen_ai.tool.call.arguments"] = arguments
                attributes["gen_ai.tool.call.result"] = turn.get("observation") if len(listed) == 1 else None
            note = (turn["parse_note"] if self._content else None) or "invalid action"
            yield self._span(
                f"/{t}/{n}", f"execute_tool {name}", middle, end, attributes, error=note if invalid else None
            )

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Each column that no other attribute holds; integers of a column with gaps, which pandas made floats, too."""
        left_out = ELSEWHERE if self._content else ELSEWHERE | CONTENT
        columns = {name: value for name, value in row.items() if name not in left_out and value is not None}
        return {f"turnkey.{name}": int(value) if holds_integers(name) else value for name, value in columns.items()}

    def _span(
        self,
        part: str,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, Any],
        scores: Mapping[str, Any] = MappingProxyType({}),
        *,
        labels: Mapping[str, str] = MappingProxyType({}),
        error: str | None = None,
        client: bool = False,
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanKind, Status, StatusCode

        return ReadableSpan(
            name=_utf8(name),
            context=self._context(part),
            parent=self._context("") if part else None,
            resource=self._run.resource,
            attributes={name: _utf8(value) for name, value in attributes.items() if value is not None},
            events=[_event(key, value, labels.get(key), end) for key, value in scores.items() if value is not None],
            kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            instrumentation_scope=InstrumentationScope(SCOPE),
            start_time=start,
            end_time=end,
        )

    def _context(self, part: str) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(_number(self._key, 16), _number(self._key + part, 8), is_remote=False, trace_flags=flags)


def calls(action: str | None, extra: str | None) -> list[tuple[str | None, str]]:
    """Name and arguments (JSON) of each call in a logged action; without tools the action, under the name None.

    No call: a turn without an action, and a turn of an agent or a tool environment that is a text.
    """
    if action is None:
        return []
    try:
        value = json.loads(action)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and value.keys() == {"text"}:
        return []
    listed = value["calls"] if isinstance(value, dict) and value.keys() == {"calls"} else value
    pairs = [_pair(call) for call in listed] if isinstance(listed, list) and listed else [None]
    if None not in pairs:
        return [pair for pair in pairs if pair is not None]
    own_agent = "chain" in (json.loads(extra) if extra else {})  # whose text is an answer, and not an action
    return [] if own_agent else [(None, action)]


def _pair(call: Any) -> tuple[str, str] | None:
    match call:
        case {"name": str(name), "arguments": arguments} | [str(name), arguments]:
            try:
                return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                return None
    return None


def _event(name: str, score: float, label: str | None, at: int) -> Event:
    from opentelemetry.sdk.trace import Event

    attributes: dict[str, Any] = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(score)}
    return Event(EVENT, attributes | ({} if label is None else {"gen_ai.evaluation.score.label": label}), at)


def _message(role: str, text: str | None) -> str | None:
    if text is None:
        return None
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}], ensure_ascii=False)


def _utf8(value: Any) -> Any:
    """A text without half surrogates, which JSON may spell and protobuf refuses; else the value itself."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def _number(text: str, size: int) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "backslashreplace"), digest_size=size).digest(), "big")


class Unsent(RuntimeError):
    """A receiver did not take all traces."""


def write_file(path: Path, all_spans: Iterator[list[ReadableSpan]]) -> tuple[int, int]:
    """Write OTLP/JSON, a trace per line, as a collector's ``otlpjsonfile`` receiver reads it.

    Returns the numbers of episodes and of spans.
    """
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    episodes = count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        for spans in all_spans:
            request = _hexadecimal(MessageToDict(encode_spans(spans), use_integers_for_enums=True))
            file.write(json.dumps(request, ensure_ascii=False, separators=(",", ":")) + "\n")
            episodes, count = episodes + 1, count + len(spans)
    return episodes, count


def _hexadecimal(node: Any) -> Any:
    """OTLP/JSON spells ids in hexadecimal digits, protobuf's JSON in base64."""
    if isinstance(node, list):
        return [_hexadecimal(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    ids = ("traceId", "spanId", "parentSpanId")
    return {name: b64decode(value).hex() if name in ids else _hexadecimal(value) for name, value in node.items()}


def endpoint(url: str) -> str:
    """The address that traces are sent to; a URL without a path gets :data:`PATH`.

    Raises:
        ValueError: it is not an address of HTTP.
    """
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise ValueError(
            f"expected the http:// or https:// URL of an OTLP receiver, such as http://127.0.0.1:4318, or the name "
            f"of a file, got {masked(url)!r}"
        )
    return parts._replace(path=PATH).geturl() if parts.path in ("", "/") else url


class Sender:
    """Sends spans by OTLP/HTTP to ``url``, see :func:`endpoint`.

    Certificate, further headers and timeout are OpenTelemetry's ``OTEL_EXPORTER_OTLP_*`` variables.
    """

    def __init__(self, url: str) -> None:
        import requests
        from google.protobuf.message import DecodeError
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        class Session(requests.Session):
            """Keeps why a request failed, which the exporter only logs."""

            problem = ""

            def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
                try:
                    response = super().send(request, **options)
                except requests.RequestException as error:
                    self.problem = f"it does not answer ({type(error).__name__})"
                    raise
                self.problem = "" if response.ok else f"it answers {response.status_code} {response.reason}: "
                if not response.ok:
                    self.problem += " ".join(response.text.split())[:200]
                elif response.headers.get("content-type", "").startswith("application/x-protobuf"):
                    try:
                        partly = ExportTraceServiceResponse.FromString(response.content).partial_success
                        if partly.rejected_spans:
                            self.problem = f"it rejected {partly.rejected_spans} spans: {partly.error_message}"
                    except DecodeError:
                        self.problem = "its answer is not OTLP"
                return response

        for name in ("proto.http.trace_exporter", "common.http"):
            logging.getLogger(f"opentelemetry.exporter.otlp.{name}").setLevel(logging.CRITICAL)
        self._session = Session()
        self._exporter = OTLPSpanExporter(endpoint(url), session=self._session)

    def send(self, spans: Sequence[ReadableSpan]) -> str:
        """Send spans in one request; returns why the receiver did not take all of them, empty if it did."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._session.problem = ""
        done = self._exporter.export(spans)
        if done is SpanExportResult.SUCCESS and not self._session.problem:
            return ""
        problem = self._session.problem or "the next is larger than 64 MiB: export with --no-content"
        return masked(plain(problem, True))[:400]  # the receiver is not trusted

    def close(self) -> None:
        self._exporter.shutdown()


def send(url: str, all_spans: Iterator[list[ReadableSpan]], total: int) -> tuple[int, int]:
    """Send traces, an episode per request; returns the numbers of episodes and of spans.

    Args:
        url: see :func:`endpoint`.
        total: number of episodes, for the error.

    Raises:
        Unsent: the receiver is not there, or refuses one; those after it are not sent.
    """
    sender, episodes, count = Sender(url), 0, 0
    try:
        for spans in all_spans:
            if problem := sender.send(spans):
                raise Unsent(
                    f"{masked(url)} took {episodes} of {total} episodes ({count} spans); {problem}. "
                    "The traces of a second export have the same ids"
                )
            episodes, count = episodes + 1, count + len(spans)
    finally:
        sender.close()
    return episodes, count


class LiveTraces:
    """Sends a process's episodes from a thread, as they enter the log; rollouts never wait for the receiver.

    The spans are those of an export, without credit, which the trainer computes later.

    Args:
        url: see :func:`endpoint`.
        log: folder of the log, whose ``run.json`` describes the run.
        segment: which start of the trainer this is.
        most_bytes: how much may wait; further episodes are not sent.
    """

    def __init__(self, url: str, log: Path, segment: str, most_bytes: int = 32 << 20) -> None:
        self._url, self._log, self._segment, self._most_bytes = url, log, segment, most_bytes
        self._queue: Queue[tuple[int, Sequence[tuple[str, int, pa.Table]]]] = Queue()
        self._lock = threading.Lock()  # of the next two
        self._bytes = self._lost = 0
        self._thread: threading.Thread | None = None

    def take(self, parts: Sequence[tuple[str, int, pa.Table]]) -> None:
        """Have an episode sent, given as its rows: (table, step, rows). One thread calls this, and never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        parts = [part for part in parts if part[0] in (*JOINED, "texts")]
        size = sum(rows.nbytes for *_, rows in parts)
        with self._lock:
            room = self._bytes + size <= self._most_bytes
            self._bytes += size * room
        if room:
            self._queue.put((size, parts))
        else:
            self._lose(1, f"{self._most_bytes >> 20} MB wait for it")

    def drain(self, seconds: float) -> int:
        """Wait at most ``seconds`` for what was taken; returns how many episodes the receiver has not got so far."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, max(0.0, seconds))
            return self._lost + self._queue.unfinished_tasks

    def _run(self) -> None:
        sender: Sender | None = None
        while True:
            batch = [self._queue.get()]
            while len(batch) < REQUEST_EPISODES and not self._queue.empty():
                batch.append(self._queue.get())
            try:
                sender = sender or Sender(self._url)
                problem = sender.send([span for spans in self._spans([parts for _, parts in batch]) for span in spans])
            except Exception as error:  # costs these episodes
                problem = masked(f"{type(error).__name__}: {error}")
            if problem:
                self._lose(len(batch), problem)
            with self._lock:
                self._bytes -= sum(size for size, _ in batch)
            for _ in batch:
                self._queue.task_done()

    def _spans(self, episodes: Sequence[Sequence[tuple[str, int, pa.Table]]]) -> Iterator[list[ReadableSpan]]:
        parts: dict[str, list[pa.Table]] = {}
        for table, step, rows in (part for parts in episodes for part in parts):
            parts.setdefault(table, []).append(placed(rows, step, self._segment))
        frames = {table: frame(table, parts.get(table, ())) for table in (*JOINED, "texts")}
        run, texts = joined(self._log, frames), frames["texts"]
        return traces(run, np.arange(len(run.episodes)), texts_of=lambda step: texts[texts["step"] == step])

    def _lose(self, count: int, reason: str) -> None:
        with self._lock:
            self._lost += count
        warn_once(f"turnkey.log.otlp: {masked(self._url)} did not get an episode, {reason}", "turnkey.log.otlp")


def warn_of_unsent(count: int, url: str | None) -> None:
    """Say how many episodes of a run did not reach the receiver."""
    if count:
        logger.warning(
            "turnkey.log.otlp: %d episodes did not reach %s; turnkey export RUN --otlp sends the whole log",
            *(count, masked(url)),
        )
