"""Figures: what they draw, how they read, what they refuse; and the slider, tried in a browser."""

import io
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("agg")
from PIL import Image  # noqa: E402

from helpers import plots as p  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")

RNG = np.random.default_rng(0)
VIT = [f"blocks.{i}" for i in range(12)]
RESNET = [f"layer{k + 1}.{i}" for k, units in enumerate((3, 4, 6, 3)) for i in range(units)]


def comparison(rows=VIT, columns=RESNET):
    values = torch.tensor(RNG.uniform(0, 1, (len(rows), len(columns))))
    return SimpleNamespace(values=values, rows=rows, columns=columns, n_images=100)


CURVE = np.linspace(0.2, 0.8, 12)
BAND = (CURVE, CURVE - 0.1, CURVE + 0.1)
FIGURES = {
    "image_grid": lambda: p.image_grid(torch.rand(7, 3, 32, 32), [str(i) for i in range(7)]),
    "image_grid_grey": lambda: p.image_grid(RNG.uniform(0, 1, (3, 8, 8))),
    "reach": lambda: p.reach(torch.rand(3, 32, 32), {"a": (4, 8, 20, 40), "b": (0, 0, 32, 32)}, grid=4),
    "gram_matrices": lambda: p.gram_matrices({"a": np.eye(6), "b": RNG.normal(size=(6, 6))}, list("xxyyyz")),
    "pair_cloud": lambda: p.pair_cloud(RNG.normal(size=(9, 9)), np.ones((9, 9)), "one layer", "another"),
    "confusions": lambda: p.confusions({"a": np.eye(3), "b": np.full((3, 3), 1 / 3)}, ["disk", "ring", "bar"]),
    "cka_heatmap": lambda: p.cka_heatmap(comparison(), title="ViT against ResNet"),
    "cka_maps": lambda: p.cka_maps({"one": comparison(), "two": comparison()}, title="two"),
    "closest_depth": lambda: p.closest_depth({"trained": comparison(), "untrained": comparison()}),
    "attention_distances": lambda: p.attention_distances(torch.rand(12, 4) * 20, 16.55),
    "attention_scatter": lambda: p.attention_scatter(torch.rand(12, 4) * 20, 16.55),
    "training_curve": lambda: p.training_curve([1e3, 1e4, 1e5], {"shape": [0.1, 0.3, 0.6]}, chance=0.1),
    "head_subsets": lambda: p.head_subsets([5.0, 9.0, 12.0], {"layer1.0": [0.6, 0.4, 0.2]}),
    "fields": lambda: p.fields(RNG.uniform(0, 1, (5, 32, 32)), list("abcde"), radii=[3, 4, 5, 6, 7]),
    "radius_against_depth": lambda: p.radius_against_depth({"ViT": BAND, "ResNet": np.arange(16)}, most=12),
    "localisation": lambda: p.localisation(RNG.uniform(0, 1, (3, 8, 8)), [(0, 0), (3, 4), (7, 0)]),
    "localisation_without_tokens": lambda: p.localisation(RNG.uniform(0, 1, (1, 8, 8)), label="accuracy"),
    "norm_ratio_heatmap": lambda: p.norm_ratio_heatmap(RNG.uniform(1, 5, (12, 65))),
    "norm_ratio_curves": lambda: p.norm_ratio_curves(RNG.uniform(1, 5, (12, 2)), RNG.uniform(1, 5, (12, 2))),
    "norm_ratio_curves_without_cls": lambda: p.norm_ratio_curves(None, RNG.uniform(1, 5, (12, 2))),
    "lines_with_band": lambda: p.lines_with_band({"a": BAND, "b": CURVE}, "block", "accuracy", level=0.1),
    "dots_with_intervals": lambda: p.dots_with_intervals(["a", "b"], [0.3, 5], [[0.2, 0.4], [4, 6]], "CKA"),
    "scorecard": lambda: p.scorecard({"One": {"a": (0.3, 0.2, 0.4, True), "b": (-5, -6, 1, None)},
                                      "Two": {"c": "there is no c.json", "d": (-2, -3, -1, False)}}),
}


