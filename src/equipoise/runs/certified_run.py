"""What is proved of a run's network, or of a new one: its equilibria, its outputs, its classes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from equipoise.analysis import (
    AttackSettings,
    CertifiedRadii,
    RadiusCertifier,
    attack_radii,
    certified_accuracy,
    certify,
    lipschitz_bound,
)
from equipoise.analysis.certificate import require_finite_weights
from equipoise.analysis.radius import require_radii
from equipoise.core import SettingError, SourceError, require_count, stop_if_requested
from equipoise.core.named_code import is_code_name
from equipoise.data import DATASETS, Dataset, Transform
from equipoise.engine import Task
from equipoise.engine.tasks import LabelAnswer
from equipoise.layers import Bound, Chain, Equilibrium
from equipoise.models import Model, create_model, list_models
from equipoise.runs.build import make_model, make_transforms, resolve
from equipoise.runs.certificate import AttackOutcome, CertifiedRun, RadiusSummary
from equipoise.runs.config import load_config
from equipoise.runs.presets import list_presets
from equipoise.runs.samples import load_part, require_alike
from equipoise.runs.saved_run import open_run
from equipoise.runs.sections import DataConfig

__all__ = ["certify_run", "digest_weights"]

BATCH = 500
LESS, MORE = (1.5, 1.25), (3.0, 4.0, 6.0, 8.0)
"""Multiples of the certified radii that are attacked besides 1 and 2, to see where half change."""
GRADIENT_TOLERANCE = 1e-4
"""To what equilibria are solved while they are attacked, or more exactly if the model does."""


@dataclass(frozen=True)
class _Subject:
    """What is to be certified.

    Attributes:
        name: What to call it.
        model: The network, in evaluation mode.
        task: What it is for, if there are data.
        transform: What is done to samples first.
        about: What is known of the training data, if it is a run.
        data: Where samples are.
    """

    name: str
    model: Model
    task: Task | None = None
    transform: Transform | None = None
    about: Dataset | None = None
    data: DataConfig | None = None
    dataset: Dataset | None = None


def certify_run(
    source: str | Path,
    settings: Sequence[str] = (),
    *,
    radii: Sequence[float] = (),
    attack: int = 0,
    attack_settings: AttackSettings | None = None,
    samples: int | None = None,
    split: str | None = None,
    root: str | None = None,
    download: bool = False,
    trust: bool = False,
    on_batch: Callable[[int, int], None] | None = None,
) -> CertifiedRun:
    """Return what is proved of a run at the weights that it kept, or of a new model.

    Args:
        source: The folder of a run, a preset or config file, or the name of a model.
        settings: Changes of a config, such as `model.options.margin=20`.
        radii: Lengths at which to state the certified accuracy, positive.
        attack: How many certified samples to attack.
        attack_settings: How hard.
        samples: How many samples to certify, the first ones; by default all.
        split: Which split of the data; by default what the run scored in the end.
        root: The folder with the data, if it is another one than the config says.
        download: Whether to download data that are missing.
        trust: As of `open_run`.
        on_batch: Called with how many samples are certified, and how many there are.
    """
    require_radii("--radii", radii)
    if samples is not None:
        require_count("--samples", samples)
    wants_data = bool(radii) or attack > 0

    def locate(data: DataConfig) -> DataConfig:
        chosen = data.root if root is None else root
        return replace(data, root=chosen, download=data.download or download)

    subject, weights = _find_known_subject(
        source, settings, locate, split, trust=trust, wants_data=wants_data
    )
    if not any(isinstance(module, Equilibrium) for module in subject.model.modules()):
        raise SettingError(
            "certify", "be asked of a model with an equilibrium", subject.name, got=subject.name
        )
    model = subject.model
    dataset = _load(subject, split) if wants_data else None
    point = None if dataset is None else _to_floats(dataset.gather([0])[0])
    try:
        require_finite_weights("the network", model)
    except SettingError as error:
        raise SourceError(_weights_of(source), error) from error
    equilibria = certify(model, _some_points(subject, point), strict=False)
    first = _flatten(subject.transform)
    prepare = _prepare(subject.transform)
    if dataset is None:
        seen = None if point is None else prepare(point)
        bound = lipschitz_bound(model, seen).with_input(first)
        return CertifiedRun(subject.name, equilibria, bound, weights=weights)
    certifier = RadiusCertifier(model, first=first, prepare=prepare, x=point)
    count = len(dataset) if samples is None else min(samples, len(dataset))
    found, x, y = _certify_samples(certifier, dataset, count, attack, on_batch)
    correct = found.predicted.cpu() == y
    summary = RadiusSummary(
        dataset.split,
        len(y),
        float(correct.double().mean()),
        certified_accuracy(found.radius.cpu(), correct, radii),
        certified_accuracy(found.by_norm.cpu(), correct, radii),
        float(found.radius.median()),
        float(found.error.max()),
        int((found.radius == 0).sum()),
    )
    outcome = None
    if attack:
        chosen = torch.nonzero(correct & (found.radius.cpu() > 0)).flatten()[:attack]
        outcome = _attack(certifier, model, prepare, x, found, chosen, attack_settings)
    return CertifiedRun(subject.name, equilibria, certifier.bound, summary, outcome, weights)


def _find_known_subject(
    source: str | Path,
    settings: Sequence[str],
    locate: Callable[[DataConfig], DataConfig],
    split: str | None,
    *,
    trust: bool,
    wants_data: bool,
) -> tuple[_Subject, str | None]:
    """What is to be certified, and what tells the very weights that it has, if it is a run."""
    kept = _weights_of(source)
    while True:  # a training may write others meanwhile
        weights = digest_weights(kept.parent) if isinstance(kept, Path) else None
        subject = _find_subject(source, settings, locate, split, trust=trust, wants_data=wants_data)
        if weights is None or digest_weights(Path(source)) == weights:
            return subject, weights


def _find_subject(
    source: str | Path,
    settings: Sequence[str],
    locate: Callable[[DataConfig], DataConfig],
    split: str | None,
    *,
    trust: bool,
    wants_data: bool,
) -> _Subject:
    path = Path(source)
    if path.is_dir() and str(source) not in list_presets():
        if settings:
            raise SettingError("certify", "be asked of a run without settings", settings[0])
        run = open_run(path, trust=trust)
        data = locate(run.config.data)
        known = DATASETS[data.name].as_trained(run.about)
        data = replace(data, options={**data.options, **known})
        return _Subject(str(path), run.model, run.task, run.transform, run.about, data)
    if str(source) in list_presets() or path.suffix == ".toml":
        config = load_config(str(source), settings)
        data = locate(config.data)
        config = replace(config, data=data)
        if not wants_data:
            return _Subject(config.model.name, make_model(config).eval())
        dataset = load_part(data, split, None)
        config = resolve(config, dataset)
        return _Subject(
            config.model.name,
            make_model(config).eval(),
            config.task.make(dataset),
            make_transforms(config.data, dataset)[1],
            None,
            config.data,
            dataset,
        )
    name = str(source)
    if not is_code_name(name) and name not in list_models():
        raise SourceError(name, "must be the folder of a run, a preset or a model; there is none.")
    if wants_data or settings:
        raise SettingError(
            "certify",
            "be asked of a run or a preset for radii and settings, since a model alone has no data",
            name,
            got=f"the model {name!r}",
        )
    torch.manual_seed(0)
    return _Subject(name, create_model(name).eval())


def _weights_of(source: str | Path) -> Path | str:
    path = Path(source) / "model.safetensors"
    return path if path.is_file() else str(source)


def _load(subject: _Subject, split: str | None) -> Dataset:
    """The samples to certify, of a task with classes."""
    assert subject.data is not None
    encoding = None if subject.about is None else subject.about.encoding
    if subject.dataset is None:
        dataset = load_part(subject.data, split, encoding)
    else:
        dataset = subject.dataset
    if subject.about is not None:
        try:
            require_alike(subject.about, dataset)
        except SettingError as error:
            raise SourceError(subject.name, error) from error
    task = subject.task
    if task is None or not issubclass(task.answer_type, LabelAnswer) or not len(dataset):
        kind = "no samples" if not len(dataset) else f"the task {getattr(task, 'name', None)!r}"
        raise SettingError(
            "certified radii", "be asked of samples with one class each", kind, got=kind
        )
    return dataset


def _some_points(subject: _Subject, point: Tensor | None) -> Tensor | None:
    """Samples at which a spectral radius is measured where nothing is proved."""
    model = subject.model
    if point is not None:
        return _prepare(subject.transform)(point).to(next(model.parameters()))
    if subject.data is not None:
        try:
            encoding = None if subject.about is None else subject.about.encoding
            raw = load_part(subject.data, None, encoding).gather(list(range(4)))[0]
            return _prepare(subject.transform)(_to_floats(raw)).to(next(model.parameters()))
        except (ValueError, OSError, IndexError):
            pass  # without the data there are random points
    shape = getattr(model, "input_shape", None)
    if shape is None:
        return None
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))


def _to_floats(raw: Tensor) -> Tensor:
    """Images in [0, 1], or rows of a table, in float64; tokens stay tokens."""
    if raw.dtype == torch.uint8:
        return raw.double() / 255
    return raw.double() if raw.is_floating_point() else raw


def _prepare(transform: Transform | None) -> Callable[[Tensor], Tensor]:
    if transform is None:
        return lambda x: x
    return lambda x: transform(x, torch.zeros(len(x)))[0]


def _flatten(transform: Transform | None) -> list[Bound]:
    """How far each step of a transform moves samples."""

    def bounds(part: object) -> list[Bound]:
        if isinstance(part, Chain):
            return [bound for one in part.parts for bound in bounds(one)]
        assert isinstance(part, Bound)
        return [part]

    return [] if transform is None else bounds(transform.output_lipschitz())


def _certify_samples(
    certifier: RadiusCertifier,
    dataset: Dataset,
    count: int,
    kept: int,
    on_batch: Callable[[int, int], None] | None,
) -> tuple[CertifiedRadii, Tensor, Tensor]:
    """The radii of samples, the samples themselves as far as they are attacked, and targets."""
    found, samples, targets = [], list[Tensor](), list[Tensor]()
    for start in range(0, count, BATCH):
        stop_if_requested()
        if on_batch is not None:
            on_batch(start, count)
        raw, y = dataset.gather(list(range(start, min(start + BATCH, count))))
        if not len(raw):
            continue
        x = _to_floats(raw)
        found.append(certifier.radii(x))
        targets.append(y)
        samples += [x] if kept else []
    if on_batch is not None:
        on_batch(count, count)
    x = torch.cat(samples) if samples else torch.zeros(0)
    return CertifiedRadii.concatenate(found), x, torch.cat(targets)


def _attack(
    certifier: RadiusCertifier,
    model: nn.Module,
    prepare: Callable[[Tensor], Tensor],
    x: Tensor,
    found: CertifiedRadii,
    chosen: Tensor,
    settings: AttackSettings | None,
) -> AttackOutcome:
    """Attack certified radii and multiples of them; what is found is checked by exact solves."""
    settings = settings or AttackSettings()
    tried = copy.deepcopy(model).eval().requires_grad_(False)
    for module in tried.modules():
        if isinstance(module, Equilibrium):
            tolerance = min(module.stop.tolerance, GRADIENT_TOLERANCE)
            module.stop = replace(module.stop, tolerance=tolerance)
            module.eval_options = {}
            module.solves.on_failure = "ignore"
    x = x[chosen]
    start = x.to(next(model.parameters()))
    classes, radius = found.predicted[chosen], found.radius[chosen]
    changed: dict[float, float] = {}

    def attack(factor: float) -> Tensor:
        """Which classes change within a multiple of the radii."""
        limit = factor * radius
        found = []
        for rows in torch.arange(len(x)).split(BATCH):  # type: ignore[no-untyped-call]
            points, _ = attack_radii(
                lambda sample: tried(prepare(sample)),
                start[rows],
                classes[rows],
                limit[rows].to(start),
                settings,
            )
            length = torch.linalg.vector_norm((points.to(x) - x[rows]).flatten(1), dim=1)
            predicted = certifier.logits(points.to(x))[0].argmax(dim=1)
            found.append((predicted != classes[rows]) & (length <= limit[rows]))
        other = torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)
        changed[factor] = float(other.double().mean()) if len(other) else 0.0
        return other

    broken = int(attack(1.0).sum())
    attack(2.0)
    within = changed[2.0] >= 0.5
    for factor in LESS if within else MORE:
        attack(factor)
        if (changed[factor] >= 0.5) != within:
            break
    return AttackOutcome(len(chosen), settings, broken, dict(sorted(changed.items())))


def digest_weights(folder: Path) -> str:
    """Return what tells the weights of a run from others.

    Args:
        folder: Where the run is kept.
    """
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
