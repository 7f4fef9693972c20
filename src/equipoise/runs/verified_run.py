"""What the papers prove, checked on the network of a run with its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from equipoise.analysis.check import Case, Check, Subject, Verdict, verify
from equipoise.core import SettingError, SourceError
from equipoise.data import DATASETS, batches
from equipoise.layers import Equilibrium
from equipoise.runs.samples import load_part, require_alike
from equipoise.runs.saved_run import Run, open_run

__all__ = ["verify_run"]


def verify_run(
    folder: Path | Run,
    checks: Sequence[Check],
    *,
    samples: int = 32,
    root: str | None = None,
    trust: bool = False,
    on_check: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Check statements on the network of a run with samples that it learnt from.

    Those about another kind of network are left out; there must be one that is not.

    Args:
        folder: Where the run is kept, or the run that is open already.
        checks: The statements.
        samples: How many samples at most.
        root: The folder with the data, if it is another one than in training.
        trust: As of `open_run`.
        on_check: Called with each verdict.
    """
    run = folder if isinstance(folder, Run) else open_run(folder, trust=trust)
    if not any(isinstance(module, Equilibrium) for module in run.model.modules()):
        raise SettingError(
            "verify.run",
            "be of a network with an equilibrium",
            run.model.name,
            "The papers' statements are about equilibria.",
        )
    x, y = _first_samples(run, samples, root)
    cases: dict[Subject, Case | None] = {}
    found = []
    for check in checks:
        if check.subject not in cases:
            cases[check.subject] = _adapt(check.subject, run.model, x, y)
        case = cases[check.subject]
        if case is None:
            continue
        found.append(verify(check, case))
        if on_check is not None:
            on_check(found[-1])
    if not found:
        kinds = " or ".join(dict.fromkeys(check.subject.name for check in checks))
        raise SettingError("verify.run", f"be of {kinds}", run.model.name)
    return found


def _adapt(subject: Subject, model: nn.Module, x: Tensor, y: Tensor) -> Case | None:
    case = subject.adapt(model, x, y)
    return case and replace(case, label=f"trained: {case.label}")


def _first_samples(run: Run, count: int, root: str | None) -> tuple[Tensor, Tensor]:
    data = run.config.data if root is None else replace(run.config.data, root=root)
    known = DATASETS[data.name].as_trained(run.about)
    data = replace(data, options={**data.options, **known})
    dataset = load_part(data, "train", run.about.encoding)
    try:
        require_alike(run.about, dataset)
    except SettingError as error:
        raise SourceError(run.folder, error) from error
    size = min(count, len(dataset))
    found = batches(dataset, size, shuffle=False, transform=run.transform)
    x, y = next(((x, y) for x, y in found if len(x)), (None, None))
    if x is None or y is None:
        raise SourceError(run.folder, "must have samples to check with; its data has none.")
    device = next(run.model.parameters()).device
    return x.to(device), y.to(device)