def png(figure, **options):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None}, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_fits_a_phone_and_leaves_nothing_open(name):
    import matplotlib.pyplot as plt

    style = dict(matplotlib.rcParams)
    figure = FIGURES[name]()
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == style
    assert figure.get_figwidth() <= p.WIDTH
    assert figure.get_facecolor() == (1, 1, 1, 1)  # opaque: the same on a dark page
    png(figure)
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert texts == [] or min(text.get_fontsize() for text in texts) >= 10
    shown = [axis for axis in figure.axes if axis.axison]
    labels = [axis.get_xlabel() + axis.get_ylabel() for axis in shown]
    assert any(labels) or name.startswith("image_grid")


def test_figures_are_byte_stable():
    first, second = (png(p.closest_depth(np.eye(12, 16))) for _ in range(2))
    assert first == second


def test_colours_differ_in_lightness_from_white_enough_to_read():
    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in matplotlib.colors.to_rgb(colour)]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    for colour in (*p.COLOURS, p.GREY):  # names are written in these colours
        assert 1.05 / (luminance(colour) + 0.05) >= 3, colour


def images(axis):
    return [image for image in axis.get_images()]


def test_a_map_shows_its_values_on_one_scale_with_nan_apart():
    values = np.full((2, 3), 0.5)
    values[0, 1] = np.nan
    image, = images(p.cka_heatmap(values).axes[0])
    assert image.get_clim() == (0, 1)
    assert image.get_array().mask.tolist() == [[False, True, False], [False] * 3]
    assert image.origin == "lower"
    nothing = image.cmap(np.ma.masked_invalid([np.nan]))[0][:3]
    assert nothing[0] == nothing[1] == nothing[2]  # grey, which viridis never is


@pytest.mark.parametrize("names, ticks, labels, title", [
    (RESNET, [0, 3, 7, 13], ["layer1", "layer2", "layer3", "layer4"], "ResNet unit"),
    (VIT, [0, 2, 4, 6, 8, 10], ["0", "2", "4", "6", "8", "10"], "ViT block"),
    ([f"blocks.{i}.{part}" for i in range(4) for part in ("norm1", "attn", "mlp")], [0, 3, 6, 9],
     ["0", "1", "2", "3"], "ViT block"),
    (["features.a", "head"], [0, 1], ["features", "head"], "layer"),
    (["conv1", "bn1", *(f"layer1.{i}" for i in range(30))], [2], ["layer1"], "ResNet unit"),  # no room before it
])
def test_ticks_stand_at_the_first_layer_of_each_stage(names, ticks, labels, title):
    axis = p.cka_heatmap(np.zeros((len(names), len(names))), names, names).axes[0]
    assert axis.get_yticks().tolist() == ticks
    assert [text.get_text() for text in axis.get_yticklabels()] == labels
    assert axis.get_ylabel() == title == axis.get_xlabel()


def test_reach_dims_what_lies_outside_the_box_cut_at_the_edges():
    axis = p.reach(np.zeros((3, 8, 8)), {"a": (-3, 4, 4, 20)}).axes[0]
    shown = images(axis)[0].get_array()[:, :, 0]
    assert (shown[:4, 4:] == 0).all() and (shown[4:] > 0.5).all() and (shown[:, :4] > 0.5).all()
    box = axis.patches[0]
    assert (*box.get_xy(), box.get_width(), box.get_height()) == (4, 0, 4, 4)


def test_gram_matrices_show_pairs_on_one_scale_whatever_the_diagonal():
    axis = p.gram_matrices({"a": [[50, -2, 1], [-2, 50, 0], [1, 0, 50]]}, ["x", "x", "y"]).axes[0]
    image, = images(axis)
    assert image.get_clim() == (-1, 1) and image.get_array()[0, 1] == -1 and image.get_array()[0, 2] == 0.5
    assert [text.get_text() for text in axis.get_yticklabels()] == ["x", "y"]
    assert axis.get_yticks().tolist() == [0.5, 2]


def test_pair_cloud_shows_each_pair_once_and_no_image_with_itself():
    first = np.array([[9.0, 1, 2], [1, 9, 3], [2, 3, 9]])
    axis = p.pair_cloud(first, 2 * first, "x", "y").axes[0]
    assert axis.collections[0].get_offsets().tolist() == [[1, 2], [2, 4], [3, 6]]
    assert axis.get_lines()[0].get_ydata().tolist() == [2, 6]


