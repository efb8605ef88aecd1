"""Photographs: any folder is read or refused in plain words, a batch at a time."""

import os
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import photos as p

pytestmark = pytest.mark.filterwarnings("error")


def gradient(width=60, height=40):
    """An image whose red grows to the right and whose green grows downwards."""
    red = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    green = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([red, green, np.full_like(red, 128.0)], 2).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    for k in range(6):
        gradient(60 + k).save(tmp_path / f"photo{k}.png")
    return tmp_path


def test_shape_range_and_centre_crop(tmp_path):
    gradient().save(tmp_path / "wide.png")
    image = p.load_photos(tmp_path, size=40).images[0]
    assert image.shape == (3, 40, 40) and image.dtype == torch.float32
    # 60 x 40, 10 columns lost on either side
    assert image[0, :, 0].mean() == pytest.approx(10 / 59, abs=0.01)
    assert image[0, :, -1].mean() == pytest.approx(49 / 59, abs=0.01)
    assert image[1, [0, -1]].mean(1).tolist() == pytest.approx([0, 1], abs=0.01)


def test_fewer_are_the_first_of_more_and_another_seed_is_another_order(folder):
    every = p.load_photos(folder, size=16)
    assert len(every) == 6
    few = p.load_photos(folder, n=3, size=16)
    assert few.names == every.names[:3] and torch.equal(few.images, every.images[:3])
    orders = {p.load_photos(folder, size=16, seed=seed).names for seed in range(5)}
    assert len(orders) > 1


def test_batches_can_be_read_again_and_join_to_the_images(folder):
    photos = p.load_photos(folder, size=16)
    batches = photos.batches(4)
    assert len(batches) == 2
    for _ in range(2):
        assert torch.equal(torch.cat(list(batches)), photos.images)
    with pytest.raises(ValueError, match="at least 1"):
        photos.batches(0)
    with pytest.raises(ValueError, match="slice"):
        photos[0]


def test_a_batch_is_let_go_when_the_next_is_read(folder):
    batches = iter(p.load_photos(folder, size=16).batches(2))
    first = weakref.ref(next(batches))
    next(batches)
    assert first() is None


def save_16_bit(path):
    Image.fromarray(np.linspace(0, 65535, 1600).reshape(40, 40).astype(np.uint16)).save(path)


