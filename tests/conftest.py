"""Set-up of every test: JAX on the CPU, runtime checks of shapes and types, hypothesis without deadlines."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Read when JAX is first imported. A caller who wants the tests on an accelerator sets it before.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiles, and most of them come again: in the next run, and in other files of this one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Only what is imported after the hook is checked, so nothing of radix_jax may be imported above. The tower: an int is
# good where a float is asked for, as in every static checker.
install_import_hook("radix_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A compiled program holds several. Linux grants a process 65,530 by default; past them the compiler aborts.
MAX_MEMORY_MAPS = 20_000


def num_memory_maps() -> int:
    """Of this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped_in_time() -> Iterator[None]:
    """Between test files, so that engines and programs are kept for as long as there is room."""
    yield
    if num_memory_maps() > MAX_MEMORY_MAPS:
        import jax
        from tiny import drop_kept_engines

        drop_kept_engines()
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def usual_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, here and in programs started here, though what started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
