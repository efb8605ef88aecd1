"""Every measure of the course on networks of your own: `python -m helpers.report MODEL [MODEL]`, one page.

    python -m helpers.report vit resnet                                 # the lab's own two
    python -m helpers.report vit_base_patch16_224 resnet50 --images DIR # weights from the hub
    python -m helpers.report mine=resnet50 --checkpoint mine=FILE       # your own weights
    torchrun --nproc-per-node 2 -m helpers.report MODEL MODEL -n 512    # the images shared over processes

What is finished is kept beside the report until that is written, so the same command goes on after an
interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import timm
import torch
from torch import Tensor
from torch import distributed as dist

from . import onepass, page, shapes, zoo
from .files import write_whole
from .onepass import Network, Results, field_maps, measure
from .photos import load_photos
from .rules import RULES, apply

SMALL = 64  # pixels a side up to which a network gets the lab's images
UNTRAINED = "the weights are random, so there is nothing learned that the claim could be about."
WAYS_ON = """  - connect to the network once: weights from the hub are then kept in its cache
  - give a file of your own: --checkpoint {0}=FILE (safetensors or a plain state dict)
  - look at the untrained network, on a page that says so: --random-weights"""


class Stop(Exception):
    """What ends a report, in words for the user."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m helpers.report", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL",
                        help="a timm name, one of the lab's, or LABEL=name")
    parser.add_argument("--images", metavar="DIR", 
                        help="folder of photographs; default: the few that scikit-image and scikit-learn "
                             "ship, and the lab's own images for small networks")
    parser.add_argument("--n", "-n", type=int, default=512,
                        help="images (default 512); under torchrun write -n, it takes --n for its own")
    parser.add_argument("--batch", type=int, help="images a batch (default: an eighth of them, 8 to 64)")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--random-weights", action="store_true", help="untrained networks, with a banner")
    parser.add_argument("--option", action="append", default=[], metavar="NAME:KEY=VALUE",
                        help="an argument for timm, vit_small_patch14_dinov2:img_size=224 say")
    parser.add_argument("--no-normalise", action="append", default=[], metavar="NAME",
                        help="feed images in [0, 1] as they are: for networks trained without mean and "
                             "deviation")
    parser.add_argument("--size", type=int, help="pixels a side (default: what each network was trained on)")
    parser.add_argument("--layers", choices=("block", "fine"), default="block")
    parser.add_argument("--field-images", type=int, default=32, 
                        help="images for receptive fields (default 32)")
    parser.add_argument("--field-draws", type=int, default=4,
                        help="activations drawn for each image and block (default 4)")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    args = parser.parse_args(given)
    wanted = [(item.split("=")[0], item.split("=")[-1]) for item in args.models]  # (label, name)
    args.models = dict(wanted)
    if len(args.models) < len(wanted):
        parser.error("each network needs a name of its own: give LABEL=name for a second one of a kind")
    args.checkpoint = dict(_named(parser, item, "=") for item in args.checkpoint)
    options: dict[str, dict] = {}
    for item in args.option:
        name, setting = _named(parser, item, ":")
        key, value = _named(parser, setting, "=")
        options.setdefault(name, {})[key] = _value(value)
    args.option = options
    if unknown := {*args.checkpoint, *options, *args.no_normalise} - set(args.models):
        parser.error(f"{sorted(unknown)} are none of the networks asked for, {list(args.models)}")
    if args.n < 16:
        parser.error("at least 16 images are needed: two batches of 8")
    args.batch = args.batch or max(8, min(64, args.n // 8))
    if not 4 <= args.batch <= args.n // 2:
        parser.error("a batch needs at least 4 images, and there must be two batches for an interval")
    return args


def _named(parser, item: str, sign: str) -> tuple[str, str]:
    name, found, value = item.partition(sign)
    return (name, value) if found and name and value else parser.error(f"{item!r} should be NAME{sign}…")


def _value(text: str):
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


# ---------------------------------------------------------------- networks and images

def networks(args: argparse.Namespace, random: bool, seed: int, device: torch.device) -> dict[str, Network]:
    """Label -> network, with trained or with random weights."""
    return {label: _network(args, label, name, random, seed, device) for label, name in args.models.items()}


def _network(args, label: str, name: str, random: bool, seed: int, device: torch.device) -> Network:
    options = dict(args.option.get(label, {}))
    if args.size and "img_size" not in options and _takes(name, img_size=args.size):
        options["img_size"] = args.size
    model = _weights(args, label, name, options, random, seed).float().to(device)
    config = getattr(model, "pretrained_cfg", None) or {}
    size = args.size or options.get("img_size") or tuple(config.get("input_size", (3, 224, 224))[-2:])
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    prepare = zoo.transform(model, size, **(plain if label in args.no_normalise else {}))
    return Network(label, model, prepare, zoo.transform(model, size, **plain), args.layers)


def _weights(args, label: str, name: str, options: dict, random: bool, seed: int):
    file = args.checkpoint.get(label)
    lab = name in {card.name for card in zoo.cards()} and not file
    try:
        if random:  # with open branches: timm starts those of ResNets at exactly nothing, LayerScale near it
            if "resnet" in name and (lab or _takes(name, zero_init_last=False)):
                options["zero_init_last"] = False
            return zoo.open_branches(zoo.load(name, random=True, seed=seed, **options))
        if not file:
            return zoo.load(name, **options)
        try:
            return zoo.load(name, checkpoint=file, **options)
        except ValueError:
            if not Path(file).is_file() or "num_classes" in options:
                raise
            return zoo.load(name, checkpoint=file, num_classes=0, **options)  # a file without a classifier
    except RuntimeError as error:
        raise Stop(f"{label}: {str(error).split(' Ways on')[0]}\nWays to go "
                   f"on:\n{WAYS_ON.format(label)}") from error
    except ValueError as error:
        raise Stop(f"{label}: {error}") from error


def _takes(name: str, **options) -> bool:
    """Whether timm builds this model with these options; on no device, so at no cost."""
    try:
        with torch.device("meta"):
            timm.create_model(name, **options)
        return True
    except Exception:  # of many kinds, all of which mean no
        return False


def images(args: argparse.Namespace, size: int) -> tuple[Callable[[int], Tensor], int, str]:
    """(batch number -> images (b, 3, size, size) in [0, 1], how many images, what they are)."""
    if args.images is None and size <= SMALL:
        def scenes(i: int) -> Tensor:
            return shapes.draw(min(args.batch, args.n - i * args.batch), (args.seed, i), max(size, 16)).images
        what = f"{args.n} of the lab's images: shapes on textures, drawn from seed {args.seed}."
        return scenes, args.n, what
    try:
        photos = load_photos(args.images, args.n, size, args.seed)
    except ValueError as error:
        raise Stop(str(error)) from error
    source = (f"of the folder {Path(args.images).name}" if args.images else
              "cut from the few that scikit-image and scikit-learn ship")
    what = f"{len(photos)} photographs {source}, seed {args.seed}."
    return (lambda i: photos[i * args.batch : (i + 1) * args.batch].images), len(photos), what


def fingerprint(args: argparse.Namespace, nets: dict[str, Network], first: Tensor) -> str:
    """What decides the numbers: settings, weights, images, code. So parts of another run are never taken."""
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "device")}
    digest = hashlib.sha256(json.dumps([settings, torch.__version__, timm.__version__]).encode())
    digest.update(Path(onepass.__file__).read_bytes())
    for network in nets.values():
        for name, value in network.model.state_dict().items():
            digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    digest.update(first.numpy().tobytes())
    files = filter(Path.is_file, Path(args.images).rglob("*")) if args.images else ()
    for file in sorted(files):  # of later batches too, and nothing decoded
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- stages, shared out and resumed

