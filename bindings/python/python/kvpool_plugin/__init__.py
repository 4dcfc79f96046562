"""The entry point of kvpool in engines whose loaders skip a plugin that cannot be imported.

Such an engine would run without kvpool, and say so in its log alone. This package imports nothing of the engine and
nothing of kvpool, so that its function is always called, and what fails in it ends the process.
"""

import os
import sys


def register_vllm() -> None:
    """The entry point of the group ``vllm.general_plugins``.

    vLLM loads all installed plugins if ``VLLM_PLUGINS`` is not set; kvpool's does nothing unless it is
    named there, or ``KVPOOL_VLLM`` is set.
    """
    is_named = "kvpool" in os.environ.get("VLLM_PLUGINS", "").split(",")
    part = os.environ.get("KVPOOL_VLLM", "pool" if is_named else "off")
    if part == "off":
        return
    try:
        from kvpool.vllm import install, metrics

        install(part)
        metrics.share()
    except Exception as error:
        # vLLM calls plugins once for each process, also if this fails: a caller that tries again gets the same error.
        if plugins := sys.modules.get("vllm.plugins"):
            plugins.plugins_loaded = False
        raise RuntimeError(
            f"kvpool cannot be used: {error}. VLLM_PLUGINS or KVPOOL_VLLM asks for it; KVPOOL_VLLM=off runs vLLM without it"
        ) from error
