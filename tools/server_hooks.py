# SPDX-License-Identifier: Apache-2.0
"""Hooks on decoder layers, sent to vLLM's workers by ``server_cell.py``; a module, so that every process can import it."""

from __future__ import annotations

import io
import re
from typing import Any


def watch(model: Any) -> int:
    """In the worker: record (boundary, positions, state) of every decoder layer call."""
    record: list[Any] = []
    found = [(m, int(r.group(1))) for n, m in model.named_modules() if (r := re.search(r"(?:^|\.)layers\.(\d+)$", n))]
    for module, layer in found:

        def leave(module: Any, args: Any, kwargs: Any, output: Any, layer: int = layer) -> None:
            positions = kwargs["positions"] if "positions" in kwargs else args[0]
            both = isinstance(output, tuple) and len(output) > 1 and output[1] is not None
            first = output[0] if isinstance(output, tuple) else output
            state = output[0] + output[1] if both else first.clone()
            record.append((layer + 1, positions.clone().cpu(), state.cpu()))

        module.register_forward_hook(leave, with_kwargs=True)
    model._watched = record
    return len(found)


def watched(model: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(model._watched, out)
    return out.getvalue()
