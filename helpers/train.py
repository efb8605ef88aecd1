"""Train the lab's models: `python -m helpers.train vit resnet --resume`.

A run draws its images as it goes, writes its whole state to the cache folder once a minute in
one atomic step, and resumes from there exactly: batches depend on the seed and the step alone.
When a cosine cycle ends, the weights and a card are written to helpers/weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save as as_safetensors
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from . import attention, shapes, zoo
from .files import write_whole

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vits-and-convnets"
HELD_OUT = 10**6  # the seed of the images that judge a run; no run trains on them
LOOK_AT, JUDGE_ON = 1_000, 5_000  # held-out images along the way, and for the card
N_SHAPES = len(shapes.SHAPES)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run. Counts are images, not steps."""

    model: dict  # arguments of zoo.build
    cycles: tuple[int, ...]  # one warm-up and cosine each; a checkpoint is written at the end of each
    start: str | None = None  # the checkpoint to go on from, with a new optimiser; None: untrained
    distinct: int | None = None  # train on so many images, repeated; None: never the same image twice
    seed: int = 1
    batch: int = 64
    rate: float = 3e-3
    warmup: int = 6_400
    decay: float = 0.05  # not on positions, CLS, norms and biases
    betas: tuple[float, float] = (0.9, 0.99)
    smoothing: float = 0.05
    clip: float = 1.0
    background_weight: float = 0.5  # of the background texture's loss; the shape's has weight 1
    report: int = 12_800  # how often held-out accuracy is looked at


VIT = Recipe({"kind": "vit"}, cycles=(128_000,))
RESNET = Recipe({"kind": "resnet"}, cycles=(64_000,), rate=2e-3)

RECIPES: dict[str, Recipe] = {
    "vit": VIT,
    "vit-b": replace(VIT, seed=2),
    # other fresh images; the stored checkpoint is the one after the second cycle
    "vit-long": replace(VIT, start="vit", seed=3, cycles=(256_000, 512_000, 1_024_000)),
    "resnet": RESNET,
    "resnet-b": replace(RESNET, seed=2),
    "vit-gap": replace(VIT, model={"kind": "vit", "pool": "avg"}),
    "vit-gap-b": replace(VIT, model={"kind": "vit", "pool": "avg"}, seed=2),
    **{f"vit-{n // 1000}k": replace(VIT, distinct=n) for n in (1_000, 10_000, 100_000)},
    **{f"vit-cut-{i}": replace(VIT, model={"kind": "vit", "cut": i}) for i in (1, 6, 10)},
    **{f"vit-cut-{i}-b": replace(VIT, model={"kind": "vit", "cut": i}, seed=2) for i in (1, 6, 10)},
    **{f"resnet-{n // 1000}k": replace(RESNET, distinct=n) for n in (1_000, 10_000)},
    "mixer": replace(VIT, model={"kind": "mixer"}),
    "effnet": replace(RESNET, model={"kind": "effnet"}),
}


@dataclass
class Run:
    """A training run at the end of some step."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    images: int = 0
    seconds: float = 0.0  # processor seconds, over all sittings
    history: list[dict] = field(default_factory=list)

    @classmethod
    def start(cls, recipe: Recipe, device: str) -> Run:
        model = zoo.build(**recipe.model, seed=recipe.seed)
        if recipe.start:
            model.load_state_dict(zoo.load(recipe.start).state_dict())
        model = model.to(device)
        if recipe.model["kind"] in ("resnet", "effnet"):
            model = model.to(memory_format=torch.channels_last)
        plain, decayed = [], []
        for name, p in model.named_parameters():
            (plain if p.ndim < 2 or name in ("pos_embed", "cls_token") else decayed).append(p)
        groups = [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}]
        return cls(model, torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas))

    def save(self, path: Path) -> None:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for index, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{k}": v for k, v in state.items()}
        facts = {"images": self.images, "seconds": self.seconds, "history": self.history}
        tensors = {k: v.detach().contiguous().clone() for k, v in tensors.items()}
        write_whole(path, as_safetensors(tensors, metadata={"run": json.dumps(facts)}))

    def restore(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["run"])
            tensors = {k: file.get_tensor(k) for k in file.keys()}
        self.model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        whole = self.optimiser.state_dict()
        for key, value in tensors.items():
            if key.startswith("optimiser."):
                _, index, name = key.split(".")
                whole["state"].setdefault(int(index), {})[name] = value
        self.optimiser.load_state_dict(whole)
        self.images, self.seconds, self.history = facts["images"], facts["seconds"], facts["history"]


def train(name: str, recipe: Recipe, resume: bool = False, weights: Path = zoo.WEIGHTS, cache: Path = CACHE,
          device: str | None = None, progress: bool = True) -> Run:
    """Train `recipe` under `name`, from its saved state if `resume`; writes checkpoints and cards."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    run, saved = Run.start(recipe, device), cache / f"{name}.safetensors"
    if saved.exists() and resume:
        run.restore(saved)
    elif saved.exists():
        raise ValueError(f"a run is saved at {saved}: pass --resume to go on with it, or delete the file")
    held_out = shapes.draw(LOOK_AT, HELD_OUT)
    bank = shapes.draw(recipe.distinct, (recipe.seed, 2)) if recipe.distinct else None
    ends = np.cumsum(recipe.cycles).tolist()
    bar = tqdm(total=ends[-1], initial=run.images, unit="img", desc=name, disable=not progress, mininterval=5)
    clock, last_save = time.process_time(), time.monotonic()
    while run.images < ends[-1]:
        loss = _step(run, recipe, _batch(recipe, bank, run.images))
        run.images += recipe.batch
        bar.update(recipe.batch)
        if run.images % recipe.report < recipe.batch:
            run.history.append({"images": run.images, "loss": round(loss, 4), **_look(run.model, held_out)})
            bar.set_postfix(loss=f"{loss:.2f}", shape=f"{run.history[-1]['shape']:.3f}")
        finished = [end for end in ends if run.images - recipe.batch < end <= run.images]
        if finished or time.monotonic() - last_save > 60:
            now = time.process_time()
            run.seconds, clock, last_save = run.seconds + now - clock, now, time.monotonic()
            if finished:
                export(name, recipe, run, weights)
            run.save(saved)
    bar.close()
    return run


