"""A prompt below the context limit but above the pool is refused at once, and blocks nobody."""

import pytest
from scheduling import FakeModel, RequestMaker, expected_output, make_scheduler, run_all


def test_refused_at_submit_and_the_next_one_is_served() -> None:
    scheduler = make_scheduler(page_size=16, num_pages=49, max_model_len=4096)
    model, make = FakeModel(49, 16), RequestMaker()
    with pytest.raises(ValueError, match=r"1002 prompt \+ 16 output tokens needs 64 pages .* the pool has 48"):
        scheduler.add(make([1] * 1002, 16))
    short = make([1, 2, 3, 4, 5], 16)
    scheduler.add(short)
    assert run_all(scheduler, model)[short.request_id].output_ids.tolist() == expected_output(short)
