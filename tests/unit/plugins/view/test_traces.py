"""``turnkey export``: episodes as OpenTelemetry traces, in a file and at a real receiver of OTLP/HTTP."""

import base64
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status, TracesData
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from typer.testing import CliRunner

from verl_turnkey.plugins import notices
from verl_turnkey.plugins.cli.main import app, main
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.view import conversations, traces
from verl_turnkey.plugins.view.join import LoggedRun, load, read
from verl_turnkey.plugins.view.traces import LiveTraces

STANDARD = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}


class Receiver:
    """Takes traces; answers a request with ``answers[n]``, or with success after the last of them."""

    def __init__(self, *answers: tuple[int, bytes], release: threading.Event | None = None) -> None:
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        receiver, left = self, list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if release is not None:
                    release.wait()
                status, answer = left.pop(0) if left else (200, b"")
                if status == 200:
                    request = ExportTraceServiceRequest.FromString(body)
                    receiver.requests.append((self.path, dict(self.headers), request))
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf" if status == 200 else "text/plain")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def spans(self) -> list[Span]:
        return [span for *_, request in self.requests for span in spans_of(request)]


def spans_of(data: ExportTraceServiceRequest | TracesData) -> list[Span]:
    return [span for resource in data.resource_spans for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Span) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


def collector(path: Path) -> list[Span]:
    """The spans of a file, read as a collector's file receiver does: strictly, ids in hexadecimal digits."""

    def ids(node: dict) -> dict:
        names = {"traceId", "spanId", "parentSpanId"} & node.keys()
        return node | {name: base64.b64encode(bytes.fromhex(node[name])).decode() for name in names}

    lines = [json.loads(line, object_hook=ids) for line in path.read_text(encoding="utf-8").splitlines()]
    return [span for line in lines for span in spans_of(Parse(json.dumps(line), TracesData()))]


