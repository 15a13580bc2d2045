"""A kernel through the grid: a right one passes, each way of being wrong is seen and named; the command tells it."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from radix_jax import check_kernel as module
from radix_jax.check_kernel import CaseResult, DecodeTiming, check_kernel, run_case
from radix_jax.cli_kernels import _print_timings
from radix_jax.cli_kernels import check_kernel as command
from radix_jax.pallas_kernels.paged_attention.backends import attention_fn
from radix_jax.pallas_kernels.paged_attention.oracle_grid import GRID, case_inputs


def all_lanes(q: Any, kv_pages: Any, *rows: Any, page_offset: Any, scale: float) -> Any:
    """A function that takes all lanes for heads, and computes nothing."""
    return q + 0 * kv_pages.reshape(*kv_pages.shape[:2], -1, 2 * q.shape[2])[0, 0, 0, 0]


def dense_attention(
    q: Any,
    kv_pages: Any,
    page_table: Any,
    kv_lens: Any,
    cu_q_lens: Any,
    *,
    page_offset: Any,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    return_lse: bool,
    num_kv_heads: int,
    kv_scales: Any,
    max_q_len: int,
    fault: str = "",
) -> Any:
    """All scores of all tokens at once: right, slow, and with a fault on demand."""
    (num_tokens, num_heads, head_dim), num_rows = q.shape, page_table.shape[0]
    tokens = jnp.arange(num_tokens)
    row = jnp.minimum((cu_q_lens[None, 1:] <= tokens[:, None]).sum(axis=1), num_rows - 1)
    if fault == "page of another row":
        page_table = jnp.roll(page_table, 1, axis=0)
    pages = page_table if fault == "page_offset ignored" else page_table + page_offset
    if fault == "16-bit page ids":
        pages = pages.astype(jnp.int16).astype(jnp.int32)
    if fault == "width is not rounded":
        num_kv_heads = kv_pages.shape[2] // (2 * head_dim)
    kv = kv_pages[pages].reshape(num_rows, -1, kv_pages.shape[2])[..., : 2 * num_kv_heads * head_dim]
    kv_pos = jnp.arange(kv.shape[1])
    kv = kv.astype(jnp.float32)
    if fault != "0 * NaN":
        kv = jnp.where((kv_pos < kv_lens[:, None])[:, :, None], kv, 0.0)
    kv = kv.reshape(num_rows, kv.shape[1], num_kv_heads, 2, head_dim)
    if kv_scales is not None and fault != "kv_scales ignored":
        kv = kv * kv_scales[:, :, None]
    group = num_heads // num_kv_heads
    kv_head = (
        jnp.arange(num_heads) % num_kv_heads if fault == "heads of a group apart" else jnp.arange(num_heads) // group
    )
    k, v = kv[row][:, :, kv_head, 0], kv[row][:, :, kv_head, 1]
    scale = head_dim**-0.5 if fault == "scale ignored" else scale
    scores = jnp.einsum("tnh,tsnh->tns", q.astype(jnp.float32), k) * scale
    if logit_soft_cap is not None and fault != "soft cap ignored":
        scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
    q_pos = (kv_lens[row] - cu_q_lens[row + 1] + tokens)[:, None]
    last_pos = q_pos - (fault == "mask one short") + (fault == "mask one far")
    seen = kv_pos <= last_pos
    if sliding_window is not None and fault != "window ignored":
        seen &= kv_pos > q_pos - sliding_window - (fault == "window one wide")
    scores = jnp.where(seen[:, None, :], scores, -1e30)
    out = jnp.einsum("tns,tsnh->tnh", jax.nn.softmax(scores), v)
    if fault != "padding undefined":
        out = jnp.where(tokens[:, None, None] < cu_q_lens[-1], out, 0.0)
    else:
        out = jnp.where(tokens[:, None, None] < cu_q_lens[-1], out, jnp.nan)
    out = out.astype(q.dtype)
    if not return_lse:
        return out
    lse = jax.nn.logsumexp(scores, axis=-1)
    lse = lse / np.log(2.0) if fault == "lse in base 2" else lse
    return out, lse if fault == "lse of padding" else jnp.where(tokens[:, None] < cu_q_lens[-1], lse, -jnp.inf)


def test_a_right_kernel_passes() -> None:
    seen: list[CaseResult] = []
    report = check_kernel(dense_attention, cases="mixed-[lrst]*", on_case=seen.append)
    assert report.passed, report.as_text()
    assert [case.case for case in report.cases] == [
        case.name for case in GRID if case.name[:7] in ("mixed-l", "mixed-r", "mixed-s", "mixed-t")
    ]
    assert {case.status for case in report.cases} == {"ok"}
    assert report.as_text() == f"dense_attention on cpu: {len(report.cases)} ok"
    assert (report.timings, report.copy_bandwidth) == ((), None)
    assert report.cases == tuple(seen)


def test_all_cases_are_the_usual_choice() -> None:
    seen: list[CaseResult] = []

    def stop(result: CaseResult) -> None:
        seen.append(result)
        if len(seen) == 3:
            raise StopIteration

    with pytest.raises(StopIteration):
        check_kernel(lambda *_, **__: 1, on_case=stop)
    assert [result.case for result in seen] == [case.name for case in GRID[:3]]


@pytest.mark.parametrize(
    ("fault", "cases", "wrong"),
    [
        ("mask one short", "prefill", ["prefill"]),
        ("mask one far", "prefill", ["prefill"]),
        ("mask one far", "decode-page-*", ["decode-page-size-1", "decode-page-size-64"]),
        ("page of another row", "decode-page-size-*", ["decode-page-size-1", "decode-page-size-64"]),
        ("page_offset ignored", "one-token", ["one-token"]),
        ("page_offset ignored", "*traced*", ["decode-traced-page-offset"]),
        ("16-bit page ids", "decode-[hp]*", ["decode-highest-pages"]),
        ("width is not rounded", "*-width", ["decode-rounded-width"]),
        ("0 * NaN", "mixed", ["mixed"]),
        ("0 * NaN", "decode", ["decode"]),
        ("kv_scales ignored", "*scales*", ["mixed-scales-of-float32"]),
        ("kv_scales ignored", "decode-float*", ["decode-float8_e4m3fn", "decode-float8_e5m2"]),
        ("heads of a group apart", "decode-*-heads-*", ["decode-6-heads-on-2", "decode-16-heads-on-2"]),
        ("scale ignored", "mixed-soft-cap", ["mixed-soft-cap"]),
        ("soft cap ignored", "decode-s*", ["decode-soft-cap"]),
        ("soft cap ignored", "mixed*w*soft-cap", ["mixed-window-and-soft-cap", "mixed-lse-window-and-soft-cap"]),
        ("window ignored", "*-window-16", ["decode-window-16", "cached-prefix-window-16"]),
        ("window one wide", "*-window-50", ["decode-window-50", "cached-prefix-window-50"]),
        ("lse in base 2", "*-lse", ["decode-lse", "mixed-lse"]),
        ("lse of padding", "*-lse", ["decode-lse", "mixed-lse"]),
        ("padding undefined", "decode-w*-1", ["decode-window-1"]),
    ],
)
def test_each_way_of_being_wrong_is_seen_and_named(fault: str, cases: str, wrong: list[str]) -> None:
    report = check_kernel(functools.partial(dense_attention, fault=fault), cases=cases)
    assert not report.passed
    assert [case.case for case in report.cases if case.status == "wrong"] == wrong
    for case in report.cases:
        if case.status == "wrong":
            assert case.max_error is not None
            assert case.max_error > case.tolerance
            assert " of token " in case.message
            assert f"{case.case}: wrong, {case.message}" in report.as_text()
            assert case.message.startswith("lse" if fault.startswith("lse") else "out")


def test_padding_is_told_from_rows() -> None:
    report = check_kernel(functools.partial(dense_attention, fault="padding undefined"), cases="prefill")
    assert report.cases[0].max_error == float("inf")
    assert "out of token 60, which belongs to no row" in report.cases[0].message
    assert report.as_dict()["cases"][0]["max_error"] == "inf"


def plain_attention(q: Any, kv_pages: Any, page_table: Any, kv_lens: Any, cu_q_lens: Any, *, page_offset, scale) -> Any:
    """Without the options."""
    fn = attention_fn("xla")
    options = {"sliding_window": None, "logit_soft_cap": None, "return_lse": False, "kv_scales": None}
    return fn(
        q,
        kv_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        page_offset=page_offset,
        scale=scale,
        num_kv_heads=kv_pages.shape[2] // (2 * q.shape[2]),
        max_q_len=q.shape[0],
        **options,
    )


def test_an_option_that_is_lacking_is_no_fault() -> None:
    report = check_kernel(plain_attention, cases="decode-[wb]*[0-9]")
    assert report.passed
    lacking = {case.case: case.message for case in report.cases if case.status == "not supported"}
    assert set(lacking) == {f"decode-window-{window}" for window in (1, 16, 50)}
    assert "takes no sliding_window, and here it is 16" in lacking["decode-window-16"]
    assert "decode-window-16: not supported" in report.as_text()


def test_a_kernel_that_supports_nothing_does_not_pass() -> None:
    def nothing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("head_dim 64\nand more")

    report = check_kernel(nothing, cases="mixed")
    assert (report.cases[0].status, report.cases[0].message, report.passed) == ("not supported", "head_dim 64", False)


def test_what_a_kernel_raises_is_its_result() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    def short(q: Any, *_: Any, **__: Any) -> Any:
        return q[1:]

    report = check_kernel(broken, cases="one-token")
    assert (report.cases[0].status, report.cases[0].message) == (
        "raised",
        f"ZeroDivisionError: ZeroDivisionError (test_check_kernel.py:{broken.__code__.co_firstlineno + 1})",
    )
    assert not report.passed
    report = check_kernel(short, cases="one-token")
    assert report.cases[0].status == "raised"
    assert "'short' returned float32[0, 4, 64]; the contract is float32[1, 4, 64]" in report.cases[0].message


def test_backends_by_name() -> None:
    assert check_kernel("xla", cases="one-token").as_text() == "xla on cpu: 1 ok"
    assert check_kernel("pallas_interpret", cases="one-token").kernel == "pallas_interpret"
    with pytest.raises(ValueError, match="'pallas_gpu' can't run here"):
        check_kernel("pallas_gpu")
    with pytest.raises(ValueError, match="'flash' is not one of auto, xla"):
        check_kernel("flash")
    with pytest.raises(ValueError, match=f"no case fits 'decoed'; the first of all {len(GRID)} are decode, prefill"):
        check_kernel("xla", cases="decoed")


@pytest.mark.parametrize("case", module.LARGE_CASES, ids=lambda case: case.name)
def test_a_pool_at_the_end_of_a_large_one(case: Any) -> None:
    """As on a device, in a smaller pool: rows are found in its highest pages, and a wrong page is NaN."""
    num_pages = len(case_inputs(case).kv_pages) + 40
    assert run_case("xla", attention_fn("xla"), case, num_pages).status == "ok"
    fault = functools.partial(dense_attention, fault="page_offset ignored")
    assert run_case("wrong", fault, case, num_pages).max_error == float("inf")


def test_the_large_pool_is_beyond_32_bits() -> None:
    case = module.LARGE_CASES[0]
    width = 2 * case.num_kv_heads * case.head_dim
    assert module.LARGE_POOL_PAGES * case.page_size * width > 2**32
    # The rows' own elements too, were the count to wrap around.
    assert (module.LARGE_POOL_PAGES - len(case_inputs(case).kv_pages)) * case.page_size * width > 2**32


def test_decode_steps_are_timed_against_their_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of a device, made small; on a CPU nothing is timed by itself."""
    monkeypatch.setattr(module, "DECODE_SHAPES", ((2, 32), (3, 64), (4, 2**20)))
    monkeypatch.setattr(module, "_device_bytes", lambda: 2**24)
    timings = list(module._time_decode("xla", attention_fn("xla"), 1e9))
    assert [(timing.num_rows, timing.kv_len) for timing in timings] == [(2, 32), (3, 64)]
    assert [timing.floor_s for timing in timings] == [2 * 32 * 4096 / 1e9, 3 * 64 * 4096 / 1e9]
    assert all(timing.seconds >= 0 for timing in timings)


