"""What comparing networks costs, and how far minibatch CKA is from the full matrix: the numbers of a page.

    python book/tools/costs.py        measures on this machine and writes book/tools/costs.md

Times are processor seconds of one thread, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import shapes, zoo
from helpers.cka import MinibatchCKA, compare
from helpers.grams import raw_gram
from helpers.record import layers, stream, watch

N = 1024  # images of the lab
BATCH = 128  # images a batch in the sums for large networks, the least that the paper allows
IMAGENET = 50_000  # images of ImageNet's validation set
LARGE = [("ViT-S/16", "vit_small_patch16_224"), ("ViT-B/16", "vit_base_patch16_224"),
         ("ViT-L/16", "vit_large_patch16_224"), ("ViT-H/14", "vit_huge_patch14_224"),
         ("ResNet-50", "resnet50"), ("ResNet-152x2 (BiT)", "resnetv2_152x2_bit")]
GPU = 20e12  # float32 operations a second, a round figure for one large accelerator


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def table(header: list[str], rows: list[list]) -> str:
    lines = [header, ["---:" if i else "---" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


# ---------------------------------------------------------------- measured on the lab's networks

def growth(vit, resnet) -> str:
    """Seconds against images, whole comparisons and the bare passes in them."""
    rows = []
    for n in (128, 256, 512, 1024):
        batches = shapes.draw(n, seed=1).batches(64)
        whole = seconds(lambda batches=batches: compare(vit, resnet, batches))
        with torch.no_grad():
            bare = seconds(lambda batches=batches: [(vit(x), resnet(x)) for x in batches])
        rows.append([n, f"{bare:.1f}", f"{whole:.1f}", f"{1000 * whole / n:.0f}"])
    return table(["images", "the two passes alone (s)", "the whole comparison (s)", "ms an image"], rows)


def grams(vit, resnet, images) -> torch.Tensor:
    """Gram matrices of every second block and unit over all images at once: (14, N, N)."""
    found = []
    for model in (vit, resnet):
        kept = {name: [] for name in layers(model)[1::2]}
        for part in stream(model, images.split(64), list(kept), lambda out: out.flatten(1)):
            for name, features in part.items():
                kept[name].append(features)
        found += [raw_gram(torch.cat(features)) for features in kept.values()]
    return torch.stack(found)


def cka(K: torch.Tensor, batches) -> torch.Tensor:
    """Minibatch CKA of 6 blocks (rows) with 8 units, from parts of the full Gram matrices."""
    total = MinibatchCKA()
    for index in batches:
        part = K[:, index][:, :, index]
        total.update(part[:6], part[6:])
    return total.matrix()


def deviations(K: torch.Tensor, n: int, batch: int, repeats: int, shuffles: int = 1) -> tuple[float, float]:
    """Root mean square and largest distance of the map from the full matrix's, over repeats."""
    full, generator, found = cka(K, [torch.arange(N)]), torch.Generator().manual_seed(0), []
    for _ in range(repeats):
        chosen = torch.randperm(N, generator=generator)[:n]
        orders = [chosen[torch.randperm(n, generator=generator)] for _ in range(shuffles)]
        found.append(cka(K, [part for order in orders for part in order.split(batch)]) - full)
    found = torch.stack(found)
    return float(found.square().mean().sqrt()), float(found.abs().max())


def estimator(K: torch.Tensor) -> tuple[str, str]:
    rows = []
    for batch in (8, 16, 32, 64, 128, 256, 512):
        once, often = deviations(K, N, batch, 10), deviations(K, N, batch, 2, shuffles=5)
        rows.append([batch, *(f"{value:.3f}" for value in (*once, *often))])
    by_batch = table(["images a batch", "typical", "largest", "typical, 5 reshuffles", "largest"], rows)
    rows = []
    for n in (128, 256, 512, 1024):
        mini, whole = deviations(K, n, 64, 10), deviations(K, n, n, 10 if n < N else 1)
        rows.append([n, *(f"{value:.3f}" for value in (*mini, *whole))])
    by_images = table(["images", "typical, batches of 64", "largest", "typical, one batch of all", "largest"],
                      rows)
    return by_batch, by_images


# ---------------------------------------------------------------- counted for large networks

def counted(name: str) -> tuple[float, list[int], int]:
    """Operations of a forward pass of one image, features of each block, parameters; nothing is computed."""
    with torch.device("meta"):
        model, image = timm.create_model(name).eval(), torch.zeros(1, 3, 224, 224)
        counter = FlopCounterMode(display=False)
        names = layers(model, images=image)
        with watch(model, names, lambda out: out, grad=True) as kept, torch.no_grad(), counter:
            model(image)
    return (counter.get_total_flops(), [kept[layer].numel() for layer in names],
            sum(p.numel() for p in model.parameters()))


def speed() -> float:
    """Operations a second of this processor in one thread, in a forward pass of ViT-S/16."""
    model, images = timm.create_model("vit_small_patch16_224").eval(), torch.rand(8, 3, 224, 224)
    with torch.no_grad():
        model(images)
        return 8 * counted("vit_small_patch16_224")[0] / seconds(lambda: model(images))


def large(rate: float) -> str:
    rows = []
    for label, name in LARGE:
        F, sizes, parameters = counted(name)
        total = sum(sizes)
        gram, products = 2 * BATCH * total, 2 * BATCH * len(sizes) ** 2  # operations an image
        hours = IMAGENET * (F + gram + products) / 3600
        memory = 4 * parameters + 4 * BATCH * 2 * max(sizes) + 8 * BATCH**2 * 2 * len(sizes)
        rows.append([label, len(sizes), f"{F / 1e9:.0f}", f"{gram / F:.1%}", f"{products / F:.4%}",
                     f"{hours / rate:.1f}", f"{60 * hours / GPU:.1f}", f"{memory / 2**30:.1f}",
                     f"{4 * IMAGENET * total / 2**30:,.0f}"])
    return table(["network", "blocks", "F (10⁹ operations an image)", "Gram, share of F", "products, of F",
                  "one core here (h)", "one accelerator (min)", "memory (GiB)", "all features kept (GiB)"],
                 rows)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vit, resnet, parts = zoo.load("vit"), zoo.load("resnet"), ["<!-- written by book/tools/costs.py -->"]

    def add(title: str, numbers: str, words: str) -> None:
        """One table; the file is written each time, so that a run that is stopped leaves what it has."""
        parts.append(f"```{{rubric}} {title}\n```\n\n{numbers}\n{words}")
        Path(__file__).with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(parts[-1], flush=True)

    add("Seconds against images", growth(vit, resnet),
        "The lab's ViT and ResNet, all blocks and units, batches of 64; processor seconds of one thread "
        f"({platform.machine()}, torch {torch.__version__}).")
    rate = speed()
    add("Large networks", large(rate),
        f"{IMAGENET:,} images of 224 pixels in batches of {BATCH}, block outputs compared within one network."
        f" This core did {rate / 1e9:.0f} billion operations a second in a ViT-S/16; the accelerator is "
        f"reckoned with {GPU / 1e12:.0f} thousand billion.")
    by_batch, by_images = estimator(grams(vit, resnet, shapes.draw(N, seed=2).images))
    add("Images a batch", by_batch,
        f"Distance of minibatch CKA over {N:,} images from CKA of their full Gram matrices, over a map of "
        "6 × 8 values: every second block and unit of the lab's ViT and ResNet. Typical: root mean square "
        "over the map and over random partitions.")
    add("Number of images", by_images,
        f"Distance of CKA over random subsets of the images from that of all {N:,}, same map.")


if __name__ == "__main__":
    main()
