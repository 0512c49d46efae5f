"""K-FAC in one process, without `hvd.init()`, against K-FAC in numpy; and what surrounds it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fusion_rt.torch.kfac import KFAC, pack, unpack
from tests.for_each import for_each
from tests.torch.kfac.reference import NumpyKFAC, patches, softmax_minus, with_ones

OPTIONS: list[dict[str, Any]] = [
    {},
    {"kl_clip": None, "damping": 0.03},
    {"kl_clip": 1e-5, "factor_decay": 0.5},
    {"factor_update_steps": 2, "inverse_update_steps": 4},
]
REFERENCE_NAMES = {
    "kl_clip": "clip",
    "factor_decay": "decay",
    "factor_update_steps": "factor_every",
    "inverse_update_steps": "inverse_every",
}


def reference_of(lr: float, options: dict[str, Any]) -> NumpyKFAC:
    return NumpyKFAC(lr, **{REFERENCE_NAMES.get(name, name): value for name, value in options.items()})


def mlp(seed: int = 0, bias: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 6, bias=bias), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=bias)
    ).double()


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (size,), generator=generator)


def train(model: torch.nn.Module, kfac: KFAC, steps: range, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        inputs, labels = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        kfac.step()
        optimizer.step()


def close(parameter: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-8, atol=1e-10)


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@for_each("options", OPTIONS)
@for_each("bias", [True, False])
def test_ten_steps_of_two_layers_are_those_of_numpy(options: dict[str, Any], bias: bool) -> None:
    lr = 0.1
    model = mlp(bias=bias)
    parameters = [
        np.concatenate([layer.weight.detach().numpy(), *([layer.bias.detach().numpy()[:, None]] if bias else [])], 1)
        for layer in (model[0], model[2])
    ]
    train(model, KFAC(model, lr=lr, **options), range(10), lr)
    reference = reference_of(lr, options)
    ones: Callable[[np.ndarray], np.ndarray] = with_ones if bias else lambda rows: rows
    for step in range(10):
        inputs, labels = (tensor.numpy() for tensor in batch(step))
        first, second = parameters
        a1 = ones(inputs)
        hidden = np.tanh(a1 @ first.T)
        a2 = ones(hidden)
        g2 = softmax_minus(a2 @ second.T, labels)
        g1 = (g2 @ second[:, :6]) * (1 - hidden**2)
        gradients = [g1.T @ a1 / len(inputs), g2.T @ a2 / len(inputs)]
        steps = reference.step([a1[:, None], a2[:, None]], [g1[:, None], g2[:, None]], gradients)
        parameters = [parameter - lr * change for parameter, change in zip(parameters, steps, strict=True)]
    for layer, expected in zip((model[0], model[2]), parameters, strict=True):
        close(layer.weight, expected[:, : layer.in_features])
        if bias:
            close(layer.bias, expected[:, -1])


@for_each("options", OPTIONS)
def test_ten_steps_with_a_convolution_are_those_of_numpy(options: dict[str, Any]) -> None:
    lr = 0.1
    torch.manual_seed(1)
    geometry = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    conv = torch.nn.Conv2d(2, 3, (3, 2), **geometry)
    model = torch.nn.Sequential(
        conv, torch.nn.ReLU(inplace=True), torch.nn.Flatten(), torch.nn.Linear(3 * 3 * 4, 2)
    ).double()
    linear = model[3]
    w1 = np.concatenate([conv.weight.detach().numpy().reshape(3, -1), conv.bias.detach().numpy()[:, None]], axis=1)
    w2 = np.concatenate([linear.weight.detach().numpy(), linear.bias.detach().numpy()[:, None]], axis=1)
    batches = [
        (np.random.default_rng(step).normal(size=(4, 2, 5, 6)), np.random.default_rng(step).normal(size=(4, 2)))
        for step in range(10)
    ]

    kfac = KFAC(model, lr=lr, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        residuals = model(torch.from_numpy(inputs)) - torch.from_numpy(targets)
        (residuals.square().sum(1) / 2).mean().backward()
        kfac.step()
        optimizer.step()

    reference = reference_of(lr, options)
    for inputs, targets in batches:
        rows = with_ones(patches(inputs, (3, 2), **geometry))  # [4, locations, 13]
        outputs = rows @ w1.T  # [4, locations, 3]
        hidden = np.maximum(outputs, 0).transpose(0, 2, 1).reshape(4, -1)
        a2 = with_ones(hidden)
        g2 = a2 @ w2.T - targets
        g1 = (g2 @ w2[:, :-1]).reshape(4, 3, -1).transpose(0, 2, 1) * (outputs > 0)
        gradients = [np.einsum("ntg,nta->ga", g1, rows) / 4, g2.T @ a2 / 4]
        change1, change2 = reference.step([rows, a2[:, None]], [g1, g2[:, None]], gradients)
        w1, w2 = w1 - lr * change1, w2 - lr * change2
    close(conv.weight, w1[:, :-1].reshape(conv.weight.shape))
    close(conv.bias, w1[:, -1])
    close(linear.weight, w2[:, :-1])
    close(linear.bias, w2[:, -1])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # which is what is asked for
@for_each("mode", ["zeros", "reflect", "replicate", "circular"])
@for_each("padding", ["same", "valid", (2, 1)])
def test_patches_are_what_the_convolution_sees(mode: str, padding: Any) -> None:
    torch.manual_seed(2)
    conv = torch.nn.Conv2d(2, 3, (4, 3), padding=padding, padding_mode=mode, dilation=(1, 2)).double()
    kfac = KFAC(conv)
    (state,) = kfac._states.values()
    images = torch.randn(2, 2, 7, 8, dtype=torch.float64)
    rows = state.layer._input_rows(images)
    outputs = rows @ conv.weight.reshape(3, -1).T + conv.bias
    torch.testing.assert_close(outputs, conv(images).flatten(2).transpose(1, 2))
    torch.testing.assert_close(state.layer._input_rows(images[0]), rows[:1])


@for_each("size", [1, 2, 7, 30])
def test_half_of_a_symmetric_matrix_is_all_of_it(size: int) -> None:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    matrix = matrix + matrix.T
    packed = pack(matrix)
    assert packed.shape == (size * (size + 1) // 2,)
    assert torch.equal(unpack(packed, size), matrix)


def test_a_sequence_counts_as_locations_of_one_example() -> None:
    """For [N, T, features]: A is the mean over both, G the sum over T."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2).double()
    kfac = KFAC(model)
    inputs = torch.randn(3, 5, 4, dtype=torch.float64)
    weights = torch.randn(3, 5, 2, dtype=torch.float64)
    (model(inputs) * weights).sum((1, 2)).mean().backward()
    kfac.step()
    (state,) = kfac._states.values()
    rows = torch.cat([inputs, torch.ones(3, 5, 1, dtype=torch.float64)], 2)
    torch.testing.assert_close(state.a, torch.einsum("nti,ntj->ij", rows, rows) / 15)
    torch.testing.assert_close(state.g, torch.einsum("nti,ntj->ij", weights, weights) / 3)


