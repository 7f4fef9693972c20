"""Full-batch training steps of the implicit ReLU network, warm and cold, side by side.

Two runs of the same network on the same samples make the same steps in turn; one keeps the last
solutions of each sample. Minima of processor time over windows of steps, at equal tolerance.

Run: python benchmarks/relu_implicit.py   (one thread; prints a Markdown table)
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, ScheduleConfig, TrainConfig, Trainer, make_task
from equipoise.engine.progress import SilentProgress
from equipoise.families.relu_implicit import ReluImplicitNetwork

RATE = 0.3


def make_data(samples: int) -> Dataset:
    """Return two classes of 784 numbers, with a mean of their own each."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % 2
    x = torch.rand(samples, 784, generator=draw) + torch.rand(2, 784, generator=draw)[y]
    return Dataset("made up", "train", "classification", ("0", "1"), (784,), x, y)


class Run:
    """One run, a step at a time."""

    def __init__(self, data: Dataset, width: int, tolerance: float, *, warm: bool) -> None:
        torch.manual_seed(0)
        self.model = ReluImplicitNetwork((784,), width, tolerance=tolerance)
        self.trainer = Trainer(
            self.model,
            make_task("binary-regression", data),
            data,
            settings=TrainConfig(epochs=1, batch=len(data), warm_start=warm),
            optimizer=OptimizerConfig("sgd", learning_rate=RATE, momentum=0.0),
            schedule=ScheduleConfig("constant"),
            progress=SilentProgress(),
        )
        self.rows = self.trainer.course.rows(self.trainer.position)[0]
        self.x, self.y = data.gather(self.rows)

    def step(self) -> tuple[float, float, float]:
        """Make a step; return its seconds, and the mean steps of its two solves."""
        start = time.process_time()
        stepper = self.trainer.stepper
        step = stepper.compute(self.x, self.y, RATE, self.rows)
        stepper.apply(step, stepper.verdict(step))
        seconds = time.process_time() - start
        last = self.model.equilibrium.last
        assert last is not None
        assert last.adjoint is not None
        return seconds, _mean(last.steps), _mean(last.adjoint.steps)


def _mean(steps: Tensor) -> float:
    return float(steps.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[1e-4, 1e-5, 1e-6])
    parser.add_argument("--profile", action="store_true", help="show where a warm step's time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = make_data(args.samples)
    print("| tolerance | steps of training | cold | warm | ratio | cold solves | warm solves |")
    print("|---|---|---|---|---|---|---|")
    for tolerance in args.tolerances:
        cold, warm = (Run(data, args.width, tolerance, warm=warm) for warm in (False, True))
        pairs = []
        for number in range(1, args.steps + 1):
            pairs.append((cold.step(), warm.step()))
            if number % args.window == 0:
                window, pairs = pairs, []
                slow, fast = (min(pair[side][0] for pair in window) for side in (0, 1))
                solves = [
                    " + ".join(f"{sum(p[s][k] for p in window) / len(window):.1f}" for k in (1, 2))
                    for s in (0, 1)
                ]
                print(
                    f"| {tolerance:g} | {number - args.window + 1} to {number} | "
                    f"{1e3 * slow:.0f} ms | {1e3 * fast:.0f} ms | {slow / fast:.1f} | "
                    f"{solves[0]} | {solves[1]} |",
                    flush=True,
                )
    if args.profile:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            warm.step()
        table = found.key_averages(group_by_input_shape=True)
        print(table.table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
