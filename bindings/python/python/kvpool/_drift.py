"""A check at start-up that an engine still has the methods that kvpool overrides.

Engines change their block managers without notice. An integration that overrides a method whose
signature is another one now would fail in the middle of a request, or be silently wrong. So each
integration compares what it overrides with the installed engine, and refuses by name. A method may
also change what it does: integrations with a table of hashes compare bodies too.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Container, Iterable, Mapping

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


def _plain(node: object) -> str:
    """A syntax tree without docstrings, as a text that is the same under all versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    # Empty fields are left out: newer versions of Python have more of them.
    parts = [f"{name}={_plain(value)}" for name, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({','.join(parts)})"


def name_of(function: object) -> str:
    """Returns the name of a function in tables of bodies."""
    return f"{function.__module__}.{function.__qualname__}"  # type: ignore[attr-defined]


def body_of(function: object) -> str:
    """Returns a hash of a function's source without comments and docstrings; empty if it has no source."""
    try:
        source = inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""  # of a dataclass
    tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    return hashlib.sha256(_plain(tree).encode()).hexdigest()[:12]


def _has_body(function: object, bodies: Mapping[str, Container[str]] | None) -> bool:
    return bodies is None or body_of(function) in bodies.get(name_of(function), ())


def check_methods(
    engine: str,
    stock: object,
    ours: type,
    attributes: Iterable[str] = (),
    functions: Iterable[tuple] = (),
    own: Iterable[str] = (),
    bodies: Mapping[str, Container[str]] | None = None,
) -> None:
    """Compares each method of ``ours`` with that of ``stock``, which must have it.

    ``own`` are the methods of ``ours`` that override none: a method that the engine has renamed would
    never be called. ``attributes`` are further names of ``stock``, a class, module or object, on which
    ``ours`` relies. ``functions`` are pairs of functions, theirs and a stand-in with the expected signature.
    ``bodies`` are the known hashes of all these functions, by name.
    """
    differences = []

    def compare(name: str, theirs: object, expected: object = None) -> None:
        if expected is not None and _shape(theirs) != _shape(expected):
            signatures = inspect.signature(theirs), inspect.signature(expected)  # type: ignore[arg-type]
            differences.append(f"{name}{signatures[0]}, expected {signatures[1]}")
        elif not _has_body(theirs, bodies):
            differences.append(f"the body of {name} is another one")

    of = getattr(stock, "__name__", type(stock).__name__)
    for name, method in vars(ours).items():
        theirs = getattr(stock, name, None)
        if not inspect.isfunction(method) or name in own or theirs is not None and theirs is getattr(object, name, None):
            continue
        if theirs is None:
            differences.append(f"{of}.{name} is missing")
        else:
            compare(f"{of}.{name}", theirs, None if name == "__init__" and _takes_anything(method) else method)
    for name in attributes:
        theirs = getattr(stock, name, None)
        # A field without a default is an annotation of its class.
        if theirs is None and not hasattr(stock, name) and name not in getattr(stock, "__annotations__", ()):
            differences.append(f"{of}.{name} is missing")
        elif inspect.isfunction(theirs):
            compare(f"{of}.{name}", theirs)
    for theirs, expected in functions:
        compare(theirs.__qualname__, theirs, expected)
    if differences:
        message = f"kvpool does not fit {engine}: " + "; ".join(differences)
        raise EngineChanged(message, engine=engine, differences=differences)