def test_confusions_have_true_classes_in_rows_from_above_and_one_scale():
    axis, *_ = p.confusions({"a": [[1, 0], [0.25, 0.75]]}, ["disk", "ring"]).axes
    image, = images(axis)
    assert image.get_clim() == (0, 1) and image.get_array()[1].tolist() == [0.25, 0.75]
    assert axis.yaxis_inverted() and [t.get_text() for t in axis.get_yticklabels()] == ["disk", "ring"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("named", "true")


def test_closest_depth_is_the_largest_in_each_row_ignoring_nan():
    values = np.zeros((3, 5))
    values[0, 4] = values[1, 2] = values[2, 0] = 0.9
    values[:, 1] = np.nan
    line, = p.closest_depth(values).axes[0].get_lines()
    assert line.get_ydata().tolist() == [4, 2, 0]


def test_heads_are_sorted_within_their_block():
    figure = p.attention_distances([[9, 3, 6], [1, 2, 0]], 16.55)
    lines = [line.get_ydata() for line in figure.axes[0].get_lines()]
    assert [list(line) for line in lines[:2]] == [[3, 6, 9], [0, 1, 2]]
    assert list(lines[2]) == [16.55, 16.55]


def test_names_at_line_ends_do_not_overlap():
    figure = p.lines_with_band({name: [0.0, 0.5 + k / 1000] for k, name in enumerate("abcdef")}, "x", "y")
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 6
    assert all(low.y1 <= high.y0 + 1 for low, high in zip(boxes, boxes[1:], strict=False))


def test_lines_differ_in_more_than_colour():
    axis = p.lines_with_band({name: [0, 1] for name in "abcdef"}, "x", "y").axes[0]
    assert len({(line.get_linestyle(), line.get_marker(), line._dash_pattern[1] is None or
                 tuple(line._dash_pattern[1])) for line in axis.get_lines()}) == 6


def test_bands_are_drawn_where_they_are_given():
    axis = p.lines_with_band({"a": BAND, "b": CURVE}, "x", "y").axes[0]
    assert len(axis.collections) == 1
    edges = axis.collections[0].get_paths()[0].get_extents()
    assert edges.y0 == pytest.approx(0.1) and edges.y1 == pytest.approx(0.9)


def test_each_row_may_run_over_its_own_range():
    figure = p.dots_with_intervals(["px", "share"], [14, 0.3], [[13, 16], [0.2, 0.4]], holds=[True, None],
                                   controls=[12, np.nan], shared=False)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["14 [13, 16]", "0.3 [0.2, 0.4]"]
    values = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert values == pytest.approx([(14 - 12) / (16 - 12), 0.5])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["holds", "undecided", "control"]


def test_scorecard_shows_each_group_and_says_what_was_not_measured():
    axis = FIGURES["scorecard"]().axes[0]
    texts = [text.get_text() for text in axis.texts]
    assert [text for text in texts if text in ("One", "Two")] == ["One", "Two"]
    assert texts.count("not measured") == 1 and "0.3 [0.2, 0.4]" in texts
    assert [label.get_text() for label in axis.get_yticklabels()] == list("abcd")
    assert list(axis.get_yticks()) == [1, 2, 4, 5]  # the groups' own lines are 0 and 3
    for line in axis.lines:
        assert np.abs(line.get_xdata()).max() <= 1
    with pytest.raises(ValueError, match="at least one finding"):
        p.scorecard({"empty": {}})


def test_the_token_is_marked_on_its_patch():
    axis = p.localisation(np.zeros((1, 4, 6)), [(2, 5)]).axes[0]
    assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.get_lines()} == {(5, 2)}
    assert images(axis)[0].origin == "upper"


def test_each_field_is_drawn_over_its_own_largest_value():
    figure = p.fields(np.stack([np.eye(4), 10 * np.eye(4), np.zeros((4, 4))]), list("abc"), radii=[1, 2, 3])
    assert [images(axis)[0].get_array().max() for axis in figure.axes[:3]] == [1, 1, 0]
    assert [axis.patches[0].radius for axis in figure.axes[:3]] == [1, 2, 3]


