"""``--model`` of the cases: a checkpoint of somebody's own, cut to its first layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def cases(*options: str, report: Path) -> subprocess.CompletedProcess[str]:
    """Run the native cases on CP2."""
    command = [sys.executable, "-m", "pytest", "cases/test_native.py", "-k", "native_widths"]
    command += ["--topology", "cp2", "--parity-report", str(report), "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_first_layer_of_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    """Three layers are cut to one for the trainer and the oracle alike, or neither would pass."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    from oracles.checkpoints import tiny_checkpoint

    model = tiny_checkpoint(tmp_path / "model", layers=3, file_size=60_000)
    assert len(list(model.glob("model-*.safetensors"))) > 1
    found = cases("-m", "not native", "--model", str(model), report=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    results = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    names = {one["name"] for result in results for one in result.get("observations", [])}
    assert "grad.model.layers.0.mlp.up_proj.weight" in names
    assert not any("layers.1." in name for name in names)


@pytest.mark.parametrize(
    ("config", "options", "problem"),
    [
        (None, (), "no config.json there"),
        ({"model_type": "llama"}, (), "model_type is 'llama'; the trainer runs 'qwen3'"),
        ({"model_type": "qwen3", "num_hidden_layers": 3}, (), "no model.safetensors there"),
        (
            {"model_type": "qwen3", "num_hidden_layers": 3},
            ("--model-layers", "4"),
            "--model-layers is 4; it has 3",
        ),
    ],
)
def test_a_wrong_model_is_a_usage_error(
    tmp_path: Path, config: dict[str, object] | None, options: tuple[str, ...], problem: str
) -> None:
    """Before a rank starts: nothing is reported but the error."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if options:
        (tmp_path / "model.safetensors").touch()
    found = cases("--model", str(tmp_path), *options, report=tmp_path / "report")
    assert found.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--model {tmp_path}: " in found.stderr
    assert problem in found.stderr
    assert not (tmp_path / "report" / "run.jsonl").exists()
