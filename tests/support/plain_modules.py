"""Modules as users run them, without the runtime type checks that tests have: a wrong type reaches our own checks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent.parent.parent / "radix_jax"


def plain_module(name: str) -> ModuleType:
    """A second, private copy of `radix_jax.<name>`, imported past the import hook."""
    spec = importlib.util.spec_from_file_location(f"plain_{name}", PACKAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their own module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
