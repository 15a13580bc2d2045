"""Clients that leave in the middle end their requests: nothing runs on, and no page stays held. The engine's half: a
closed stream, and an abort, are what a server makes of a closed socket."""

import pytest
from tiny import assert_idle, dense_greedy, finish, greedy, tiny_engine


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 12])
def test_eight_streams_and_eight_plain_requests_that_are_left(num_steps: int, overlap: bool) -> None:
    engine = tiny_engine(overlap=overlap)
    stays = engine.add_request([7, 8, 9], greedy(20))
    # Long outputs: none comes to its end by itself here. Eight rows run, the rest waits.
    streams = [engine.stream([200 + i, *range(30)], greedy(90, ignore_eos=True)) for i in range(8)]
    plain = [engine.add_request([100 + i, *range(30)], greedy(90, ignore_eos=True)) for i in range(8)]
    for _ in range(num_steps):
        next(streams[0])
    assert engine.stats().num_running + engine.stats().num_waiting == 17
    for stream, request_id in zip(streams, plain, strict=True):
        stream.close()
        output = engine.abort(request_id)
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        engine.check_integrity()
    assert engine.unfinished == {stays}
    assert finish(engine)[stays].outputs[0].token_ids == dense_greedy([7, 8, 9], 20)
    assert_idle(engine)
