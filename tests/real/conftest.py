"""Real extractions, done once a session and told apart in the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import jobs, run_job, write_evidence
from vllm_env import VllmEnv


@pytest.fixture(scope="session")
def models(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models and the states that transformers computes for them."""
    folder = tmp_path_factory.mktemp("models")
    run_job(vllm_env, folder, {"reference": True}, "reference")
    return folder


@pytest.fixture(scope="session")
def extracted(vllm_env: VllmEnv, models: Path) -> Callable[[str, str], dict[str, Any]]:
    """What the runner answered for a speculators release and a way."""
    answers: dict[tuple[str, str], dict[str, Any]] = {}

    def get(speculators: str, way: str) -> dict[str, Any]:
        if (speculators, way) not in answers:
            job = {"runs": jobs(speculators, way)}
            answers[speculators, way], _ = run_job(
                vllm_env,
                models,
                job,
                f"{speculators}-{way}",
                speculators=speculators,
                SPECULATORS_COMPAT_WAY=way,
            )
            if os.environ.get("UPDATE_EVIDENCE") == "1":
                write_evidence(vllm_env, answers)
        return answers[speculators, way]

    return get
