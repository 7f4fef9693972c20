"""Two processes under torchrun run these checks beside torch's own modules on the whole batch.

One start serves all checks, since it takes seconds. A check may differ between the processes only
in what it looks at: both must draw the same random numbers and communicate equally often.
"""

import copy
import os
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, create_model
from equipoise.engine import distributed
from equipoise.engine.batchnorm import SyncedBatchNorm, synchronize
from equipoise.engine.distributed import Group

TIMEOUT = timedelta(seconds=20)
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_reductions_see_both_processes(group: Group) -> None:
    assert (group.world, group.rank, group.local_rank) == (
        2,
        int(os.environ["RANK"]),
        int(os.environ["LOCAL_RANK"]),
    )
    assert group.is_main == (group.rank == 0)
    own = torch.tensor([[1.0, 2.0], [3.0, 1e-12]], dtype=torch.float64).T + group.rank
    kept = own.clone()
    close(group.sum(own), 2 * own - 2 * group.rank + 1)
    assert torch.equal(own, kept)
    assert group.sum(torch.tensor(2**40 + group.rank)).item() == 2**41 + 1
    assert [group.any(group.rank == 1), group.any(False), group.any(True)] == [True, False, True]
    assert group.max(float(-3 - group.rank)) == -3.0
    assert group.max(0.1) == 0.1
    assert torch.tensor(group.max(float("nan") if group.rank else 1.0)).isnan()
    assert group.broadcast_text("größe ∂" if group.is_main else None) == "größe ∂"
    with pytest.raises(ValueError, match="must be a text in the main process"):
        group.broadcast_text(None if group.is_main else "mine")


def check_barrier_waits_for_the_last(group: Group) -> None:
    begin = time.monotonic()
    time.sleep(0.2 * group.rank)
    group.barrier()
    assert time.monotonic() - begin > 0.15 or group.rank


def check_second_start_is_refused(_: Group) -> None:
    with pytest.raises(ValueError, match="must be called once"):
        Group.from_environment()


def compare_normalization(
    plain: nn.Module, shares: tuple[int, int], shape: tuple[int, ...], **layout: torch.memory_format
) -> None:
    """Two steps and an evaluation, beside torch's module on the batch of both processes."""
    rank = int(os.environ["RANK"])
    plain = plain.double()
    for number, weight in enumerate(plain.parameters()):
        nn.init.normal_(weight, mean=1.0 - number)
    synced = synchronize(copy.deepcopy(plain))
    assert isinstance(synced, SyncedBatchNorm)
    mine = slice(0, shares[0]) if rank == 0 else slice(shares[0], None)
    for _ in range(2):
        whole = (
            (50 + 3 * torch.randn(sum(shares), *shape, dtype=torch.float64))
            .to(**layout)
            .requires_grad_()
        )
        own = whole.detach()[mine].requires_grad_()
        direction = torch.randn_like(whole)
        expected, actual = plain(whole), synced(own)
        close(actual, expected[mine])
        gradients = torch.autograd.grad(expected, [whole, *plain.parameters()], direction)
        found = torch.autograd.grad(actual, [own, *synced.parameters()], direction[mine])
        close(found[0], gradients[0][mine])
        for part, total in zip(found[1:], gradients[1:], strict=True):
            close(Group(world=2).sum(part), total)
        for name, buffer in plain.named_buffers():
            close(synced.get_buffer(name), buffer)
    sample = torch.randn(4, *shape, dtype=torch.float64)[rank:]
    close(synced.eval()(sample), plain.eval()(sample))


def check_normalization_is_that_of_the_whole_batch(_: Group) -> None:
    for shares in ((3, 3), (5, 1), (4, 0), (0, 2), (1, 1)):
        compare_normalization(nn.BatchNorm2d(3), shares, (3, 4, 5))
        compare_normalization(nn.BatchNorm1d(3, momentum=None), shares, (3,))


def check_normalization_keeps_options(_: Group) -> None:
    compare_normalization(nn.BatchNorm1d(4, affine=False, eps=0.3), (2, 3), (4, 6))
    compare_normalization(nn.BatchNorm3d(2, momentum=0.7), (2, 1), (2, 2, 3, 2))
    compare_normalization(nn.BatchNorm2d(3, track_running_stats=False), (2, 1), (3, 2, 2))
    compare_normalization(nn.BatchNorm2d(3), (2, 3), (3, 4, 4), memory_format=torch.channels_last)


