"""Recording: what is kept is what each layer computed, and the model is left as it was found."""

import sys
import warnings

import pytest
import timm
import torch
from torch import nn

from helpers.record import device_of, evaluating, images_of, layers, record, stream, watch


class Tiny(nn.Module):
    """An in-place activation that runs twice, a norm, dropout, a tuple in a dict for an output."""

    def __init__(self, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, width, 3)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.5)
        self.pair = Pair()
        self.never = nn.Linear(2, 2)

    def forward(self, x):
        x = self.act(self.conv(x))
        x = self.drop(self.norm(x))
        x = self.act(-x)
        return self.pair(x)["out"][0]


class Pair(nn.Module):
    def forward(self, x):
        return {"out": (x.mean((2, 3)), None), "other": x}


def images(n=5, size=8):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def expected(model, x):
    """The same layers by hand, in eval mode."""
    model = model.eval()
    conv = model.conv(x)
    norm = model.norm(conv.relu())
    last = (-norm).relu()
    return {"conv": conv, "act": conv.relu(), "norm": norm, "act#2": last, "pair": last.mean((2, 3))}


# --- what is kept ---------------------------------------------------------------------------------


def test_every_output_is_what_the_layer_computed():
    model, x = Tiny(), images()
    kept = record(model, x, ["pair", "conv", "norm", "act", "act:input"], keep=lambda v: v)
    assert list(kept) == ["pair", "conv", "norm", "act", "act#2", "act:input", "act:input#2"]
    for name, value in expected(Tiny(), x).items():
        assert torch.allclose(kept[name], value, atol=1e-6), name
    assert torch.equal(kept["act:input"], kept["conv"])  # although the activation wrote over it


def test_one_call_of_a_module_that_runs_twice():
    kept = record(Tiny(), images(), ["act#2"], keep=lambda v: v)
    assert list(kept) == ["act#2"]
    assert torch.allclose(kept["act#2"], expected(Tiny(), images())["act#2"], atol=1e-6)


@pytest.mark.parametrize(
    "batches",
    [
        lambda x: x,
        lambda x: [x[:2], x[2:]],
        lambda x: (part for part in x.split(2)),
        lambda x: [(x[:4], torch.zeros(4), ["path"] * 4), [x[4:], torch.zeros(1)]],
        lambda x: [{"pixel_values": x[:1]}, {"image": x[1:], "label": 3}],
        lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(5)), 3),
        lambda x: [x.double()],
    ],
)
def test_batches_in_every_form(batches):
    x = images()
    kept = record(Tiny(), batches(x), ["conv"])
    assert kept["conv"].shape == (5, 4 * 36)
    assert torch.allclose(kept["conv"], expected(Tiny(), x)["conv"].flatten(1), atol=1e-6)


def test_keep_runs_inside_the_hook_so_that_nothing_else_is_held():
    import weakref

    alive, held = [], []

    def keep(value):
        alive.append(weakref.ref(value.untyped_storage()))
        held.append(sum(ref() is not None for ref in alive))
        return value.mean((1, 2, 3))

    model = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(12)))
    kept = record(model, images().split(1), [str(i) for i in range(12)], keep)
    assert max(held) <= 3 and kept["11"].shape == (5,)


def test_stream_gives_one_batch_at_a_time_and_leaves_the_model_free_in_between():
    model, x = Tiny().train(), images()
    found = []
    for kept in stream(model, x.split(2), ["conv", "pair"]):
        assert model.training and not hooks(model)
        found.append(kept["pair"])
    assert [len(part) for part in found] == [2, 2, 1]
    assert torch.allclose(torch.cat(found), expected(Tiny(), x)["pair"], atol=1e-6)


def test_watch_fills_anew_with_each_pass_and_can_keep_the_gradient():
    model, x = Tiny().eval(), images().requires_grad_()
    with watch(model, ["norm"], lambda v: v, grad=True) as kept:
        model(images(2))
        assert len(kept["norm"]) == 2
        model(x)
    assert not hooks(model) and list(kept) == ["norm"]
    kept["norm"][0].sum().backward()
    assert x.grad[0].abs().sum() > 0 and x.grad[1:].abs().sum() == 0
    with watch(model, ["norm"]) as kept:
        model(x)
    assert not kept["norm"].requires_grad