def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def stage(name: str, folder: Path, count: int, work: Callable[[int], dict | Tensor]) -> list:
    """work(0), …, work(count - 1), done by all processes together and known to all; each kept when finished.

    Process r of N does every Nth piece, so any number of processes gives the very same pieces. A kept piece
    that was damaged, or put there from another run, is done again, with a sentence that says so.
    """
    from tqdm import tqdm

    world, done = (dist.get_world_size() if dist.is_initialized() else 1), {}
    mine = range(rank(), count, world)
    for i in tqdm(mine, desc=name, unit="batch", disable=rank() > 0, file=sys.stderr):
        file = folder / f"{name.replace(' ', '-')}-{i:05}.pt"
        piece = _kept(file)
        if piece is None:
            packed = io.BytesIO()
            torch.save(work(i), packed)
            piece = packed.getvalue()
            write_whole(file, _seal(file, piece) + piece)
        done[i] = torch.load(io.BytesIO(piece), weights_only=True)
    if world > 1:
        everyone: list = [None] * world
        dist.all_gather_object(everyone, done)
        done = {i: part for each in everyone for i, part in each.items()}
    return [done[i] for i in range(count)]


def _seal(file: Path, piece: bytes) -> bytes:
    """A checksum of a piece and its place: the run (which is the folder's name), the stage, the number."""
    return hashlib.sha256(f"{file.parent.name}/{file.name}:".encode() + piece).digest()  # 32 bytes


