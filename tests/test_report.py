"""The report on two small untrained networks: complete, honest about what they are, and it stops in plain words."""

import json
import re

import pytest
import torch

from helpers import onepass, report, rules, zoo
from helpers.cka import compare
from helpers.tokens import places
from helpers.verdict import Verdict

SETTINGS = ["--n", "16", "--batch", "8", "--size", "64", "--field-images", "8", "--field-draws", "2"]
MEASURES = {"within", "across", "attention_distance", "receptive_field", "norm_ratios", "localisation"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(page, numbers, arguments, folder) of one report; what a rerun must not compute again is counted."""
    folder = tmp_path_factory.mktemp("report")
    given = ["test_vit", "test_resnet", "--random-weights", *SETTINGS, "--out", str(folder / "r.html")]
    assert report.main(given) == 0
    return (folder / "r.html").read_text(), json.loads((folder / "r.json").read_text()), given, folder


def test_page_and_numbers_are_complete(made):
    page, numbers, _, folder = made
    assert set(numbers["measures"]) == MEASURES and set(numbers["findings"]) == {rule.finding for rule in rules.RULES}
    images = re.findall(r"<img alt=\"([^\"]+)\" src=\"data:image/png;base64,", page)
    assert len(images) == page.count("<img") >= 8 and min(map(len, images)) > 30
    assert not re.search(r"(src|href)=[\"']?https?:", page) and "nan" not in " ".join(images)
    assert numbers["n_images"] == 16 and sorted(p.name for p in folder.iterdir()) == ["r.html", "r.json"]


def test_random_weights_are_said_on_every_figure(made):
    page, numbers, *_ = made
    alts = re.findall(r"<img alt=\"([^\"]+)\"", page)
    assert numbers["random_weights"] and page.index("UNTRAINED") < page.index("<img")
    assert all("UNTRAINED" in alt for alt in alts)
    assert "holds here" not in page and set(numbers["findings"].values()) == {report.UNTRAINED}


def test_a_measure_that_a_model_does_not_admit_has_its_reason(made):
    page, numbers, *_ = made
    assert "cannot be measured on a ResNet" in numbers["left_out"]["test_resnet"]["distance"]
    assert "Left out for test_resnet: attention distance cannot be measured" in page
    assert numbers["left_out"]["test_vit"] == {}


FAMILIES = {  # architecture -> what it does not admit; the reason is a sentence about the network
    "deit_tiny_distilled_patch16_224": set(),
    "beit_base_patch16_224": set(),
    "coatnet_nano_rw_224": {"distance", "norms"},
    "swin_tiny_patch4_window7_224": {"distance", "norms"},
    "crossvit_tiny_240": {"distance", "norms", "tokens", "fields"},
    "levit_128s": {"distance", "norms", "tokens", "fields"},
    "tiny_vit_5m_224": {"distance", "norms", "tokens", "fields"},  # rows, columns, channels, and does not say so
    "vgg11": {"distance", "norms", "tokens", "fields"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_measured_or_left_out_with_the_reason(name):
    network = report.networks(report.arguments([name, "--random-weights"]), True, 0, torch.device("cpu"))[name]
    images = torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    network.look_at(images)
    assert set(network.reasons) == FAMILIES[name]
    assert not any("keep" in reason or len(reason) < 40 for reason in network.reasons.values())
    part = onepass.measure([network], images)
    assert bool(part["plain"]["xy"].isfinite().all()) and ("distance" in part[name]) == ("distance" not in FAMILIES[name])


def test_a_map_whose_axes_contradict_what_its_model_declares_has_no_places():
    model = torch.nn.Identity()  # timm's default: (n, C, rows, columns)
    assert places(torch.zeros(2, 5, 7, 7), model, None)[2] == (7, 7)
    assert places(torch.zeros(2, 5, 4, 7), model, None)[2] == (4, 7)
    with pytest.raises(ValueError, match="cannot be told"):
        places(torch.zeros(2, 7, 7, 5), model, None)
    model.output_fmt = "NHWC"
    assert places(torch.zeros(2, 7, 7, 5), model, None)[2] == (7, 7)
    with pytest.raises(ValueError, match="cannot be told"):
        places(torch.zeros(2, 5, 7, 7), model, None)


def test_tables_and_titles_may_break_in_long_names_and_scroll_with_the_keyboard(made):
    page, *_ = made
    regions = re.findall(r'<div class="wide" tabindex="0" role="region" aria-label="Table: ([^"]+)">', page)
    assert len(regions) == page.count("<table") and "test_<wbr>vit" in page


def test_cka_is_that_of_compare(made):
    _, numbers, given, _ = made
    args = report.arguments(given)
    nets = report.networks(args, True, 0, torch.device("cpu"))
    batch_of, *_ = report.images(args, 64)
    x, y = nets.values()
    expected = compare(x.model, y.model, [batch_of(0), batch_of(1)], transforms=(x.prepare, y.prepare))
    found = torch.tensor(numbers["measures"]["across"][0]["cka"], dtype=torch.float64)
    torch.testing.assert_close(found, expected.values, atol=1e-6, rtol=0)


def test_finished_pieces_are_not_measured_again(tmp_path, monkeypatch):
    done = []
    assert report.stage("one", tmp_path, 3, lambda i: done.append(i) or {"n": torch.tensor(i)})[2]["n"] == 2

    def broken(i):
        done.append(i)
        if i == 4:
            raise KeyboardInterrupt
        return {"n": torch.tensor(i)}

    with pytest.raises(KeyboardInterrupt):
        report.stage("one", tmp_path, 6, broken)
    parts = report.stage("one", tmp_path, 6, lambda i: done.append(i) or {"n": torch.tensor(i)})
    assert done == [0, 1, 2, 3, 4, 4, 5] and [int(part["n"]) for part in parts] == list(range(6))


def test_other_settings_weights_or_images_are_another_run(made):
    args, batch = report.arguments(made[2]), torch.zeros(1)
    nets = [report.networks(args, True, seed, torch.device("cpu")) for seed in (0, 0, 1)]
    same, again, other = (report.fingerprint(args, net, batch) for net in nets)
    changed = report.arguments([*made[2], "--batch", "4"])
    assert same == again and len({same, other, report.fingerprint(changed, nets[0], batch),
                                  report.fingerprint(args, nets[0], batch + 1)}) == 4


def test_without_weights_it_stops_and_names_the_ways_on(monkeypatch, capsys, tmp_path):
    def no_hub(*_, **options):
        raise OSError("no network")
    monkeypatch.setattr(zoo.timm, "create_model", no_hub)
    assert report.main(["resnet50", "--n", "16", "--out", str(tmp_path / "r.html")]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("resnet50", "--checkpoint resnet50=FILE", "--random-weights", "network once"))
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("given, said", [
    (["test_vit", "--checkpoint", "test_vit=absent.safetensors"], "no checkpoint at"),
    (["resnet5O", "--random-weights"], "no model is called"),
    (["test_vit", "--random-weights", "--images", "nowhere-at-all"], "does not exist"),
])
def test_what_cannot_be_is_said_in_a_sentence(given, said, capsys, tmp_path):
    assert report.main([*given, "--out", str(tmp_path / "r.html")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given, said", [
    (["test_vit", "test_vit"], "LABEL=name"),
    (["test_vit", "--n", "4"], "at least 16"),
    (["test_vit", "--checkpoint", "FILE"], "should be NAME="),
    (["test_vit", "--no-normalise", "resnet50"], "none of the networks"),
    (["test_vit", "--n", "16", "--batch", "9"], "two batches"),
])
def test_arguments_that_make_no_sense(given, said, capsys):
    with pytest.raises(SystemExit):
        report.arguments(given)
    assert said in capsys.readouterr().err


def test_checkpoint_with_and_without_classifier_and_options(tmp_path):
    from safetensors.torch import save_file
    model = zoo.load("test_resnet", random=True, seed=3)
    for name, keys in (("whole", model.state_dict()), ("bare", {k: v for k, v in model.state_dict().items() if k[:3] != "fc."})):
        save_file(keys, tmp_path / f"{name}.safetensors")
        args = report.arguments([f"{name}=test_resnet", "--checkpoint", f"{name}={tmp_path / name}.safetensors",
                                 "--no-normalise", name, "--size", "40"])
        network = report.networks(args, False, 0, torch.device("cpu"))[name]
        assert torch.equal(network.model.conv1[0].weight, model.conv1[0].weight)
        pixels = torch.rand(1, 3, 40, 40)
        assert torch.equal(network.prepare(pixels), pixels)


def test_memory_of_a_part_does_not_hold_gram_matrices():
    args = report.arguments(["test_vit", "--random-weights", *SETTINGS])
    network = report.networks(args, True, 0, torch.device("cpu"))["test_vit"]
    sizes = []
    for n in (8, 16):
        images = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        network.look_at(images)
        part = onepass.measure([network], images)
        sizes.append(sum(v.numel() for v in (*part["plain"].values(), *part["freed"].values())))
    assert sizes[0] == sizes[1] == 2 * (6 * 6 + 6 + 6)


def test_copies_of_the_patches_keep_all_of_their_place():
    """A network whose tokens are the patches themselves: convolution and untrained blocks aside, share kept is 1."""
    images = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    args = report.arguments(["test_resnet", "--random-weights", *SETTINGS])
    network = report.networks(args, True, 0, torch.device("cpu"))["test_resnet"]
    network.look_at(images)
    part = onepass.measure([network], images)
    part["test_resnet"]["tokens"] = part["test_resnet"]["copies"]
    sample = rules.Sample(onepass.Results({"test_resnet": network}, [part]))
    assert sample.kept("test_resnet") == 1 and sample.sharpness("test_resnet") > 0.5


def test_stage_contrast_of_a_block_map_and_of_a_smooth_one():
    stage = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    at = torch.arange(7)
    blocky = (stage[:, None] == stage).double()
    smooth = 1 - (at[:, None] - at).abs().double() / 10
    assert rules.stage_sizes(["layer1.0", "layer1.1", "layer1.2", *(f"layer2.{i}" for i in range(4))]) == [3, 4]
    assert rules.stage_contrast(blocky, [3, 4]) == 1
    assert abs(rules.stage_contrast(smooth, [3, 4])) < 1e-12
    assert rules.ends(smooth) == pytest.approx(1 - 5 / 10)


def test_a_rule_sets_the_trained_against_the_untrained():
    """Contrasts that are large, and no larger than before training, support nothing."""
    numbers = torch.linspace(1, 2, 32)

    class Fake:
        def __init__(self, shift):
            self.n_images, self.values, self.parts, self.fields = 32, numbers + shift, range(32), {}
            self.networks = {"v": onepass.Network("v", None, None, None)}

        def admits(self, *_):
            return True

        def each(self, *_):
            return self.values

    rule = rules.Rule("attention-distance", "claim.", "rule", "paper", "px", "images", ("distance",), False,
                      rules.over_untrained(lambda sample, vit, cnn: sample.mean(vit, "x")[None]))
    outcome = [rules.apply(rule, Fake(0), Fake(shift), "v", None) for shift in (-1, 0, 1)]
    assert all(isinstance(found, Verdict) for found in outcome)
    assert [found.holds for found in outcome] == [True, False, False]
    assert [found.value for found in outcome] == pytest.approx([1, 0, -1])
    assert "transformer" in rules.apply(rule, Fake(0), Fake(0), None, "v")


def test_a_share_of_the_depth_is_never_empty():
    for depth in range(1, 40):
        for low, high in ((0, 1 / 6), (5 / 6, 1), (0, 1 / 4), (1 / 4, 7 / 12), (1 / 3, 2 / 3)):
            assert len(range(depth)[rules._share(range(depth), low, high)]) >= 1
    assert rules._share(range(12), 5 / 6, 1) == slice(10, 12) and rules._share(range(12), 1 / 4, 7 / 12) == slice(3, 7)


def test_rules_are_applied_to_trained_networks(tmp_path):
    """The lab's pair, few images: the numbers are rough, but every rule gives a verdict."""
    out = tmp_path / "lab.html"
    assert report.main(["vit", "resnet", "--n", "32", "--batch", "16", "--field-images", "8", "--field-draws", "1",
                        "--out", str(out)]) == 0
    findings = json.loads(out.with_suffix(".json").read_text())["findings"]
    assert len(findings) == 7 and all(found["rule"] and found["margins"] for found in findings.values())
