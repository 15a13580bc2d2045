"""The first token, which prefill gives, comes first and once: 64 streams side by side, each with its own script."""

from tiny import SMALL, assert_idle, counting_llama, greedy

from radix_jax import Engine, EngineConfig


def test_scripted_tokens_in_order_for_each_stream() -> None:
    """The model's script is to count on from the prompt's last token."""
    engine = Engine(counting_llama(), None, EngineConfig(**(SMALL | {"max_running_requests": 64})))
    scripts = {}
    for stream in range(64):
        max_tokens = stream % 3 + 1
        request_id = engine.add_request([9] * (stream % 5) + [stream], greedy(max_tokens))
        scripts[request_id] = [(stream + 1 + i) % 64 for i in range(max_tokens)]
    seen: dict[str, list[list[int]]] = {request_id: [] for request_id in scripts}
    ends = {}
    while engine.has_unfinished():
        for output in engine.step():
            seen[output.request_id].append(output.outputs[0].token_ids)
            if output.finished:
                ends[output.request_id] = output.outputs[0].finish_reason
        engine.check_integrity()
    for request_id, script in scripts.items():
        assert seen[request_id] == [script[: i + 1] for i in range(len(script))]
    assert ends == dict.fromkeys(scripts, "length")
    assert_idle(engine)
