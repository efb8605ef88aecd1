"""Attention distance against a slow reference, closed forms, and many kinds of ViT."""

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import attention, zoo
from helpers.cka import cka
from helpers.record import record
from helpers.tokens import layout


def slow_mean_distance(maps, grid, patch, prefix, renormalise):
    """float64 loops over one head's maps (n, t, t), straight from the definition."""
    places = [(r * patch[0], c * patch[1]) for r in range(grid[0]) for c in range(grid[1])]
    values = []
    for one in np.asarray(maps, dtype=np.float64):
        for q, here in enumerate(places):
            row = one[prefix + q, prefix:]
            spread = sum(w * math.dist(here, there) for w, there in zip(row, places, strict=True))
            values.append(spread / row.sum() if renormalise else spread)
    return np.mean(values)


def small(name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    for parameter in model.parameters():  # far from the initial, nearly uniform attention
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("grid", "patch", "pixels"), [
    (7, 32, 115.50), (14, 16, 116.49), (16, 14, 116.57), (28, 8, 116.72), (24, 16, 200.05), (8, 4, 16.55)])
def test_uniform_attention_has_its_closed_form(grid, patch, pixels):
    assert attention.uniform_distance(grid, patch) == pytest.approx(pixels, abs=0.005)


def test_identity_and_neighbourhood():
    distances = attention.patch_distances(14, 16)
    assert attention.query_distances(torch.eye(196), distances, prefix=0).abs().max() == 0
    near = (distances <= 16 * math.sqrt(2) + 1e-6).double()
    near = near / near.sum(1, keepdim=True)
    assert attention.query_distances(near, distances, prefix=0).mean() == pytest.approx(16.7, abs=0.05)


def test_attention_to_cls_pulls_the_plain_mean_down():
    maps = torch.full((197, 197), 0.4 / 196)
    maps[:, 0] = 0.6
    distances = attention.patch_distances(14, 16)
    assert attention.query_distances(maps, distances).mean() == pytest.approx(116.49, abs=0.01)
    plain = attention.query_distances(maps, distances, renormalise=False).mean()
    assert plain == pytest.approx(0.4 * 116.49, abs=0.01)


def test_a_query_with_nothing_on_patches_has_no_distance():
    maps = torch.zeros(5, 5)
    maps[:, 0] = 1
    assert attention.query_distances(maps, attention.patch_distances(2, 16)).isnan().all()


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.integers(0, 99))
def test_query_distances_match_the_definition(rows, columns, prefix, renormalise, seed):
    t = prefix + rows * columns
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(2, t, t, generator=generator).mul(3).softmax(-1)
    ours = attention.query_distances(maps, attention.patch_distances((rows, columns), (8, 16)), prefix, renormalise)
    slow = slow_mean_distance(maps, (rows, columns), (8, 16), prefix, renormalise)
    assert ours.mean().item() == pytest.approx(slow, rel=1e-5, abs=1e-6)
    assert ours.min() >= 0 and ours.max() <= math.hypot(8 * (rows - 1), 16 * (columns - 1)) + 1e-4


