"""Effective receptive fields against closed forms and a slow Jacobian."""

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import receptive, zoo
from helpers.record import record


def ones(k, channels=1):
    """k convolutions 3 x 3 of ones."""
    net = nn.Sequential(*[nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1, bias=False)
                          for i in range(k)])
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    return net


def small_vit(**options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=options.pop("patch_size", 8),
                              embed_dim=12, depth=2, num_heads=2, **options).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def slow_gradients(model, images, layer, indices):
    """d activation / d pixel for each image, place and channel: (n, places, channels, 3, H, W) float64."""
    found = []
    for image in images:
        pixels = image[None].clone().requires_grad_()
        output = record_with_graph(model, pixels, layer)
        rows = []
        for index in indices:
            rows.append(torch.stack([torch.autograd.grad(value, pixels, retain_graph=True)[0][0]
                                     for value in output[0, index]]))
        found.append(torch.stack(rows))
    return torch.stack(found).double()


def record_with_graph(model, pixels, layer):
    from helpers.record import watch
    with watch(model, [layer], keep=lambda x: x, grad=True) as kept:
        model(pixels)
    output = kept[layer]
    return output if output.ndim == 3 else output.flatten(2).transpose(1, 2)  # (1, places, channels)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("side", [25, 33])
def test_ones_convolutions_have_their_closed_form(k, side):
    field = receptive.field(ones(k), torch.rand(2, 3, side, side), str(k - 1))
    profile = np.ones(1)
    for _ in range(k):
        profile = np.convolve(profile, np.ones(3))
    expected = np.zeros((side, side))
    middle = slice(side // 2 - k, side // 2 + k + 1)
    expected[middle, middle] = np.outer(profile, profile)
    np.testing.assert_allclose(field, expected)
    across = field.sum(1) / field.sum()
    places = torch.arange(side) - side // 2
    assert (across * places**2).sum().item() == pytest.approx(2 * k / 3)
    assert receptive.radius(field, 1.0).item() == pytest.approx(k * math.sqrt(2))


def test_an_even_grid_averages_the_four_middle_places():
    field = receptive.field(ones(1), torch.rand(1, 3, 8, 8), "0")
    singles = [receptive.field(ones(1), torch.rand(1, 3, 8, 8), "0", at=(r, c)) for r in (3, 4) for c in (3, 4)]
    torch.testing.assert_close(field, torch.stack(singles).mean(0))
    torch.testing.assert_close(field, field.flip(0))
    torch.testing.assert_close(field, field.T)


@pytest.mark.parametrize("layer", ["blocks.0", "blocks.1", "blocks.1.attn", "blocks.1.norm2:input"])
@pytest.mark.parametrize("order", receptive.ORDERS)
@pytest.mark.parametrize("rgb", list(receptive.COLOURS))
def test_vit_fields_match_the_slow_jacobian(layer, order, rgb):
    model, images = small_vit(), torch.rand(2, 3, 32, 32)
    ours = receptive.field(model, images, layer, order=order, rgb=rgb, draws=None)
    middle = [1 + row * 4 + column for row in (1, 2) for column in (1, 2)]  # after CLS, on the 4 x 4 grid
    gradients = slow_gradients(model, images, layer, middle)
    if order == "mean-then-abs":
        gradients = gradients.mean(2, keepdim=True)
    slow = {"mean": lambda g: g.abs().mean(3), "norm": lambda g: g.norm(dim=3), "grey": lambda g: g.sum(3).abs()}
    torch.testing.assert_close(ours, slow[rgb](gradients).mean((0, 1, 2)), rtol=1e-4, atol=1e-7)


def test_resnet_units_match_the_slow_jacobian_in_place_sums_and_all():
    model, images = zoo.build("resnet"), torch.rand(1, 3, 32, 32)
    for name, parameter in model.named_parameters():
        if name.endswith("bn3.weight"):
            nn.init.ones_(parameter)
    model.layer1[1].bn3.weight.data.mul_(2)
    for layer in ("layer1.1.bn3", "layer1.1"):  # the first is overwritten by the sum right after it was seen
        ours = receptive.field(model, images, layer, at=(16, 3), draws=None)
        pixels = images.clone().requires_grad_()
        x = model.act1(model.bn1(model.conv1(pixels)))
        x = model.layer1[0](x)
        unit = model.layer1[1]
        branch = unit.bn3(unit.conv3(unit.act2(unit.bn2(unit.conv2(unit.act1(unit.bn1(unit.conv1(x))))))))
        output = branch if layer.endswith("bn3") else (branch + x).relu()
        slow = torch.stack([torch.autograd.grad(a, pixels, retain_graph=True)[0][0].abs().mean(0)
                            for a in output[0, :, 16, 3]]).mean(0)
        torch.testing.assert_close(ours, slow.double(), rtol=1e-3, atol=1e-6)


def test_draws_are_an_unbiased_estimate_and_follow_the_seed():
    model, images = small_vit(), torch.rand(1, 3, 32, 32).repeat(64, 1, 1, 1)
    exact = receptive.field(model, images[:1], "blocks.1", draws=None)  # 4 places x 12 channels
    drawn = receptive.field(model, images, "blocks.1", draws=6)  # 384 draws of 48
    assert (drawn - exact).abs().mean() < 0.1 * exact.mean()
    again = receptive.field(model, images, "blocks.1", draws=6)
    other = receptive.field(model, images, "blocks.1", draws=6, seed=1)
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    torch.testing.assert_close(receptive.field(model, images[:1], "blocks.1", draws=48), exact)


def test_the_batches_do_not_matter_and_images_stay_apart():
    model, images = small_vit(), torch.rand(4, 3, 32, 32)
    whole = receptive.fields(model, images, ["blocks.0", "blocks.1"], per_image=True, draws=None)
    parts = receptive.fields(model.train(), ((x,) for x in images.split(3)), ["blocks.0", "blocks.1"],
                             per_image=True, draws=None)
    for name, field in whole.items():
        assert field.shape == (4, 32, 32)
        torch.testing.assert_close(field, parts[name], rtol=1e-4, atol=1e-7)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_cls_sees_everything_and_other_prefixes():
    model, images = small_vit(reg_tokens=3), torch.rand(1, 3, 32, 32)
    assert (receptive.field(model, images, "blocks.0", at="cls") > 0).all()
    corner = receptive.field(model, images, "patch_embed", at=(0, 3))  # no prefix here
    assert (corner[:8, 24:] > 0).all() and corner.sum() == corner[:8, 24:].sum()
    one = receptive.field(model, images, "blocks.0", at=(0, 3))
    assert one[:8, 24:].mean() > one.mean()


@pytest.mark.parametrize(("name", "options"), [
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2)}),
    ("mixer_s16_224", {"img_size": 64}),
    ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}),
    ("efficientnet_b0", {})])
