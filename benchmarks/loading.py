"""What fraction of a training step waits for images: decoded when needed, ahead, or once.

    python benchmarks/loading.py --data-root DIR            # DIR/train/CLASS/*.jpg
    python benchmarks/loading.py --data-root DIR --enlarge 512

Each way of loading trains the same network for two epochs; of each epoch the fraction of its time
that was spent waiting for samples is shown. `--enlarge` first writes the images anew with this many
pixels on each side, as photographs have them; they are still brought to `--size` when they are
decoded.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

import equipoise
from equipoise.data import (
    Compose,
    Dataset,
    Loading,
    Normalize,
    RandomResizedCrop,
    ToFloat,
    load_data,
)
from equipoise.engine import TrainConfig, Trainer, make_progress, make_task, read_metrics

WAYS = {
    "decoded when needed": Loading(),
    "decoded ahead by 2 workers": Loading(workers=2),
    "decoded ahead, and kept": Loading(workers=2, memory=2**30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--model", default="opteq-cifar10-162k")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--enlarge", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = (args.size, args.size)
    dataset = load_data("image-folder", "train", args.data_root, size=size)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    dataset = dataset.select_rows(order[: args.samples])
    with tempfile.TemporaryDirectory() as folder:
        if args.enlarge:
            enlarge(dataset, Path(folder) / "train", args.enlarge)
            dataset = load_data("image-folder", "train", folder, size=size)
        start = time.process_time()
        dataset.gather(range(min(64, len(dataset))))
        start = time.process_time()
        dataset.gather(range(min(64, len(dataset))))
        cost = (time.process_time() - start) / min(64, len(dataset))
        print(f"{len(dataset)} images, {1000 * cost:.2f} ms of CPU time to decode one")
        for name, loading in WAYS.items():
            waits, seconds = train(dataset, loading, args)
            shown = ", ".join(f"{wait:.2%}" for wait in waits)
            print(f"{name:28s} waiting {shown} of epochs 1 and 2   {seconds:.1f} s", flush=True)


def enlarge(dataset: Dataset, target: Path, side: int) -> None:
    for (path,) in dataset.files:
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        Image.open(path).convert("RGB").resize((side, side)).save(folder / path.name, quality=90)


def train(
    dataset: Dataset, loading: Loading, args: argparse.Namespace
) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = equipoise.create_model(
        args.model, num_classes=len(dataset.classes), norm="project", tolerance=1e-2
    )
    size = (args.size, args.size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            make_task("classification", dataset),
            dataset,
            settings=TrainConfig(epochs=2, batch=args.batch),
            transform=Compose(RandomResizedCrop(size), ToFloat(), Normalize(0.5, 0.25)),
            loading=loading,
            folder=Path(folder),
            progress=make_progress(quiet=True),
        )
        seconds = trainer.fit().seconds
        lines = read_metrics(Path(folder) / "metrics.jsonl")
    return [line["loading_fraction"] for line in lines if line["kind"] == "epoch"], seconds


if __name__ == "__main__":
    main()
