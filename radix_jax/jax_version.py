"""A clear word where the installed jax is too old. Looks at the installed package, without importing it."""

import re
from importlib import metadata

MIN_JAX = (0, 10, 2)


def check_jax_version() -> None:
    """Raise ImportError unless jax and jaxlib of at least MIN_JAX are installed."""
    needed = ".".join(map(str, MIN_JAX))
    for package in ("jax", "jaxlib"):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "none is"
        else:
            if _release(installed) >= MIN_JAX:
                continue
            found = f"{installed} is"
        raise ImportError(
            f"radix_jax needs {package} {needed} or newer, and {found} installed; "
            f"run: pip install --upgrade 'jax>={needed}' 'jaxlib>={needed}'"
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version up to a suffix: 0.11.0.dev20260101 -> (0, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()
