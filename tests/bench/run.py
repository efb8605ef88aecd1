"""make bench: what the course's measures cost beside other libraries', on one page of the book.

    python tests/bench/run.py [--images 256] [--batch 64] [--repeats 3] [--only cka attention …] [--page]

Every measurement runs in a process of its own (work.py). Results go into results.json, measurement by
measurement, so that a run that was stopped loses little and `--only` replaces a part; the page follows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
sys.path[:0] = [str(ROOT), str(HERE)]
GROUPS = ("reference", "cka", "products", "flat", "receptive", "attention", "accuracy", "course")
NETWORKS = ("vit", "resnet", "vit untrained", "resnet untrained", "resnet18 untrained",
            "vit_tiny_patch16_224 untrained", "real resnet50", "real vit_small_patch14_dinov2")


def process(task: str, name: str, images: Path, batch: int, repeats: int) -> dict:
    """What work.py says; or {"missing": why}."""
    print(f"{task}: {name} ...", flush=True)
    done = subprocess.run([sys.executable, HERE / "work.py", task, name, images, str(batch), str(repeats)],
                          capture_output=True, text=True)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"missing": f"the process ended with {done.returncode}"}


def child_seconds(command: list, folder: Path = ROOT) -> float:
    """Processor seconds of a command, its own children included."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def course(notebooks: bool) -> dict:
    """Import times, the speed of the image maker and, if asked, each notebook's run."""
    from helpers import shapes

    modules = sorted(path.stem for path in (ROOT / "helpers").glob("*.py") if path.stem != "__init__")
    imports = {"torch": "import torch", "helpers": "import torch, helpers", "cka": "import torch, helpers.cka",
               "timm": "import torch, timm",
               "all": "import torch, timm; from helpers import " + ", ".join(modules)}
    spent = {name: min(child_seconds([sys.executable, "-c", code]) for _ in range(3))
             for name, code in imports.items()}
    start = time.process_time()
    shapes.draw(2000)
    found = {"import": spent, "images a second": 2000 / (time.process_time() - start)}
    if notebooks:
        found["notebooks"] = {}
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
            print(f"course: {path.stem} ...", flush=True)
            code = ("import nbformat, sys; from nbclient import NotebookClient; "
                    "NotebookClient(nbformat.read(sys.argv[1], 4), timeout=600).execute()")
            start = time.time()
            cpu = child_seconds([sys.executable, "-c", code, path.name], path.parent)
            found["notebooks"][path.stem] = {"processor": cpu, "clock": time.time() - start}
    return found


def measured(options, keep) -> None:
    """Every measurement in turn; `keep(group, name, outcome)` stores one."""
    import peers
    import torch
    import work

    from helpers import shapes

    with tempfile.TemporaryDirectory() as folder:
        images, few = Path(folder, "images.pt"), Path(folder, "few.pt")
        drawn = shapes.draw(options.images, seed=0, size=224).images
        torch.save(drawn, images)
        torch.save(drawn[:options.batch // 2].clone(), few)
        batch, repeats = options.batch, options.repeats

        def do(group, names, file=images, batch=batch, repeats=repeats):
            if group in options.only:
                for name in names:
                    keep(group, name, process(group, name, file, batch, repeats))
        do("reference", ["all"])
        do("cka", ["bare passes", *work.OURS, *peers.CKA])
        do("products", ["all"])
        for name in ("bare", "helpers"):
            do("flat", [name], repeats=1)
            if "flat" in options.only:
                keep("flat", f"{name}, ten times the images", process("flat", name, images, batch, 10))
        do("receptive", ["helpers", "openerf"], few, batch // 4)
        do("attention", ["helpers", "published"], few, batch // 4)
        do("accuracy", NETWORKS, few, batch // 2, 1)
    if "course" in options.only:
        keep("course", "all", course(options.notebooks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--notebooks", action="store_true", help="time each notebook too")
    parser.add_argument("--page", action="store_true", help="write the page from results.json, measure nothing")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def keep(group: str, name: str, outcome: dict) -> None:
        results.setdefault(group, {})[name] = outcome
        half = RESULTS.with_suffix(".tmp")
        half.write_text(json.dumps(results, indent=1) + "\n")
        half.replace(RESULTS)

    if not options.page:
        import timm
        import torch

        settings = {"images": options.images, "batch": options.batch, "repeats": options.repeats,
                    "processor": processor(), "python": platform.python_version(),
                    "torch": torch.__version__, "timm": timm.__version__}
        if set(options.only) == set(GROUPS):
            results = {}
        results["settings"] = settings
        measured(options, keep)
    import page

    page.write(results)
    print(f"The page is {page.PAGE.relative_to(ROOT)}, the numbers are {RESULTS.relative_to(ROOT)}")


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    features = [word for word in ("avx512f", "avx512_bf16", "amx_bf16") if word in flags.split()]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({', '.join(features) or 'no AVX-512'})"


if __name__ == "__main__":
    main()
