"""A kernel of one's own beside ours, compiled for a TPU."""

import json
from pathlib import Path

import pytest
from aot_extra import needs_libtpu

from benchmarks.tpu_peers import Shape
from benchmarks.tpu_static import main

OWN_KERNEL = """
from radix_jax.pallas_kernels.paged_attention.tpu import paged_attention_tpu
from radix_jax.pallas_kernels.paged_attention.tpu_tiles import CHIPS


def attend(q, kv_pages, *rows, page_offset, scale, max_q_len, num_kv_heads):
    options = {"sliding_window": None, "logit_soft_cap": None, "return_lse": False, "kv_scales": None}
    sizes = {"max_q_len": max_q_len, "num_kv_heads": num_kv_heads}
    return paged_attention_tpu(
        q, kv_pages, *rows, page_offset=page_offset, scale=scale, chip=CHIPS["v5e"], **options, **sizes
    )
"""


@pytest.mark.slow
@needs_libtpu()
def test_a_kernel_by_its_path_is_measured_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tpu_kernel.py").write_text(OWN_KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    shape = Shape(num_rows=2, num_tokens=2, context=256, num_q_heads=4, num_kv_heads=1)
    monkeypatch.setattr("benchmarks.tpu_static.DECODE_SHAPES", (shape,))
    monkeypatch.setattr("benchmarks.tpu_static.MIXED_SHAPES", ())
    main(["--json", "--target", "v5e", "--kernel", "own_tpu_kernel:attend", "--kernel", "own_tpu_kernel:no_such"])
    printed = capsys.readouterr()
    [line] = printed.out.splitlines()
    ours, own = json.loads(line)
    assert (ours["source"], own["source"]) == ("ours", "own_tpu_kernel:attend")
    assert (ours["kv_write"], own["kv_write"]) == (True, False)
    # The same kernel without its writes.
    assert 0.8 * ours["bundles_per_512"] < own["bundles_per_512"] < ours["bundles_per_512"]
    assert own["vmem_mib"] < ours["vmem_mib"]
    assert own["context"] == 256
    assert "own_tpu_kernel:no_such decode" in printed.err
