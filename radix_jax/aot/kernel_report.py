"""What a compiler made of each kernel: registers, spills, shared memory, and the instructions that matter.

From PTX, which XLA writes into a folder, and ptxas, which turns it into machine code and tells what it took.
"""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# The form of `cp.async` that takes 16 bytes a thread, and tensor-core instructions before and from Hopper on.
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^\]]*\], ?\[[^\]]*\], ?(0x10|16)\b")
_TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\b")
_ATOMIC = re.compile(r"\b(?:atom|red)\.(?:global|shared|add|cas|exch|min|max|and|or|xor|gpu|relaxed|acq_rel)")
_ENTRY = re.compile(r"\.entry (\w+)\(")
_STATIC_SHARED = re.compile(r"\.shared [^\n]*?\.b8 \w+\[(\d+)\]")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_LAUNCH = re.compile(r"\b(\w+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]\s+shared_memory: (\d+)")


@dataclass(frozen=True)
class KernelReport:
    """One kernel.

    spilled_bytes: stores and loads to and from local memory that registers lacked room for, in the code.
    shared_bytes: of one program. num_launches: places in the program that start it. programs: of the largest launch.
    async_copies_16b, tensor_core_instructions, atomics: in the code, not as they run.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    async_copies_16b: int
    tensor_core_instructions: int
    atomics: int
    num_launches: int
    programs: int
    num_threads: int


@dataclass(frozen=True)
class _Launches:
    number: int = 0
    programs: int = 0
    num_threads: int = 0
    shared_bytes: int = 0


def read_reports(folder: Path, architecture: str) -> tuple[KernelReport, ...]:
    """A report for each kernel that XLA wrote PTX of into `folder`."""
    launches = _read_launches(folder)
    reports = []
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        entry = _ENTRY.search(ptx)
        if entry is not None:
            reports.append(report_of(ptx, run_ptxas(ptx, architecture), launches.get(entry[1], _Launches())))
    return tuple(sorted(reports, key=lambda report: report.name))


def report_of(ptx: str, ptxas_log: str, launches: _Launches = _Launches()) -> KernelReport:
    """The report of a kernel, from its PTX and what ptxas said of it."""
    entry, registers, spills = _ENTRY.search(ptx), _REGISTERS.search(ptxas_log), _SPILLS.search(ptxas_log)
    if entry is None or registers is None or spills is None:
        raise ValueError(f"ptxas said nothing of registers and spills: {ptxas_log.strip()[:500]!r}")
    return KernelReport(
        name=entry[1],
        registers=int(registers[1]),
        spilled_bytes=int(spills[2]) + int(spills[3]),
        shared_bytes=launches.shared_bytes + sum(map(int, _STATIC_SHARED.findall(ptx))),
        async_copies_16b=len(_ASYNC_COPY.findall(ptx)),
        tensor_core_instructions=len(_TENSOR_CORE.findall(ptx)),
        atomics=len(_ATOMIC.findall(ptx)),
        num_launches=launches.number,
        programs=launches.programs,
        num_threads=launches.num_threads,
    )


def read_launch_lines(text: str) -> dict[str, _Launches]:
    """Launches by kernel, from XLA's list of what a program does one after the other."""
    found: dict[str, _Launches] = {}
    for name, *numbers in _LAUNCH.findall(text):
        x, y, z, threads_x, threads_y, threads_z, shared_bytes = map(int, numbers)
        before = found.get(name, _Launches())
        found[name] = _Launches(
            before.number + 1,
            max(before.programs, x * y * z),
            threads_x * threads_y * threads_z,
            max(before.shared_bytes, shared_bytes),
        )
    return found


def _read_launches(folder: Path) -> dict[str, _Launches]:
    lists = sorted(folder.glob("*.thunk_sequence.txt"))
    return read_launch_lines("\n".join(path.read_text() for path in lists))


def run_ptxas(ptx: str, architecture: str) -> str:
    """What ptxas says of PTX.

    Raises:
        ImportError: there is no ptxas.
        RuntimeError: it does not take the PTX.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [find_ptxas(), "-v", f"-arch={architecture}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"ptxas failed: {result.stderr.strip()[:2000]}")
    return result.stderr


def find_ptxas() -> str:
    """Path of ptxas: of the package nvidia-cuda-nvcc, or on PATH.

    Raises:
        ImportError: there is none.
    """
    packages = importlib.util.find_spec("nvidia")
    for folder in packages.submodule_search_locations or () if packages else ():
        if (path := Path(folder) / "cu13" / "bin" / "ptxas").exists():
            return str(path)
    if found := shutil.which("ptxas"):
        return found
    raise ImportError("ptxas is not installed; run: pip install 'radix_jax[aot]'")
