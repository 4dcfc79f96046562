"""The groups of layers that vLLM deals blocks out to, and whether kvpool may evict ahead for them.

A block of keys and values is the same whichever requests ran beside it, so that an engine gives the same
tokens for any pattern of hits. A block of a state (convolution, Mamba, linear attention) is copied and
overwritten by vLLM's workers: of these, only the kinds in :data:`PROVEN` have been compared. All groups of
an engine share one pool, so that one group of another kind stops eviction ahead in all of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

__all__ = ["PROVEN", "unproven"]

PROVEN = {"SHORT_CONV"}
"""Kinds of states, by vLLM's name of their backend, whose tokens were equal to stock with eviction ahead
(``examples/vllm_cpu.py``), and differ if states are wrong (``tests/test_vllm_cpu.py``). Their blocks are
not moved: where states and keys share memory, vLLM copies one of the views at an address, which may be
the states alone."""


def _specs(spec: Any) -> Iterator[Any]:
    """The specifications of one group's layers, which may differ in shape."""
    inner = getattr(spec, "kv_cache_specs", None)
    yield from (spec,) if inner is None else inner.values()


def unproven(groups: Iterable[Any], proven: Container[str]) -> str | None:
    """Names the first of vLLM's groups with states of a kind that is not in ``proven``."""
    for number, group in enumerate(groups):
        for spec in _specs(group.kv_cache_spec):
            if any(base.__name__ == "AttentionSpec" for base in type(spec).__mro__):
                continue
            kind = getattr(getattr(spec, "mamba_type", None), "name", "unknown")
            if kind not in proven:
                return f"group {number} holds states ({type(spec).__name__}, {kind})"
    return None
