"""Where this user's fetched models, compiled programs and tuned kernels are kept."""

import os
from pathlib import Path


def user_cache_dir() -> Path:
    """RADIX_JAX_CACHE if set, else radix_jax in XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    own = os.environ.get("RADIX_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "radix_jax"
