"""An extension of griffe, which reads docstrings for the site: `with_lists` for each class and function."""

from typing import Any

import griffe

from docs.field_lists import with_lists


class DocstringLists(griffe.Extension):
    """Fields and parameters as lists."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Once all of it is loaded."""
        self._visit(pkg)

    def _visit(self, parent: griffe.Object) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Alias):
                continue
            if member.docstring is not None:
                member.docstring.value = with_lists(member.docstring.value, _names(member))
            self._visit(member)


def _names(described: griffe.Object) -> set[str]:
    """Names that its docstring may describe."""
    if isinstance(described, griffe.Function):
        return {parameter.name.lstrip("*") for parameter in described.parameters}
    if isinstance(described, griffe.Class):
        own = {name for name, member in described.members.items() if isinstance(member, griffe.Attribute)}
        return own | {parameter.name.lstrip("*") for parameter in described.parameters}
    return set()
