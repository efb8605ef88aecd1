"""One measurement in a process of its own: python tests/bench/work.py TASK NAME IMAGES.pt [batch] [repeats]

Prints one line of JSON. Seconds are processor seconds of one thread; each repetition runs the bare forward
passes first, then the contender, so that a busy machine slows both. The peak is the process's largest
resident memory, bare passes included.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the course

import timm  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

MODELS = ("resnet18", "vit_tiny_patch16_224")
OURS = {f"helpers, {grain}, {kind}{', fast' * fast}": (grain, kind == "unbiased", fast)
        for fast in (False, True) for grain in ("block", "fine") for kind in ("unbiased", "biased")}


def networks(dtype=torch.float32):
    torch.manual_seed(0)
    return [timm.create_model(name).eval().to(dtype) for name in MODELS]


def seconds(work) -> tuple[float, object]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB to GiB


@torch.inference_mode()
def bare(models, loader):
    for images, _ in loader:
        for model in models:
            model(images)


def names_of(models, grain="block"):
    from helpers.record import layers

    return [layers(model, grain) for model in models]


def interleaved(first, second, repeats: int) -> dict:
    """Processor seconds of both, turn about, and what the second gave."""
    found = {"bare": [], "own": []}
    for _ in range(repeats):
        found["bare"].append(seconds(first)[0])
        own, result = seconds(second)
        found["own"].append(own)
    return found | {"peak": peak(), "result": result}


def cka(name: str, images, batch: int, repeats: int) -> dict:
    """A contender for all-pairs CKA; "bare passes" is the noise of the measurement itself."""
    models, loader = networks(), DataLoader(TensorDataset(images, torch.zeros(len(images))), batch)
    bare(models, [(images[:2], None)])
    inside = {"cka": 0.0}
    if name in OURS:
        grain, unbiased, fast = OURS[name]
        work = _ours(models, names_of(models, grain), loader, unbiased, fast, inside)
    elif name == "bare passes":
        def work():
            return bare(models, loader), None
    else:
        import peers

        layers = names_of(models)

        def work():
            return peers.CKA[name](models, layers, loader)
    found = interleaved(lambda: bare(models, loader), work, repeats)
    values, found["estimator"] = found.pop("result")
    found["values"] = None if values is None else torch.as_tensor(values, dtype=torch.float64).tolist()
    return found | {"inside": inside["cka"] / repeats}


def _ours(models, layers, loader, unbiased, fast, inside):
    """`compare`, with the seconds that are spent on anything but forward passes summed up in `inside`."""
    from helpers import cka as module

    def timed(function):
        def run(*arguments, **options):
            spent, result = seconds(lambda: function(*arguments, **options))
            inside["cka"] += spent
            return result
        return run

    module.raw_gram = timed(module.raw_gram)
    module.MinibatchCKA.update = timed(module.MinibatchCKA.update)
    kind = "minibatch " + ("unbiased" if unbiased else "biased")
    return lambda: (module.compare(*models, loader, *layers, unbiased=unbiased, fast=fast).values, kind)


def products(name: str, images, batch: int, repeats: int) -> dict:
    """The floor under CKA: X Xᵀ of every layer's output, nothing else; and operations and bytes on paper."""
    from torch.utils.flop_counter import FlopCounterMode

    from helpers.record import observe

    models, found = networks(), {}
    images = images[:batch]
    with FlopCounterMode(display=False) as counter:
        bare(models, [(images[:1], None)])
    found["forward_flop"] = counter.get_total_flops() * len(images)
    found["bare"] = min(seconds(lambda: bare(models, [(images, None)]))[0] for _ in range(repeats))
    for grain in ("block", "fine"):
        spent, features = [], []

        def product(output, spent=spent, features=features):
            flat = output.flatten(1)
            features.append(flat.shape[1])
            runs = [seconds(lambda: flat @ flat.T)[0] for _ in range(repeats)]
            spent.append(min(runs))
            return torch.zeros(1)

        for model, layers in zip(models, names_of(models, grain), strict=True):
            observe(model, images, layers, product)
        flop = 2 * len(images) ** 2 * sum(features)
        found[grain] = {"layers": len(features), "seconds": sum(spent), "flop": flop,
                        "bytes": 4 * len(images) * sum(features)}
    return found


