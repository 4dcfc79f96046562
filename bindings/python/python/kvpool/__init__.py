"""A lock-free concurrent pool for the KV-cache blocks of LLM inference engines."""

from __future__ import annotations

from . import errors
from ._kvpool import *  # noqa: F403
from ._kvpool import __version__
from .errors import *  # noqa: F403