def check_normalization_of_frozen_weights(_: Group) -> None:
    plain = nn.BatchNorm2d(2).double()
    plain.weight.requires_grad_(False)
    synced = synchronize(plain)
    own = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    synced(own).square().sum().backward()
    assert plain.weight.grad is None
    assert own.grad is not None
    assert plain.bias.grad is not None


def check_normalization_of_low_precision_inputs(group: Group) -> None:
    plain = nn.BatchNorm2d(3)
    synced = synchronize(copy.deepcopy(plain))
    whole = (4 + torch.randn(8, 3, 4, 4)).bfloat16().requires_grad_()
    own = whole.detach()[4 * group.rank :][:4].requires_grad_()
    direction = torch.randn_like(whole)
    expected, actual = plain(whole), synced(own)
    assert actual.dtype == expected.dtype
    expected.backward(direction)
    actual.backward(direction[4 * group.rank :][:4])
    close(actual, expected[4 * group.rank :][:4], 2e-2)
    close(own.grad, whole.grad[4 * group.rank :][:4], 2e-2)
    close(synced.running_var, plain.running_var, 1e-3)


def check_normalization_refuses_one_value(group: Group) -> None:
    for samples in ((1, 0), (0, 0)):
        with pytest.raises(
            ValueError,
            match=f"more than one value for each channel in training; got {sum(samples)}",
        ):
            SyncedBatchNorm(2)(torch.zeros(samples[group.rank], 2))
    with pytest.raises(ValueError, match=r"must have shape \(samples, 2, ...\); got \(4, 3\)"):
        SyncedBatchNorm(2)(torch.zeros(4, 3))


def check_wrapped_model_steps_like_one_process(group: Group) -> None:
    # Each process starts elsewhere, and must go on from the main process's tensors.
    model = create_model("opteq-digits", tolerance=1e-12).double()
    torch.manual_seed(group.rank)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.1 * torch.rand_like(tensor))
    images, labels = torch.rand(12, 1, 8, 8, dtype=torch.float64), torch.randint(10, (12,))
    images, labels = group.sum(images), group.sum(labels) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = group.wrap(model)
    assert any(isinstance(module, SyncedBatchNorm) for module in model.modules())
    alone = create_model("opteq-digits", tolerance=1e-12).double()
    alone.load_state_dict(
        {
            name: group.sum(tensor if group.is_main else 0 * tensor)
            for name, tensor in model.state_dict().items()
        }
    )
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    for shares in ((6, 6), (9, 3)):
        mine = slice(0, shares[0]) if group.is_main else slice(shares[0], None)
        for each in (optimizer, single):
            each.zero_grad()
        nn.functional.cross_entropy(alone(images), labels).backward()
        loss = nn.functional.cross_entropy(wrapped(images[mine]), labels[mine])
        (loss * group.world * shares[group.rank] / sum(shares)).backward()
        for (name, actual), expected in zip(
            model.named_parameters(), alone.parameters(), strict=True
        ):
            assert expected.grad.norm() > 0, name
            assert (actual.grad - expected.grad).norm() <= 1e-8 * expected.grad.norm(), name
        for each in (optimizer, single):
            each.step()
    for name, tensor in model.state_dict().items():
        close(tensor, alone.state_dict()[name], 1e-8)
        assert torch.equal(group.sum(tensor), 2 * tensor), name


def check_lost_process_is_an_error(group: Group) -> None:
    group.barrier()
    if group.rank == 1:
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        group.barrier()
    assert time.monotonic() - begin < 2 * TIMEOUT.total_seconds()


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def work(folder: Path) -> None:
    """Run the checks in one process, up to the first that fails: after it they are out of step."""
    distributed.TIMEOUT = TIMEOUT
    report = folder / f"{os.environ['RANK']}.txt"
    with Group.from_environment("cpu") as group:
        wrapped = group.wrap(nn.Linear(1, 1))
        threads = count_threads()
        for check in CHECKS:
            torch.manual_seed(0)
            try:
                check(group)
            except Exception:
                report.write_text(f"process {group.rank}: {traceback.format_exc()}")
                break
        else:
            report.write_text("")
    group.close()
    # Those of the closed group are gone though a wrapped model is still there; Python might abort
    # at its end otherwise.
    assert count_threads() < threads or not threads, wrapped


