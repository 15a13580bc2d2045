"""Traces: the ids that requests stand for, and files of every form, right and wrong."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from radix_jax.replay import Trace, TraceRequest, read_trace
from radix_jax.replay.trace import FIRST_OUTPUT_ID, MAX_HASH_ID, FreshIds, GivenIds, HashedIds
from radix_jax.request import RecordedRequest

DATA = Path(__file__).parent.parent / "data" / "traces"
LINE = {"timestamp": 1500, "input_length": 1030, "output_length": 3, "hash_ids": [7, 0, 9]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_hash_id_stands_for_512_ids_of_its_own():
    ids = HashedIds(np.array([7, 0, 9], np.int32)).make(1030)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*range(7 * 512, 8 * 512), *range(512), *range(9 * 512, 9 * 512 + 6)]


def test_mooncake_lines(tmp_path: Path):
    trace = read_trace(written(tmp_path / "a.jsonl", LINE, "", LINE | {"timestamp": 2750, "input_length": 1536}))
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in trace] == [(0.0, 1030, 3), (1.25, 1536, 3)]
    assert trace[1].prompt_ids()[:1030].tolist() == trace[0].prompt_ids().tolist()
    assert (trace.name, trace.num_prompt_tokens, trace.max_len) == ("a.jsonl", 2566, 1539)


def test_outputs_are_shared_by_nobody():
    trace = read_trace(DATA / "mooncake_conversation.jsonl")
    outputs = np.concatenate([trace.output_ids(place) for place in range(len(trace))])
    assert len(np.unique(outputs)) == len(outputs) == sum(one.output_len for one in trace)
    assert outputs.min() >= FIRST_OUTPUT_ID > max(int(one.prompt_ids().max()) for one in trace)


def test_azure_prompts_share_nothing():
    trace = read_trace(DATA / "azure_conv.csv")
    assert len(trace) == 40
    assert (trace[0].arrival_s, trace[0].prompt_len, trace[0].output_len) == (0.0, 374, 44)
    assert trace[1].arrival_s == pytest.approx(50.995169 - 46.680590)
    ids = np.concatenate([one.prompt_ids() for one in trace])
    assert len(np.unique(ids)) == len(ids)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path):
    ids = np.array([5, 6, 7], np.int32)
    records = [
        RecordedRequest(arrival_s=3.0, token_ids=ids, output_ids=ids[:2], max_tokens=9, namespace=("a", 1), priority=2),
        RecordedRequest(arrival_s=4.5, token_ids=ids[1:], output_ids=ids[:0], max_tokens=9),
    ]
    trace = read_trace(written(tmp_path / "r.jsonl", *(record.to_json() for record in records)))
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in trace] == [(0.0, 3, 2), (1.5, 2, 1)]
    assert (trace[0].namespace, trace[0].priority, trace[1].namespace) == (("a", 1), 2, None)
    assert trace[0].prompt_ids().tolist() == [5, 6, 7]
    assert trace.output_ids(0).tolist() == [5, 6]
    assert trace.output_ids(1).tolist() == [FIRST_OUTPUT_ID + 2]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "the fields timestamp, input_length, output_length, hash_ids"),
        ({"timestamp": 1}, "the fields timestamp, input_length, output_length, hash_ids"),
        (LINE | {"timestamp": -1}, "timestamp=-1 is no number of milliseconds"),
        (LINE | {"timestamp": "1"}, "timestamp='1' is no number"),
        (LINE | {"timestamp": math.inf}, "timestamp=inf is no number"),
        (LINE | {"timestamp": 10**400}, "timestamp=10+ is no number"),
        ("[" * 100_000, "it is nested too deep"),
        (LINE | {"input_length": 0}, "input_length=0 is below"),
        (LINE | {"output_length": 1.5}, "output_length=1.5 is not an int"),
        (LINE | {"hash_ids": [7, 0]}, "input_length=1030 takes 3 hash_ids"),
        (LINE | {"hash_ids": [7, -1, 9]}, "hash_ids entry=-1 is below"),
        (LINE | {"hash_ids": [7, 0, MAX_HASH_ID + 1]}, f"is above {MAX_HASH_ID}"),
        (LINE | {"timestamp": 1}, "arrives before the request in front of it"),
    ],
)
def test_bad_lines_are_refused_with_number_and_reason(tmp_path: Path, line: object, reason: str):
    path = written(tmp_path / "bad.jsonl", LINE, "", line)
    with pytest.raises(ValueError, match=f"bad.jsonl, line 3: .*{reason}"):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:50.9,1", "has 2 fields"),
        ("2023-11-16 18:15:50.9951690,0,4", "ContextTokens=0 is below"),
        ("yesterday,1,4", "yesterday"),
    ],
)
def test_bad_azure_lines(tmp_path: Path, line: str, reason: str):
    path = written(
        tmp_path / "bad.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,1,1", line
    )
    with pytest.raises(ValueError, match=f"line 3: .*{reason}"):
        read_trace(path)


def test_what_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="is no text"):
        read_trace(path)


def test_more_outputs_than_there_are_ids_for(tmp_path: Path):
    lines = [LINE | {"output_length": FIRST_OUTPUT_ID - 1}, LINE | {"output_length": 1}]
    assert len(read_trace(written(tmp_path / "long.jsonl", *lines))) == 2
    with pytest.raises(ValueError, match="1073741825 output tokens, there are ids for 1073741824"):
        read_trace(written(tmp_path / "long.jsonl", *lines, LINE | {"output_length": 1}))


def test_files_without_a_request(tmp_path: Path):
    with pytest.raises(ValueError, match="is empty"):
        read_trace(written(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="has no request"):
        read_trace(written(tmp_path / "header.csv", "TIMESTAMP,ContextTokens,GeneratedTokens"))
    with pytest.raises(ValueError, match="the header"):
        read_trace(written(tmp_path / "other.csv", "TIMESTAMP,Tokens"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [2**31]}, "no int32"),
        ({"output_ids": [True]}, "output_ids entry=True is not an int"),
        ({"output_ids": 3}, "is not a list"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"arrival_s": -1.0}, "arrival_s=-1.0"),
        ({"arrival_s": 10**400}, "arrival_s=10+ is not a finite number"),
        ({"namespace": {"a": 1}}, "is an object"),
        ({"more": 1}, "has the fields"),
    ],
)
def test_bad_records(change: dict[str, object], reason: str):
    good = RecordedRequest(
        arrival_s=0.0, token_ids=np.array([1], np.int32), output_ids=np.array([2], np.int32), max_tokens=1
    )
    fields = json.loads(good.to_json())
    assert RecordedRequest.from_json(json.dumps(fields)).to_json() == good.to_json()
    with pytest.raises(ValueError, match=reason):
        RecordedRequest.from_json(json.dumps(fields | change))


def test_arrivals_can_be_sped_up_and_must_be_in_order():
    requests = [TraceRequest(arrival_s, 1, 1, FreshIds(0)) for arrival_s in (0.0, 3.0)]
    assert [one.arrival_s for one in Trace("t", requests).sped_up(2.0)] == [0.0, 1.5]
    with pytest.raises(ValueError, match=r"speed=0\.0 is not above 0"):
        Trace("t", requests).sped_up(0.0)
    with pytest.raises(ValueError, match=r"request 1 of t arrives at 0\.0 s, the one before it at 3\.0 s"):
        Trace("t", requests[::-1])
    assert Trace("t", requests).head(1)[0] is requests[0]
    assert GivenIds(np.array([4, 5], np.int32)).make(1).tolist() == [4]
