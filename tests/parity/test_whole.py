"""The imported text part of a transformers model that sees images writes as the whole does."""

import jax
import numpy as np
import pytest

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.recipes.exchange import import_model
from tests.parity import weights

pytestmark = pytest.mark.parity


@pytest.fixture
def seeing(tmp_path):
    """A Gemma 3 with eyes, and the folder that it was saved in."""
    import torch
    import transformers

    torch.manual_seed(0)
    text = dict(
        vocab_size=weights.VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=5,
        query_pre_attn_scalar=20,
        max_position_embeddings=64,
    )
    eyes = dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=eyes, mm_tokens_per_image=4, image_token_index=60,
        boi_token_index=58, eoi_token_index=59,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.35, 0.35)
    model.save_pretrained(tmp_path / "whole")
    return model.double(), Folder(tmp_path / "whole")


def test_the_text_part_of_gemma_3_is_what_the_whole_model_computes(seeing):
    import torch

    model, folder = seeing
    output = []
    family, _ = hub_architecture.read_family(folder, output.append)
    blueprint = Blueprint(family.build(), Precision.float32())
    tensors = hub_architecture.in_folder_names(
        layout(family.build(), family.HUB), folder, family.HUB
    )
    ignored = hub_architecture.compare(tensors, folder, family.HUB, is_tied=True)
    hub_architecture.log_ignored(ignored, folder, family.HUB, output.append)
    assert any("vision_tower.*" in line for line in output)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), blueprint.shapes
    )
    with folder.opened() as fetch:
        params = import_model.load(tensors, fetch, placed)
    ours = weights.forward(blueprint.merge(params), family)
    with torch.no_grad():
        theirs = model(torch.from_numpy(weights.tokens() % 58).long()).logits.numpy()
    assert np.abs(theirs).max() > 0.5
    # Up to the first id that stands for a part of an image.
    same = (weights.tokens() < 58).cumprod(1).astype(bool)
    assert same.sum() > 16
    np.testing.assert_allclose(np.asarray(ours)[same], theirs[same], rtol=1e-4, atol=2e-5)
