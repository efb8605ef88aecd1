"""Similarity of images to one another, and how much two such similarities agree: Gram matrices and HSIC.

Song et al. 2012 (the unbiased HSIC₁), Székely and Rizzo 2014 (its centred form). n images throughout.

Three choices keep the numbers right. Features whose mean over the images is large beside what differs between
images are centred before they are multiplied (HSIC does not change, rounding does). Products are float32 or
wider, sums are float64. HSIC comes from centred Gram matrices, never from a difference of large terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**22  # numbers multiplied at a time on a processor: so many that a chunk's own costs do not count
LARGE_MEAN = 30  # energy of the mean over energy of the differences, above which features are centred first
SMALLEST = {True: 4, False: 2}  # images from which the unbiased, and the biased, HSIC can be estimated


def gram(features, kernel: str = "linear", bandwidth: float = 0.5) -> Tensor:
    """Similarity of every image with every other: features (n, …) to (n, n) float64.

    "linear": inner products of the features, centred over the images. "rbf": exp(-distance² / (2 σ²)) where σ
    is `bandwidth` times the median distance. Raises ValueError for features that are NaN or infinite.
    """
    features = torch.as_tensor(features)
    if features.ndim == 0 or features.numel() == 0 or features.is_complex():
        raise ValueError(f"features must be real (n, …), not {features.dtype} {tuple(features.shape)}")
    if kernel not in ("linear", "rbf") or bandwidth <= 0:
        raise ValueError(f'kernel must be "linear" or "rbf", bandwidth > 0, not {kernel!r}, {bandwidth}')
    K = raw_gram(features if features.is_floating_point() else features.double(), kernel, bandwidth)
    if not K.isfinite().all():
        raise ValueError(f"features {tuple(features.shape)} hold NaN or infinite values, or too large ones")
    return K


def raw_gram(features: Tensor, kernel: str = "linear", bandwidth: float = 0.5) -> Tensor:
    """`gram` without its checks: NaN features give a NaN Gram matrix."""
    # (n, …) to (n, features), axes in the order of memory: no copy for channels-last, products do not mind
    axes = sorted(range(1, features.ndim), key=features.stride, reverse=True)
    flat = features.permute(0, *axes).reshape(len(features), -1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    rounding = len(flat) * (2 * torch.finfo(wide).eps) ** 2
    K = _products(flat, wide)
    energy = float(K.trace())
    constant = energy == 0 and torch.equal(flat, flat[:1].expand_as(flat))
    if wide != torch.float64 and not constant and not 1e-30 < energy < float("inf"):  # over- or underflow
        wide = torch.float64
        K = _products(flat, wide)
        energy = float(K.trace())
    first = flat[0].to(wide)
    if energy <= rounding * float(first.dot(first)) < float("inf"):
        K = torch.zeros_like(K)  # constant over the images but for rounding
    return K if kernel == "linear" else _rbf(K, bandwidth)


def centre(K: Tensor, unbiased: bool = True) -> Tensor:
    """Gram matrices (…, n, n) with row and column means taken off, in float64; centring twice changes
    nothing.

    Biased: H K H with H = I - 11ᵀ/n. Unbiased: the same idea for the off-diagonal entries alone, with a zero
    diagonal (Székely and Rizzo 2014, definition 2). A matrix of which only rounding is left becomes exactly
    0.
    """
    K = K.double()
    size = _largest(K)
    K = K - K.mean(-1, keepdim=True) - K.mean(-2, keepdim=True) + K.mean((-2, -1), keepdim=True)
    K = K * (_largest(K) > 1e-13 * size)
    if not unbiased:
        return K
    n, size = K.shape[-1], _largest(K)
    off_diagonal = 1 - torch.eye(n, dtype=K.dtype, device=K.device)
    K = K * off_diagonal
    rows = K.sum(-1, keepdim=True)  # (…, n, 1), and the column sums too, since a Gram matrix is symmetric
    total = rows.sum(-2, keepdim=True)
    K = (K - (rows + rows.mT) / (n - 2) + total / ((n - 1) * (n - 2))) * off_diagonal
    return K * (_largest(K) > 1e-6 * size)  # products were float32


def hsic(K, L, unbiased: bool = True) -> Tensor:
    """Hilbert-Schmidt independence criterion of two Gram matrices (n, n): how much their similarities agree,
    ().

    Biased: tr(K H L H) / (n - 1)² (Gretton et al. 2005). Unbiased: HSIC₁ (Song et al. 2012), which is 0 on
    average for independent features and therefore sometimes negative.
    """
    K, L = torch.as_tensor(K), torch.as_tensor(L)
    if K.ndim != 2 or K.shape[0] != K.shape[1] or K.shape != L.shape:
        raise ValueError(f"hsic needs two (n, n) Gram matrices of the same images, not {tuple(K.shape)} and "
                         f"{tuple(L.shape)}; features become one with gram(features)")
    return (centre(K, unbiased) * centre(L, unbiased)).sum() / pairs(len(K), unbiased)


def deconfound(K: Tensor, K_input: Tensor, unbiased: bool = True) -> Tensor:
    """Gram matrices (…, n, n) without what the similarity of the inputs, K_input (n, n), explains of them.

    The residual of a regression of the centred K on the centred K_input (Cui et al. 2022): two networks may
    agree only because the same pictures look alike to any network. ValueError for a K_input of other images.
    """
    K, K_input = torch.as_tensor(K), torch.as_tensor(K_input)
    if K_input.ndim != 2 or K_input.shape != K.shape[-2:]:
        raise ValueError(f"K_input must be one (n, n) Gram matrix, of the same images as K {tuple(K.shape)}, "
                         f"not {tuple(K_input.shape)}; for several inputs, call deconfound for each")
    K, K_input = centre(K, unbiased), centre(K_input, unbiased)
    shared = (K * K_input).sum((-2, -1), keepdim=True)
    slope = shared / K_input.square().sum().clamp_min(torch.finfo(K.dtype).tiny)
    residual = K - slope * K_input
    return residual * (_largest(residual) > 1e-6 * _largest(K))


def pairs(n: int, unbiased: bool) -> int:
    """What HSIC divides by for n images; ValueError when there are too few to estimate it."""
    if n < SMALLEST[unbiased]:
        name = "unbiased" if unbiased else "biased"
        raise ValueError(f"{n} images: the {name} HSIC needs at least {SMALLEST[unbiased]} in a batch; "
                         "use larger batches" + " or unbiased=False" * (unbiased and n > 1))
    return n * (n - 3) if unbiased else (n - 1) ** 2


def _products(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products (n, n) of the centred rows of (n, features).

    Centring (n, n) matrices afterwards costs nothing, centring features half as much as multiplying them, so
    that is done only from the first chunk on whose mean is so large that the digits would not suffice.
    """
    n, centred = len(flat), False
    chunk = flat.shape[1] if flat.device.type != "cpu" else max(CHUNK // n, 1)
    K = torch.zeros(n, n, dtype=torch.float64, device=flat.device)
    with torch.autocast(flat.device.type, enabled=False):
        for part in flat.split(chunk, dim=1):
            part = part.to(dtype)
            if not centred:
                product = part @ part.T
                mean, whole = float(product.sum() / n), float(product.trace())  # energies
                centred = mean > LARGE_MEAN * (whole - mean)
            if centred:
                part = part - part.mean(0)
                product = part @ part.T
            K += product
    K -= K.mean(0)
    return K - K.mean(1, keepdim=True)


def _rbf(K: Tensor, bandwidth: float) -> Tensor:
    norms = K.diagonal()
    squares = (norms[:, None] + norms - 2 * K).clamp_min(0)
    ordered = squares.flatten().sort().values
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return torch.where(squares == 0, 1.0, torch.exp(-squares / (2 * bandwidth**2 * median)))


def _largest(K: Tensor) -> Tensor:
    return K.abs().amax((-2, -1), keepdim=True)