def test_accumulated_gradients_give_the_average_of_their_factors() -> None:
    whole, parts = mlp(), mlp()
    kfac_whole, kfac_parts = KFAC(whole), KFAC(parts, loss_scale=0.5)
    for step in range(3):
        inputs, labels = batch(step)
        for model in (whole, parts):
            model.zero_grad()
        torch.nn.functional.cross_entropy(whole(inputs), labels).backward()
        for half in (slice(0, 4), slice(4, 8)):
            (torch.nn.functional.cross_entropy(parts(inputs[half]), labels[half]) * 0.5).backward()
        kfac_whole.step()
        kfac_parts.step()
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_scaled_loss_gives_the_same_and_an_overflow_is_dropped() -> None:
    plain, scaled = mlp(), mlp()
    scale = 1024.0
    kfac_plain, kfac_scaled = KFAC(plain), KFAC(scaled, loss_scale=lambda: scale)
    for step in range(4):
        inputs, labels = batch(step)
        for model in (plain, scaled):
            model.zero_grad()
        (torch.nn.functional.cross_entropy(scaled(inputs), labels) * (torch.inf if step == 1 else scale)).backward()
        if step == 1:
            before = copy.deepcopy(kfac_scaled.state_dict()["layers"])
            kfac_scaled.step()
            after = kfac_scaled.state_dict()["layers"]
            assert all(torch.equal(before[name][key], after[name][key]) for name in before for key in ("a", "g"))
            continue
        torch.nn.functional.cross_entropy(plain(inputs), labels).backward()
        for parameter in scaled.parameters():
            parameter.grad /= scale
        kfac_plain.step()
        kfac_scaled.step()
        for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_scaler_whose_scale_changes_gives_the_same() -> None:
    """It doubles every other step, and halves in the fifth, which overflows."""
    plain, scaled = mlp(), mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    kfac_plain, kfac_scaled = KFAC(plain), KFAC(scaled, loss_scale=scaler.get_scale)
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, scaled)]
    scales = []
    for step in range(8):
        inputs, labels = batch(step)
        for optimizer in made:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(scaled(inputs), labels)
        scaler.scale(loss * (torch.inf if step == 4 else 1.0)).backward()
        scaler.unscale_(made[1])
        kfac_scaled.step()
        scaler.step(made[1])
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 4:
            continue
        torch.nn.functional.cross_entropy(plain(inputs), labels).backward()
        kfac_plain.step()
        made[0].step()
    assert scales == [256.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_scale_that_is_not_told_counts_squared() -> None:
    plain, divided = mlp(), mlp()
    kfac_plain, kfac_divided = KFAC(plain), KFAC(divided)
    inputs, labels = batch(0)
    torch.nn.functional.cross_entropy(plain(inputs), labels).backward()
    (torch.nn.functional.cross_entropy(divided(inputs), labels) / 4).backward()
    for kfac in (kfac_plain, kfac_divided):
        kfac.step()
    told, untold = (kfac.state_dict()["layers"] for kfac in (kfac_plain, kfac_divided))
    for name in told:
        torch.testing.assert_close(untold[name]["g"] * 16, told[name]["g"])
        torch.testing.assert_close(untold[name]["a"], told[name]["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_factors_in_single(dtype: torch.dtype) -> None:
    model, reference = mlp().to(dtype), mlp()
    reference.load_state_dict(model.state_dict())
    for net in (model, reference):
        kfac = KFAC(net, damping=0.1)
        inputs, labels = batch(0)
        own = next(net.parameters()).dtype
        torch.nn.functional.cross_entropy(net(inputs.to(own)), labels).backward()
        kfac.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        assert one.grad.dtype == dtype
        assert (one.grad.double() - other.grad).norm() < 0.05 * other.grad.norm()


@for_each("at", [3, 4, 6])
def test_a_saved_state_goes_on_bit_for_bit(at: int) -> None:
    options: dict[str, Any] = {"factor_update_steps": 2, "inverse_update_steps": 4}
    straight = mlp()
    train(straight, KFAC(straight, lr=0.2, damping=0.01, **options), range(10))

    first = mlp()
    kfac = KFAC(first, lr=0.2, damping=0.01, **options)
    train(first, kfac, range(at))
    file = io.BytesIO()
    torch.save((first.state_dict(), kfac.state_dict()), file)
    file.seek(0)
    model_state, kfac_state = torch.load(file, weights_only=True)
    second = mlp(seed=5)
    resumed = KFAC(second)
    second.load_state_dict(model_state)
    resumed.load_state_dict(kfac_state)
    train(second, resumed, range(at, 10))
    assert equal(straight, second)
    train(first, kfac, range(at, 10))
    assert equal(straight, first), "saving changed something"


def test_the_state_of_another_model_is_refused_and_changes_nothing() -> None:
    kfac = KFAC(mlp())
    model = mlp()
    train(model, kfac_of_model := KFAC(model), range(1))
    other = kfac_of_model.state_dict()
    other["layers"]["0"]["a"] = torch.eye(3)
    with pytest.raises(ValueError, match=r"layer '0' has 'a' of shape \(3, 3\)"):
        kfac.load_state_dict(other)
    del other["layers"]["0"]
    with pytest.raises(ValueError, match=r"the layers \['2'\], and this one has \['0', '2'\]"):
        kfac.load_state_dict(other)
    assert kfac.state_dict()["steps"] == 0


def test_what_is_left_alone_is_named_and_keeps_its_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.Conv2d(4, 4, 3, groups=2),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 2),
    )
    with pytest.warns(UserWarning, match=r"1 \(Conv2d: 2 groups\); 2 \(BatchNorm2d: neither Linear nor Conv2d\)"):
        kfac = KFAC(model)
    model(torch.randn(4, 2, 7, 7)).square().mean().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    kfac.step()
    changed = [not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False, False, False, True, True]
    KFAC(model, skip_layers=["1", "BatchNorm2d"])  # no warning


def test_shared_frozen_and_computed_weights_are_left_alone() -> None:
    tied = torch.nn.ModuleDict(
        {"one": torch.nn.Linear(3, 3), "two": torch.nn.Linear(3, 3), "own": torch.nn.Linear(3, 3)}
    )
    tied["two"].weight = tied["one"].weight
    with pytest.warns(UserWarning, match="one .*shares a parameter.*two .*shares a parameter"):
        assert list(KFAC(tied).owners()) == ["own"]
    frozen = mlp()
    frozen[0].requires_grad_(False)
    assert list(KFAC(frozen).owners()) == ["2"]
    frozen[0].bias.requires_grad_(True)
    with pytest.warns(UserWarning, match="0 .*its weight is not trained"):
        KFAC(frozen)
    normed = torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)), torch.nn.Linear(3, 2)
    )
    with pytest.warns(UserWarning, match="computed from other parameters"):
        assert list(KFAC(normed).owners()) == ["1"]


