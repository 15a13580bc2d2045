"""What the command line names as MODULE:FUNCTION."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def named_function(name: str) -> Callable[..., Any]:
    """The function `name` = "module:function", the module looked for from the current folder on.

    Raises:
        ValueError: a module that can't be imported, or that has no such function.
    """
    module_name, _, fn_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{module_name} can't be imported from {os.getcwd()}: {type(error).__name__}: {error}"
        ) from error
    fn = getattr(module, fn_name, None)
    if not callable(fn):
        raise ValueError(f"{module_name} has no function {fn_name!r}")
    return fn
