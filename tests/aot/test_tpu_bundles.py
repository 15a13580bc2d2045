"""What is read from the bundles that libtpu writes of a kernel."""

from pathlib import Path

import pytest

from radix_jax.aot.tpu_bundles import Work, read_program
from radix_jax.aot.tpu_report import kernel_calls, read_kernels

# Two loops, the inner one of copies; a branch over [6, 9) that always has one matmul less than the way through it.
BUNDLES = """
= control target key start
LB: loop body

     0   :  { %s1 = smov.u32 0 } /* Start region 1 */
   0x1 LB: > { %s2 = sphi %s1, %s3 } /* Start region 10 */
   0x2 LB: >> { %5 = dma.hbm_to_vmem /*hbm=*/%s4, /*size_in_granules=*/1024, /*vmem=*/%s6 } /* Start region 20 */
   0x3   : >> { %9 = sbr.rel (!%p1) target = $region20 }
   0x4   : >> {}
   0x5   : >> {}
   0x6   : >> {}
   0x7   : >> {} /* End region 20 */
   0x8   : > { %7 = sbr.rel (%p2) target = $region30 }
   0x9   : > {}
   0xa   : > {}
   0xb   : > {}
   0xc   : > { %8 = vmatmul.bf16.gmra.mxu0 %v1 } /* Start region 29 */
   0xd   : > { %8 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %1 = vst [vmem:[#allocation7_spill] sm:$0xff] %v2 }
   0xe   : > { %v3 = vld [vmem:[#allocation7_spill] sm:$0xff]  ;;  %8 = vmatmul.bf16.gmra.mxu1 %v1 } /* End region 29 */
   0xf PF: > { %4 = vst [vmem:[#allocation9] sm:$0xff] %v2 } /* Start/End empty region 30 */
  0x10   : > { %8 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %6 = sst [smem:[#allocation3_spill]] %s5 }
  0x11   : > { %9 = sbr.rel (!%p1) target = $region10 }
  0x12   : > {}
  0x13   : > {}
  0x14   : > {}
  0x15   : > {} /* End region 10 */
  0x16   :  { %2 = dma.vmem_to_hbm /*vmem=*/%s1 }
"""
USE = """== CAPACTIY:
MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
""" + "\n".join(["0 0 0 2 0 0 0 0 0 0 2"] * 23)


def test_everything_is_counted() -> None:
    total = read_program(BUNDLES).total
    assert total == Work(23, 4, 1, 1024, 1, 1, 1, 1)


def test_loops_end_behind_the_delay_slots_of_their_branch() -> None:
    outer, inner = read_program(BUNDLES).loops
    assert (outer.first, outer.last, outer.depth, outer.parent) == (1, 0x15, 1, None)
    assert (inner.first, inner.last, inner.depth, inner.parent) == (2, 7, 2, 0)


def test_the_main_loop_has_the_matmuls() -> None:
    program = read_program(BUNDLES)
    assert program.main_loop == 0
    assert read_program(BUNDLES.replace("vmatmul", "vadd")).main_loop is None


def test_ways_through_a_loop() -> None:
    program = read_program(BUNDLES)
    # 1; six of the inner loop; 8 to 15, 16 to 21.
    assert program.steady(0, lambda inner: 1) == Work(21, 4, 1, 1024, 0, 1, 1, 1)
    assert program.steady(0, lambda inner: 4).bundles == 21 + 3 * 6
    assert program.steady(0, lambda inner: 4).copies_in == 4
    assert program.longest(0, lambda inner: 0).bundles == program.around(0).bundles == 15
    # Without matmuls behind the branch, the way over them is the cheapest: from 8 and its slots to 15.
    bare = read_program(BUNDLES.replace("vmatmul", "vadd"))
    assert bare.steady(0, lambda inner: 1).bundles == 21 - 2
    assert bare.longest(0, lambda inner: 1).bundles == 21


def test_shares_are_of_the_slots_of_all_bundles() -> None:
    program = read_program(BUNDLES, USE)
    assert program.shares(0)["VALU"] == pytest.approx(0.5)
    assert program.shares(0)["SALU"] == pytest.approx(1.0)
    assert program.shares(0)["MATMUL"] == 0.0
    assert read_program(BUNDLES).slots == ()


def test_a_text_without_bundles_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are no bundles in the text of 5 characters"):
        read_program("hello")


CALL = 'bf16[8,128]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
ASKED = '"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"104857600"}]'
USED = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"9408512"}]'
HLO = f"""
  %copy.1 = bf16[8,128]{{1,0}} copy(%a)
  %decode.3 = {CALL}{{"body":"TUxJ",{ASKED},{USED}}}
  %decode.4 = {CALL}{{"body":"TUxJ",{ASKED},{USED}}}
  ROOT %write = {CALL}{{"body":"UjFX","used_scoped_memory_configs":[]}}
"""


def test_kernels_and_their_vmem_are_found_in_the_program() -> None:
    calls = kernel_calls(HLO)
    assert {name: call.vmem_bytes for name, call in calls.items()} == {
        "decode.3": 9408512,
        "decode.4": 9408512,
        "write": 0,
    }
    assert calls["decode.3"].code == calls["decode.4"].code != calls["write"].code


def test_of_kernels_with_the_same_code_one_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "17-decode.4-02-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-decode.4-01-schedule-analysis_final_bundles.txt").write_text("")
    with pytest.raises(ValueError, match="libtpu wrote no bundles of write, nor of a kernel with the same code"):
        read_kernels(tmp_path, HLO)
    (tmp_path / "18-write-02-final_bundles.txt").write_text("0x1 : { %1 = vadd.f32 %v1 }")
    kernels = {kernel.name: kernel for kernel in read_kernels(tmp_path, HLO)}
    assert {name: (kernel.launches, kernel.bundles) for name, kernel in kernels.items()} == {
        "decode": (2, 23),
        "write": (1, 1),
    }