def _kept(file: Path) -> bytes | None:
    """The piece in a file that `stage` wrote; None where there is none, or one that its seal does not fit."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    seal, piece = content[:32], content[32:]
    if seal == _seal(file, piece):
        return piece
    print(f"{file.name} in {file.parent} was cut short, changed, or belongs to another run: that batch is "
          "measured again.", file=sys.stderr)
    return None


def group(title: str, nets: dict[str, Network], args, batch_of, n: int, folder: Path) -> Results:
    """All measures of one group of networks, trained or untrained."""
    for network in nets.values():
        network.look_at(batch_of(0))
    sizes = [min(args.batch, n - start) for start in range(0, n, args.batch)]
    usable = [i for i, size in enumerate(sizes) if size >= 4]  # HSIC needs four
    every = list(nets.values())
    parts = stage(f"{title} one pass", folder, len(usable), lambda i: measure(every, batch_of(usable[i])))
    results, few = Results(nets, parts), min(args.field_images, n)
    for label, network in nets.items():
        if "fields" in network.reasons:
            continue

        def fields_of(i: int, network=network) -> Tensor:
            chosen = batch_of(i)[: few - i * args.batch]
            return field_maps(network, chosen, args.field_draws, args.seed + i)

        maps = stage(f"{title} receptive fields {label}", folder, -(-few // args.batch), fields_of)
        results.fields[label] = torch.cat(maps)
    return results


def report(args: argparse.Namespace, device: torch.device) -> Path:
    """Measure, judge, write; the page's path."""
    trained = networks(args, args.random_weights, args.seed, device)
    probe = max(max(network.prepare(torch.zeros(1, 3, 32, 32)).shape[-2:]) for network in trained.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch_of, n, what = images(args, probe)
    notes = list(dict.fromkeys(str(w.message) for w in caught))
    if n < 16:
        raise Stop(f"{n} images are too few: at least 16 are needed")
    folder = args.out.with_suffix(".parts") / fingerprint(args, trained, batch_of(0))
    first = group("networks", trained, args, batch_of, n, folder)
    control = group("controls", networks(args, True, args.seed + 1, device), args, batch_of, n, folder)
    if rank() > 0:
        return args.out
    vit, cnn = (next((label for label, network in trained.items() if network.kind == kind), None)
                for kind in ("transformer", "convolutional"))
    findings = [(rule.finding, rule.claim, UNTRAINED if args.random_weights else
                 apply(rule, first, control, vit, cnn)) for rule in RULES]
    rows = [[label, args.models[label], _origin(args, label),
             sum(p.numel() for p in network.model.parameters()),
             "{} x {}".format(*network.prepare(torch.zeros(1, 3, 32, 32)).shape[-2:]), network.kind]
            for label, network in trained.items()]
    facts = {"images": what, "batch": args.batch, "notes": notes, "rows": rows}
    title = "Do these networks see alike? " + ", ".join(trained)
    text, numbers = page.write(title, facts, first, control, findings, (vit, cnn), args.random_weights)
    keys = "label", "name", "weights", "parameters", "input", "kind"
    stored = {"images": what, "n_images": first.n_images, "random_weights": args.random_weights,
              "notes": notes, "networks": [dict(zip(keys, row, strict=True)) for row in rows],
              "left_out": {label: network.reasons for label, network in trained.items()},
              "findings": {slug: found if isinstance(found, str) else found.as_dict()
                           for slug, _, found in findings},
              "measures": _finite(numbers)}
    write_whole(args.out.with_suffix(".json"), json.dumps(stored, indent=1, allow_nan=False) + "\n")
    write_whole(args.out, text)
    shutil.rmtree(args.out.with_suffix(".parts"))
    return args.out


def _origin(args, label: str) -> str:
    if args.random_weights:
        return f"random, seed {args.seed}"
    if label in args.checkpoint:
        return Path(args.checkpoint[label]).name
    return "the lab's" if args.models[label] in {card.name for card in zoo.cards()} else "timm's hub"


def _finite(value):
    """JSON has no NaN: None in its place."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def device_for(asked: str | None) -> torch.device:
    """The device asked for, else a GPU of this process's own, else the processor.

    All compute in float32: half precision would change the numbers.
    """
    torch.backends.cudnn.allow_tf32 = False
    local = int(os.environ.get("LOCAL_RANK", 0))
    if asked:
        return torch.device(asked)
    if torch.cuda.is_available():
        return torch.device("cuda", local % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _stopped(*_) -> None:
    sys.exit(f"No report. Process {rank()} was stopped, by hand or because another one died. The same "
             "command goes on from what is finished.")


def main(given: list[str] | None = None) -> int:
    args, several = arguments(given), int(os.environ.get("WORLD_SIZE", 1)) > 1
    try:
        device = device_for(args.device)
        if several:
            signal.signal(signal.SIGTERM, _stopped)  # which torchrun sends when another process has died
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=12))
        written = report(args, device)
        if rank() == 0:
            print(f"written: {written} and {written.with_suffix('.json').name}")
        return 0
    except (Stop, ValueError) as stop:
        print(f"No report. {stop}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, say
        print(f"No report. {error.strerror or error}. Finished batches are kept: when that is put right, the "
              "same command goes on from them.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on from what is finished.", file=sys.stderr)
        return 130
    except RuntimeError as error:
        lost = any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "peer"))
        if not several or not lost:
            raise
        print(f"No report. Process {rank()} lost another process, which died or was stopped "
              f"({str(error)[:200]}). The same command goes on from what is finished.", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
