"""Run a model over batches of images and keep something of chosen layers, as each layer computes it.

This is the only module that touches hooks.  `keep` is applied inside the hook, so that what a layer computed can be
replaced by something small (a Gram matrix, a mean, a norm) before the next layer runs: memory then grows neither
with depth nor, with `stream`, with the number of images.  The model is left as it was found.

Layer names are those of `model.named_modules()`.  `"blocks.3"` is that module's output and `"blocks.3:input"` its
first input.  A module that runs several times in one pass gives `"relu"`, `"relu#2"`, `"relu#3"`, … one entry a call;
ask for `"relu#2"` to keep that call alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from torch import Tensor, nn

IMAGE_KEYS = ("image", "images", "pixel_values")
LARGEST_SENSIBLE_PIXEL = 32.0  # images in [0, 1], standardised or not, stay far below; 0-255 does not


def flatten(output: Tensor) -> Tensor:
    """(n, …) to (n, features): the default `keep`."""
    return output.flatten(1)


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
    """Every module below the model by name, without the prefixes that torch.compile puts in."""
    named = unwrap(model).named_modules(remove_duplicate=False)
    return {name.replace("_orig_mod.", "").replace("._orig_mod", ""): module for name, module in named if name}


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the processor for a model without any."""
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def images_of(batch) -> Tensor:
    """The images of a batch: a tensor, the first item of a tuple or list, or a dict's "image" or "pixel_values"."""
    if isinstance(batch, dict):
        keys = [key for key in IMAGE_KEYS if key in batch]
        if not keys:
            raise ValueError(f"a batch is a dict with keys {list(batch)}; its images must be under one of {IMAGE_KEYS}")
        batch = batch[keys[0]]
    elif isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise ValueError(f"a batch must be a tensor of images, or a tuple that starts with one, not {type(batch).__name__}")
    return batch


@contextmanager
def evaluating(model: nn.Module):
    """The model in eval mode; every module's own mode is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def watch(model: nn.Module, layers: Iterable[str], keep: Callable = flatten, grad: bool = False):
    """Yield a dict that the next forward pass fills with `keep(value)` of each layer, in the order they run.

    With `grad=True` nothing is detached, so that gradients can be taken from what is kept.  A layer that returns a
    tuple or a dict gives its first tensor.  Raises ValueError for unknown or repeated names, and when `keep` fails.
    """
    wanted, modules, kept, calls, handles = _checked(layers), modules_of(model), {}, {}, []

    def keeper(name):
        def take(values):
            calls[name] = calls.get(name, 0) + 1
            key = name if calls[name] == 1 else f"{name}#{calls[name]}"
            if name in wanted or key in wanted:
                kept[key] = _keep(keep, _first_tensor(values, name), name, grad)
        return take

    def start_of_pass(*_):
        kept.clear()
        calls.clear()

    sites = dict.fromkeys(re.sub(r"#\d+$", "", layer) for layer in wanted)
    _check_known([site.removesuffix(":input") for site in sites], modules)
    try:
        handles.append(unwrap(model).register_forward_pre_hook(start_of_pass))
        for site in sites:
            module, take = modules[site.removesuffix(":input")], keeper(site)
            if site.endswith(":input"):
                hook = lambda _, args, kwargs, take=take: take([*args, *kwargs.values()])  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(lambda _, args, output, take=take: take(output)))
        with torch.compiler.set_stance("force_eager"):  # code compiled before would not see the hooks
            yield kept
    finally:
        for handle in handles:
            handle.remove()


def stream(model: nn.Module, batches, layers: Iterable[str], keep: Callable = flatten,
           progress: bool = False) -> Iterator[dict[str, Tensor]]:
    """For each batch, a dict of `keep(output)` by layer, in the order of `layers`; nothing is accumulated.

    `batches`: anything to loop over, of tensors (n, channels, height, width), tuples that start with one, or dicts
    with an "image"; a single tensor is one batch.  Images move to the model's device and precision.
    Between two batches the model carries no hook and is in its own mode.  Raises ValueError for bad images, for
    images that the model cannot take, and for layers that never ran.
    """
    layers, model, count = _checked(layers), unwrap(model), 0
    _check_known([re.sub(r"#\d+$", "", layer).removesuffix(":input") for layer in layers], modules_of(model))
    for count, batch in enumerate(_loop(batches, progress), start=1):  # noqa: B007
        images = check_images(images_of(batch))
        with evaluating(model), watch(model, layers, keep) as kept:
            run(model, images)
        yield _in_order(kept, layers)
    if count == 0:
        raise ValueError("there were no batches: the loader is empty, or a generator that has already been used up")


def record(model: nn.Module, batches, layers: Iterable[str], keep: Callable = flatten,
           progress: bool = False) -> dict[str, Tensor]:
    """`stream`, with the results of all batches concatenated along dimension 0, on the processor."""
    parts: dict[str, list[Tensor]] = {}
    for kept in stream(model, batches, layers, keep, progress):
        for name, value in kept.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat([torch.atleast_1d(value) for value in values]) for name, values in parts.items()}


def run(model: nn.Module, images: Tensor):
    """One forward pass without gradients, the images moved to the model's device and precision."""
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.no_grad():
            return model(images.to(device_of(model), next(floats, images.dtype)))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the model could not take images of shape {tuple(images.shape)}; it needs "
                         f"(n, {', '.join(map(str, expected_size(model)))}). It said: {error}") from error