def save_animated(path):
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "lime")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def save_turned(path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees when shown
    gradient(40, 40).save(path, exif=exif, quality=95)


def test_cmyk(tmp_path):
    Image.new("RGB", (40, 40), (200, 100, 50)).convert("CMYK").save(tmp_path / "print.jpg", quality=95)
    image = p.load_photos(tmp_path, size=16).images[0].mean((1, 2)) * 255
    assert image.tolist() == pytest.approx([200, 100, 50], abs=4)


def test_16_bit_is_scaled_not_clipped(tmp_path):
    save_16_bit(tmp_path / "deep.png")
    image = p.load_photos(tmp_path, size=40).images[0]
    assert image[:, 20].mean() == pytest.approx(0.5, abs=0.02) and image[0].std() > 0.25


def test_transparency_becomes_white(tmp_path):
    Image.new("RGBA", (40, 40), (0, 0, 0, 0)).save(tmp_path / "cut-out.png")
    assert p.load_photos(tmp_path, size=16).images.min() == 1


def test_palette_with_transparency(tmp_path):
    image = Image.new("P", (40, 40), 0)
    image.putpalette([10, 10, 10, 250, 0, 0])
    image.save(tmp_path / "web.gif", transparency=0)
    assert p.load_photos(tmp_path, size=16).images.min() == 1


def test_grey_float_and_one_bit(tmp_path):
    for name, image in {
        "grey.png": Image.new("L", (40, 40), 128),
        "float.tif": Image.fromarray(np.full((40, 40), 0.5, np.float32)),
        "bits.png": Image.new("1", (40, 40), 1),
    }.items():
        image.save(tmp_path / name)
    photos = p.load_photos(tmp_path, size=16)
    means = dict(zip(photos.names, photos.images.mean((1, 2, 3)).tolist(), strict=True))
    assert means == pytest.approx({"grey.png": 0.5, "float.tif": 0.5, "bits.png": 1.0}, abs=0.01)


def test_photographs_are_shown_as_the_camera_was_held(tmp_path):
    save_turned(tmp_path / "phone.jpg")
    image = p.load_photos(tmp_path, size=40).images[0]
    # red grew to the right before the turn and grows downwards after it
    assert image[0, -5:].mean() - image[0, :5].mean() > 0.5
    assert abs(image[0, :, -5:].mean() - image[0, :, :5].mean()) < 0.1


def test_animation_gives_its_first_picture_and_says_so(tmp_path):
    save_animated(tmp_path / "moving.gif")
    with pytest.warns(UserWarning, match=r"moving\.gif \(animated, its first picture"):
        photos = p.load_photos(tmp_path, size=16)
    assert photos.images[0].mean((1, 2)).tolist() == pytest.approx([1, 0, 0], abs=0.01)


def broken(kind):
    def save(path):
        gradient(200, 200).save(path, format=kind)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    return save


BAD = {
    "notes.txt": (lambda path: path.write_text("not a picture"), "not an image"),
    "liar.png": (lambda path: path.write_text("not a picture"), "not an image"),
    "empty.jpg": (lambda path: path.write_bytes(b""), "not an image"),
    "dot.png": (lambda path: Image.new("RGB", (1, 1)).save(path), "1 x 1 pixels, too small"),
    "strip.png": (lambda path: Image.new("RGB", (900, 2)).save(path), "too small"),
    "half.jpg": (broken("JPEG"), "broken or unreadable"),
    "half.png": (broken("PNG"), "broken or unreadable"),
    "minus.tif": (lambda path: Image.fromarray(-np.ones((40, 40), np.float32)).save(path), "its numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_left_out_by_name_with_the_reason(folder, name):
    make, reason = BAD[name]
    make(folder / name)
    with pytest.warns(UserWarning, match=f"{name} \\(left out: .*{reason}"):
        photos = p.load_photos(folder, size=16)
    assert len(photos) == 6 and name not in photos.names


@pytest.mark.parametrize("name", BAD)
def test_a_folder_of_nothing_else_is_refused_with_the_reason(tmp_path, name):
    make, reason = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"no usable photograph; .*{name} \\(left out: .*{reason}"):
        p.load_photos(tmp_path)


def test_huge_pictures_are_left_out_before_they_are_decoded(folder, monkeypatch):
    gradient(300, 300).save(folder / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.warns(UserWarning, match=r"huge\.png \(left out: too many pixels"):
        assert len(p.load_photos(folder, size=16)) == 6


def test_long_lists_of_bad_files_are_cut_short(folder):
    for k in range(30):
        (folder / f"note{k}.txt").write_text("text")
    with pytest.warns(UserWarning, match="and 22 more"):
        p.load_photos(folder, size=16)


def test_fewer_than_asked_goes_on_and_says_so(folder):
    with pytest.warns(UserWarning, match="100 photographs were asked for .* holds 6 usable ones"):
        assert len(p.load_photos(folder, n=100, size=16)) == 6


def test_folders_below_count_and_hidden_files_do_not(folder):
    (folder / "cats").mkdir()
    gradient().save(folder / "cats" / "cat.jpg")
    gradient().save(folder / ".hidden.png")
    names = p.load_photos(folder, size=16).names
    assert "cats/cat.jpg" in names and len(names) == 7


def test_a_read_only_folder_is_enough(folder):
    before = sorted(os.listdir(folder))
    folder.chmod(0o555)
    try:
        assert len(p.load_photos(folder, size=16).images) == 6
    finally:
        folder.chmod(0o755)
    assert sorted(os.listdir(folder)) == before


def test_a_photograph_lost_on_the_way_is_named(folder):
    photos = p.load_photos(folder, size=16)
    photos.files[2].write_bytes(b"gone")
    with pytest.raises(ValueError, match=f"{photos.names[2]} could be read before"):
        list(photos.batches(2))


@pytest.mark.parametrize("options, words", [
    (dict(folder="no/such/folder"), "does not exist"),
    (dict(folder=__file__), "is a file, not a folder"),
    (dict(n=0), "at least 1"),
    (dict(n=2.5), "whole number"),
    (dict(size=4), "at least 8 pixels"),
    (dict(seed=-1), "seed"),
])
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        p.load_photos(**options)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it is empty"):
        p.load_photos(tmp_path)


needs_shipped = pytest.mark.skipif(not p._shipped_files(), reason="neither scikit-image nor scikit-learn")


@needs_shipped
def test_shipped_photographs_come_with_a_warning_and_from_the_seed():
    with pytest.warns(UserWarning, match="crops of only"):
        many = p.load_photos(n=20, size=32)
    with pytest.warns(UserWarning, match="crops of only"):
        few = p.load_photos(n=4, size=32)
    with pytest.warns(UserWarning, match="crops of only"):
        other = p.load_photos(n=4, size=32, seed=1)
    assert many.images.shape == (20, 3, 32, 32) and len(set(many.names)) == 20
    assert 0 <= many.images.min() and many.images.max() <= 1
    assert few.names == many.names[:4] and torch.equal(few.images, many.images[:4])
    assert not torch.equal(few.images, other.images)
    assert torch.equal(torch.cat(list(many.batches(7))), many.images)
    # two crops of one photograph differ
    by_file = {}
    for k, file in enumerate(many.files):
        by_file.setdefault(file, []).append(k)
    pairs = [group[:2] for group in by_file.values() if len(group) > 1]
    assert pairs and all(not torch.equal(many.images[a], many.images[b]) for a, b in pairs)


def test_without_folder_and_packages_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(p, "SHIPPED", {"no_such_package": ("data", ("cat.png",))})
    with pytest.raises(ValueError, match="pip install scikit-image"):
        p.load_photos()