def reference(name: str, images, batch: int, repeats: int) -> dict:
    """CKA in float64 from first to last, written out plainly, for all four estimators."""
    models, layers = networks(torch.float64), names_of(networks())
    features = [[[] for _ in names] for names in layers]
    for part in images.double().split(batch):
        for model, names, kept in zip(models, layers, features, strict=True):
            got = {}
            handles = [model.get_submodule(n).register_forward_hook(
                lambda _, args, output, n=n, got=got: got.__setitem__(n, output.flatten(1))) for n in names]
            with torch.inference_mode():
                model(part)
            for handle in handles:
                handle.remove()
            for store, n in zip(kept, names, strict=True):
                store.append(got[n].clone())
    parts = [[f @ f.T for f in store] for side in features for store in side]
    whole = [torch.cat(store) for side in features for store in side]
    whole = [f @ f.T for f in whole]
    split = len(layers[0])
    found = {}
    for kind in ("biased", "unbiased"):
        for scope, batches in (("full", [[K] for K in whole]), ("minibatch", parts)):
            ready = [[_ready(K, kind) for K in grams] for grams in batches]
            pair = torch.tensor([[sum(float((K * L).sum()) * _weight(len(K), kind)
                                      for K, L in zip(a, b, strict=True)) for b in ready] for a in ready])
            pair = pair / (pair.diagonal()[:, None] * pair.diagonal()).sqrt()
            found[f"{scope} {kind}"] = pair[:split, split:].tolist()
    return found


def _ready(K, kind):
    n = len(K)
    if kind == "biased":
        H = torch.eye(n, dtype=K.dtype) - 1 / n
        return H @ K @ H
    K = K - K.mean()  # a constant changes nothing, and the digits last longer
    K = K - torch.diag(K.diagonal())
    rows = K.sum(0)
    K = K - (rows[:, None] + rows) / (n - 2) + rows.sum() / ((n - 1) * (n - 2))
    return K - torch.diag(K.diagonal())


def _weight(n, kind):  # HSIC of a batch, times its images
    return n / (n * (n - 3)) if kind == "unbiased" else n / (n - 1) ** 2


def flat(name: str, images, batch: int, repeats: int) -> dict:
    """Peak memory when one batch is seen `repeats` times: name is "bare" or "helpers"."""
    models, loader = networks(), ((images[:batch], None) for _ in range(repeats))
    if name == "bare":
        bare(models, loader)
    else:
        from helpers.cka import compare

        compare(*models, loader)
    return {"peak": peak()}


def receptive(name: str, images, batch: int, repeats: int) -> dict:
    """Fields of each network's last block, against one forward and one backward pass; float64 by hand."""
    import peers

    from helpers.receptive import field

    models, found = networks(), {}
    for model, exact, layer, place in zip(models, networks(torch.float64), ("layer4.1", "blocks.11"),
                                          ((3, 3), (6, 6)), strict=True):
        def passes(model=model, layer=layer, place=place, images=images):
            return torch.cat([_gradient(model, layer, place, part) for part in images.split(batch)])

        def work(model=model, layer=layer, place=place):
            if name == "openerf":
                return peers.openerf(model, layer, images)
            return field(model, images.split(batch), layer, at=place, order="mean-then-abs", rgb="grey")
        run = interleaved(passes, work, repeats)
        exact = passes(exact, layer, place, images.double())  # (n, 3, H, W)
        exact = exact.mean(1).clamp_min(0).sum(0) if name == "openerf" else exact.sum(1).abs().mean(0)
        got = run.pop("result").double()
        run["error"] = float((got / got.sum() - exact / exact.sum()).abs().max() / (exact / exact.sum()).max())
        found[layer] = run
    return found


