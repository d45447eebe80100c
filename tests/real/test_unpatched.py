"""What the plugin is for: the same script on the same packages, without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_env import VllmEnv

pytestmark = pytest.mark.real
SCRIPT = """
import sys
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
if __name__ == "__main__":
    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[0, 1], max_model_len=64)
    generator.generate([[5, 6, 7]])
"""


def test_speculators_0_3_dies_without_the_plugin(vllm_env: VllmEnv, models: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = vllm_env.run(script, models / "llama", speculators="0.3.0", SPECULATORS_COMPAT="0")
    assert done.returncode == 1
    assert "SchedulerConfig" in done.stdout
    assert "is_encoder_decoder\n  Field required" in done.stdout
