"""Models by name: what is loaded is trained, whole, and what its card says."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import shapes, train, zoo

CARDS = {card.name: card for card in zoo.cards()}
SOME = shapes.draw(8, 3).images


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder of its own with one small checkpoint in it, in place of helpers/weights."""
    model = zoo.build("resnet", seed=5)
    run = train.Run(model, None, images=64)
    monkeypatch.setattr(train, "JUDGE_ON", 16)
    monkeypatch.setattr(zoo, "WEIGHTS", tmp_path)
    train.export("small", train.RESNET, run, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CARDS)
def test_a_checkpoint_is_as_accurate_as_its_card_says(name):
    scenes = shapes.draw(500, 77)
    predicted = train._predict(zoo.load(name), scenes)
    for i, (label, truth) in enumerate((("shape", scenes.shape), ("background", scenes.background))):
        accuracy, _, _ = CARDS[name].accuracy[label]
        share = (predicted[:, i] == truth).double().mean().item()
        # four standard deviations of a share of 500 images, and a little for a share near 0 or 1
        assert abs(share - accuracy) < 4 * (accuracy * (1 - accuracy) / 500) ** 0.5 + 0.01


@pytest.mark.parametrize("name", CARDS)
def test_a_checkpoint_is_small_and_its_card_tells_how_it_was_made(name):
    facts = CARDS[name].facts
    assert (zoo.WEIGHTS / f"{name}.safetensors").stat().st_size < 3e6
    assert {"recipe", "seconds", "processor", "versions", "held_out", "history"} <= facts.keys()
    assert facts["images"] == facts["history"][-1]["images"] or facts["images"] % facts["recipe"]["report"]


def test_lab_models_come_in_eval_mode_and_take_plain_images(weights):
    model = zoo.load("small")
    assert not model.training
    assert model(SOME).shape == (8, zoo.OUTPUTS)
    assert torch.equal(zoo.transform(model)(SOME), SOME)


def test_random_gives_an_untrained_twin_from_a_seed(weights):
    trained, one, same, other = (zoo.load("small", **k) for k in
                                 ({}, {"random": True}, {"random": True}, {"random": True, "seed": 1}))
    assert torch.equal(one(SOME), same(SOME))
    assert not torch.equal(one(SOME), other(SOME)) and not torch.equal(one(SOME), trained(SOME))


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    zoo.build("vit", seed=9)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("keep", [0.0, 0.003, 0.1, 0.37, 0.5, 0.61, 0.75, 0.9, 0.99, 0.9999])
def test_a_truncated_checkpoint_is_refused(weights, keep):
    path = weights / "small.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="sha256"):
        zoo.load("small")


def test_one_flipped_bit_is_noticed(weights):
    path = weights / "small.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="sha256"):
        zoo.load("small")


def test_a_missing_file_and_a_damaged_card_are_named(weights):
    (weights / "small.safetensors").unlink()
    with pytest.raises(ValueError, match="small.safetensors are missing"):
        zoo.load("small")
    (weights / "small.json").write_text('{"name": "small"')
    with pytest.raises(ValueError, match="card small.json is damaged"):
        zoo.load("small")


def test_weights_of_another_model_are_refused(weights):
    save_file(zoo.build("vit").state_dict(), weights / "small.safetensors")
    card = json.loads((weights / "small.json").read_text())
    card["sha256"] = None  # even a card that vouches for nothing
    (weights / "small.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match="does not fit"):
        zoo.load("small")


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(ValueError, match="vit_base_patch16_224"):
        zoo.load("vit_bas_patch16_224")


def test_a_timm_model_from_a_file_with_and_without_classifier(tmp_path):
    model = zoo.load("test_resnet", random=True, seed=3)
    save_file(model.state_dict(), tmp_path / "whole.safetensors")
    image = torch.rand(1, 3, 160, 160)
    assert torch.equal(zoo.load("test_resnet", tmp_path / "whole.safetensors")(image), model(image))
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    assert torch.equal(zoo.load("test_resnet", tmp_path / "whole.pth")(image), model(image))
    half = {k: v.half() for k, v in model.state_dict().items() if not k.startswith("fc.")}
    save_file(half, tmp_path / "backbone.safetensors")
    backbone = zoo.load("test_resnet", tmp_path / "backbone.safetensors", num_classes=0)
    assert next(backbone.parameters()).dtype == torch.float32


def test_a_file_that_lacks_layers_is_refused_without_a_classifier_too(tmp_path):
    whole = zoo.load("test_resnet", random=True, num_classes=0).state_dict()
    save_file({k: v for k, v in whole.items() if not k.startswith("layer3")}, tmp_path / "cut.safetensors")
    with pytest.raises(ValueError, match="layer3"):
        zoo.load("test_resnet", tmp_path / "cut.safetensors", num_classes=0)


class Bomb:
    def __reduce__(self):
        return (shutil.rmtree, ("nowhere-at-all-bomb",))


def test_a_pickle_in_disguise_is_refused_and_never_run(tmp_path):
    torch.save({"fc.weight": Bomb()}, tmp_path / "evil.pth")
    shutil.copy(tmp_path / "evil.pth", tmp_path / "evil.safetensors")
    for name in ("evil.pth", "evil.safetensors"):
        with pytest.raises(ValueError, match=name):
            zoo.load("test_resnet", tmp_path / name)
    with pytest.raises(ValueError, match="no checkpoint"):
        zoo.load("test_resnet", tmp_path / "absent.safetensors")


def test_without_hub_and_file_the_error_names_the_ways_on(monkeypatch):
    monkeypatch.setattr(zoo.timm, "create_model", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(RuntimeError, match="checkpoint=FILE.*random=True"):
        zoo.load("resnet50")


def test_transform_resizes_and_normalises_as_the_model_wants():
    model = zoo.load("test_vit", random=True)
    config = model.pretrained_cfg
    out = zoo.transform(model)(torch.full((2, 3, 50, 70), 0.25))
    assert out.shape[-2:] == tuple(config["input_size"][1:])
    expected = (0.25 - torch.tensor(config["mean"])) / torch.tensor(config["std"])
    assert torch.allclose(out[0, :, 5, 5], expected, atol=1e-5)
    plain = zoo.transform(model, size=64, mean=(0.0,) * 3, std=(1.0,) * 3)(SOME)
    assert plain.shape == (8, 3, 64, 64) and plain.min() >= 0 and plain.max() <= 1


def test_stored_in_half_precision_only_where_no_prediction_changes(weights):
    stored = load_file(weights / "small.safetensors")
    kinds = {v.dtype for k, v in stored.items() if v.is_floating_point() and "running" not in k}
    said = CARDS and json.loads((weights / "small.json").read_text())["stored_as"]
    assert kinds == ({torch.float16} if said == "float16" else {torch.float32})


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "beit_base_patch16_224"])
def test_open_branches_have_scales_of_one_and_keep_all_else(name):
    options = {"init_values": 1e-5} if "vit" in name else {"depth": 1} if "beit" in name else {}
    model = zoo.load(name, random=True, **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changed = {key for key, value in zoo.open_branches(model).state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all("gamma" in key for key in changed)
    assert all((model.state_dict()[key] == 1).all() for key in before if "gamma" in key)