def _gradient(model, layer, place, images):
    """The derivative of the mean over channels at one place of the grid, by the pixels: (B, 3, H, W)."""
    got, pixels = [], images.clone().requires_grad_()
    handle = model.get_submodule(layer).register_forward_hook(lambda _, args, output: got.append(output))
    model(pixels)
    handle.remove()
    output = got[0]
    if output.ndim == 3:  # (B, 1 + 14 * 14, d)
        output = output[:, 1:].unflatten(1, (14, 14)).permute(0, 3, 1, 2)
    return torch.autograd.grad(output[:, :, *place].mean(1).sum(), pixels)[0]


def attention(name: str, images, batch: int, repeats: int) -> dict:
    """Mean distances of all heads, CLS dropped without renormalising, against a pass that forms the weights."""
    import peers

    from helpers.attention import attention_maps, mean_distance, softmax_visible

    model, exact = networks()[1], networks(torch.float64)[1]
    parts = images.split(batch)

    def published(model, parts):
        maps = (attention_maps(model, part)[..., 1:, 1:].numpy() for part in parts)
        return sum(torch.tensor([peers.published_distance(16, block).sum(0) for block in part])
                   for part in maps) / len(images)

    def passes():
        with softmax_visible(model):
            bare([model], [(part, None) for part in parts])

    def work():
        return published(model, parts) if name == "published" else mean_distance(model, parts, renormalise=False)
    run = interleaved(passes, work, repeats)
    true = published(exact, [part.double() for part in parts])
    run["error"] = float((torch.as_tensor(run.pop("result")) - true).abs().max())
    return run


def accuracy(name: str, images, batch: int, repeats: int) -> dict:
    """How far fast and exact mode are from float64, all blocks of one network with one another."""
    from helpers.cka import MinibatchCKA
    from helpers.grams import raw_gram
    from helpers.record import layers, observe
    from helpers.zoo import load

    size = 32 if name.split()[0] in ("vit", "resnet") else 224
    model = real(name) if name.startswith("real ") else load(name.split()[0], random="untrained" in name)
    images = torch.nn.functional.interpolate(images, size=size, mode="area") if size == 32 else images
    if "dinov2" in name:
        images = (images - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor(
            [0.229, 0.224, 0.225])[:, None, None]
    names, values = layers(model, images=images), {}
    for mode, dtype in (("exact", torch.float32), ("fast", torch.float32), ("true", torch.float64)):
        model.to(dtype)
        totals = {"unbiased": MinibatchCKA(True), "biased": MinibatchCKA(False)}
        for part in images.to(dtype).split(batch):
            kept = observe(model, part, names, raw_gram, fast=mode == "fast")
            for total in totals.values():
                total.update(list(kept.values()))
        values |= {f"{mode} {kind}": total.matrix() for kind, total in totals.items()}
    return {f"{mode} {kind}": float((values[f"{mode} {kind}"] - values[f"true {kind}"]).abs().nan_to_num().max())
            for mode in ("exact", "fast") for kind in ("unbiased", "biased")}


def real(name: str):
    """One of the networks in the folder COURSE_REAL (or shared/real beside the repository)."""
    import os

    from safetensors.torch import load_file

    folder = Path(os.environ.get("COURSE_REAL", Path(__file__).parents[3] / "shared" / "real"))
    name = name.removeprefix("real ")
    options = {"img_size": 518, "dynamic_img_size": True} if "dinov2" in name else {}
    model = timm.create_model(name, num_classes=0, **options).eval()
    model.load_state_dict({key: value.float() for key, value in load_file(folder / f"{name}.safetensors").items()})
    return model


TASKS = {f.__name__: f for f in (cka, products, reference, flat, receptive, attention, accuracy)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    task, name, file, batch, repeats = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        outcome = TASKS[task](name, torch.load(file), int(batch), int(repeats))
    except ImportError as error:
        outcome = {"missing": f"not installed here: {error}"}
    except Exception as error:
        outcome = {"missing": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    print("\n" + json.dumps(outcome))
