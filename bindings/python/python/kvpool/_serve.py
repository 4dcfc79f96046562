"""The admin interface of an engine's pool, which a variable of the environment asks for."""

from __future__ import annotations

import os
import re

from ._kvpool import Admin, FramePool
from .errors import KvPoolError

__all__ = ["serve"]


def serve(variable: str, pool: FramePool, number: int) -> Admin | None:
    """Serves a pool at the address in a variable, or by the settings file whose path is there.

    Raises :class:`KvPoolError`, which names the variable, if that is not possible. ``number`` tells
    apart the pools of an engine's processes: see :meth:`Admin.from_settings`.
    """
    text = os.environ.get(variable, "off")
    if text == "off":
        return None
    is_address = re.match(r"(https?://|unix:)", text) or re.search(r":\d+$", text)
    try:
        return Admin.from_settings(pool, {"admin": text} if is_address else text, number=number).wait()
    except KvPoolError as error:
        raise type(error)(f"{variable} is {text!r}: {error}", **vars(error)) from None
