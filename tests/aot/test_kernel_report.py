"""What is read from PTX, from ptxas and from XLA's list of launches."""

from pathlib import Path

import pytest

from radix_jax.aot.kernel_report import read_launch_lines, report_of

PTX = """
.version 8.8
.target sm_90a
.visible .entry decode_kernel(
	.param .u64 .ptr .global .align 16 decode_kernel_param_0
)
{
	.shared .align 4 .b8 scratch[512];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 16;
	cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd2, %rd3, 1, 1, 1, 0, 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	atom.global.gpu.relaxed.add.f32 %f1, [%rd1], %f2;
	red.relaxed.gpu.global.add.f32 [%rd1], %f2;
	redux.sync.add.s32 %r1, %r2, -1;
}
"""
LOG = """ptxas info    : Compiling entry function 'decode_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_kernel
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 118 registers, used 1 barriers
"""
LAUNCHES = """003: kCustomKernel [sink] decode_kernel grid: [8, 3, 64] threads: [128, 1, 1]  shared_memory: 71680 bytes
006: kCustomKernel [sink] write_kernel grid: [8, 8, 1] threads: [64, 2, 1]  shared_memory: 0 bytes
008: kCustomKernel [prev=007 (1)] decode_kernel grid: [8, 2, 64] threads: [128, 1, 1]  shared_memory: 71680 bytes
"""


def test_everything_is_counted() -> None:
    launches = read_launch_lines(LAUNCHES)
    assert set(launches) == {"decode_kernel", "write_kernel"}
    assert launches["write_kernel"].num_threads == 128
    report = report_of(PTX, LOG, launches["decode_kernel"])
    assert (report.name, report.registers, report.spilled_bytes) == ("decode_kernel", 118, 32)
    assert report.shared_bytes == 71680 + 512
    assert (report.async_copies_16b, report.tensor_core_instructions, report.atomics) == (2, 2, 2)
    assert (report.num_launches, report.programs, report.num_threads) == (2, 1536, 128)


def test_a_silent_ptxas_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ptxas said nothing of registers and spills: 'error: no such arch'"):
        report_of(PTX, "error: no such arch")
