"""The models: the lab's own checkpoints by short name, and any timm model by its timm name.

Whatever `load` returns is in eval mode, on the CPU, in float32, and *trained*, unless
untrained weights were asked for in so many words.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from .shapes import SHAPES, TEXTURES
from .skips import remove_skip

WEIGHTS = Path(__file__).parent / "weights"
LAYER_SCALE = re.compile(r"gamma(_\w+|\d)?")  # timm's names of LayerScale's parameters, in ViTs and elsewhere
OUTPUTS = len(SHAPES) + len(TEXTURES)  # a lab model's logits: shape first, then background texture
# EfficientNet-B0's seven stages in timm's notation: block, repeats, kernel, stride, expansion, channels
# (about 0.4 times B0's), squeeze-and-excitation. Strides are such that stages work at 32, 16, 8 and 4 px.
EFFNET = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e6_c16_se0.25"], ["ir_r2_k5_s2_e6_c16_se0.25"],
          ["ir_r3_k3_s2_e6_c32_se0.25"], ["ir_r3_k5_s1_e6_c48_se0.25"], ["ir_r4_k5_s1_e6_c72_se0.25"],
          ["ir_r1_k3_s1_e6_c128_se0.25"]]


class StandardisingConv2d(nn.Conv2d):
    """A convolution that first maps the lab's pixels (mean 0.5, deviation 0.2) to mean 0, deviation 1.

    It stands at the entrance of the lab's models, so they take images in [0, 1] as they are drawn.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x - 0.5) / 0.2)

    @classmethod
    def of(cls, conv: nn.Conv2d) -> StandardisingConv2d:
        """The same convolution, same weights, with the standardising in front."""
        new = cls(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
                  conv.dilation, conv.groups, conv.bias is not None)
        new.load_state_dict(conv.state_dict())
        return new


@dataclass(frozen=True)
class Card:
    """What a lab checkpoint is and how it came about; `facts` holds the whole JSON card."""

    name: str
    model: dict  # arguments of `build`
    accuracy: dict  # label -> [accuracy, low, high] on held-out images
    images: int  # images seen in training, repeats counted
    distinct: int | None  # how many different images those were; None: never the same image twice
    sha256: str
    facts: dict


def build(kind: str, *, seed: int = 0, heads: int = 4, pool: str = "token", cut: int | None = None,
          branch: str = "both", **options) -> nn.Module:
    """An untrained lab architecture, in eval mode, for images (n, 3, 32, 32) in [0, 1].

    kind "vit": timm's VisionTransformer, 12 blocks of width 64, patches of 4 px, so 8 x 8 tokens,
    and a CLS token unless `pool` is "avg"; queries and keys are normalised (it learns faster so).
    `cut` is a block without the skip connection of `branch` ("attn", "mlp" or "both").
    kind "resnet": timm's bottleneck ResNet of 3-4-6-3 units (ResNet-50's), narrower, with a
    stride-1 stem and no pooling after it, so that its stages work at 32, 16, 8 and 4 px.
    kind "mixer": timm's MLP-Mixer, 12 blocks of width 64 on the ViT's 8 x 8 tokens.
    kind "effnet": timm's EfficientNet with B0's 16 units in 7 stages, narrower, with a stride-1 stem.
    Other kinds are timm names, built for 32-pixel images with `options`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "vit":
            model = timm.create_model(
                "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=64, depth=12, num_heads=heads,
                num_classes=OUTPUTS, global_pool=pool, class_token=pool == "token", qk_norm=True, **options,
            )
            if cut is not None:
                remove_skip(model.blocks[cut], branch)
        elif kind == "resnet":
            widths = (10, 20, 40, 80)
            model = ResNet(Bottleneck, (3, 4, 6, 3), num_classes=OUTPUTS, channels=widths, **options)
            model.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        elif kind == "mixer":
            model = MlpMixer(num_classes=OUTPUTS, img_size=32, patch_size=4, num_blocks=12, embed_dim=64,
                             **options)
        elif kind == "effnet":
            model = EfficientNet(decode_arch_def(EFFNET), num_classes=OUTPUTS, num_features=256, stem_size=16,
                                 act_layer=nn.SiLU, **options)
            model.conv_stem.stride = (1, 1)
        else:
            model = timm.create_model(kind, num_classes=OUTPUTS, **options)
        name, first = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
        model.set_submodule(name, StandardisingConv2d.of(first))
    model.pretrained_cfg = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "input_size": (3, 32, 32)}
    return model.eval()


def cards() -> list[Card]:
    """The cards of all the lab's checkpoints, by name."""
    return [_card(path) for path in sorted(WEIGHTS.glob("*.json"))]


