"""What a figure is about: a trained run, or a network as it is first drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from equipoise.core import SettingError, SourceError, choose, require_count
from equipoise.data import Dataset
from equipoise.engine import CheckpointError, load_weights, read_checkpoint
from equipoise.layers import Equilibrium
from equipoise.runs.build import make_model, make_transforms, resolve, try_out
from equipoise.runs.config import load_config
from equipoise.runs.presets import list_presets
from equipoise.runs.samples import load_part
from equipoise.runs.saved_run import Run, load_run_samples, open_run
from equipoise.runs.sweep import split_values

__all__ = ["Network", "Source", "at_epoch", "list_kept_epochs", "open_network"]


@dataclass(frozen=True)
class Source:
    """Where a network comes from; another process can open it again.

    Args:
        name: The folder of a run, a preset or a TOML file.
        settings: Of a network that is not trained, such as `model.options.deviation=1`.
        root: The folder with the data, if it is another one than in the config.
        trust: As of `open_run`.
        title: What it is called in a figure.
    """

    name: str
    settings: tuple[str, ...] = ()
    root: str | None = None
    trust: bool = False
    title: str = ""

    @property
    def folder(self) -> Path | None:
        """The folder of a run; None of a network that is not trained."""
        return Path(self.name) if Path(self.name).is_dir() else None

    @classmethod
    def parse(
        cls, words: Sequence[str], *, root: str | None = None, trust: bool = False
    ) -> list[Source]:
        """Return what the words of a command line mean.

        Args:
            words: Folders of runs, presets and TOML files; and settings of those that are not
                trained, where `KEY=V1,V2` makes a network for each value.
            root: As of `Source`.
            trust: As of `Source`.
        """
        names = [word for word in words if "=" not in word or Path(word).exists()]
        settings = [word for word in words if word not in names]
        if not names:
            raise ValueError("look: the folder of a run, or a preset, must be given; got none.")
        choices = []
        for setting in settings:
            key, _, text = setting.partition("=")
            values = split_values(text)
            choices.append([(f"{key}={value}", len(values) > 1) for value in values])
        found = []
        for name in names:
            source = cls(name, root=root, trust=trust, title=Path(name).name or name)
            if source.folder is not None and settings:
                raise SourceError(
                    name, f"is a trained run, whose settings cannot change; got {settings[0]}."
                )
            if source.folder is not None:
                found.append(source)
                continue
            if not Path(name).is_file() and name not in list_presets():
                load_config(name, trust=trust)  # which says what is wrong with it
            for point in itertools.product(*choices):
                varied = ", ".join(_shorten(setting) for setting, many in point if many)
                title = f"{name}, {varied}" if varied else f"{name}, not trained"
                given = tuple(setting for setting, _ in point)
                found.append(replace(source, settings=given, title=title))
        return _with_own_titles(found)


def _shorten(setting: str) -> str:
    """`deviation = 1` for `model.options.deviation=1`."""
    key, _, value = setting.partition("=")
    return f"{key.rpartition('.')[2]} = {value}"


def _with_own_titles(sources: list[Source]) -> list[Source]:
    """Name runs of the same name by their paths."""
    titles = [source.title for source in sources]
    return [
        replace(source, title=source.name) if titles.count(source.title) > 1 else source
        for source in sources
    ]


@dataclass(frozen=True)
class Network:
    """An open network.

    Attributes:
        source: Where it comes from.
        run: The network, its task and what is known of its data.
    """

    source: Source
    run: Run

    def samples(self, split: str | None, count: int) -> Dataset:
        """Return some samples, evenly spread over a split of the data.

        Args:
            split: As of `evaluate_run`.
            count: How many at most.
        """
        require_count("look.samples", count)
        dataset = load_run_samples(self.run, split, self.source.root)
        try_out(self.run.model, self.run.task, dataset, self.run.transform)
        count = min(count, len(dataset))
        return dataset.select_rows([k * len(dataset) // count for k in range(count)]).in_memory()

    def layer(self, name: str | None = None) -> tuple[str, Equilibrium]:
        """Return an equilibrium layer and its name; raise if there is none.

        Args:
            name: Which; by default the first.
        """
        layers = self.run.model.equilibria()
        if not layers:
            raise SettingError(
                f"The model {self.run.model.name!r} of {self.source.title}",
                "have an equilibrium to look at",
                None,
                "Its landscape can be drawn: equipoise look landscape.",
                got="none",
            )
        name = choose("look.layer", name, layers) if name is not None else next(iter(layers))
        return name, layers[name]


def open_network(source: Source) -> Network:
    """Open a run with the weights that it kept, or draw a network anew.

    Args:
        source: Where it comes from.
    """
    if source.folder is not None:
        return Network(source, open_run(source.folder, trust=source.trust))
    config = load_config(source.name, source.settings, trust=source.trust)
    if source.root is not None:
        config = replace(config, data=replace(config.data, root=source.root))
    dataset = load_part(config.data, "train", None)
    config = resolve(config, dataset)
    run = Run(
        Path(source.name),
        config,
        make_model(config).eval(),
        config.task.make(dataset),
        dataset.select_rows([]),
        make_transforms(config.data, dataset)[1],
    )
    return Network(source, run)


def list_kept_epochs(folder: Path) -> list[int]:
    """Return the epochs after which a run kept its weights, beginning with 0, the first ones.

    Args:
        folder: The folder of the run.
    """
    names = (path.stem.removeprefix("epoch-") for path in (folder / "weights").glob("epoch-*"))
    return sorted(int(name) for name in names if name.isdecimal())


@contextmanager
def at_epoch(network: Network, epoch: int | None) -> Iterator[None]:
    """Give a run's model the weights that it had after an epoch while the context lasts.

    Args:
        network: The run.
        epoch: One of `list_kept_epochs`; None leaves the weights to use.
    """
    if epoch is None:
        yield
        return
    folder = network.source.folder
    if folder is None:
        raise SourceError(network.source.name, "is not a trained run, so it has no epochs.")
    known = list_kept_epochs(folder)
    if epoch not in known:
        raise SourceError(
            folder,
            f"must have kept its weights after epoch {epoch}; it has those of "
            f"{', '.join(map(str, known)) or 'none'}. Train it with train.weights_every=1.",
        )
    path = folder / "weights" / f"epoch-{epoch:06d}.safetensors"
    model = network.run.model
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors, _ = read_checkpoint(path)
    try:
        load_weights(model, tensors)
    except ValueError as error:
        raise CheckpointError(path, error) from error
    try:
        yield
    finally:
        model.load_state_dict(own)
