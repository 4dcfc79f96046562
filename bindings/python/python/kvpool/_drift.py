"""A check at start-up that an engine still has the methods that kvpool overrides.

Engines change their block managers without notice. An integration that overrides a method whose
signature is another one now would fail in the middle of a request, or be silently wrong. So each
integration compares what it overrides with the installed engine, and refuses by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from .errors import KvPoolError

__all__ = ["EngineChanged", "check_methods"]


class EngineChanged(KvPoolError):
    """The installed engine is not one that this integration was written for.

    ``engine`` is its name and version, ``differences`` are the names that differ, and how.
    """


def _shape(function: object) -> list[tuple[str, object, bool]]:
    """The parameters of a function: names, kinds, and whether they have defaults."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default is not inspect.Parameter.empty) for p in parameters]


def _takes_anything(function: object) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}  # type: ignore[arg-type]
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def check_methods(
    engine: str,
    stock: object,
    ours: type,
    attributes: Iterable[str] = (),
    functions: Iterable[tuple] = (),
    own: Iterable[str] = (),
) -> None:
    """Compares each method of ``ours`` with that of ``stock``, which must have it.

    ``own`` are the methods of ``ours`` that override none: a method that the engine has renamed would
    never be called. ``attributes`` are further names of ``stock``, a class, module or object, on which
    ``ours`` relies. ``functions`` are pairs of functions, theirs and a stand-in with the expected signature.
    """
    differences = []
    of = getattr(stock, "__name__", type(stock).__name__)
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or name == "__init__" and _takes_anything(method):
            continue
        theirs = getattr(stock, name, None)
        if name in own or theirs is not None and theirs is getattr(object, name, None):
            continue
        if theirs is None:
            differences.append(f"{of}.{name} is missing")
            continue
        if _shape(theirs) != _shape(method):
            theirs, method = inspect.signature(theirs), inspect.signature(method)
            differences.append(f"{of}.{name}{theirs}, expected {method}")
    for name in attributes:
        # A field without a default is an annotation of its class.
        if not hasattr(stock, name) and name not in getattr(stock, "__annotations__", ()):
            differences.append(f"{of}.{name} is missing")
    for theirs, expected in functions:
        if _shape(theirs) != _shape(expected):
            differences.append(f"{theirs.__qualname__}{inspect.signature(theirs)}")
    if differences:
        message = f"kvpool does not fit {engine}: " + "; ".join(differences)
        raise EngineChanged(message, engine=engine, differences=differences)