def test_results_can_be_trained_on():
    kept = record(Tiny(), images(), ["conv"])["conv"]
    nn.Linear(kept.shape[1], 1)(kept).sum().backward()


# --- the model is left as it was found ------------------------------------------------------------


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_mode_hooks_gradients_statistics_and_randomness_are_untouched():
    model = Tiny().train()
    model.norm.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    calls = []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    record(model, images(), ["conv", "norm"])
    assert [m.training for m in (model, model.conv, model.norm, model.drop)] == [True, True, False, True]
    assert hooks(model) == 1 and calls == [1]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert torch.equal(rng, torch.get_rng_state()) and torch.is_grad_enabled()


def test_left_as_found_after_an_error_too():
    model, seen = Tiny().train(), []

    def keep(value):
        seen.append(value)
        if len(seen) == 2:
            raise RuntimeError("boom")
        return value

    with pytest.raises(ValueError, match=r"keep failed on layer 'norm', of shape \(5, 4, 6, 6\): boom"):
        record(model, images(), ["conv", "norm"], keep)
    assert model.training and not hooks(model)
    generator = stream(model, images().split(1), ["conv"])
    next(generator)
    generator.close()
    assert model.training and not hooks(model)


def test_a_hook_that_changes_the_output_is_seen():
    model = Tiny()
    model.conv.register_forward_hook(lambda module, args, out: out * 0 + 3)
    assert bool((record(model, images(), ["conv"])["conv"] == 3).all())


def test_nested_modes_are_restored():
    model = Tiny().train()
    model.drop.eval()
    with evaluating(model):
        assert not any(m.training for m in model.modules())
    assert model.training and not model.drop.training


# --- wrapped models -------------------------------------------------------------------------------


def test_data_parallel_and_compiled_models_have_plain_names():
    x, model = images(), Tiny().eval()
    plain = record(model, x, ["conv", "norm"])
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        kept = record(wrapped, x, ["conv", "norm"])
        assert all(torch.equal(kept[name], plain[name]) for name in plain)
        assert layers(wrapped, "fine") == layers(model, "fine")


def test_models_compiled_in_place_or_in_part_and_already_run():
    x = images()
    plain = record(Tiny(), x, ["conv"])["conv"]
    whole, part = Tiny().eval(), Tiny().eval()
    whole.compile(backend="eager")
    part.conv = torch.compile(part.conv, backend="eager")
    for model in (whole, part):
        model(x)
        assert torch.equal(record(model, x, ["conv"])["conv"], plain)


def test_half_precision_models_take_float32_images():
    kept = record(Tiny().bfloat16(), images(), ["conv"])
    assert kept["conv"].dtype == torch.bfloat16


def test_device_of():
    assert device_of(Tiny()).type == "cpu" and device_of(nn.ReLU()).type == "cpu"
    with torch.device("meta"):
        assert device_of(Tiny()).type == "meta"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (images()[0], r"not \(3, 8, 8\).*images\[None\]"),
        ([images(), torch.arange(5)], r"not \(5,\).*\(images, labels\)"),
        (images()[:0], "n ≥ 1"),
        ((images() * 255).byte(), r"uint8.*images.float\(\) / 255"),
        (torch.full((2, 3, 8, 8), float("nan")), "2 of 2 images hold NaN"),
        (images().index_fill(0, torch.tensor([1]), float("inf")), "1 of 5 images hold NaN or inf"),
        (images()[:, :1], r"\(5, 1, 8, 8\); it needs \(n, 3, "),
        ([], "no batches"),
        (["a.png"], "not str"),
        ([{"pixels": images()}], r"\['pixels'\]"),
        (7, "not int"),
    ],
)
def test_bad_batches(batches, message):
    with pytest.raises(ValueError, match=message):
        record(Tiny(), batches, ["conv"])


def test_a_generator_used_up():
    generator = iter([images()])
    record(Tiny(), generator, ["conv"])
    with pytest.raises(ValueError, match="used up"):
        record(Tiny(), generator, ["conv"])


