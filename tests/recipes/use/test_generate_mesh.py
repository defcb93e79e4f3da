"""Generation with parameters, caches and rows split over a mesh."""

import json

import numpy as np
import pytest

from jaxlm.cli.main import main
from tests.cli.test_exchange import write

MESHES = {
    "rows": ("--config.mesh.data=8",),
    "weights": ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--repetition_penalty=1.3",), ("--beams=2",)])
def test_a_text_does_not_depend_on_the_mesh(capsys, tmp_path, words):
    source = write(tmp_path / "source", "gemma3")  # most of its layers have a window
    texts = {}
    for name, mesh in MESHES.items():
        run = tmp_path / name
        assert main(["import", f"--from={source}", f"--workdir={run}", *mesh, "--quiet"]) == 0
        capsys.readouterr()
        asked = ("--prompt=def main", "--prompt=a", "--max_tokens=12", "--temperature=0")
        assert main(["generate", f"--workdir={run}", *asked, *words, "--json"]) == 0
        texts[name] = json.loads(capsys.readouterr().out)["samples"]
    for one, other in zip(*texts.values(), strict=True):
        assert one["ids"] == other["ids"]
        np.testing.assert_allclose(one["log_probabilities"], other["log_probabilities"], atol=1e-3)
