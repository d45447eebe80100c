"""What vLLM calls in every process that it starts, by the entry point in ``vllm.general_plugins``.

A module beside the package, because importing the package activates it: in an environment where the plugin is merely
installed, vLLM's processes must stay as they are.
"""

from __future__ import annotations

import os

#: Whether the package is being imported for the server's adapters only, and must not activate itself.
server_only = False


def load() -> None:
    """Activate where the parent process did, and the server's adapters where they are switched on; else do nothing."""
    global server_only
    if os.environ.get("SPECULATORS_COMPAT", "").strip().lower() in ("0", "off", "false", "no"):  # settings.OFF_SWITCH
        return
    if os.environ.get("SPECULATORS_COMPAT_ACTIVE"):  # activation.MARKER
        from speculators_compat import activate

        activate()
    if os.environ.get("SPECULATORS_COMPAT_SERVE", "").strip().lower() in ("1", "on", "true", "yes"):  # serving.SERVE
        server_only = True
        try:
            from speculators_compat import serving
        finally:
            server_only = False
        serving.activate_server()