def count_threads() -> int:
    """Those of C++ too, where the system tells."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {
        "OMP_NUM_THREADS": "1"
    }
    options = [
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    found = [report.read_text() for report in sorted(tmp_path.iterdir())]
    assert found == ["", ""], "\n".join([*found, done.stderr])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "variables",
    [{}, {"MASTER_ADDR": "here"}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}],
    ids=["none", "address", "one"],
)
def test_group_of_one_needs_no_torch_distributed(
    variables: dict[str, str], environment: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    environment.setattr(torch.distributed, "init_process_group", None)
    model, tensor = nn.BatchNorm1d(2), torch.tensor([1.0, 2.0])
    with Group.from_environment("cpu") as group:
        assert (group.rank, group.local_rank, group.world, group.is_main) == (0, 0, 1, True)
        assert group.wrap(model) is model
        total = group.sum(tensor)
        assert torch.equal(total, tensor)
        assert total.data_ptr() != tensor.data_ptr()
        assert (group.any(True), group.any(False), group.max(-2.0), group.broadcast_text("a")) == (
            True,
            False,
            -2.0,
            "a",
        )
        group.barrier()


@pytest.mark.parametrize(
    ("variables", "device", "message"),
    [
        (
            {"RANK": "0"},
            "cpu",
            "must have LOCAL_RANK as a whole number; got ''. Start with torchrun",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"},
            "cpu",
            "must have WORLD_SIZE as a whole number; got 'two'",
        ),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "cpu",
            "must have LOCAL_RANK <= RANK < WORLD_SIZE",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            "cpu",
            "must have LOCAL_RANK <= RANK < WORLD_SIZE",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "cpu",
            "must have MASTER_ADDR; got ''",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "cpu",
            "must have MASTER_PORT as a whole",
        ),
        (
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
            },
            "meta",
            "must be cpu or cuda",
        ),
    ],
    ids=["missing", "not-a-number", "rank", "local-rank", "address", "port", "device"],
)
def test_group_refuses_inconsistent_environment(
    variables: dict[str, str], device: str, message: str, environment: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Group.from_environment(device)


def test_group_needs_a_gpu_for_each_process(environment: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("1", "1", "2", "127.0.0.1", "1"), strict=True):
        environment.setenv(name, value)
    environment.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ValueError,
        match="must have one GPU for each process of a machine; got process 2 and 1 GPUs",
    ):
        Group.from_environment("cuda")


def test_group_needs_a_build_with_torch_distributed(environment: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("0", "0", "2", "127.0.0.1", "1"), strict=True):
        environment.setenv(name, value)
    environment.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"must have torch\.distributed with gloo"):
        Group.from_environment("cpu")


def test_synchronize_keeps_parameters_state_and_mode() -> None:
    norm = nn.BatchNorm2d(3, eps=0.1, momentum=None)
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), norm, nn.ModuleDict({"again": norm, "other": nn.BatchNorm2d(3).eval()})
    )
    parameters, state = dict(model.named_parameters()), model.state_dict()
    synced = synchronize(model)
    assert synced is model
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == state._metadata
    assert isinstance(model[1], SyncedBatchNorm)
    assert model[1] is model[2]["again"]
    assert (model[1].eps, model[1].momentum, model[1].training, model[2]["other"].training) == (
        0.1,
        None,
        True,
        False,
    )
    assert isinstance(synchronize(nn.BatchNorm1d(2)), SyncedBatchNorm)


def test_synced_normalization_alone_is_torchs() -> None:
    plain, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    synced = synchronize(copy.deepcopy(plain))
    assert torch.equal(synced(x), plain(x))
    assert all(
        torch.equal(synced.state_dict()[name], tensor)
        for name, tensor in plain.state_dict().items()
    )


def test_synchronize_leaves_cells_and_refuses_coupled_ones() -> None:
    cell = Cell()
    cell.norm = nn.BatchNorm1d(2)
    synchronize(nn.Sequential(cell))
    assert type(cell.norm) is nn.BatchNorm1d
    cell.coupled = True
    with pytest.raises(
        ValueError, match="Cell must not have batch normalisation when several processes train it"
    ):
        synchronize(nn.Sequential(cell))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