@pytest.mark.parametrize("call, words", [
    (lambda: p.image_grid(torch.rand(3, 32)), "images"),
    (lambda: p.image_grid(torch.rand(2, 4, 8, 8)), "images"),
    (lambda: p.image_grid(torch.rand(2, 3, 8, 8), ["one"]), "one title an image"),
    (lambda: p.cka_heatmap([1, 2]), "2 dimensions"),
    (lambda: p.cka_heatmap(np.eye(2), ["a"], ["b", "c"]), "as many names; got 1 and 2"),
    (lambda: p.cka_maps({}), "at least one map"),
    (lambda: p.gram_matrices({}, []), "at least one matrix"),
    (lambda: p.confusions({"a": np.eye(2)}, ["x"]), "1 classes need"),
    (lambda: p.gram_matrices({"a": np.eye(3)}, ["x"]), "1 groups need"),
    (lambda: p.reach(np.zeros((8, 8)), {"a": (0, 0, 1, 1)}), "3 dimensions"),
    (lambda: p.lines_with_band({}, "x", "y"), "at least one curve"),
    (lambda: p.lines_with_band({"a": (CURVE, CURVE)}, "x", "y"), "got 2 arrays"),
    (lambda: p.lines_with_band({"a": (CURVE, CURVE[:3], CURVE)}, "x", "y"), "band"),
    (lambda: p.lines_with_band({"a": CURVE}, "x", "y", x=[1, 2]), "x has 2 points and y has 12"),
    (lambda: p.dots_with_intervals(["a"], [1, 2], [[0, 1], [1, 2]]), "k names"),
    (lambda: p.attention_distances([1, 2], 16), "2 dimensions"),
    (lambda: p.head_subsets([1, 2], {"a": [1, 2, 3]}), "3 subsets"),
    (lambda: p.fields(np.zeros((2, 4, 4)), ["a"]), "for each of the 2"),
    (lambda: p.localisation(np.zeros((2, 4, 4)), [(0, 0)]), "one token a map"),
    (lambda: p.norm_ratio_curves(None, np.zeros((12, 3))), "one column"),
])
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_import_does_not_bring_matplotlib_or_torch():
    code = "import sys, helpers.plots; print(sorted({'torch', 'matplotlib', 'PIL'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# ---------------------------------------------------------------- the slider

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def frame(colour, size=(200, 100)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="png")
    return buffer.getvalue()


def slider(**changes):
    options = dict(
        frames=[frame(colour) for colour in COLOURS], labels=[f"block {k}" for k in range(4)],
        alts=[f'picture {k} </script> "quoted" é' for k in range(4)], title="Colours <of> blocks", start=1,
    )
    return p.frame_slider(**{**options, **changes})


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def only(self, tag):
        element, = [attributes for name, attributes in self.found if name == tag]
        return element


def test_slider_is_byte_stable_and_its_repr_does_not_depend_on_the_pixels():
    assert str(slider()) == str(slider()) == slider()._repr_html_()
    assert str(slider()) != str(slider(start=0))
    assert repr(slider()) == "slider over 4 frames: block 0 to block 3"


def test_slider_is_self_contained_and_says_what_it_shows():
    page = str(slider())
    elements = Elements(page)
    assert "http" not in page and not any("src" in found for tag, found in elements.found if tag != "img")
    image, control = elements.only("img"), elements.only("input")
    assert image["alt"] == 'picture 1 </script> "quoted" é'
    assert image["src"].startswith("data:image/png;base64,")
    assert (image["width"], image["height"]) == ("200", "100")
    assert control["aria-label"] == "Colours <of> blocks" and control["aria-valuetext"] == "block 1"
    assert (control["min"], control["max"], control["value"]) == ("0", "3", "1")
    assert page.count("</script>") == 1  # none from a text
    assert [tag for tag, _ in elements.found].count("button") == 2
    assert "$" not in re.sub(r"data:image/png[^\"]*", "", page)  # no placeholder left over


def test_slider_from_figures_keeps_to_its_size():
    figures = [p.cka_heatmap(RNG.uniform(0, 1, (40, 40))) for _ in range(3)]
    options = dict(labels=["0", "1", "2"], alts=["map 0", "map 1", "map 2"], title="maps")
    whole = p.frame_slider(figures, **options)
    assert len(str(whole)) < 3 * 80_000
    smaller = p.frame_slider(figures, **options, limit=int(len(str(whole)) * 0.8))
    assert len(str(smaller)) < 0.85 * len(str(whole))
    with pytest.raises(ValueError, match="over its limit of 1,000"):
        p.frame_slider(figures[:2], ["a", "b"], ["a", "b"], "maps", limit=1000)


