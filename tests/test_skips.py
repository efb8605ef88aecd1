"""Norm ratios against a slow reference, and skips cut exactly and put back."""

import copy

import numpy as np
import pytest
import timm
import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

from helpers import skips, zoo
from helpers.record import layers, record


def lively(model):
    """Random weights far from initialisation, so that no branch is negligible or zero."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


BLOCKS = {
    "ViT": ("vit_tiny_patch16_224", {}),
    "LayerScale": ("deit3_small_patch16_224", {"embed_dim": 48, "num_heads": 3}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"patch_size": 16, "embed_dim": 48, "num_heads": 3}),
    "GAP": ("vit_base_patch16_gap_224", {"embed_dim": 48, "num_heads": 3}),
    "BEiT": ("beit_base_patch16_224", {"embed_dim": 48, "num_heads": 3}),
    "EVA": ("eva02_tiny_patch14_224", {"patch_size": 16}),
    "relative positions": ("vit_relpos_small_patch16_224", {"embed_dim": 48, "num_heads": 3}),
    "post-norm": ("vit_relpos_medium_patch16_rpn_224", {"embed_dim": 48, "num_heads": 3}),
}


def vit(kind):
    name, options = BLOCKS[kind]
    return lively(timm.create_model(name, img_size=32, depth=2, **options))


def raw(model, images, names):
    return {k: v.double() for k, v in record(model, images, names, keep=lambda x: x).items()}


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_stream_is_the_sum_of_its_branches(kind):
    """z + f(z) of the sites that the ratio reads is the next z: nothing of a branch is missed (LayerScale …)."""
    model, images = vit(kind), torch.rand(2, 3, 32, 32)
    sites = skips._sites(model)
    seen = raw(model, images, list(dict.fromkeys([s for pair in sites.values() for s in pair] + layers(model))))
    for block in layers(model):
        (z, f), (z2, f2) = sites[f"{block} attn"], sites[f"{block} mlp"]
        torch.testing.assert_close(seen[z] + seen[f], seen[z2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen[z2] + seen[f2], seen[block], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_norm_ratios_of_vits_match_the_definition(kind):
    model, images = vit(kind), torch.rand(5, 3, 32, 32)
    ratios = skips.norm_ratios(model, [images[:3], images[3:]])
    sites, prefix = skips._sites(model), model.num_prefix_tokens
    seen = raw(model, images, list(dict.fromkeys(s for pair in sites.values() for s in pair)))
    for i, block in enumerate(layers(model)):
        for j, branch in enumerate(("attn", "mlp")):
            z, f = (seen[site].numpy() for site in sites[f"{block} {branch}"])
            slow = np.sqrt((z**2).sum(-1)) / np.sqrt((f**2).sum(-1))  # (n, t)
            assert ratios.patches[i, j] == pytest.approx(slow[:, prefix:].mean(), rel=1e-4)
            assert ratios.tokens[i, j].numpy() == pytest.approx(slow.mean(0), rel=1e-4)
            assert ratios.per_image()[i, j].numpy() == pytest.approx(slow[:, prefix:].mean(1), rel=1e-4)
            if ratios.has_cls:
                assert ratios.cls[i, j] == pytest.approx(slow[:, 0].mean(), rel=1e-4)
    assert ratios.patches.shape == (2, 2) and (ratios.cls is None) == (kind in ("GAP", "relative positions", "post-norm"))


def test_medians_ignore_an_outlier():
    each = {"b attn": torch.tensor([[9.0, 1, 2, 3, 1000]]), "b mlp": torch.ones(1, 5)}
    ratios = skips.Ratios(["b"], ("attn", "mlp"), each, prefix=1, has_cls=True)
    assert ratios.patches[0, 0] == 251.5 and ratios.patches_median[0, 0] == 2
    assert ratios.cls[0, 0] == 9 and ratios.cls_median[0, 0] == 9


NARROW = {"layers": (2, 1, 1, 1), "channels": (4, 8, 8, 8)}
UNITS = {
    "basic": lambda: ResNet(BasicBlock, **NARROW),
    "bottleneck": lambda: ResNet(Bottleneck, **NARROW),
    "squeeze-excite": lambda: ResNet(Bottleneck, **NARROW, block_args={"attn_layer": "se"}),
    "v2": lambda: ResNetV2((2, 1, 1, 1), (128, 128, 128, 128), stem_chs=32),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_of_resnets(name):
    model, images = lively(UNITS[name]()), torch.rand(2, 3, 64, 64)
    ratios = skips.norm_ratios(model, images)
    names = layers(model)
    assert ratios.cls is None and ratios.patches.shape == (len(names),)
    sites = skips._sites(model)
    for index in (0, 1, len(names) - 1):
        z, f = sites[f"{names[index]} unit"]
        seen = raw(model, images, [z, f, names[index]])
        total = seen[z] + seen[f]
        total = total if "v2" in name else total.relu()
        torch.testing.assert_close(total, seen[names[index]], rtol=1e-3, atol=1e-3)
        slow = (seen[z].norm(dim=1) / seen[f].norm(dim=1)).mean()
        assert ratios.patches[index].item() == pytest.approx(slow.item(), rel=1e-3)


def test_a_silent_branch_is_infinite_and_named():
    with pytest.warns(UserWarning, match="layer1.0 unit"):
        ratios = skips.norm_ratios(zoo.build("resnet"), torch.rand(2, 3, 32, 32))  # last norms start at 0
    assert ratios.patches.isinf().all()


@pytest.mark.parametrize(("name", "options"), [
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}),
    ("mixer_s32_224", {"img_size": 64}),
    ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)})])
def test_other_blocks_are_refused(name, options):
    model = timm.create_model(name, **options)
    with pytest.raises(ValueError, match="ViT"):
        skips.norm_ratios(model, torch.rand(1, 3, 64, 64))
    with pytest.raises(ValueError, match="that can be cut"):
        with skips.cut_skip(model, 0):
            pass


@pytest.mark.parametrize("model", [zoo.build("vit"), zoo.build("resnet")], ids=["vit", "resnet"])
def test_cosines(model):
    model, images = lively(model), torch.rand(4, 3, 32, 32)
    cosines = skips.block_cosines(model, images)
    assert cosines.patches.shape == (len(layers(model)),)
    seen = raw(model, images, ["blocks.3:input", "blocks.3"] if hasattr(model, "blocks") else ["layer2.1:input", "layer2.1"])
    z, y = seen.values()
    if z.ndim == 4:
        slow, index = torch.cosine_similarity(z, y, dim=1).mean(), 4
        assert cosines.patches[0].isnan()  # layer1.0 changes the shape
    else:
        slow, index = torch.cosine_similarity(z, y, dim=2)[:, 1:].mean(), 3
    assert cosines.patches[index].item() == pytest.approx(slow.item(), abs=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("branch", ["attn", "mlp", "both"])
def test_cut_skips_leave_the_branch_alone_exactly(kind, branch):
    model, images = vit(kind), torch.rand(2, 3, 32, 32)
    whole = model(images)
    with skips.cut_skip(model, 1, branch):
        seen = record(model, images, ["blocks.1:input", "blocks.1.drop_path1", "blocks.1.drop_path2", "blocks.1"],
                      keep=lambda x: x)
        assert not torch.equal(model(images), whole)
    z, f1, f2, out = seen.values()
    after_attention = f1 if branch != "mlp" else z + f1
    expected = f2 if branch != "attn" else after_attention + f2
    assert torch.equal(out, expected)
    assert torch.equal(model(images), whole)


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("block", [0, 1])
def test_cut_units_of_resnets(name, block):
    model, images = lively(UNITS[name]()), torch.rand(1, 3, 64, 64)
    whole, unit = model(images), layers(model)[block]
    with skips.cut_skip(model, block):
        kept = record(model, images, [skips._sites(model)[f"{unit} unit"][1], unit], keep=lambda x: x)
    f, out = kept.values()
    assert torch.equal(out, f if "v2" in name else f.relu())
    assert torch.equal(model(images), whole)


def test_a_trained_cut_survives_copies_and_saves():
    model = zoo.build("vit")
    skips.remove_skip(model.blocks[2])
    twin, images = copy.deepcopy(model), torch.rand(2, 3, 32, 32)
    assert torch.equal(twin(images), model(images))
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert not torch.equal(twin(images), model(images))  # the copy runs its own weights
    fresh = zoo.build("vit", cut=2)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(images), model(images))


def test_nested_cuts_and_errors_restore():
    model, images = zoo.build("vit"), torch.rand(2, 3, 32, 32)
    whole = model(images)
    with pytest.raises(RuntimeError):
        with skips.cut_skip(model, 2, "attn"), skips.cut_skip(model, "blocks.2", "mlp"):
            raise RuntimeError
    assert torch.equal(model(images), whole) and "forward" not in model.blocks[2].__dict__


@pytest.mark.parametrize(("model", "block", "branch", "match"), [
    ("vit", 12, "both", "blocks.0 to blocks.11"), ("vit", "blocks.77", "both", "no block"),
    ("vit", 0, "head", "branch"), ("resnet", 0, "attn", "one skip")])
def test_bad_cuts(model, block, branch, match):
    with pytest.raises(ValueError, match=match):
        with skips.cut_skip(zoo.build(model), block, branch):
            pass
    with pytest.raises(ValueError, match="that can be cut"):
        skips.remove_skip(nn.Linear(3, 3))


def test_cosines_of_channels_last_blocks():
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 1), embed_dim=24,
                              num_heads=(2, 2)).eval()
    images = torch.rand(2, 3, 56, 56)
    found = skips.block_cosines(model, images).each["layers.0.blocks.1 block"]
    before, after = raw(model, images, ["layers.0.blocks.1:input", "layers.0.blocks.1"]).values()
    slow = torch.cosine_similarity(before, after, dim=3).flatten(1)  # (n, H, W, C)
    torch.testing.assert_close(found.double(), slow, rtol=1e-4, atol=1e-4)


def test_token_norms():
    norms = skips.token_norms(zoo.build("vit"), torch.rand(3, 3, 32, 32))
    assert norms["blocks.11"].shape == (3, 65) and (norms["blocks.0"] > 0).all()
