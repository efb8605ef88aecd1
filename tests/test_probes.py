"""Closed-form probes against numpy and scikit-learn, and on features whose answer is known."""

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from helpers import probes, shapes, zoo
from helpers.record import record


def data(n, d, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    centres = torch.randn(classes, d, generator=generator)
    X = centres[y] + torch.randn(n, d, generator=generator)
    return X * torch.rand(d, generator=generator) * 9 + 5, y


@given(st.integers(6, 40), st.integers(1, 50), st.integers(2, 4), st.floats(0.01, 100), st.integers(0, 99))
def test_ridge_matches_scikit_learn(n, d, classes, l2, seed):
    X, y = data(n, d, classes, seed)
    probe = probes.ridge(X, y, classes, l2)
    Z = X.double().numpy()
    Z = (Z - Z.mean(0)) / Z.std(0)
    targets = 2 * np.eye(classes)[y] - 1
    np.testing.assert_allclose(probe(X), Ridge(alpha=l2).fit(Z, targets).predict(Z), atol=1e-6)


def test_the_gradient_of_the_loss_is_zero_at_the_answer():
    X, y = data(30, 8, 3)
    probe = probes.ridge(X, y, 3, l2=2.0)
    Z = (X.double() - probe.mean) / probe.deviation
    W, b = probe.weight.clone().requires_grad_(), probe.bias.clone().requires_grad_()
    T = 2 * torch.nn.functional.one_hot(y, 3).double() - 1
    loss = (Z @ W + b - T).square().sum() + 2.0 * W.square().sum()
    for gradient in torch.autograd.grad(loss, (W, b)):
        assert gradient.abs().max() < 1e-8


def test_units_of_the_features_do_not_matter_and_constants_are_ignored():
    (X, y), (Z, _) = data(50, 5, 3), data(20, 5, 3, seed=1)
    X, Z = X.double(), Z.double()
    scores = probes.ridge(X, y, 3)(Z)
    scale = torch.tensor([1e-6, 1e5, 3.0, 1.0, 1e-3]).double()
    torch.testing.assert_close(probes.ridge(X * scale + 7, y, 3)(Z * scale + 7), scores)
    torch.testing.assert_close(probes.ridge(X * scale, y, 3)(Z * scale), scores)
    constant = torch.full((50, 1), 0.1)
    wider = probes.ridge(torch.cat([X, constant], 1), y, 3)
    torch.testing.assert_close(wider(torch.cat([Z, torch.full((20, 1), 55.0)], 1)), scores)


def test_stacks_of_probes_and_devices_of_labels():
    stack = torch.stack([data(40, 6, 3, seed)[0] for seed in range(4)])
    y = data(40, 6, 3, 0)[1]
    together = probes.accuracy(probes.ridge(stack, y, 3), stack, y)
    apart = torch.stack([probes.accuracy(probes.ridge(X, y, 3), X, y) for X in stack])
    torch.testing.assert_close(together, apart)


def test_separable_classes_and_pure_noise():
    X, y = data(400, 20, 4)
    Z, z = X[200:], y[200:]
    assert probes.accuracy(probes.ridge(X[:200], y[:200], 4), Z, z) > 0.95
    noise = torch.randn(400, 20, generator=torch.Generator().manual_seed(3))
    assert probes.accuracy(probes.ridge(noise[:200], y[:200], 4), noise[200:], z) < 0.4


def test_regression():
    X, _ = data(200, 6, 2)
    y = X.double() @ torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    probe = probes.ridge(X[:100], y[:100], None, l2=1e-6)
    assert probes.r2(probe, X[100:], y[100:]) == pytest.approx(1, abs=1e-6)
    assert probes.r2(probes.ridge(X[:100], y[:100, 0], None, l2=1e12), X[100:], y[100:, 0]).abs() < 0.2
    with pytest.raises(ValueError, match="r2"):
        probes.accuracy(probe, X, y)


def test_few_shot():
    labels = torch.randint(5, (200,), generator=torch.Generator().manual_seed(0))
    chosen = probes.few_shot(labels, 7, seed=3)
    assert labels[chosen].bincount().tolist() == [7] * 5 and len(chosen.unique()) == 35
    assert torch.equal(chosen, probes.few_shot(labels, 7, seed=3))
    assert not torch.equal(chosen, probes.few_shot(labels, 7, seed=4))
    with pytest.raises(ValueError, match="class 0"):
        probes.few_shot(labels, 100)


@pytest.mark.parametrize("model", [
    zoo.build("vit"),
    timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2, reg_tokens=3),
], ids=["vit", "registers"])
def test_pooling(model):
    images, prefix = torch.rand(3, 3, 32, 32), model.num_prefix_tokens
    plain = record(model, images, ["blocks.1"], keep=lambda x: x)["blocks.1"]
    pooled = {pool: probes.features(model, images.split(2), ["blocks.1"], pool)["blocks.1"]
              for pool in ("cls", "mean", 5, "tokens")}
    torch.testing.assert_close(pooled["cls"], plain[:, 0])
    torch.testing.assert_close(pooled["mean"], plain[:, prefix:].mean(1))
    torch.testing.assert_close(pooled[5], plain[:, prefix + 5])
    torch.testing.assert_close(pooled["tokens"].flatten(1, 2), plain[:, prefix:])