@pytest.mark.parametrize("changes, words", [
    (dict(frames=[frame("red")], labels=["a"], alts=["a"]), "two frames or more"),
    (dict(labels=["a"]), "4 frames, 1 labels"),
    (dict(alts=["a", "b", "c", " "]), "not empty"),
    (dict(title=""), "not empty"),
    (dict(start=4), "start=4"),
    (dict(frames=[frame("red"), frame("red"), frame("red"), frame("red", (10, 10))]), "one size"),
])
def test_slider_refusals(changes, words):
    with pytest.raises(ValueError, match=words):
        slider(**changes)


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {error}")
        yield opened
        opened.close()


def open_page(browser, path, javascript=True):
    """Two sliders and a copy of the first, on a phone."""
    other = slider(labels=[f"image {k}" for k in range(4)], start=0)
    path.write_text(f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
                    f'content="width=device-width"><title>t</title><body>{slider()}{other}{slider()}</body>',
                    encoding="utf-8")
    phone = {"width": 390, "height": 800}
    page = browser.new_context(viewport=phone, java_script_enabled=javascript).new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(path.as_uri())
    return page


def state(page, k):
    """(label beside, value read aloud, alt, colour in the middle of the picture) of the k-th slider."""
    colour = page.locator("img").nth(k).evaluate(
        """async (image) => {
            await image.decode();
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.drawImage(image, 0, 0);
            return [...canvas.getImageData(50, 50, 1, 1).data];
        }""")
    return (page.locator(".frame-label").nth(k).text_content(),
            page.locator("input").nth(k).get_attribute("aria-valuetext"),
            page.locator("img").nth(k).get_attribute("alt")[:9], tuple(colour[:3]))


@pytest.mark.filterwarnings("default")
def test_keys_buttons_and_dragging_move_one_slider_and_all_it_says(browser, tmp_path):
    page = open_page(browser, tmp_path / "page.html")

    def expected(k, word="block"):
        return (f"{word} {k}", f"{word} {k}", f"picture {k}", COLOURS[k])

    control = page.locator("input").first
    assert state(page, 0) == expected(1)
    control.focus()
    for key, k in [("ArrowRight", 2), ("ArrowUp", 3), ("ArrowRight", 3), ("ArrowLeft", 2), ("ArrowDown", 1),
                   ("End", 3), ("Home", 0), ("PageUp", 1), ("PageDown", 0), ("PageDown", 0)]:
        page.keyboard.press(key)
        assert state(page, 0) == expected(k), key
    page.get_by_role("button", name="next frame").first.click()
    assert state(page, 0) == expected(1)
    control.fill("3")  # what dragging ends in: an input event
    assert state(page, 0) == expected(3)
    # the others stayed where they were, the copy of the same slider too, which works by itself
    assert state(page, 1) == expected(0, "image") and state(page, 2) == expected(1)
    page.get_by_role("button", name="previous frame").nth(2).click()
    assert state(page, 2) == expected(0) and state(page, 0) == expected(3)
    assert page.problems == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not page.locator(".frame-note").first.is_visible()
    for role in ("button", "slider"):  # large enough for a finger
        assert page.get_by_role(role).first.bounding_box()["height"] >= 44


@pytest.mark.filterwarnings("default")
def test_keys_go_no_further_than_the_slider(browser, tmp_path):
    page = open_page(browser, tmp_path / "page.html")
    page.evaluate("window.heard = []; document.addEventListener('keydown', (event) => heard.push(event.key))")
    page.locator("input").first.focus()
    for key in ("ArrowRight", "Home", "a"):
        page.keyboard.press(key)
    assert page.evaluate("window.heard") == ["a"]  # JupyterLab would act on the others


@pytest.mark.filterwarnings("default")
def test_without_javascript_the_first_picture_and_a_note_are_there(browser, tmp_path):
    page = open_page(browser, tmp_path / "page.html", javascript=False)
    assert page.locator("img").first.is_visible()
    assert page.locator(".frame-note").first.is_visible()
    assert not page.locator("input").first.is_visible()
