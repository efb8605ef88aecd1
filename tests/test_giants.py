"""Chapter 13's two networks: measured on small stand-ins, kept whole in a file, and true to the real ones where
those are at hand."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from helpers import giants, onepass, report, rules

REAL = Path(os.environ.get("COURSE_REAL", Path(__file__).parents[2] / "shared" / "real"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two untrained stand-ins, measured on crops of the shipped photographs, and the same from a file."""
    folder = tmp_path_factory.mktemp("giants")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(giants, "HUB", {giants.VIT: "test_vit", giants.RESNET: "test_resnet"})
        found = giants.measure("hub", n=16, field_images=2, folder=folder / "parts", options=("--random-weights",))
    giants.save(found, folder / "kept.npz")
    return found, giants.stored(folder / "kept.npz")


def test_a_file_keeps_what_was_measured(measured):
    found, kept = measured
    for group in ("trained", "untrained"):
        one, other = getattr(found, group), getattr(kept, group)
        assert one.n_images == other.n_images == 16
        for kind in ("plain", "freed"):
            torch.testing.assert_close(one.compare("ViT", "ResNet", kind).values,
                                       other.compare("ViT", "ResNet", kind).values, atol=1e-5, rtol=0)
        for name in ("distance", "cls", "patches"):
            torch.testing.assert_close(one.each("ViT", name), other.each("ViT", name).to(one.each("ViT", name)))
        for of in ("tokens", "copies"):
            torch.testing.assert_close(one.localisation("ViT", of).maps, other.localisation("ViT", of).maps,
                                       atol=1e-5, rtol=0)
        assert one.networks["ResNet"].reasons == other.networks["ResNet"].reasons
    assert found.norms.shape == kept.norms.shape == (16, 6, 197) and found.facts == kept.facts


def test_rules_give_the_same_answer_from_a_file(measured):
    for rule in rules.RULES:
        one, other = (rules.apply(rule, each.trained, each.untrained, "ViT", "ResNet") for each in measured)
        assert type(one) is type(other)
        if not isinstance(one, str) and rule.finding != "receptive-field":  # whose fields are kept coarser
            assert one.holds == other.holds and one.value == pytest.approx(other.value, abs=1e-3)


def test_a_source_without_the_files_is_said_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds no vit_small_patch14_dinov2.safetensors"):
        giants.measure(tmp_path)


def test_without_a_source_the_stored_measurements_are_used(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_REAL", raising=False)
    found = giants.at_hand()
    said = capsys.readouterr().out
    assert "stored measurements" in said and "/" not in said
    assert found.trained.n_images >= 128
    for label, blocks in ((giants.VIT, 12), (giants.RESNET, 16)):
        assert len(found.trained.networks[label].blocks) == blocks
    maps = found.trained.compare(giants.VIT, giants.RESNET).values
    assert bool(maps.isfinite().all()) and found.trained.fields.keys() == found.untrained.fields.keys()


@pytest.mark.skipif(not (REAL / "resnet50.safetensors").is_file(), reason="no folder of real networks; set COURSE_REAL")
def test_the_stored_numbers_come_out_again():
    args = report.arguments([*giants._arguments(REAL, None), "-n", "16", "--batch", "8"])
    networks = report.networks(args, False, 0, torch.device("cpu"))
    batch_of, *_ = report.images(args, 224)
    images = torch.cat([batch_of(0), batch_of(1)])  # the first batch of the chapter
    for network in networks.values():
        network.look_at(images)
    part, stored = onepass.measure(list(networks.values()), images), giants.stored().trained.parts[0]
    torch.testing.assert_close(part["plain"]["xy"], stored["plain"]["xy"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(part[giants.VIT]["distance"], stored[giants.VIT]["distance"], rtol=1e-3, atol=1e-2)
