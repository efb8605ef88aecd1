"""The libraries that do the course's job, each called as its documentation says: name -> (values, what they are).

A contender gets (models, layers, loader): two networks in eval mode, the names of their layers, and a loader of
(images, labels). It returns the CKA matrix and the estimator that it says it computes, which decides the
reference that it is held against: "minibatch" or "full" (all images at once), "unbiased" or "biased".
Libraries that take features, not networks, get the layers' outputs of all images, stored in float32.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings

import numpy as np
import torch


def stored_features(models, layers, loader) -> list[list[torch.Tensor]]:
    """What plain hooks give when everything is kept: for each network, a list of (n, features) float32."""
    kept = [{name: [] for name in names} for names in layers]
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, parts=parts, name=name: parts[name].append(output.flatten(1))
        )
        for model, parts in zip(models, kept, strict=True) for name in parts
    ]
    with torch.inference_mode():
        for images, _ in loader:
            for model in models:
                model(images)
    for handle in handles:
        handle.remove()
    return [[torch.cat(parts.pop(name)) for name in list(parts)] for parts in kept]


def plain_numpy(models, layers, loader):
    X, Y = ([_centred(f.numpy() @ f.numpy().T) for f in side] for side in stored_features(models, layers, loader))
    values = [[(K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum()) for L in Y] for K in X]
    return values, "full biased"


def _centred(K):
    return K - K.mean(0) - K.mean(1)[:, None] + K.mean()


def torch_cka(models, layers, loader):
    from torch_cka import CKA

    cka = CKA(*models, "x", "y", *layers, device="cpu")
    cka.compare(loader)
    return cka.export()["CKA"], "minibatch unbiased"


def cka_pytorch(models, layers, loader):
    from cka_pytorch import CKACalculator

    cka = CKACalculator(*models, *layers, device=torch.device("cpu"), verbose=False)
    values = cka.calculate_cka_matrix(loader, num_epochs=1)
    rows, columns = cka.hook_manager1.module_names, cka.hook_manager2.module_names
    cka.reset()
    return values[[rows.index(n) for n in layers[0]]][:, [columns.index(n) for n in layers[1]]], "minibatch unbiased"


def pytorch_cka(models, layers, loader):
    from cka import compute_cka

    values = compute_cka(*models, loader, layers=layers[0], model2_layers=layers[1], device="cpu", progress=False)
    return values[0], "minibatch unbiased"


def ckatorch(models, layers, loader):
    # its class compares the tokens inside an image and takes no feature maps, so its function for two matrices
    from ckatorch import cka_base

    X, Y = stored_features(models, layers, loader)
    return [[cka_base(x, y, unbiased=True).item() for y in Y] for x in X], "full unbiased"


def thingsvision(models, layers, loader):
    # the package imports TensorFlow before anything else; its CKA alone needs none of that
    if "thingsvision" not in sys.modules:
        spec = importlib.util.find_spec("thingsvision")
        if spec is None:
            raise ImportError("No module named 'thingsvision'")
        for name, inside in (("thingsvision", ""), ("thingsvision.core", "/core")):
            package = types.ModuleType(name)
            package.__path__ = [spec.submodule_search_locations[0] + inside]
            sys.modules[name] = package
    from thingsvision.core.cka import get_cka

    X, Y = stored_features(models, layers, loader)
    cka = get_cka("torch", m=len(X[0]), kernel="linear", unbiased=True, device="cpu")
    return [[float(cka.compare(x, y)) for y in Y] for x in X], "full unbiased"


def repsim(models, layers, loader, estimator="gretton", meant="full biased"):
    from repsim import cka

    X, Y = stored_features(models, layers, loader)
    values = cka([f.numpy() for f in X + Y], kernel_type="linear", estimator=estimator)
    return values[:len(X), len(X):], meant


def repsim_song(models, layers, loader):
    return repsim(models, layers, loader, "song", "full unbiased")


CKA = {
    "plain numpy": plain_numpy, "torch-cka": torch_cka, "cka-pytorch": cka_pytorch, "pytorch-cka": pytorch_cka,
    "ckatorch": ckatorch, "thingsvision": thingsvision, "repsim": repsim,
    "repsim, song": repsim_song,
}


def openerf(model, layer, images):
    """Its inner loop, an image at a time, without reading files: (H, W), negative gradients cut."""
    from openerf.erf import _compute_positive_input_gradients_from_layer as gradients

    module = model.get_submodule(layer)
    return sum(gradients(model, image[None].clone().requires_grad_(), module, layer) for image in images)


def published_distance(patch_size: int, attention_weights: np.ndarray) -> np.ndarray:
    """The authors' published function, CLS removed by the caller: (B, h, p, p) -> (B, h)."""
    num_patches = attention_weights.shape[-1]
    length = int(np.sqrt(num_patches))
    assert length**2 == num_patches, "Num patches is not perfect square"
    distance_matrix = np.zeros((num_patches, num_patches))
    for i in range(num_patches):
        for j in range(num_patches):
            if i != j:  # zero distance
                xi, yi, xj, yj = i // length, i % length, j // length, j % length
                distance_matrix[i, j] = patch_size * np.linalg.norm([xi - xj, yi - yj])
    mean_distances = attention_weights * distance_matrix[None, None]
    return np.mean(np.sum(mean_distances, axis=-1), axis=-1)


warnings.filterwarnings("ignore", category=UserWarning)
