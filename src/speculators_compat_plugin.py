"""What vLLM calls in every process that it starts, by the entry point in ``vllm.general_plugins``.

A module beside the package, because importing the package activates it: in an environment where the plugin is merely
installed, vLLM's processes must stay as they are.
"""

from __future__ import annotations

import os


def load() -> None:
    """Activate where the parent process did, else do nothing."""
    if os.environ.get("SPECULATORS_COMPAT_ACTIVE"):  # activation.MARKER
        from speculators_compat import activate
        from speculators_compat.settings import switched_off

        if not switched_off():
            activate()
