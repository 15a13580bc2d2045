"""Figures of the Mosaic kernels of a program: from the HLO that XLA compiled and from what libtpu wrote of each."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from radix_jax.aot.tpu_bundles import Program, read_program

_CALL = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*custom_call_target="tpu_custom_call"')
KERNEL_CODE = re.compile(r'"body":"[^"]*"')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(.*?)\]')
_VMEM = re.compile(r'"memory_space":"1".*?"size":"(\d+)"')
_CYCLES = re.compile(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)')
_COPY_NUMBER = re.compile(r"\.\d+$")
_FINAL = re.compile(r"^\d+-(.+)-\d+-final_bundles\.txt$")
_USE = re.compile(r"^\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt$")


@dataclass(frozen=True)
class TpuKernel:
    """One kernel of a program.

    launches: places in the program that run it. bundles: instruction words, each counted once. main_loop_bundles: of
    the loop with most matmuls, what a usual iteration runs, loops in it once. matmul_share, vector_share: of the matrix
    and the vector units' slots, over all of the main loop's bundles. copies: from and to HBM that the code starts.
    spills, fills: of vector registers, in the code; scalar_spills: to SMEM. vmem_bytes: that XLA set aside for it.
    static_cycles: libtpu's estimate of one launch, with loops whose trips it knows run so often; None where it was not
    asked.
    """

    name: str
    launches: int
    bundles: int
    main_loop_bundles: int
    matmul_share: float
    vector_share: float
    copies: int
    spills: int
    fills: int
    scalar_spills: int
    vmem_bytes: int
    static_cycles: int | None


def read_kernels(folder: Path, hlo: str) -> dict[TpuKernel, Program]:
    """The kernels of a program and their bundles, from its compiled HLO, with the kernels' code, and the folder into
    which libtpu wrote what it made of each.

    Kernels that are the same but for the number in their name are one. Of those with the same code libtpu may write
    only one down.

    Raises:
        ValueError: libtpu wrote nothing of a kernel.
    """
    bundles, uses, cycles = _read_folder(folder)
    launches: Counter[TpuKernel] = Counter()
    programs: dict[TpuKernel, Program] = {}
    calls = kernel_calls(hlo)
    written = {call.code: name for name, call in calls.items() if name in bundles}
    for name, call in calls.items():
        source = name if name in bundles else written.get(call.code)
        if source is None:
            raise ValueError(f"libtpu wrote no bundles of {name}, nor of a kernel with the same code")
        program = read_program(bundles[source], uses.get(source, ""))
        kernel = _kernel(name, program, call.vmem_bytes, cycles.get(source))
        launches[kernel] += 1
        programs.setdefault(kernel, program)
    return {replace(kernel, launches=number): programs[kernel] for kernel, number in launches.items()}


class KernelCall(NamedTuple):
    """code: as the HLO has it. vmem_bytes: that XLA set aside."""

    code: str
    vmem_bytes: int


def kernel_calls(hlo: str) -> dict[str, KernelCall]:
    """Each call of a Mosaic kernel, by the name of its instruction."""
    calls = {}
    for line in hlo.splitlines():
        if call := _CALL.match(line):
            scoped = _SCOPED.search(line)
            sizes = _VMEM.findall(scoped[1]) if scoped else []
            code = KERNEL_CODE.search(line)
            calls[call[1]] = KernelCall(code[0] if code else "", sum(map(int, sizes)))
    return calls


def _kernel(call: str, program: Program, vmem_bytes: int, cycles: int | None) -> TpuKernel:
    main = program.main_loop
    shares = program.shares(main) if main is not None and program.slots else {}
    total = program.total
    return TpuKernel(
        name=_COPY_NUMBER.sub("", call),
        launches=1,
        bundles=total.bundles,
        main_loop_bundles=0 if main is None else program.steady(main, lambda inner: 1).bundles,
        matmul_share=round(shares.get("MATMUL", 0.0), 4),
        vector_share=round(shares.get("VALU", 0.0), 4),
        copies=total.copies_in + total.copies_out,
        spills=total.spills,
        fills=total.fills,
        scalar_spills=total.scalar_spills,
        vmem_bytes=vmem_bytes,
        static_cycles=cycles,
    )


def _read_folder(folder: Path) -> tuple[dict[str, str], dict[str, str], Counter[str]]:
    bundles: dict[str, str] = {}
    uses: dict[str, str] = {}
    cycles: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        if match := _FINAL.match(path.name):
            if "schedule-analysis" not in path.name:
                bundles[match[1]] = path.read_text(errors="replace")
        elif match := _USE.match(path.name):
            uses[match[1]] = path.read_text()
        elif path.name.endswith("static_llo_profile.textproto"):
            cycles |= Counter({name: int(number) for name, number in _CYCLES.findall(path.read_text())})
    return bundles, uses, cycles
