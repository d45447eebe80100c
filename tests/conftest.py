"""Fixtures that several test files use."""

from __future__ import annotations

import pytest
from vllm_env import VLLM, VllmEnv, make


@pytest.fixture(scope="session")
def vllm_env() -> VllmEnv:
    """The environment of the vLLM release that most tests run on."""
    return make(VLLM)