def _batch(recipe: Recipe, bank: shapes.Scenes | None, start: int) -> shapes.Scenes:
    """The images that follow the first `start` of a run."""
    if bank is None:
        return shapes.draw(recipe.batch, (recipe.seed, 1, start))
    places = np.arange(start, start + recipe.batch)
    rows = np.empty(recipe.batch, np.int64)
    for epoch in np.unique(places // len(bank)):  # a batch may end one pass and begin the next
        order = np.random.default_rng((recipe.seed, int(epoch))).permutation(len(bank))
        here = places // len(bank) == epoch
        rows[here] = order[places[here] % len(bank)]
    return bank[rows]


def _step(run: Run, recipe: Recipe, scenes: shapes.Scenes) -> float:
    device = next(run.model.parameters()).device
    for group in run.optimiser.param_groups:
        group["lr"] = rate(recipe, run.images)
    logits = run.model.train()(scenes.images.to(device))
    loss = cross_entropy(logits[:, :N_SHAPES], scenes.shape.to(device), label_smoothing=recipe.smoothing)
    loss = loss + recipe.background_weight * cross_entropy(
        logits[:, N_SHAPES:], scenes.background.to(device), label_smoothing=recipe.smoothing
    )
    run.optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip)
    run.optimiser.step()
    return loss.item()


def rate(recipe: Recipe, images: int) -> float:
    """The learning rate after `images`: in every cycle a linear warm-up, then half a cosine to zero."""
    for length in recipe.cycles:
        if images < length:
            break
        images -= length
    warm = min(1.0, (images + recipe.batch) / recipe.warmup)
    return recipe.rate * warm * (1 + math.cos(math.pi * images / length)) / 2


@torch.inference_mode()
def _predict(model: nn.Module, scenes: shapes.Scenes) -> torch.Tensor:
    """Predicted shape and background texture: (n, 2) int64."""
    device = next(model.parameters()).device
    logits = torch.cat([model.eval()(x.to(device)).cpu() for x in scenes.batches(250)])
    return torch.stack([logits[:, :N_SHAPES].argmax(1), logits[:, N_SHAPES:].argmax(1)], 1)


def _look(model: nn.Module, scenes: shapes.Scenes) -> dict:
    """What is logged along the way; for a ViT also how far each head looks, in pixels, block by block."""
    right = _predict(model, scenes) == torch.stack([scenes.shape, scenes.background], 1)
    seen = dict(zip(("shape", "background"), right.double().mean(0).tolist(), strict=True))
    if hasattr(model, "blocks") and hasattr(model.blocks[0], "attn"):
        distances = attention.mean_distance(model, scenes[:128].batches(64))
        seen["head_distances"] = [[round(x, 2) for x in row] for row in distances.tolist()]
    return seen


def export(name: str, recipe: Recipe, run: Run, folder: Path) -> None:
    """Write NAME.safetensors and its card, in float16 where that changes no held-out prediction."""
    scenes = shapes.draw(JUDGE_ON, HELD_OUT + 1)
    before = _predict(run.model, scenes)
    state = {k: v.detach().cpu().contiguous().clone() for k, v in run.model.state_dict().items()}
    halved = {k: v.half() if v.is_floating_point() and "running" not in k else v for k, v in state.items()}
    copy = zoo.build(**recipe.model)
    copy.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in halved.items()})
    changed = int((_predict(copy, scenes) != before).any(1).sum())
    labels = torch.stack([scenes.shape, scenes.background], 1)
    path = folder / f"{name}.safetensors"
    write_whole(path, as_safetensors(halved if changed == 0 else state))
    card = {
        "name": name,
        "model": recipe.model,
        "images": run.images,
        "distinct": recipe.distinct,
        "accuracy": {
            label: _wilson(int((before == labels)[:, i].sum()), len(scenes))
            for i, label in enumerate(("shape", "background"))
        },
        "held_out": len(scenes),
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "stored_as": "float16" if changed == 0 else f"float32 (float16 would change {changed} predictions)",
        "seconds": round(run.seconds),
        "processor": _processor(run.model),
        "versions": {"python": platform.python_version(), "torch": torch.__version__.split("+")[0],
                     "timm": timm.__version__, "numpy": np.__version__},
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "history": run.history,
    }
    write_whole(folder / f"{name}.json", json.dumps(card, indent=1) + "\n")


def _wilson(right: int, n: int, z: float = 1.96) -> list[float]:
    """A share and its 95 % Wilson interval."""
    share = right / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [round(x, 4) for x in (share, middle - half, middle + half)]


def _processor(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} processor, {torch.get_num_threads()} thread(s)"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"one or more of: {', '.join(RECIPES)}")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state where there is one")
    parser.add_argument("--threads", type=int, default=1,
                        help="processor threads (1: two runs side by side beat one run with two)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"no recipe is called {', '.join(unknown)}; there are: {', '.join(RECIPES)}")
    torch.set_num_threads(options.threads)
    for name in options.names:
        try:
            train(name, RECIPES[name], resume=options.resume)
        except (ValueError, OSError) as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