def test_timings_are_shown_with_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    _print_timings((DecodeTiming(64, 4096, 300e-6, 250e-6),), 4.3e12)
    shown = capsys.readouterr().out
    for part in ("4.30 TB/s", "4,096", "300.0", "250.0", "83%"):
        assert part in shown


app = typer.Typer()
app.command()(command)
MINE = """
from radix_jax.pallas_kernels import paged_attention

def right(q, kv_pages, page_table, kv_lens, cu_q_lens, *, page_offset, scale):
    return paged_attention(q, kv_pages, page_table, kv_lens, cu_q_lens, page_offset=page_offset, scale=scale)

def wrong(q, kv_pages, page_table, kv_lens, cu_q_lens, *, page_offset, scale):
    return paged_attention(q, kv_pages, page_table, kv_lens, cu_q_lens, page_offset=page_offset, scale=1.01 * scale)

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current folder."""
    (tmp_path / "my_kernels.py").write_text(MINE)
    (tmp_path / "broken_kernels.py").write_text("1 +")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
    return "my_kernels"


def test_the_command_prints_a_table(mine: str) -> None:
    done = CliRunner().invoke(app, [f"{mine}:right", "--case", "decode-w*-1"])
    assert done.exit_code == 1, "nothing was right, as windows are not supported"
    done = CliRunner().invoke(app, [f"{mine}:right", "--case", "one*"])
    assert done.exit_code == 0
    assert "one-token" in done.stdout
    assert done.stdout.endswith("right on cpu: 1 ok\n")
    done = CliRunner().invoke(app, [f"{mine}:wrong", "--case", "mixed"])
    assert done.exit_code == 1
    assert "wrong: out of token" in done.stdout