KINDS = {
    "CLS": ("vit_tiny_patch16_224", {}, 1),
    "one block": ("vit_tiny_patch16_224", {"depth": 1}, 1),
    "patch 8": ("vit_tiny_patch16_224", {"patch_size": 8}, 1),
    "patch 32": ("vit_tiny_patch16_224", {"patch_size": 32}, 1),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, 2),
    "registers": ("vit_small_patch14_reg4_dinov2", {"patch_size": 16, "embed_dim": 48, "num_heads": 3}, 5),
    "no CLS": ("vit_base_patch16_gap_224", {"embed_dim": 48, "num_heads": 3}, 0),
    "registers, no CLS": ("vit_medium_patch16_reg4_gap_256", {"embed_dim": 48, "num_heads": 3}, 4),
    "relative positions": ("vit_relpos_small_patch16_224", {"embed_dim": 48, "num_heads": 3}, 0),
    "post-norm": ("vit_relpos_medium_patch16_rpn_224", {"embed_dim": 48, "num_heads": 3}, 0),
    "BEiT": ("beit_base_patch16_224", {"embed_dim": 48, "num_heads": 3}, 1),
    "EVA": ("eva02_tiny_patch14_224", {"patch_size": 16}, 1),
    "query-key norm": ("vit_tiny_patch16_224", {"qk_norm": True}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_every_kind_of_vit(kind, size):
    name, options, prefix = KINDS[kind]
    model = small(name, img_size=size, **{"depth": 2, **options})
    images = torch.rand(3, 3, *size)
    where = layout(model, images)
    assert (where.prefix, where.grid) == (prefix, (size[0] // where.patch[0], size[1] // where.patch[1]))
    maps = attention.attention_maps(model, [images[:2], images[2:]])
    assert maps.shape == (len(model.blocks), 3, model.blocks[0].attn.num_heads, where.tokens, where.tokens)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    for renormalise in (True, False):
        ours = attention.mean_distance(model, images, renormalise=renormalise)
        slow = [[slow_mean_distance(head, where.grid, where.patch, prefix, renormalise)
                 for head in block.transpose(0, 1)] for block in maps]
        np.testing.assert_allclose(ours, slow, rtol=1e-5)


def test_maps_are_those_that_make_the_output():
    # in float64: in float32 the model's own attention kernel rounds otherwise than the product below
    model, images = small(img_size=64, depth=2).double(), torch.rand(2, 3, 64, 64).double()
    maps = attention.attention_maps(model, images, blocks=[1])[0].double()
    block = model.blocks[1]
    kept = record(model, images, ["blocks.1.attn.qkv", "blocks.1.attn"], keep=lambda x: x)
    values = kept["blocks.1.attn.qkv"].chunk(3, dim=2)[2].unflatten(2, (3, -1)).transpose(1, 2)  # (n, h, t, d)
    expected = block.attn.proj((maps @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(kept["blocks.1.attn"], expected, rtol=1e-6, atol=1e-7)


def test_dynamic_image_sizes():
    model = small(dynamic_img_size=True, dynamic_img_pad=True, depth=1)
    for size, grid in [((64, 96), (4, 6)), ((60, 90), (4, 6)), ((32, 32), (2, 2))]:
        images = torch.rand(2, 3, *size)
        assert layout(model, images).grid == grid
        assert attention.mean_distance(model, images).isfinite().all()


def test_per_image_and_batching_and_generators():
    model, images = zoo.build("vit"), torch.rand(5, 3, 32, 32)
    per_image = attention.mean_distance(model, images, per_image=True)
    assert per_image.shape == (12, 4, 5)
    whole = attention.mean_distance(model, ((x, 0) for x in images.split(2)))
    torch.testing.assert_close(per_image.mean(2), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(attention.mean_distance(model, images, blocks=[3]), whole[3:4])
    assert whole.sub(attention.uniform_distance(8, 4)).abs().max() < 0.3  # untrained: nearly uniform


def test_the_model_is_left_as_it_was():
    model = zoo.build("vit").train()
    model.blocks[2].eval()
    model.blocks[3].attn.fused_attn = False
    before = [(m.training, getattr(m, "fused_attn", None), len(m._forward_hooks)) for m in model.modules()]
    attention.mean_distance(model, torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError):
        attention.mean_distance(model, torch.rand(2, 3, 30, 30))
    after = [(m.training, getattr(m, "fused_attn", None), len(m._forward_hooks)) for m in model.modules()]
    assert before == after
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("name", "options"), [
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}),
    ("mixer_s32_224", {"img_size": 64}), ("resnet18", {}), ("efficientnet_b0", {}),
    ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}),
    ("cait_xxs24_224", {"img_size": 64, "depth": 1, "embed_dim": 48}),
    ("xcit_nano_12_p16_224", {"img_size": 64, "depth": 1})])
def test_models_without_global_attention_are_refused(name, options):
    with pytest.raises(ValueError, match="attention"):
        attention.mean_distance(timm.create_model(name, **options), torch.rand(1, 3, 64, 64))


def test_differential_attention_is_refused():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=64, num_heads=2,
                              attn_layer="diff")
    with pytest.raises(ValueError, match="subtracts"):
        attention.mean_distance(model, torch.rand(1, 3, 32, 32))


@pytest.mark.parametrize(("call", "match"), [
    (lambda m: attention.mean_distance(m, torch.rand(1, 3, 32, 32), blocks=[12]), "0 to 11"),
    (lambda m: attention.mean_distance(m, []), "no batches"),
    (lambda m: attention.patch_distances((0, 3), 4), "grid"),
    (lambda m: attention.query_distances(torch.rand(5, 5), attention.patch_distances(3, 4)), "grid"),
    (lambda m: attention.head_subsets_cka(m, m, torch.rand(8, 3, 32, 32), size=9), "has 4"),
])
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call(zoo.build("vit"))


def test_head_subsets_are_sorted_and_match_plain_cka():
    model = small(img_size=32, patch_size=8, depth=1, embed_dim=64, num_heads=4).double()
    other, images = zoo.build("resnet").double(), torch.rand(16, 3, 32, 32).double()
    found = attention.head_subsets_cka(model, other, images, other_layers=["layer1.0", "layer2.0"], size=2)
    assert found.values.shape == (3, 2) and found.n_images == 16
    assert (found.distance.diff() >= 0).all()
    distance = attention.mean_distance(model, images)[0]
    assert [h for s in found.heads[::2] for h in s] == distance.argsort().tolist()
    outputs = record(model, images, ["blocks.0.attn.proj:input"], keep=lambda x: x)["blocks.0.attn.proj:input"]
    theirs = record(other, images, ["layer2.0"])["layer2.0"]
    by_head = outputs[:, 1:].unflatten(2, (4, 16))  # CLS left out
    for i, subset in enumerate(found.heads):
        expected = cka(by_head[:, :, list(subset)].flatten(1), theirs)
        assert found.values[i, 1].item() == pytest.approx(expected.item(), abs=1e-6)
        assert found.distance[i].item() == pytest.approx(distance[list(subset)].mean().item())
