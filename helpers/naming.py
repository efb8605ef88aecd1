"""Which modules of a network are worth comparing, by name and kind alone: residual blocks, and what is inside
them.

Made for timm's models (ViT, DeiT, BEiT, EVA, Swin, Mixer, ResNet, ResNetV2, ConvNeXt, EfficientNet, RegNet …)
and forgiving for others: a network without blocks gives its leaf modules. `record.layers` puts the names in
forward order.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from torch import nn

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM = re.compile(r"Norm(1|[123]d|Act|Fp32|B\d|S\d\w?)*$")  # LayerNorm2d, BatchNormAct2d; not NormMlpHead
SUBLAYER = re.compile(r"Attention|Attn|Squeeze|^SE")  # kept as a whole: what is inside is not listed
SUM_AFTER_ATTENTION = ("norm2", "ln_2", "layernorm_after")  # in a pre-norm block this norm reads that sum


def unwrap(model: nn.Module) -> nn.Module:
    """The plain module inside DataParallel, DistributedDataParallel or torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module below the model by name, as registered, without the prefixes of torch.compile."""
    named = unwrap(model).named_modules(remove_duplicate=False)
    clean = ((name.replace("_orig_mod.", "").removesuffix("._orig_mod"), module) for name, module in named)
    return {name: module for name, module in clean if name}


def check_known(names, modules: dict[str, nn.Module]) -> None:
    """ValueError for a name that is no module, with the nearest names there are."""
    for name in names:
        if name not in modules:
            near = get_close_matches(name, modules, n=3, cutoff=0.4) or list(modules)[:3]
            raise ValueError(f"the model has no layer {name!r}; the nearest are {near}")


def blocks(modules: dict[str, nn.Module]) -> list[str]:
    """The residual blocks; in a network without any, the modules that have no children."""
    found: list[str] = []
    for name, module in modules.items():
        if _is_block(name, module) and not _inside(name, found):
            found.append(name)
    return found or [name for name, module in modules.items() if not any(module.children())]


def details(modules: dict[str, nn.Module]) -> list[str]:
    """Blocks, norms, convolutions, attention, sums after attention and hidden layers of MLPs."""
    found = blocks(modules)
    whole = [name for name, module in modules.items() if _is_sublayer(module) and name not in found]
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if name in found or _inside(name, whole):
            continue
        if NORM.search(type(module).__name__):
            after_attention = last in SUM_AFTER_ATTENTION and any(w.startswith(parent + ".") for w in whole)
            found += [f"{name}:input", name] if after_attention else [name]
        elif last in ("fc1", "fc2"):
            in_mlp = re.search("mlp", parent.rpartition(".")[2] + type(modules.get(parent)).__name__, re.I)
            found += [f"{name}:input"] if last == "fc2" and in_mlp else []
        elif isinstance(module, CONV) or name in whole:
            found.append(name)
    return found


def _inside(name: str, others: list[str]) -> bool:
    return any(name.startswith(other + ".") for other in others)


def _is_sublayer(module: nn.Module) -> bool:
    kind = type(module).__name__
    return bool(SUBLAYER.search(kind)) and not kind.endswith("Block")


def _is_block(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    if not any(module.children()) or isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    numbered = name.rpartition(".")[2].isdigit() and not re.search("Stage|BasicLayer", kind)
    return numbered or bool(re.search("Block$|Bottleneck", kind))