def load(name: str, checkpoint: str | Path | None = None, random: bool = False, seed: int = 0,
         **options) -> nn.Module:
    """A model by name, in eval mode, float32, on the CPU.

    A lab name ("vit", "resnet", see `cards`) gives the lab's checkpoint, checked against the
    sha256 on its card. Any other name is timm's: weights come from `checkpoint` (safetensors or
    a state dict; never unpickled), else from the hub. `random=True` gives the same architecture
    untrained, from `seed`. `options` go to `timm.create_model`.
    Raises ValueError for an unknown name or a file that does not fit, RuntimeError when there
    are no weights to be had.
    """
    if (WEIGHTS / f"{name}.json").exists() and checkpoint is None:
        card = _card(WEIGHTS / f"{name}.json")
        model = build(**card.model, **({"seed": seed} if random else {}), **options)
        return model if random else _fill(model, WEIGHTS / f"{name}.safetensors", card.sha256)
    if not timm.is_model(name):
        known = [card.name for card in cards()] + timm.list_models()
        near = difflib.get_close_matches(name, known, 4)
        raise ValueError(
            f"no model is called {name!r}. Nearest: {', '.join(near) or 'none'}. "
            f"The lab's are {', '.join(card.name for card in cards()) or 'not trained yet (make train)'}; "
            "all others are timm's names (timm.list_models())."
        )
    if random:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm.create_model(name, **options).eval()
    if checkpoint is not None:
        return _from_file(name, Path(checkpoint), options)
    try:
        return timm.create_model(name, pretrained=True, **options).eval()
    except Exception as error:  # the hub client raises many kinds; each means: no weights
        raise RuntimeError(
            f"no trained weights for {name!r}: the hub could not be reached or has none ({error}). "
            "Ways on: connect to the network once (they are kept in the cache), "
            f"load({name!r}, checkpoint=FILE), or, knowing that it is untrained, load({name!r}, random=True)."
        ) from error


def open_branches(model: nn.Module) -> nn.Module:
    """Set every learned scale of a residual branch (LayerScale) to 1, in place; returns the model.

    Many large ViTs start these scales at 1e-5 or 1e-6, so that an untrained block passes on its input and
    next to nothing else. As a control that is a network without branches; with scales of 1 it has them.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if LAYER_SCALE.fullmatch(name):
                parameter.data.fill_(1)
    return model


def transform(model: nn.Module, size: int | tuple[int, int] | None = None, mean=None, std=None):
    """The function from images (n, 3, H, W) in [0, 1] to what `model` was trained on.

    Resizes (bicubic, anti-aliased) to the model's own size unless the images have it, then
    normalises with the model's mean and standard deviation. `size`, `mean` and `std` override
    what the model says of itself. A lab model's transform changes nothing.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    mean = torch.tensor(mean if mean is not None else config.get("mean", (0.0,) * 3)).view(1, 3, 1, 1)
    std = torch.tensor(std if std is not None else config.get("std", (1.0,) * 3)).view(1, 3, 1, 1)
    if size is None:
        size = config.get("input_size", (3, 224, 224))[-2:]
    size = (size, size) if isinstance(size, int) else tuple(size)

    def apply(images: torch.Tensor) -> torch.Tensor:
        if tuple(images.shape[-2:]) != size:
            images = nn.functional.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
        return (images - mean.to(images)) / std.to(images)

    return apply


def _card(path: Path) -> Card:
    try:
        facts = json.loads(path.read_text())
        return Card(facts["name"], facts["model"], facts["accuracy"], facts["images"], facts["distinct"],
                    facts["sha256"], facts)
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"the card {path.name} is damaged ({error!r}); restore helpers/weights "
                         "from the repository") from error


def _fill(model: nn.Module, path: Path, sha256: str | None = None) -> nn.Module:
    """Load a safetensors file into `model`, complaining in one sentence when it does not fit."""
    if not path.exists():
        raise ValueError(f"the weights {path.name} are missing; restore helpers/weights from the repository")
    if sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(
            f"{path.name} is not the file that its card describes (sha256 differs): it was cut short or "
            "changed on the way; restore helpers/weights from the repository or train it again"
        )
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path.name} does not fit this model: {error}") from error
    return model.eval()


def _from_file(name: str, path: Path, options: dict) -> nn.Module:
    """A timm model with weights from a file, its keys mapped by timm's own filter for the model."""
    if not path.exists():
        raise ValueError(f"no checkpoint at {path}")
    overlay = {"file": str(path)}
    if "num_classes" in options:  # timm would else load loosely, and leave what the file lacks at random
        overlay["num_classes"] = options["num_classes"]
    try:
        return timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, **options
        ).float().eval()
    except Exception as error:
        raise ValueError(
            f"{path.name} could not be read as weights of {name!r}: {error}. It must be a safetensors file "
            "or a plain state dict of this very model; a file without a classifier needs num_classes=0, one "
            "with a classifier must not be given it."
        ) from error
