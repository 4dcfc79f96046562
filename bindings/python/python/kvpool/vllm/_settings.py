"""Settings from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ..errors import InvalidArgument

_T = TypeVar("_T", int, float)


def number(name: str, kind: Callable[[str], _T], default: _T) -> _T:
    """Returns the number in a variable, or ``default``. Refuses other texts, and negative numbers."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
        if value >= 0:
            return value
    except ValueError:
        pass
    raise InvalidArgument(f"{name} is {text!r}, expected a number of at least 0")