def test_a_layer_that_never_runs_is_told_of_once() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(3, 2)})
    kfac = KFAC(model)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model["used"](inputs).square().mean().backward()
    with pytest.warns(UserWarning, match="not seen these layers .*: unused"):
        kfac.step()
    kfac.step()


def test_evaluation_and_inference_leave_no_trace() -> None:
    model = mlp()
    kfac = KFAC(model)
    inputs, labels = batch(0)
    with torch.no_grad():
        model(inputs)
    model.eval()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    model.train()
    model(inputs)  # without a backward pass
    kfac.step()
    assert all(state.updates == 0 for state in kfac._states.values())


def test_removed_hooks_are_gone_and_a_step_says_so() -> None:
    model = mlp()
    kfac = KFAC(model)
    inputs, labels = batch(0)
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    kfac.remove()
    assert not model[0]._forward_hooks
    loss.backward()
    assert not any(state.runs for state in kfac._states.values())
    with pytest.raises(RuntimeError, match="after remove"):
        kfac.step()


def test_copies_of_the_model_are_no_concern_of_the_preconditioner() -> None:
    model = mlp()
    kfac = KFAC(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.nn.functional.cross_entropy(other(batch(0)[0]), batch(0)[1]).backward()
    assert not any(state.runs for state in kfac._states.values())


def test_a_preconditioner_that_is_dropped_goes_and_the_model_still_runs() -> None:
    model = mlp()
    kfac = KFAC(model)
    reference = weakref.ref(kfac)
    del kfac
    gc.collect()
    assert reference() is None
    torch.nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()


def test_a_decomposition_that_fails_is_made_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = mlp().float(), mlp().float()
    eigh = torch.linalg.eigh

    def fails_in_single(matrix: torch.Tensor) -> Any:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrix)

    for net, failing in ((model, True), (reference, False)):
        monkeypatch.setattr(torch.linalg, "eigh", fails_in_single if failing else eigh)
        kfac = KFAC(net, kl_clip=None, damping=0.1)
        torch.nn.functional.cross_entropy(net(batch(0)[0].float()), batch(0)[1]).backward()
        kfac.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_step_that_fails_is_made_up_for_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = mlp(), mlp()
    kfac, other = KFAC(model, inverse_update_steps=10), KFAC(reference, inverse_update_steps=10)
    inputs, labels = batch(0)

    def fails(matrix: torch.Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    for net in (model, reference):
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", fails)
        with pytest.raises(torch.linalg.LinAlgError):
            kfac.step()
    kfac.step()
    other.step()
    for one, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, expected.grad)