def test_the_command_prints_json(mine: str) -> None:
    done = CliRunner().invoke(app, [f"{mine}:wrong", "--json", "--case", "[mo]*token"])
    report = json.loads(done.stdout)
    assert (report["kernel"], report["platform"], report["passed"]) == ("wrong", "cpu", True)
    assert set(report["cases"][0]) == {"case", "status", "max_error", "tolerance", "message"}
    assert done.exit_code == 0, "one token has one weight, whatever the scale"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("nowhere:fn", "nowhere can't be imported from .*ModuleNotFoundError"),
        ("broken_kernels:fn", "broken_kernels can't be imported from .*SyntaxError"),
        ("my_kernels:none", "my_kernels has no function 'none'"),
        ("my_kernels:number", "my_kernels has no function 'number'"),
        ("my_kernels", "'my_kernels' is neither MODULE:FUNCTION nor one of auto, xla"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_kernel_that_is_not_there(kernel: str, message: str) -> None:
    done = CliRunner().invoke(app, [kernel])
    assert isinstance(done.exception, ValueError)
    assert "\n" not in str(done.exception)
    with pytest.raises(ValueError, match=message):
        raise done.exception


def test_a_function_without_num_kv_heads_is_not_given_a_rounded_width() -> None:
    result = run_case("mine", all_lanes, next(case for case in GRID if case.name == "mixed-rounded-width"))
    assert result.status == "not supported"
    assert "takes no num_kv_heads, and here it is 3" in result.message