def expected_size(model: nn.Module) -> tuple:
    """(channels, height, width) that a model asks for, as far as it says; "any" where it does not."""
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), "channels")
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size or (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (0, "height", "width"))[1:]
    return (channels, *size)


def check_images(images: Tensor) -> Tensor:
    """The images themselves, or a ValueError that says what is wrong with them; a warning when they look like 0-255."""
    if images.ndim != 4 or images.shape[0] == 0:
        raise ValueError(f"images must have shape (n, channels, height, width) with n ≥ 1, not {tuple(images.shape)}"
                         + "; add the batch axis with images[None]" * (images.ndim == 3)
                         + "; was (images, labels) given where a list of batches was meant?" * (images.ndim == 1))
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; they must be floating point in [0, 1]: use images.float() / 255")
    low, high = map(float, images.aminmax())
    if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN too
        bad = int((~images.isfinite()).flatten(1).any(1).sum())
        raise ValueError(f"{bad} of {len(images)} images hold NaN or infinite pixels")
    if max(-low, high) > LARGEST_SENSIBLE_PIXEL:
        warnings.warn(f"pixels run from {low:g} to {high:g}: models expect [0, 1], standardised or not. "
                      "Were the images left at 0-255?", stacklevel=2)
    return images


def _loop(batches, progress: bool) -> Iterable:
    batches = [batches] if isinstance(batches, (Tensor, dict)) else batches
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise ValueError(f"batches must be something to loop over, not {type(batches).__name__}")
    if progress:
        from tqdm.auto import tqdm
        return tqdm(batches, unit="batch")
    return batches


def _checked(layers: Iterable[str]) -> list[str]:
    layers = [layers] if isinstance(layers, str) else list(layers)
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice or not layers:
        raise ValueError(f"layers given twice: {twice}" if twice else "no layers were given")
    return layers


def _check_known(names: Iterable[str], modules: dict[str, nn.Module]) -> None:
    for name in names:
        if name not in modules:
            near = get_close_matches(name, modules, n=3, cutoff=0.4) or list(modules)[:3]
            raise ValueError(f"the model has no layer {name!r}; the nearest are {near}")


def _first_tensor(values, name: str) -> Tensor:
    while isinstance(values, (tuple, list, dict)):
        inner = list(values.values()) if isinstance(values, dict) else list(values)
        values = next((v for v in inner if isinstance(v, (Tensor, tuple, list, dict))), None)
    if not isinstance(values, Tensor):
        raise ValueError(f"layer {name!r} gave no tensor but {type(values).__name__}")
    return values


def _keep(keep: Callable, value: Tensor, name: str, grad: bool):
    value = value if grad else value.detach()
    try:
        kept = keep(value)
    except Exception as error:
        raise ValueError(f"keep failed on layer {name!r}, of shape {tuple(value.shape)}: {error}") from error
    if isinstance(kept, Tensor) and kept.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        return kept.clone()  # a view: the next layer may write over it in place
    return kept


def _in_order(kept: dict, layers: list[str]) -> dict:
    missing = [layer for layer in layers if layer not in kept]
    if missing:
        raise ValueError(f"layers {missing} never ran in the forward pass, so there is nothing to keep of them")
    place = {layer: i for i, layer in enumerate(layers)}
    return dict(sorted(kept.items(), key=lambda item: place.get(item[0], place.get(item[0].split("#")[0]))))


def layers(model: nn.Module, every: str = "block") -> list[str]:
    """Names of layers to compare, in forward order: "block", one a residual block; "fine", about 6 or 7 a block."""
    if every not in ("block", "fine"):
        raise ValueError(f'every must be "block" or "fine", not {every!r}')
    blocks = _blocks(modules_of(model))
    return blocks if every == "block" else blocks


def _blocks(modules: dict[str, nn.Module]) -> list[str]:
    found: list[str] = []
    for name, module in modules.items():
        inside = any(name.startswith(block + ".") for block in found)
        if not inside and _is_block(name, module):
            found.append(name)
    return found or [name for name, module in modules.items() if not list(module.children())]


def _is_block(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    container = isinstance(module, (nn.Sequential, nn.ModuleList)) or re.search("Stage|BasicLayer", kind)
    numbered = name.rsplit(".", 1)[-1].isdigit()
    return bool(list(module.children())) and not container and (numbered or bool(re.search("Block|Bottleneck", kind)))