def test_pooling_of_feature_maps():
    model, images = zoo.build("resnet"), torch.rand(2, 3, 32, 32)
    plain = record(model, images, ["layer2.0"], keep=lambda x: x)["layer2.0"]  # (n, C, 16, 16)
    mean = probes.features(model, images, ["layer2.0"], "mean")["layer2.0"]
    torch.testing.assert_close(mean, plain.mean((2, 3)))
    pooled = probes.features(model, images, ["layer2.0"], "tokens", grid=(4, 4))["layer2.0"]
    torch.testing.assert_close(pooled[:, 1, 2], plain[:, :, 4:8, 8:12].mean((2, 3)))


def test_layer_and_token_accuracy_are_probes_of_features():
    model, train, test = zoo.build("vit"), shapes.draw(90, 1), shapes.draw(60, 2)
    names = ["blocks.0", "blocks.11"]
    given = (train.batches(40), train.background, test.batches(40), test.background)
    found = probes.layer_accuracy(model, *given, layers=names, pool="mean", classes=8)
    images = probes.layer_accuracy(model, *given, layers=names, pool="mean", classes=8, per_image=True)
    assert found.shape == (2,) and images.shape == (2, 60)
    torch.testing.assert_close(images.double().mean(1), found)
    seen = record(model, train.images, names, keep=lambda x: x[:, 1:].mean(1))
    unseen = record(model, test.images, names, keep=lambda x: x[:, 1:].mean(1))
    for name, value in zip(names, found, strict=True):
        X = seen[name].double().numpy()
        mean, std = X.mean(0), X.std(0)
        scores = Ridge(alpha=10.0).fit((X - mean) / std, 2 * np.eye(8)[train.background] - 1).predict(
            (unseen[name].double().numpy() - mean) / std)
        assert value == pytest.approx((scores.argmax(1) == test.background.numpy()).mean(), abs=1 / 60)
    each = probes.token_accuracy(model, *given, layer="blocks.0", classes=8, per_image=True)
    grid = each.double().mean(-1)
    assert each.shape == (8, 8, 60)
    single = probes.layer_accuracy(model, *given, layers=["blocks.0"], pool=19, classes=8)
    assert grid[2, 3] == pytest.approx(single[0].item(), abs=1 / 60)


@pytest.mark.parametrize(("call", "match"), [
    (lambda: probes.ridge(torch.rand(5, 2), torch.tensor([0, 1, 2, 3, 4]), 4), "0 to 3"),
    (lambda: probes.ridge(torch.rand(5, 2), torch.rand(5), 4), "whole numbers"),
    (lambda: probes.ridge(torch.rand(5, 2), torch.zeros(4).long(), 2), "5 images"),
    (lambda: probes.ridge(torch.rand(5, 2), torch.zeros(5).long(), 2, l2=0), "l2"),
    (lambda: probes.ridge(torch.full((5, 2), torch.nan), torch.zeros(5).long(), 2), "NaN"),
    (lambda: probes.features(zoo.build("resnet"), torch.rand(1, 3, 32, 32), pool="cls"), "no CLS"),
    (lambda: probes.features(zoo.build("vit", pool="avg"), torch.rand(1, 3, 32, 32), pool="cls"), "no CLS"),
    (lambda: probes.features(zoo.build("vit"), torch.rand(1, 3, 32, 32), pool="max"), "pool"),
    (lambda: probes.features(zoo.build("vit"), torch.rand(1, 3, 32, 32), ["blocks.0"], pool=64), "blocks.0"),
])
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