def export(*words: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    synthetic_run.write(run, episodes=24, turns=6, steps=3, skill=0.8, seed=3)
    return run


@pytest.fixture(scope="module")
def run(folder: Path) -> LoggedRun:
    return load(folder)


@pytest.fixture(scope="module")
def exported(folder: Path) -> list[Span]:
    out = folder.parent / "all.jsonl"
    export(folder, "--otlp", out)
    return collector(out)


def test_an_episode_is_a_trace_of_its_turns_and_calls(run: LoggedRun, exported: list[Span]):
    roots = [span for span in exported if not span.parent_span_id]
    assert len(roots) == len(run.episodes) == len({span.trace_id for span in exported})
    assert len({span.span_id for span in exported}) == len(exported)
    assert {span.name for span in roots} == {"invoke_agent example/Household-v0"}
    by_trace: dict[bytes, list[Span]] = {}
    for span in exported:
        by_trace.setdefault(span.trace_id, []).append(span)
    by_key = {attributes(spans[-1]).get("gen_ai.conversation.id"): spans for spans in by_trace.values()}
    for key, of_episode in run.turns.groupby(run.episodes["episode"].to_numpy()[run.turns["at"]]):
        root, *rest = by_key[key]
        assert {span.parent_span_id for span in rest} == {root.span_id}
        kinds = [attributes(span)["gen_ai.operation.name"] for span in rest]
        assert kinds.count("chat") == len(of_episode)
        assert kinds.count("execute_tool") == of_episode["action"].notna().sum()  # no action, no call
        times = [time for span in rest for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
        assert times == sorted(times)
        assert root.start_time_unix_nano <= times[0]
        assert times[-1] <= root.end_time_unix_nano


def test_a_turn_has_its_columns_its_credit_and_its_texts(run: LoggedRun, exported: list[Span]):
    chats = [span for span in exported if span.name == "chat unknown"]
    texts = read(run.folder, "texts").set_index(["episode", "turn"])
    by_turn = {
        (at["gen_ai.conversation.id"], at["turnkey.turn"]): (at, span) for span in chats if (at := attributes(span))
    }
    with_credit = 0
    for turn in run.turns.to_dict("records"):
        key = run.episodes["episode"][turn["at"]], turn["turn"]
        at, span = by_turn[key]
        assert at["gen_ai.usage.input_tokens"] == turn["prompt_tokens"]
        assert at["turnkey.composed_reward"] == turn["composed_reward"]
        [written] = json.loads(at["gen_ai.output.messages"])
        assert (written["role"], written["parts"]) == (
            "assistant",
            [{"type": "text", "content": texts.loc[key, "response"]}],
        )
        scores = {}
        for event in span.events:
            assert event.name == "gen_ai.evaluation.result"
            score = attributes(event)
            scores[score["gen_ai.evaluation.name"]] = score["gen_ai.evaluation.score.value"]
        expected = {name: turn[name] for name in ("composed_reward", "advantage") if not np.isnan(turn[name])}
        assert scores == pytest.approx(expected)
        if "advantage" in expected:
            with_credit += 1
            assert at["turnkey.part.step_level"] == pytest.approx(turn["part.step_level"])
            assert (at["turnkey.train_step"], at["turnkey.group.step_level"]) == (
                turn["train_step"],
                turn["group.step_level"],
            )
            assert "turnkey.no_credit" not in at
        else:
            assert at["turnkey.no_credit"] in traces.REASONS
    assert 0 < with_credit < len(chats)


def test_an_episode_has_its_outcome_and_an_invalid_action_is_an_error(run: LoggedRun, exported: list[Span]):
    roots = [span for span in exported if not span.parent_span_id]
    outcomes = [attributes(span)["turnkey.outcome"] for span in roots]
    assert sorted(outcomes) == sorted(conversations.outcomes(run))
    assert {*outcomes} == {*conversations.OUTCOMES}
    for span, outcome in zip(roots, outcomes, strict=True):
        assert (span.status.code == Status.STATUS_CODE_ERROR) == (outcome == "failed")
        labels = [attributes(event).get("gen_ai.evaluation.score.label") for event in span.events]
        assert labels[:1] == ([None] if outcome == "failed" else [outcome])


def test_names_are_those_of_the_semantic_conventions(exported: list[Span]):
    nodes = [*exported, *(event for span in exported for event in span.events)]
    names = {name for node in nodes for name in attributes(node)}
    assert {name for name in names if not name.startswith("turnkey.")} <= {*STANDARD, ERROR_TYPE}
    operations = {attributes(span)["gen_ai.operation.name"] for span in exported}
    assert operations <= {value.value for value in gen_ai_attributes.GenAiOperationNameValues}


def test_a_second_export_is_the_same_and_a_receiver_gets_what_a_file_has(folder: Path, tmp_path: Path):
    line = folder, "--filter", "q=bring", "--filter", "split=training"
    for name in ("first.jsonl", "second.jsonl"):
        export(*line, "--otlp", tmp_path / name)
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
    with Receiver() as receiver:
        output = export(*line, "--otlp", f"http://user:secret@{receiver.address}")
        assert receiver.spans == collector(tmp_path / "first.jsonl")
        path, headers, _ = receiver.requests[0]
        assert (path, headers["Authorization"]) == ("/v1/traces", "Basic dXNlcjpzZWNyZXQ=")
        assert "secret" not in output
        sent = receiver.requests[:]
        export(*line, "--otlp", f"http://{receiver.address}/tenant/traces")
        path, _, again = receiver.requests[len(sent)]
        assert (path, again) == ("/tenant/traces", sent[0][2])


def test_a_copy_of_the_folder_has_the_same_ids(folder: Path, exported: list[Span], tmp_path: Path):
    (folder / "turnkey_log").rename(tmp_path / "elsewhere")
    try:
        export(tmp_path / "elsewhere", "--otlp", tmp_path / "copy.jsonl")
    finally:
        (tmp_path / "elsewhere").rename(folder / "turnkey_log")
    assert [span.span_id for span in collector(tmp_path / "copy.jsonl")] == [span.span_id for span in exported]


def test_no_content_leaves_out_what_was_written(folder: Path, run: LoggedRun, exported: list[Span], tmp_path: Path):
    export(folder, "--otlp", tmp_path / "out.jsonl", "--no-content")
    spans = collector(tmp_path / "out.jsonl")
    assert [span.span_id for span in spans] == [span.span_id for span in exported]
    text = (tmp_path / "out.jsonl").read_text()
    words = [
        *run.turns["action"].dropna(),
        *run.turns["anchor"],
        *run.episodes["task"],
        "no <action> tag",
        "longer than",
    ]
    assert not [word for word in {*words} if word in text]
    assert not [name for name in ("gen_ai.input.messages", "gen_ai.output.messages", "tool.call") if name in text]


@pytest.mark.parametrize(
    ("words", "keep"),
    [
        (["step=2"], lambda e: e["global_step"].eq(2)),
        (["split=validation"], lambda e: e["validation"].eq(True)),
        (["outcome=unsolved", "step=last"], lambda e: e["success"].eq(False) & e["global_step"].eq(3)),
    ],
)
def test_filters_are_those_of_the_page(folder: Path, run: LoggedRun, tmp_path: Path, words: list[str], keep):
    count = int(keep(run.episodes).sum())
    assert 0 < count < len(run.episodes)
    options = [word for condition in words for word in ("--filter", condition)]
    assert export(folder, "--otlp", tmp_path / "out.jsonl", "--no-content", *options).startswith(f"{count} episodes, ")
    assert len({span.trace_id for span in collector(tmp_path / "out.jsonl")}) == count


def test_turns_have_the_times_of_the_log(tmp_path: Path):
    synthetic_run.write(tmp_path, episodes=8, turns=4, steps=1)
    for path in (tmp_path / "turnkey_log" / "turns").rglob("*.parquet"):
        rows = pd.read_parquet(path, partitioning=None)
        rows.assign(started=1.7e9 + 100.0 * rows["turn"]).to_parquet(path)
    export(tmp_path, "--otlp", tmp_path / "out.jsonl")
    run, spans = load(tmp_path), collector(tmp_path / "out.jsonl")
    chats = [(attributes(span), span) for span in spans if span.name.startswith("chat")]
    assert len(chats) == len(run.turns)
    for at, span in chats:
        assert span.start_time_unix_nano == (1_700_000_000 + 100 * at["turnkey.turn"]) * 10**9
    seconds = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for _, span in chats]
    assert sorted(seconds) == pytest.approx(sorted(run.turns["seconds_model"]), abs=1e-5)


@pytest.mark.parametrize(
    ("action", "extra", "expected"),
    [
        ("go north", None, [(None, "go north")]),
        ("[1, 2]", None, [(None, "[1, 2]")]),
        (None, None, []),
        ('{"calls":[{"arguments":{"id":7},"name":"open"},{"arguments":{},"name":"list"}]}', None, ["open", "list"]),
        ('{"text":"done"}', None, []),
        ('[["open", {"id": "7"}]]', '{"chain": 0, "depth": 1}', [("open", '{"id": "7"}')]),
        ("The answer is 7.", '{"chain": 0, "depth": 1}', []),
        ("[" * 3000, None, [(None, "[" * 3000)]),
    ],
)
def test_calls_of_an_action(action, extra, expected):
    listed = traces.calls(action, extra)
    assert listed == expected or [name for name, _ in listed] == expected


def test_half_surrogates_that_json_spells_are_exported(tmp_path: Path):
    synthetic_run.write(tmp_path, episodes=8, turns=2, steps=1)
    action = r'{"calls": [{"name": "go\ud800", "arguments": {"to": "\udc00"}}]}'
    for path in (tmp_path / "turnkey_log" / "turns").rglob("*.parquet"):
        pd.read_parquet(path, partitioning=None).assign(action=action).to_parquet(path)
    export(tmp_path, "--otlp", tmp_path / "out.jsonl")
    called = [attributes(span) for span in collector(tmp_path / "out.jsonl") if span.name == r"execute_tool go\ud800"]
    assert {at["gen_ai.tool.call.arguments"] for at in called} == {r'{"to": "\udc00"}'}


PARTLY = ExportTraceServiceResponse(partial_success={"rejected_spans": 3, "error_message": "too old"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b"no such tenant"), "it answers 403 Forbidden: no such tenant"),
        ((403, b"\x1b[2Jno"), "it answers 403 Forbidden: ␛[2Jno"),
        ((200, PARTLY.SerializeToString()), "it rejected 3 spans: too old"),
        ((200, b"\xff"), "its answer is not OTLP"),
        (None, "it does not answer (ConnectionError). The traces"),
    ],
)
def test_a_receiver_that_does_not_take_all_is_one_line(folder: Path, monkeypatch, capsys, answer, words):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    line = ["turnkey", "export", str(folder), "--filter", "split=validation", "--otlp"]
    with Receiver((200, b""), (200, b""), answer or (200, b"")) as receiver:
        monkeypatch.setattr("sys.argv", [*line, f"http://user:secret@{receiver.address}"])
        if answer is None:
            receiver.server.shutdown()
            receiver.server.server_close()
        with pytest.raises(SystemExit) as stopped:
            main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"took {2 if answer else 0} of 16 episodes (" in error
    assert words in error
    assert "secret" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--otlp", "ftp://host/x"], "expected the http:// or https:// URL of an OTLP receiver"),
        (["--otlp", "localhost:4318"], "expected the http:// or https:// URL of an OTLP receiver"),
        (["--otlp", "http://"], "expected the http:// or https:// URL of an OTLP receiver"),
        (["--otlp", "http://u:pw@host:99999"], "got 'http://***@host:99999'"),
        (["--otlp", "{tmp}/x.jsonl", "--filter", "outcome=won"], "expected outcome=solved, unsolved or failed"),
        (["--otlp", "{tmp}/x.jsonl", "--filter", "step=9"], "fits --filter step=9"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(folder: Path, tmp_path: Path, words, message):
    done = CliRunner().invoke(app, ["export", str(folder), *(word.format(tmp=tmp_path) for word in words)])
    assert done.exit_code
    assert message in " ".join(f"{done.output} {done.exception}".replace("│", " ").split())
    assert not [*tmp_path.iterdir()]


def test_without_the_exporter_the_package_is_named(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    done = CliRunner().invoke(app, ["export", str(folder), "--otlp", str(tmp_path / "out.jsonl")])
    assert str(done.exception).endswith("pip install opentelemetry-exporter-otlp-proto-http")


# --- while a run plays ------------------------------------------------------------------------------------------------


def replay(run: LoggedRun, log: Path, live: LiveTraces) -> None:
    """Log the episodes of ``run`` again, one after the other, as a process that plays does."""
    log.mkdir(parents=True)
    shutil.copy(run.folder / "run.json", log)
    tables = Tables(log, live._segment, "player", also=live.take)
    frames = {table: read(run.folder, table) for table in ("episodes", "turns", "texts")}
    for key in frames["episodes"]["episode"]:
        rows = []
        for table, frame in frames.items():
            of_episode = frame[frame["episode"] == key]
            for step, part in of_episode.groupby("step"):
                columns = part.drop(columns=["step", "segment"]).astype(object)
                rows.append((table, int(step), columns.where(columns.notna(), None).to_dict("list")))
        tables.put_later(lambda rows=rows: rows, 1, 1)
    assert tables.drain(60)
    assert not tables.lost


def test_live_traces_are_those_of_an_export_before_its_credit(run: LoggedRun, exported: list[Span], tmp_path: Path):
    log = tmp_path / "run" / "turnkey_log"
    with Receiver() as receiver:
        live = LiveTraces(f"http://{receiver.address}", log, "20260101T000000_0000")
        replay(run, log, live)
        assert live.drain(60) == 0
        received = receiver.spans
    export(tmp_path / "run", "--otlp", tmp_path / "out.jsonl")
    by_id = {span.span_id: span for span in collector(tmp_path / "out.jsonl")}
    assert len(received) == len(by_id) == len(exported)
    resources = [resource.resource for *_, request in receiver.requests for resource in request.resource_spans]
    assert [attributes(resource)["turnkey.method"] for resource in resources] == [run.about["method"]] * len(resources)
    for span in received:
        later = by_id[span.span_id]
        of_span, of_export = attributes(span), attributes(later)
        for at in (of_span, of_export):
            at.pop("turnkey.no_credit", None)  # what will not be trained is known at the end
        assert of_span == of_export
        assert [*span.events] == [*later.events]
        assert (span.trace_id, span.name, span.start_time_unix_nano) == (
            later.trace_id,
            later.name,
            later.start_time_unix_nano,
        )


def test_nobody_waits_for_a_receiver_that_hangs_and_what_it_misses_is_counted(
    run: LoggedRun, tmp_path, caplog, monkeypatch
):
    release = threading.Event()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "600")
    notices._warned.discard("turnkey.log.otlp")
    with Receiver(release=release) as receiver:
        live = LiveTraces(
            f"http://user:secret@{receiver.address}", tmp_path / "log", "20260101T000000_0000", most_bytes=100_000
        )
        replay(run, tmp_path / "log", live)  # ends although nothing is answered
        missing = live.drain(0)
        assert missing == len(run.episodes)
        release.set()
        lost = live.drain(60)
        assert 0 < lost < missing  # those that waited have arrived
        assert len({span.trace_id for span in receiver.spans}) == missing - lost
    traces.warn_of_unsent(lost, f"http://user:secret@{receiver.address}")
    first, last = [record.getMessage() for record in caplog.records if "otlp" in record.getMessage()]
    assert "0 MB wait for it" in first
    assert last.startswith(f"turnkey.log.otlp: {lost} episodes did not reach http://***@127.0.0.1")
    assert "secret" not in first + last


def test_a_receiver_that_refuses_is_one_warning_without_the_headers(run: LoggedRun, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=abc123def,x-tenant=lab")
    notices._warned.discard("turnkey.log.otlp")
    with Receiver(*[(401, b"abc123def is no key")] * 99) as receiver:
        live = LiveTraces(f"http://{receiver.address}", tmp_path / "log", "20260101T000000_0000")
        replay(run, tmp_path / "log", live)
        assert live.drain(60) == len(run.episodes)
    [warning] = [record.getMessage() for record in caplog.records if "otlp" in record.getMessage()]
    assert "did not get an episode, it answers 401 Unauthorized: *** is no key" in warning


def test_headers_of_the_environment_are_sent(run: LoggedRun, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=lab")
    with Receiver() as receiver:
        live = LiveTraces(f"http://{receiver.address}", tmp_path / "log", "20260101T000000_0000")
        replay(run, tmp_path / "log", live)
        assert live.drain(60) == 0
        assert {headers["x-tenant"] for _, headers, _ in receiver.requests} == {"lab"}