def test_a_layer_that_runs_more_often_than_before_is_counted_in_full_from_the_next_update_on() -> None:
    """A bucket goes out when its layers have run as often as in the last update; what comes later is too late."""
    layer = torch.nn.Linear(1, 1, bias=False).double()
    kfac = KFAC(layer, factor_decay=0.0)
    (state,) = kfac._states.values()
    seen = []
    for sizes in ((1.0,), (2.0, 3.0), (2.0, 4.0), (5.0,), (6.0,)):
        sum(layer(torch.full((1, 1), size, dtype=torch.float64)).sum() for size in sizes).backward()
        kfac.step()
        seen.append(float(state.a))
    assert seen[0] == 1
    assert seen[1] in (4, 9)  # the one of which the gradient came first
    assert seen[2:] == [(4 + 16) / 2, 25, 36]


@for_each(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"damping": 0.0}, "damping"),
        ({"factor_decay": 1.0}, "factor_decay"),
        ({"kl_clip": 0.0}, "kl_clip"),
        ({"factor_update_steps": 0}, "factor_update_steps"),
        ({"inverse_update_steps": 0}, "inverse_update_steps"),
        ({"skip_layers": "Linear"}, "has none that it can"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(mlp(), **options)


def test_lazy_layers_have_to_run_first() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    with pytest.raises(ValueError, match="'0' has no shape yet; run the model"):
        KFAC(model)
    model(torch.zeros(1, 2))
    KFAC(model)
