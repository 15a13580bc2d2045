"""What an engine compiles is kept on disk by default, and the next process takes it from there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVE = """
import json, sys
import jax
from flax import nnx
from radix_jax import Engine, EngineConfig, SamplingParams
from radix_jax.models.llama import Llama, LlamaConfig

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
model = Llama(LlamaConfig(**sizes), rngs=nnx.Rngs(0))
engine = Engine(model, None, EngineConfig(num_pages=20, max_model_len=64, **json.loads(sys.argv[1])))
hits.clear()
engine.add_request([1, 2, 3], SamplingParams(max_tokens=2))
while engine.has_unfinished():
    engine.step()
assert engine.stats().num_compiles == 2
print(len(hits))
"""


def hits_of(cache: Path, **fields: Any) -> int:
    """Programs that a new process takes from disk to serve one request: a prefill and a decode step."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(fields)],
        env=environment | {"RADIX_JAX_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_kept_in_the_users_cache_or_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    cache, unused = tmp_path / "cache", tmp_path / "unused"
    assert hits_of(cache) == 0
    assert any((cache / "xla").iterdir())
    assert hits_of(unused, compile_cache_dir=str(cache / "xla")) == 2
    assert not unused.exists()


def test_or_nowhere(tmp_path: Path) -> None:
    assert hits_of(tmp_path / "unused", compile_cache_dir="") == 0
    assert not (tmp_path / "unused").exists()


def test_or_nowhere_for_a_user_who_has_no_folder_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert hits_of(tmp_path / "file" / "cache") == 0
