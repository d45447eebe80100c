"""What speculators 0.5.0 removed, as files of their own.

Each is imported under the name that it had in speculators, see :mod:`speculators_compat.patches.restored_generator`.
"""

from __future__ import annotations

from pathlib import Path

#: Module of speculators to the file that stands in for it.
FILES = {
    f"speculators.data_generation.{name}": Path(__file__).with_name(f"{name}.py")
    for name in ("vllm_hidden_states_generator", "custom_worker")
}
