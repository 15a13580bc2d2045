"""What was compiled, why, how long it took; and the persistent compile cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radix_jax.plan import Bucket
from radix_jax.runner.compile_ledger import CompileLedger

BUCKET = Bucket("decode", 8, 8, 4)


def test_compiles_are_entered_in_order() -> None:
    ledger = CompileLedger()
    assert ledger.total_s == 0
    other = Bucket("prefill", 64, 8, 4)
    assert ledger.timed(BUCKET, "warmup", lambda: "compiled") == "compiled"
    assert ledger.timed(other, "first use", lambda: 7) == 7
    assert [(record.bucket, record.reason) for record in ledger.records] == [
        (BUCKET, "warmup"),
        (other, "first use"),
    ]
    assert all(record.seconds_s >= 0 for record in ledger.records)
    assert ledger.total_s == sum(record.seconds_s for record in ledger.records)


def test_a_failed_compile_is_not_entered() -> None:
    ledger = CompileLedger()
    with pytest.raises(ZeroDivisionError):
        ledger.timed(BUCKET, "warmup", lambda: 1 // 0)
    assert ledger.records == []


KEEP = """
import sys
from pathlib import Path
import jax
from radix_jax.runner import keep_compiles
if sys.argv[2]:
    jax.config.update("jax_compilation_cache_dir", sys.argv[2])
keep_compiles(Path(sys.argv[1]))
jax.jit(lambda x: x * 2 + 1)(3.0)
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("own", [False, True])
def test_compiles_are_kept_in_the_folder_unless_the_program_has_its_own(own: bool, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a" / "ours", tmp_path / "theirs"
    arguments = [str(ours), str(theirs) if own else ""]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", KEEP, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == str(theirs if own else ours)
    assert ours.exists() is not own
    if not own:
        assert any(ours.iterdir())
