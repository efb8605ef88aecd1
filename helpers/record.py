"""Run a model over batches of images and keep something of chosen layers, as each layer computes it.

This is the only module that touches hooks. `keep` is applied inside the hook, so that what a layer computed
can be replaced by something small (a Gram matrix, a mean, a norm) before the next layer runs: memory then
grows neither with depth nor, with `stream`, with the number of images. The model is left as it was found.

Layer names are those of `model.named_modules()`. `"blocks.3"` is that module's output and `"blocks.3:input"`
its first input. A module that runs several times in one pass gives `"relu"`, `"relu#2"`, `"relu#3"`, … one
entry a call; ask for `"relu#2"` to keep that call alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from helpers.batches import check_images, expected_size, images_of, loop
from helpers.naming import blocks, check_known, details, modules_of, unwrap


def flatten(output: Tensor) -> Tensor:
    """(n, …) to (n, features): the default `keep`."""
    return output.flatten(1)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the processor for a model without any."""
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


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

    With `grad=True` nothing is detached, so that gradients can be taken from what is kept. A layer that
    returns a tuple or a dict gives its first tensor. Raises ValueError for unknown or repeated names, and
    when `keep` fails.
    """
    wanted, modules, kept, calls, handles = checked(layers), modules_of(model), {}, {}, []

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
    check_known([site.removesuffix(":input") for site in sites], modules)
    try:
        handles.append(unwrap(model).register_forward_pre_hook(start_of_pass))
        for site in sites:
            module, take = modules[site.removesuffix(":input")], keeper(site)
            if site.endswith(":input"):
                hook = lambda _, args, kwargs, take=take: take([*args, *kwargs.values()])  # noqa: E731
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(lambda _, args, output, take=take: take(output)))
        with _eagerly():
            yield kept
    finally:
        for handle in handles:
            handle.remove()


def layers(model: nn.Module, every: str = "block", images: Tensor | None = None) -> list[str]:
    """Names of layers to compare, in forward order: "block", one a residual block; "fine", about 6 or 7 a
    block.

    The order is found by sending one image through, which also drops names that never run and names that
    would give the very same tensor as an earlier one. `images` (n, channels, height, width) is needed only
    for a model that does not say its input size; where no image goes through, the order is that of the
    modules' registration.
    """
    if every not in ("block", "fine"):
        raise ValueError(f'every must be "block" or "fine", not {every!r}')
    modules = modules_of(model)
    names = (blocks if every == "block" else details)(modules)
    for image in _trial_images(unwrap(model)) if images is None else [images[:1]]:
        try:
            with evaluating(model), watch(model, names, _identity, grad=True) as kept:
                run(unwrap(model), image)
        except ValueError:
            continue
        first: dict[tuple, str] = {}  # for each tensor; a block before what is in it
        outputs = {name for name in blocks(modules) if any(modules[name].children())}
        for name, (value, version) in kept.items():
            if "#" not in name and ((id(value), version) not in first or name in outputs):
                first[id(value), version] = name
        return list(first.values())
    return names


def _trial_images(model: nn.Module) -> Iterator[Tensor]:
    """Images that the model may take, likeliest first."""
    channels, *size = expected_size(model)
    for depth in dict.fromkeys([channels if isinstance(channels, int) else 3, 3]):
        for sides in [size] if isinstance(size[0], int) else [(64, 64), (224, 224)]:
            yield torch.zeros(1, depth, *sides)


def _identity(value: Tensor) -> tuple[Tensor, int]:
    """What tells one tensor from another, while it is held: the object, and how often it was written in
    place.
    """
    return value, value._version


def observe(model: nn.Module, images: Tensor, layers: Iterable[str], keep: Callable = flatten,
            fast: bool = False) -> dict:
    """One forward pass of images (n, channels, height, width): `keep(output)` by layer, as ordered."""
    layers, model = checked(layers), unwrap(model)
    with evaluating(model), watch(model, layers, keep) as kept:
        run(model, images, fast)
    return in_order(kept, layers)


def stream(model: nn.Module, batches, layers: Iterable[str], keep: Callable = flatten,
           progress: bool = False) -> Iterator[dict[str, Tensor]]:
    """For each batch, a dict of `keep(output)` by layer, in the order of `layers`; nothing is accumulated.

    `batches`: anything to loop over, of tensors (n, channels, height, width), tuples that start with one, or
    dicts with an "image"; a single tensor is one batch. Images move to the model's device and precision.
    Between two batches the model carries no hook and is in its own mode. Raises ValueError for bad images,
    for images that the model cannot take, and for layers that never ran.
    """
    count = 0
    layers = checked(layers)
    for count, batch in enumerate(loop(batches, progress), start=1):  # noqa: B007
        yield observe(model, check_images(images_of(batch)), layers, keep)
    if count == 0:
        raise ValueError("there were no batches: an empty loader, or a generator that was already used up")


def record(model: nn.Module, batches, layers: Iterable[str], keep: Callable = flatten,
           progress: bool = False) -> dict[str, Tensor]:
    """`stream`, with the results of all batches concatenated along dimension 0, on the processor."""
    parts: dict[str, list[Tensor]] = {}
    for kept in stream(model, batches, layers, keep, progress):
        for name, value in kept.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat([torch.atleast_1d(value) for value in values]) for name, values in parts.items()}


def run(model: nn.Module, images: Tensor, fast: bool = False):
    """One forward pass without gradients, the images moved to the model's device and precision.

    `fast`: convolutions and matrix products in bfloat16 (autocast) where there are instructions for it, and
    a network of convolutions in channels-last order. Only the images change their layout, and autocast
    makes its own copies of the weights: the model stays as it is.
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    device = device_of(model)
    images = images.to(device, next(floats, images.dtype))
    if fast and sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1:
        images = images.to(memory_format=torch.channels_last)
    half = fast and images.dtype == torch.float32 and has_bfloat16(device)
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
            return model(images)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the model could not take images of shape {tuple(images.shape)}; it needs "
                         f"(n, {', '.join(map(str, expected_size(model)))}). It said: {error}") from error


def has_bfloat16(device: torch.device) -> bool:
    """Whether there are instructions for bfloat16, which without them is slower than float32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _eagerly():
    """Without code compiled before, blind to the hooks; only if already imported, being slow."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def checked(layers: Iterable[str]) -> list[str]:
    """Layer names as a list, a single one included; ValueError for none, and for one given twice."""
    layers = [layers] if isinstance(layers, str) else list(layers)
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice or not layers:
        raise ValueError(f"layers given twice: {twice}" if twice else "no layers were given")
    return layers


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


def in_order(kept: dict, layers: list[str]) -> dict:
    """What was kept of these layers, in their order, every call; ValueError for one that never ran."""
    missing = [layer for layer in layers if layer not in kept]
    if missing:
        raise ValueError(f"layers {missing} never ran in the forward pass: there is nothing to keep of them")
    place = {layer: i for i, layer in enumerate(layers)}
    found = {name: place.get(name, place.get(name.split("#")[0])) for name in kept}
    return {name: kept[name] for name in sorted((k for k in kept if found[k] is not None), key=found.get)}
