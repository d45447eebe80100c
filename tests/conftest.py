"""Fixtures that several test files use."""

from __future__ import annotations

import os

import pytest
from vllm_env import VLLM, VllmEnv, make


@pytest.fixture(scope="session")
def vllm_env() -> VllmEnv:
    """The environment of the vLLM release that most tests run on."""
    return make(VLLM)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run: `make test` brings what each needs, so a skip would hide what it proves."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "CI" in os.environ and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