def test_other_networks(name, options):
    from helpers.record import layers
    size = options.get("img_size", 64)
    model, images = timm.create_model(name, **options), torch.rand(1, 3, size, size)
    field = receptive.field(model, images, layers(model, images=images)[0], draws=2)
    assert field.shape == (size, size) and field.sum() > 0 and 0 < receptive.radius(field, 0.9) < 40


def test_the_channel_mean_of_a_norm_is_warned_of():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=2)
    images = torch.rand(1, 3, 32, 32)
    with pytest.warns(UserWarning, match="rounding noise"):
        noise = receptive.field(model, images, "norm", order="mean-then-abs")
    assert noise.max() < 1e-4 * receptive.field(model, images, "norm").max()


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 1), st.integers(0, 99))
def test_radius_matches_its_definition(height, width, mass, seed):
    field = torch.rand(height, width, generator=torch.Generator().manual_seed(seed)).double()
    ours = receptive.radius(field, mass).item()
    places = [(math.hypot(y - (height - 1) / 2, x - (width - 1) / 2), field[y, x].item())
              for y in range(height) for x in range(width)]
    inside = sum(v for r, v in places if r <= ours + 1e-9)
    closer = sum(v for r, v in places if r < ours - 1e-9)
    assert inside >= mass * field.sum().item() * (1 - 1e-9)
    assert closer < mass * field.sum().item()
    assert receptive.radius(field * 1e-6, mass) == ours


def test_radius_of_known_fields():
    delta = torch.zeros(9, 9)
    delta[4, 4] = 1
    assert receptive.radius(delta) == 0
    shifted = torch.zeros(9, 9)
    shifted[2, 4] = 3
    assert receptive.radius(shifted) == 2
    assert receptive.radius(shifted, centre="mass") == 0 == receptive.radius(shifted, centre=(2, 4))
    assert receptive.radius(torch.zeros(5, 5)).isnan()
    uniform = receptive.radius(torch.ones(201, 201)).item()
    assert uniform == pytest.approx(math.sqrt(0.5 * 201**2 / math.pi), rel=0.01)
    assert receptive.radius(torch.stack([delta, shifted])).tolist() == [0, 2]


@pytest.mark.parametrize(("call", "match"), [
    (lambda m, x: receptive.field(m, x, "blocks.9"), "no layer"),
    (lambda m, x: receptive.field(m, x, "head"), "places"),
    (lambda m, x: receptive.field(m, x, "blocks.0", at=(4, 0)), "centre"),
    (lambda m, x: receptive.field(m, x, "blocks.0", order="abs"), "order"),
    (lambda m, x: receptive.field(m, x, "blocks.0", draws=0), "draws"),
    (lambda m, x: receptive.field(m, x[..., :30], "blocks.0"), "could not take"),
    (lambda m, x: receptive.field(zoo.build("resnet"), x, "layer1.0", at="cls"), "CLS"),
    (lambda m, x: receptive.radius(torch.ones(3, 3), 0), "mass"),
    (lambda m, x: receptive.radius(-torch.ones(3, 3)), "negative"),
])
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call(small_vit(), torch.rand(1, 3, 32, 32))


def test_a_layer_s_input_can_be_asked_for():
    model, images = small_vit(), torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(receptive.field(model, images, "blocks.1:input"),
                               receptive.field(model, images, "blocks.0"))
    assert record(model, images, ["blocks.1:input"])["blocks.1:input"].shape[0] == 1
