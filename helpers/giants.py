"""Two trained networks of real size on photographs: measured here, or as the course's authors measured them.

    python -m helpers.giants FOLDER        # measure, and store the numbers for chapter 13
    python -m helpers.giants hub FOLDER    # the same of weights from timm's hub; FOLDER: your photographs

The networks (90 MB) are not part of the course. What was measured on them is: `stored()` reads it. The
measuring is that of `report`; a source is a folder with the two files of `FILES` and photographs in
`images/`, or "hub".
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import report, skips
from .files import write_whole
from .onepass import Network, Results
from .verdict import results_folder

VIT, RESNET = "ViT", "ResNet"  # the labels of the two
FILES = {VIT: "vit_small_patch14_dinov2", RESNET: "resnet50"}  # timm's names; the files add .safetensors
HUB = {VIT: "vit_small_patch14_dinov2.lvd142m", RESNET: "resnet50.tv_in1k"}
STORED = "giants.npz"  # in notebooks/results
N_NORMS = 64  # images whose token norms are kept
CELLS = 40  # a stored field has at most so many cells a side
BATCH = 16


@dataclass
class Giants:
    """What was measured on the two networks and on their untrained selves."""

    trained: Results
    untrained: Results
    norms: Tensor  # (n, L, t): of each token of the ViT after each block, CLS first
    facts: dict  # "images", "source", "prefix": tokens before the patches


def measure(source: str | Path, photos: str | Path | None = None, n: int = 128, field_images: int = 16,
            field_draws: int = 1, folder: str | Path | None = None, options: tuple[str, ...] = ()) -> Giants:
    """Measure both networks of `source` and their untrained selves on photographs.

    source: "hub" (timm's weights, fetched when they are not in the cache) or a folder. photos: a folder of
    photographs; by default the source's own `images`, else the few that scikit-image and scikit-learn ship.
    folder: where finished pieces are kept, so that the same call goes on after an interruption. options: more
    arguments of `report`.
    """
    given = _arguments(source, photos)
    args = report.arguments([*given, "-n", str(n), "--batch", str(min(BATCH, n // 2)), *options,
                             "--field-images", str(field_images), "--field-draws", str(field_draws)])
    device = report.device_for(args.device)
    trained = report.networks(args, args.random_weights, 0, device)
    batch_of, n, what = report.images(args, args.size or 224)
    folder = Path(folder or Path(tempfile.gettempdir()) / "giants.parts")
    keep = folder / report.fingerprint(args, trained, batch_of(0))
    first = report.group("networks", trained, args, batch_of, n, keep)
    control = report.group("controls", report.networks(args, True, 1, device), args, batch_of, n, keep)
    vit, batches = trained[VIT], range(-(-min(N_NORMS, n) // args.batch))
    norms = [skips.token_norms(vit.model, vit.prepare(batch_of(i))) for i in batches]  # block -> (B, t)
    norms = torch.cat([torch.stack(list(each.values()), 1) for each in norms])  # (n, L, t)
    facts = {"images": what, "source": "hub" if source == "hub" else "files",
             "prefix": getattr(vit.model, "num_prefix_tokens", 1)}
    return Giants(first, control, norms.float().cpu(), facts)


def _arguments(source: str | Path, photos: str | Path | None) -> list[str]:
    """What `report` is asked for: the two networks, where their weights are, and the photographs."""
    names = HUB if source == "hub" else FILES
    given = [f"{label}={name}" for label, name in names.items()] + ["--option", f"{VIT}:img_size=224"]
    if source != "hub":
        source = Path(source).expanduser()
        for label, name in names.items():
            file = source / f"{name}.safetensors"
            if not file.is_file():
                raise ValueError(f"the folder {source.name} holds no {file.name}; a source is a folder with "
                                 f"{' and '.join(f'{n}.safetensors' for n in FILES.values())}, or 'hub'")
            given += ["--checkpoint", f"{label}={file}"]
        given += ["--no-normalise", RESNET]  # as it was fine-tuned
        photos = photos or (source / "images" if (source / "images").is_dir() else None)
    return given + (["--images", str(photos)] if photos else [])


def at_hand(source: str | Path | None = None, photos: str | Path | None = None) -> Giants:
    """Measured now, when a source is given or named in the environment variable COURSE_REAL; else `stored()`.

    Says in a sentence which of the two it is.
    """
    source = source or os.environ.get("COURSE_REAL")
    if source:
        found = measure(source, photos)
        print(f"Measured now. {found.facts['images']}")
        return found
    found = stored()
    print(f"No networks were named, so these are the stored measurements. {found.facts['images']}")
    return found


# ---------------------------------------------------------------- stored

_NETWORK = ("label", "every", "layers", "blocks", "kind", "uniform", "has_cls", "reasons")


def save(giants: Giants, path: str | Path) -> None:
    """Everything measured, without the networks, in one file; a failed write leaves the old one whole."""
    arrays = {"norms": giants.norms.numpy().astype(np.float16)}
    facts = {**giants.facts, "networks": {}, "parts": len(giants.trained.parts)}
    for group, results in (("trained", giants.trained), ("untrained", giants.untrained)):
        facts["networks"][group] = {label: {key: getattr(network, key) for key in _NETWORK}
                                    for label, network in results.networks.items()}
        for label, maps in results.fields.items():
            arrays[f"{group}/fields/{label}"] = _halves(maps)
        for i, part in enumerate(results.parts):
            arrays |= {f"{group}/{i}/{name}": np.asarray(value, np.float32) for name, value in _flat(part)
                       if "grid" not in name and not (group == "untrained" and "copies" in name)}
            # copies are of patches, so the same in both groups
            facts.setdefault("grids", {label: list(part[label]["grid"]) for label in results.networks
                                       if "grid" in part[label]})
    whole = io.BytesIO()
    np.savez_compressed(whole, facts=np.array(json.dumps(facts)), **arrays)
    write_whole(Path(path), whole.getvalue())


def stored(path: str | Path | None = None) -> Giants:
    """What `save` wrote; by default what comes with the course, measured as chapter 13 says.

    Raises ValueError for a file that is missing, damaged or something else; nothing in it is ever executed.
    """
    path = Path(path) if path else results_folder() / STORED
    ways_on = "restore notebooks/results from the repository, or measure anew with python -m helpers.giants"
    if not path.is_file():
        raise ValueError(f"there is no {path.name}: {ways_on}")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
            arrays = {name: torch.from_numpy(np.array(kept[name])) for name in kept.files if name != "facts"}
            return _from_arrays(arrays, json.loads(str(kept["facts"])))
    except Exception as error:  # a damaged archive raises errors of a dozen kinds
        raise ValueError(f"{path.name} is damaged, or does not hold stored measurements "
                         f"({type(error).__name__}: {error}): {ways_on}") from error


def _from_arrays(arrays: dict[str, Tensor], facts: dict) -> Giants:
    groups, networks, parts = [], facts.pop("networks"), facts.pop("parts")
    grids = {label: tuple(grid) for label, grid in facts.pop("grids").items()}
    for group in ("trained", "untrained"):
        own = {label: Network(model=None, prepare=None, resize=None, **known)
               for label, known in networks[group].items()}
        results = Results(own, [_part(arrays, group, i, own, grids) for i in range(parts)])
        results.fields = {label: arrays[f"{group}/fields/{label}"].double() for label in own
                          if f"{group}/fields/{label}" in arrays}
        groups.append(results)
    return Giants(*groups, arrays["norms"].float(), facts)


def _part(arrays: dict, group: str, i: int, networks: dict, grids: dict) -> dict:
    part: dict = {label: {} for label in networks}
    for name, value in arrays.items():
        start, _, rest = name.partition(f"/{i}/")
        if start == group or (start == "trained" and "/copies/" in name):
            *path, last = rest.split("/")
            inner = part
            for key in path if rest else ():
                inner = inner.setdefault(key, {})
            if rest:
                inner[last] = int(value) if value.ndim == 0 else value.double()
    for label, grid in grids.items():
        part[label]["grid"] = grid
    return part


def _flat(part: dict, before: str = ""):
    """("plain/xy", value), … of a nested dict."""
    for key, value in part.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}/")
        else:
            yield before + str(key), value


def _halves(maps: Tensor) -> np.ndarray:
    """Fields (n, L, H, W) coarser and in float16, each layer over its largest value in any image."""
    maps = torch.nn.functional.avg_pool2d(maps, -(-maps.shape[-1] // CELLS))
    return (maps / maps.amax((0, 2, 3), keepdim=True).clamp_min(1e-300)).numpy().astype(np.float16)


def main(given: list[str]) -> int:
    if not given or len(given) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = results_folder() / STORED
    try:
        save(measure(*given, folder=target.with_suffix(".parts")), target)
    except (report.Stop, ValueError, OSError) as stop:
        print(f"Nothing was measured. {stop}", file=sys.stderr)
        return 2
    print(f"written: {target.name}, {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
