import math

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from equipoise.engine import OptimizerConfig, ScheduleConfig, TrainConfig, make_optimizer

STEPS, PER_EPOCH = 40, 10


def rates(schedule: ScheduleConfig) -> list[float]:
    return [schedule.factor(step, STEPS, PER_EPOCH) for step in range(STEPS)]


def witness(make) -> list[float]:
    """The factors that one of torch's own schedulers gives to a learning rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(found) < STEPS:  # one cycle refuses to go on after its last step
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (ScheduleConfig("constant"), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        (
            ScheduleConfig("step", milestones=(1, 2.5), drop=0.2),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 25], 0.2),
        ),
        (
            ScheduleConfig("cosine", final=0.1),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS, 0.1),
        ),
        (
            ScheduleConfig("poly", power=0.9),
            lambda o: torch.optim.lr_scheduler.PolynomialLR(o, STEPS, 0.9),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ScheduleConfig) else "",
)
def test_schedule_equals_the_one_of_torch(schedule, make):
    assert rates(schedule) == pytest.approx(witness(make), abs=1e-12)


def test_one_cycle_equals_the_one_of_torch():
    # torch counts the peak among the steps of the rise, so that its part is 13/40 where ours is
    # 12/39.
    made = rates(ScheduleConfig("one-cycle", rise=12 / 39, initial=0.04, final=0.04e-4))
    theirs = witness(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 1.0, STEPS, pct_start=13 / 40, cycle_momentum=False
        )
    )
    assert made == pytest.approx(theirs, abs=1e-9)
    assert max(made) == made[12] == pytest.approx(1)


@pytest.mark.parametrize("name", ["constant", "cosine", "poly"])
def test_warmup_rises_evenly_and_then_the_schedule_begins(name):
    made = rates(ScheduleConfig(name, warmup=0.5))
    assert made[:5] == pytest.approx([k / 6 for k in range(1, 6)])
    plain = ScheduleConfig(name)
    assert made[5:] == pytest.approx(
        [plain.factor(step, STEPS - 5, PER_EPOCH) for step in range(STEPS - 5)]
    )


def test_warmup_before_milestones_leaves_them_where_they_are():
    made = rates(ScheduleConfig("step", warmup=0.5, milestones=(2,), drop=0.1))
    assert made[5:20] == [1] * 15
    assert made[20:] == pytest.approx([0.1] * 20)


@pytest.mark.parametrize("name", ["constant", "cosine", "one-cycle", "poly"])
def test_runs_of_one_step_have_a_rate(name):
    assert 0 < ScheduleConfig(name).factor(0, 1, 1) <= 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: ScheduleConfig("linear"),
            "schedule.name must be one of constant, cosine, one-cycle, poly, step; got 'linear'.",
        ),
        (
            lambda: ScheduleConfig("step"),
            "schedule.milestones must name at least one epoch for 'step'; got none.",
        ),
        (
            lambda: ScheduleConfig("step", milestones=(3, 2)),
            r"schedule.milestones must increase; got \(3, 2\).",
        ),
        (lambda: ScheduleConfig(rise=0), r"schedule.rise must be in \(0, 1\]; got 0."),
        (
            lambda: ScheduleConfig(warmup=-1),
            "schedule.warmup must be zero or a positive number; got -1.",
        ),
        (
            lambda: ScheduleConfig("one-cycle", warmup=1),
            "schedule.warmup must be 0 for 'one-cycle', which has a rise of its own; got 1.",
        ),
        (
            lambda: OptimizerConfig("adamm"),
            "optimizer.name must be one of adam, adamw, muon, sgd; got 'adamm'. Did you mean 'adam",
        ),
        (
            lambda: OptimizerConfig(learning_rate=math.nan),
            "optimizer.learning_rate must be a positive number; got nan.",
        ),
        (
            lambda: OptimizerConfig(betas=(0.9, 1.0)),
            r"optimizer.betas must be in \[0, 1\); got 1.0.",
        ),
        (
            lambda: OptimizerConfig("sgd", momentum=0.0, nesterov=True),
            "optimizer.nesterov must be false without momentum; got True.",
        ),
        (
            lambda: TrainConfig(epochs=0),
            "train.epochs must be a whole number of at least 1; got 0.",
        ),
        (
            lambda: TrainConfig(batch=True),
            "train.batch must be a whole number of at least 1; got True.",
        ),
        (lambda: TrainConfig(ema=1.0), r"train.ema must be in \[0, 1\); got 1.0."),
        (lambda: TrainConfig(clip=-1.0), "train.clip must be zero or a positive number; got -1.0."),
        (lambda: TrainConfig(seed=2**63), "train.seed must be a whole number from 0 to"),
        (
            lambda: TrainConfig(precision="float8"),
            "train.precision must be one of bfloat16, float16, float32; got 'float8'.",
        ),
    ],
    ids=range(16),
)
def test_bad_settings_get_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make()


@pytest.mark.parametrize("everything", [False, True])
def test_optimizer_spares_biases_and_scales_from_decay(everything):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    made = make_optimizer(model, OptimizerConfig("adamw", weight_decay=0.1, decay_all=everything))
    decayed = [
        weight for group in made.param_groups if group["weight_decay"] for weight in group["params"]
    ]
    assert len(decayed) == (4 if everything else 1)
    assert sum(len(group["params"]) for group in made.param_groups) == 4


def test_optimizer_spares_biases_and_scales_of_any_shape_from_decay():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(4, 1, 1))
            self.bias = torch.nn.Parameter(torch.zeros(1, 4, 1, 1))
            self.biases = torch.nn.ParameterList([torch.zeros(4, 5, 5)])
            self.row = torch.nn.Parameter(torch.ones(1, 4))
            self.kernels = torch.nn.ModuleList(
                [torch.nn.Conv1d(1, 4, 1), torch.nn.Conv2d(4, 1, 1, bias=False)]
            )
            self.norm = torch.nn.LayerNorm((4, 5, 5))
            self.attention = torch.nn.MultiheadAttention(4, 1, add_bias_kv=True)

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Linear(4, 5)

    model = Scaled()
    model.named = Named()
    model.lengths = weight_norm(torch.nn.Conv1d(2, 4, 1))
    made = make_optimizer(model, OptimizerConfig("adamw", weight_decay=0.1))
    decayed = {
        id(weight)
        for group in made.param_groups
        if group["weight_decay"]
        for weight in group["params"]
    }
    assert {name for name, weight in model.named_parameters() if id(weight) in decayed} == {
        "row",
        "kernels.0.weight",
        "kernels.1.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "named.bias.weight",
        "lengths.parametrizations.weight.original0",
        "lengths.parametrizations.weight.original1",
    }