def test_images_left_at_0_to_255_are_noticed():
    with pytest.warns(UserWarning, match="0-255"):
        record(Tiny(), images() * 255, ["conv"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(Tiny(), images() * 5 - 2.5, ["conv"])


def test_wrong_size_says_what_the_model_needs():
    model = timm.create_model("test_vit", num_classes=0)
    size = model.patch_embed.img_size[0]
    with pytest.raises(ValueError, match=rf"\(2, 3, 50, 50\); it needs \(n, 3, {size}, {size}\)"):
        record(model, images(2, 50), ["blocks.0"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cnov"], "no layer 'cnov'; the nearest are .*'conv'"),
        (["conv", "norm", "conv"], r"given twice: \['conv'\]"),
        (["conv", "never"], r"\['never'\] never ran"),
        (["act#3"], r"\['act#3'\] never ran"),
        ([], "no layers"),
    ],
)
def test_bad_layers(names, message):
    with pytest.raises(ValueError, match=message):
        record(Tiny(), images(), names)


def test_a_layer_without_a_tensor():
    class Words(nn.Module):
        def forward(self, x):
            return "words"

    with pytest.raises(ValueError, match="layer '0' gave no tensor but str"):
        record(nn.Sequential(Words()), images(), ["0"])
    with pytest.raises(ValueError, match="must be a tensor"):
        images_of("path")


# --- names of layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks", "first", "last"),
    [
        ("vit_tiny_patch16_224", 12, "blocks.0", "blocks.11"),
        ("resnet50", 16, "layer1.0", "layer4.2"),
        ("resnetv2_50x1_bit", 16, "stages.0.blocks.0", "stages.3.blocks.2"),
        ("swin_tiny_patch4_window7_224", 12, "layers.0.blocks.0", "layers.3.blocks.1"),
        ("convnext_atto", 12, "stages.0.blocks.0", "stages.3.blocks.1"),
        ("efficientnet_b0", 16, "blocks.0.0", "blocks.6.0"),
        ("mixer_s32_224", 8, "blocks.0", "blocks.7"),
        ("beit_base_patch16_224", 12, "blocks.0", "blocks.11"),
        ("eva02_tiny_patch14_224", 12, "blocks.0", "blocks.11"),
        ("regnetx_002", 13, "s1.b1", "s4.b7"),
    ],
)
def test_layers_of_timm_models(name, blocks, first, last):
    with torch.device("meta"):  # shapes only: no weights, no arithmetic
        model = timm.create_model(name)
    found = layers(model)
    assert (len(found), found[0], found[-1]) == (blocks, first, last)
    fine = layers(model, "fine")
    assert set(found) < set(fine) and [x for x in fine if x in found] == found
    assert 4 <= len(fine) / blocks <= 8.5


def test_fine_layers_of_one_block():
    with torch.device("meta"):
        vit, resnet = timm.create_model("vit_tiny_patch16_224"), timm.create_model("resnet50")
    inside = ["norm1", "attn", "norm2:input", "norm2", "mlp.fc2:input"]
    found = [x for x in layers(vit, "fine") if x.startswith("blocks.4")]
    assert found == [*(f"blocks.4.{x}" for x in inside), "blocks.4"]
    unit = ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3"]
    found = [x for x in layers(resnet, "fine") if x.startswith("layer2.1")]
    assert found == [*(f"layer2.1.{x}" for x in unit), "layer2.1"]


def test_fine_layers_are_what_they_say():
    model = timm.create_model("test_vit", num_classes=0).eval()
    x = images(2, model.patch_embed.img_size[0])
    kept = record(model, x, layers(model, "fine"), keep=lambda v: v)
    block = model.blocks[1]
    with torch.no_grad():
        z = kept["blocks.0"]
        attention = block.ls1(block.attn(block.norm1(z)))
        assert torch.allclose(kept["blocks.1.norm2:input"], z + attention, atol=1e-5)
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(z + attention)))
        assert torch.allclose(kept["blocks.1.mlp.fc2:input"], hidden, atol=1e-5)


def test_layers_are_in_the_order_they_run_and_none_twice():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.late, self.unused = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.early = nn.Conv2d(3, 4, 1)
            self.same = nn.Identity()

        def forward(self, x):
            return self.same(self.late(self.early(x)))

    assert layers(Backwards()) == layers(Backwards(), "fine") == ["early", "late"]
    with pytest.raises(ValueError, match="'all'"):
        layers(Backwards(), "all")


def test_recording_alone_does_not_import_the_compiler():
    import subprocess

    code = "import sys, torch; from torch import nn; from helpers.record import record\n" \
           "record(nn.Sequential(nn.Conv2d(3, 2, 1)), torch.rand(1, 3, 4, 4), ['0'])\n" \
           "assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
