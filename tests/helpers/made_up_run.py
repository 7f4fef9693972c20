"""Runs for tests of the page: one as a training would leave it, and one that means harm."""

from __future__ import annotations

import math

import numpy as np

from equipoise.report import Mistake, RunReport, ShownSample, SolvePath, SolveSpread, Survey

HARM = (
    "<script>alert(1)</script>\"'&<img src=http://evil.example/x onerror=alert(2)>{$x^2$ "
    "\\frac}\x00\u202e\ud800]]><!--</style>"
)


def step_line(step: int, steps: int, generator: np.random.Generator) -> dict:
    progress = step / steps
    return {
        "kind": "step",
        "step": step,
        "epoch": 0,
        "loss": 2.3 * math.exp(-4 * progress) * generator.lognormal(0, 0.15),
        "accuracy": 1 - 0.9 * math.exp(-5 * progress),
        "learning_rate": 1e-3 * (1 - progress),
        "gradient_norm": generator.lognormal(0, 0.3),
        "forward_steps": 6 + 3 * progress,
        "backward_steps": 4 + progress,
        "forward_residual": 7e-4 * generator.lognormal(0, 0.2),
        "backward_residual": 5e-4 * generator.lognormal(0, 0.2),
        "forward_status": {"CONVERGED": 127, "MAX_STEPS": 1},
        "backward_status": {"CONVERGED": 128},
        "skipped": False,
        "samples_per_second": 900.0,
    }


def epoch_line(epoch: int, per_epoch: int) -> dict:
    return {
        "kind": "epoch",
        "epoch": epoch,
        "step": (epoch + 1) * per_epoch,
        "train": {"loss": 1 / (epoch + 1), "accuracy": 0.9},
        "test": {
            "loss": 1.1 / (epoch + 1),
            "accuracy": 0.95 - 0.1 / (epoch + 1),
            "samples": 10000,
            "missed": 3,
        },
        "forward_status": {"CONVERGED": 1270, "MAX_STEPS": 10},
        "backward_status": {"CONVERGED": 1280},
        "skipped": 1,
        "operator_norms": {"equilibrium.1": 0.98, "equilibrium.2": 0.95 + 0.001 * epoch},
        "norm_limit": 1.0,
        "seconds": 12.1,
    }


def run(steps: int = 400, epochs: int = 5, **more) -> RunReport:
    generator = np.random.default_rng(0)
    settings = {
        "title": "mnist with opteq-mnist",
        "subtitle": "16 November 2026, 15:49 UTC, data in /data/mnist",
        "config": {
            "model": {"name": "opteq-mnist", "options": {"tolerance": 1e-3, "max_steps": 50}},
            "data": {"name": "mnist", "root": "", "download": True, "mean": [0.1307]},
            "train": {"epochs": epochs, "batch": 128},
        },
        "environment": {
            "torch": "2.13.0",
            "command": "equipoise train mnist",
            "platform": {"system": "Linux", "threads": 2},
        },
        "steps": [step_line(step, steps, generator) for step in range(steps)],
        "epochs": [epoch_line(epoch, steps // epochs) for epoch in range(epochs)],
        "summary": {
            "stopped": "early",
            "epochs": epochs,
            "steps": steps,
            "seconds": 3725.0,
            "parameters": {"extractor": 12000, "total": 114666},
            "metric": "accuracy",
            "test": {
                "accuracy": 0.9917,
                "samples": 10000,
                "missed": 3,
                "status": {"CONVERGED": 9997, "MAX_STEPS": 3},
            },
            "skipped": 2,
            "forward_status": {"CONVERGED": 490000, "MAX_STEPS": 6000, "STALLED": 800},
            "backward_status": {"CONVERGED": 496000},
        },
        "classes": [f"class {k}" for k in range(10)],
        "confusion": np.diag(np.arange(100, 110)) + np.eye(10, k=1, dtype=np.int64) * 7,
        "solves": [
            SolvePath(
                residual=list(0.8 * 0.5 ** np.arange(16)),
                objective=list(20 * 0.3 ** np.arange(16)),
                description="The layer minimises a strongly convex function.",
                certificate="The map is a contraction.",
                image=generator.random((8, 8)),
                truth="class 7",
                prediction="class 1 (73.5 %)",
                solver="fixed_point, down to a residual of 1e-06",
                own_solve="The model itself takes 5 steps of Anderson.",
            )
        ],
        "survey": Survey(
            3,
            10000,
            "test",
            [SolveSpread([4, 5, 5], [2e-4, 9e-4, 8e-4], 1e-3)],
            wrong=1,
            mistakes=[Mistake(17, "class 7", "class 1", 0.735, generator.random((8, 8)))],
        ),
    }
    return RunReport(**{**settings, **more})


def masks(count: int = 2, height: int = 120, width: int = 160) -> list[ShownSample]:
    generator = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), height // 4)[:, None].repeat(width, 1)
    truth[:, :10] = 255
    prediction = np.where(generator.random(truth.shape) < 0.1, 1, truth)
    image = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return [
        ShownSample({"image": image, "truth": truth, "prediction": prediction})
        for _ in range(count)
    ]


def hostile() -> RunReport:
    ordinary = run(90, 2)
    losses = [None, math.inf, 1e308, 10**400, "many", True, [1.0], 1.0, 2.0]
    return RunReport(
        title=HARM,
        config={
            HARM: {HARM: HARM, "list": [HARM, {HARM: HARM}]},
            "model": {"options": {"tolerance": HARM}},
            f"{HARM}2": HARM,
        },
        environment={HARM: HARM, "nested": {HARM: {HARM: None}}},
        steps=[
            {**line, HARM: 0.5, "loss": losses[k % 9], "forward_residual": -1.0}
            for k, line in enumerate(ordinary.steps)
        ],
        epochs=[
            {
                **line,
                "operator_norms": {
                    HARM: 0.5,
                    "y" * 300: 1.0,
                    **{f"layer {k}": k / 20 for k in range(20)},
                },
                "train": None,
                "test": {HARM: 0.7, "loss": None, "missed": "all"},
                "forward_status": {HARM: 5, "CONVERGED": None},
            }
            for line in ordinary.epochs
        ],
        summary={
            "metric": HARM,
            "test": {HARM: 0.3, "status": {HARM: 4}},
            "seconds": None,
            "parameters": {HARM: 5, "total": "many"},
        },
        classes=[HARM] * 12 + ["longname" * 40],
        confusion=np.eye(13) * 7,
        samples=masks(1),
        ignore=255,
        solves=[
            SolvePath(
                [1.0, 0.0, math.nan, 1e-3],
                [math.inf, -1.0, 3.0],
                HARM,
                HARM * 100,
                np.full((8, 8), np.nan),
                HARM,
                HARM,
                HARM,
                HARM,
                HARM,
            )
        ],
        subtitle=HARM,
        survey=Survey(
            2,
            3,
            HARM,
            [
                SolveSpread([1, math.nan, 10**9], [0.0, -1.0, 1e308, 1e-300], 0.0, HARM),
                SolveSpread([], [math.inf], None, "y" * 300),
            ],
            2,
            [
                Mistake(0, HARM, HARM, math.nan, np.full((8, 8, 3), np.inf)),
                Mistake(1, HARM, HARM, 0.5),
            ],
        ),
    )
