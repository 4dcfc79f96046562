"""Writes the docstrings and the defaults of the compiled module into its stubs, of which the module is the source.

    python stubs.py            # rewrites python/kvpool/_kvpool.pyi
    python stubs.py --check    # fails if that would change it
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

STUBS = Path(__file__).parent / "python" / "kvpool" / "_kvpool.pyi"
RECORD = "_Record"  # what the records have in common
WIDTH = 125

_Definition = ast.ClassDef | ast.FunctionDef


def docstring(doc: str, column: int) -> list[str]:
    """Returns the lines of a docstring."""
    indent, (first, *rest) = " " * column, inspect.cleandoc(doc).replace("\\", "\\\\").split("\n")
    if not rest and column + len(first) + 6 <= WIDTH:
        return [f'{indent}"""{first}"""']
    return [f'{indent}"""{first}', *(f"{indent}{line}".rstrip() for line in rest), f'{indent}"""']


def described(module: ModuleType, owner: ast.ClassDef | None, node: _Definition) -> Any:
    """Returns the object of the module that a definition describes, if its docstring is ours."""
    if node.name == RECORD or (node.name.startswith("__") and owner is not None):
        return None
    scope: Any = module
    if owner is not None:
        scope = module.Stats if owner.name == RECORD else getattr(module, owner.name, None)  # types of the stubs alone
    found = inspect.getattr_static(scope, node.name, None)
    return getattr(found, "__func__", found)


def with_docstring(lines: list[str], node: _Definition, doc: str) -> None:
    """Replaces the docstring of a definition, or its body `...`."""
    column, body = node.col_offset + 4, node.body[0]
    is_value = isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant)
    new = docstring(doc, column)
    if is_value and ast.get_docstring(node) is not None:
        lines[body.lineno - 1 : body.end_lineno] = new
    elif is_value:
        lines[body.lineno - 1 : body.end_lineno] = [lines[body.lineno - 1].removesuffix(" ..."), *new]
    else:
        first = min([body.lineno, *(one.lineno for one in getattr(body, "decorator_list", []))])
        lines[first - 1 : first - 1] = new


def with_defaults(lines: list[str], node: ast.FunctionDef, signature: inspect.Signature) -> None:
    """Replaces the defaults `...` of a function."""
    keyed = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    positional = list(zip(node.args.args[::-1], node.args.defaults[::-1], strict=False))[::-1]
    # From the end: a replacement moves what follows it.
    for argument, default in [*positional, *keyed][::-1]:
        if isinstance(default, ast.Constant) and default.value is ... and argument.arg in signature.parameters:
            value = signature.parameters[argument.arg].default
            text = f'"{value}"' if isinstance(value, str) else repr(value)
            line = lines[default.lineno - 1]
            lines[default.lineno - 1] = line[: default.col_offset] + text + line[default.end_col_offset :]


def definitions(tree: ast.Module) -> list[tuple[ast.ClassDef | None, _Definition]]:
    """Returns the classes, and their functions with the class, from the last line to the first."""
    found: list[tuple[ast.ClassDef | None, _Definition]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.append((None, node))
            found += [(node, inner) for inner in node.body if isinstance(inner, ast.FunctionDef)]
    return sorted(found, key=lambda one: -one[1].lineno)


def rewritten(text: str, module: ModuleType) -> str:
    """Returns the stubs with the module's docstrings and defaults."""
    lines = text.splitlines()
    for owner, node in definitions(ast.parse(text)):
        target = described(module, owner, node)
        doc = getattr(target, "__doc__", None)
        if doc:
            with_docstring(lines, node, doc)
        if isinstance(node, ast.FunctionDef) and owner is not None:
            of = getattr(module, owner.name) if node.name == "__new__" else target
            if getattr(of, "__text_signature__", None):
                with_defaults(lines, node, inspect.signature(of))
    return "\n".join(lines) + "\n"


def main() -> None:
    from kvpool import _kvpool

    before = STUBS.read_text()
    after = rewritten(before, _kvpool)
    if "--check" not in sys.argv[1:]:
        STUBS.write_text(after)
    elif after != before:
        sys.exit("the stubs differ from the module: run bindings/python/stubs.py")


if __name__ == "__main__":
    main()
