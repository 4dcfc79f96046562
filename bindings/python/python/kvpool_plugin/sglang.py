"""The entry point of kvpool in SGLang.

SGLang logs what fails in a plugin, or in its import, and runs without it. So this module imports nothing
of kvpool before it is called, and ends the process if kvpool was asked for and cannot be used.
"""

import os


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``.

    SGLang loads all installed plugins if ``SGLANG_PLUGINS`` is not set; kvpool's changes nothing
    unless it is named there, or ``KVPOOL_SGLANG`` is set.
    """
    is_named = "kvpool" in (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(","))
    part = os.environ.get("KVPOOL_SGLANG", "host" if is_named else "off")
    if part == "off":
        return
    try:
        from kvpool.sglang import install

        install(part)
    except Exception as error:
        # No `Exception`: SGLang would continue.
        message = f"kvpool cannot be used: {error}. SGLANG_PLUGINS or KVPOOL_SGLANG asks for it"
        raise SystemExit(f"{message}; KVPOOL_SGLANG=off runs SGLang without it") from error
