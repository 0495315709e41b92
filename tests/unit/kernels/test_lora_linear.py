"""Tests that the LoRA linear equals float64, allocates and saves only what it needs, and agrees with PEFT's layers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from kernel_cases import assert_near, randn
from lora_cases import SCALE, make_lora_inputs
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from rlpipe.kernels.lora import lora_linear
from rlpipe.learner.adapter_layers import FusedLora, fuse_lora
from rlpipe.models.nf4 import from_nf4, resolve_nf4

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
CPU = torch.device("cpu")


def products_of(run: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    names = Counter(event.name for event in found.events())
    return Counter({name: names[name] for name in ("aten::mm", "aten::addmm", "aten::addmm_") if names[name]})


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(13,), (2, 5), (0,), (3, 0), (2, 3, 2), ()])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_result_and_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool) -> None:
    actual, expected = make_lora_inputs(shape, dtype=dtype, with_bias=with_bias).both()
    assert all(tensor.dtype is dtype for tensor in actual)
    assert_near(actual, expected, TOLERANCES[dtype])


def test_a_result_may_be_changed_in_place() -> None:
    """Check what models such as Gemma 3n do with the result of a linear layer."""
    weight = randn(6, 4, seed=0)
    x, down, up = (randn(*shape, seed=1).requires_grad_() for shape in ((2, 5, 4), (3, 4), (6, 3)))
    scaled = 3 * lora_linear(x, weight, down, up, scale=SCALE)
    expected = torch.autograd.grad(scaled.square().sum(), (x, down, up))
    y = lora_linear(x, weight, down, up, scale=SCALE)
    y *= 3
    for actual, want in zip(torch.autograd.grad(y.square().sum(), (x, down, up)), expected, strict=True):
        torch.testing.assert_close(actual, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_adapter_that_is_wider_has_gradients_of_its_own_type(dtype: torch.dtype) -> None:
    inputs = make_lora_inputs((2, 40), dtype=dtype, adapter_dtype=torch.float32)
    actual, expected = inputs.both()
    assert [tensor.dtype for tensor in actual] == [dtype, dtype, torch.float32, torch.float32, dtype]
    assert_near(actual, expected, TOLERANCES[dtype])


def test_a_narrower_adapter_and_weight_are_widened() -> None:
    inputs = make_lora_inputs(dtype=torch.float32, adapter_dtype=torch.bfloat16)
    inputs.weight = inputs.weight.bfloat16()
    actual, expected = inputs.both()
    assert [tensor.dtype for tensor in actual[:3]] == [torch.float32, torch.float32, torch.bfloat16]
    assert_near(actual[:2], expected[:2], TOLERANCES[torch.float32])
    assert_near(actual[2:], expected[2:], TOLERANCES[torch.bfloat16])


def test_second_gradients_are_refused_and_first_ones_are_those_of_differences() -> None:
    inputs = make_lora_inputs((2, 3))
    assert inputs.bias is not None

    def run(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return lora_linear(x, inputs.weight, down, up, scale=SCALE, bias=bias)

    assert torch.autograd.gradcheck(run, (inputs.x, inputs.down, inputs.up, inputs.bias))
    (first,) = torch.autograd.grad(inputs.run().square().sum(), inputs.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_inputs_and_gradients_may_lie_in_any_order() -> None:
    inputs = make_lora_inputs((4, 5))
    inputs.x = inputs.x.detach().transpose(0, 1)[::2].requires_grad_()
    inputs.down = inputs.down.detach().T.contiguous().T.requires_grad_()
    assert_near(*inputs.both(), TOLERANCES[torch.float64])
    sums = [torch.autograd.grad(y.sum(), inputs.leaves) for y in (inputs.run(), inputs.expect())]  # a gradient of one 1
    assert_near(*sums, TOLERANCES[torch.float64])


@pytest.mark.parametrize("trained", [["x"], ["down"], ["up"], ["bias"], ["x", "up"], ["down", "up"]])
def test_only_what_requires_a_gradient_gets_one(trained: list[str]) -> None:
    inputs = make_lora_inputs()
    for name in ("x", "down", "up", "bias"):
        getattr(inputs, name).requires_grad_(name in trained)
    assert_near(*inputs.both(), TOLERANCES[torch.float64])


def test_each_product_runs_once_and_none_is_for_the_weight() -> None:
    inputs = make_lora_inputs(with_bias=False)
    y = inputs.run()
    # Forward: one with the weight, two with the adapter; backward: those for x's gradient, and two sums over tokens.
    assert sum(products_of(inputs.run).values()) == 3
    assert sum(products_of(lambda: y.backward(torch.ones_like(y))).values()) == 5
    inputs.x.requires_grad_(False)
    y = inputs.run()
    assert sum(products_of(lambda: y.backward(torch.ones_like(y))).values()) == 3


def saved_by(inputs: Any) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        inputs.run()
    return saved


def test_what_is_kept_are_the_inputs_as_they_are_and_one_tensor_of_the_rank() -> None:
    inputs = make_lora_inputs((2, 6), dtype=torch.bfloat16, adapter_dtype=torch.float32)
    given = {tensor.data_ptr() for tensor in (inputs.x, inputs.weight, inputs.down, inputs.up)}
    saved = saved_by(inputs)
    assert given == {tensor.data_ptr() for tensor in saved} & given
    assert [tensor.shape for tensor in saved if tensor.data_ptr() not in given] == [(12, 3)]
    inputs.x.requires_grad_(False)
    assert not {inputs.weight.data_ptr(), inputs.down.data_ptr()} & {tensor.data_ptr() for tensor in saved_by(inputs)}


def test_without_gradients_nothing_is_kept() -> None:
    inputs = make_lora_inputs()
    with torch.no_grad():
        assert saved_by(inputs) == []
        assert inputs.run().grad_fn is None
    for leaf in inputs.leaves:
        leaf.requires_grad_(False)
    assert saved_by(inputs) == []
    assert_near([inputs.run()], [inputs.expect()], TOLERANCES[torch.float64])


def test_what_cannot_be_multiplied_is_named() -> None:
    inputs = make_lora_inputs()
    with pytest.raises(ValueError, match=r"down \[3, 10\], up \[3, 7\]: they must be"):
        lora_linear(inputs.x, inputs.weight, inputs.down, inputs.up.T, scale=1.0)
    with pytest.raises(ValueError, match="freeze it"):
        lora_linear(inputs.x, inputs.weight.requires_grad_(), inputs.down, inputs.up, scale=1.0)


class Model(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.is_loaded_in_4bit = isinstance(linear, Linear4bit)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y: Tensor = self.linear(x, **options)
        return y


def make_base(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if kind == "plain":
        return nn.Linear(64, 24, dtype=dtype)
    return Linear4bit(64, 24, quant_type="nf4", compute_dtype=dtype, quant_storage=dtype).to(dtype)


def make_model(kind: str = "plain", dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    model = Model(make_base(kind, dtype)).to("cpu")
    resolve_nf4(model, CPU)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=7, target_modules=["linear"], **options))
    _spread_adapters(adapted)
    return adapted.eval()


def _spread_adapters(model: nn.Module) -> None:
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(randn(*parameter.shape, seed=number, dtype=parameter.dtype) * 0.2)


def layer_of(model: PeftModel) -> Any:
    return model.base_model.model.linear


def outcome(model: PeftModel, dtype: torch.dtype, autocast: torch.dtype | None = None, **options: Any) -> list[Tensor]:
    """Return the output, and the gradients of x and of all trained parameters."""
    x = randn(2, 20, 64, seed=3, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = layer_of(model)(x, **options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(y, [x, *trained], randn(*y.shape, seed=5, dtype=y.dtype), allow_unused=True)
    return [y, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("kind", ["plain", "nf4"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1.5e-2),
        (torch.float16, torch.float16, 2e-3),
        (torch.bfloat16, None, 1.5e-2),
    ],
)
def test_layers_compute_what_those_of_peft_do(
    kind: str, dtype: torch.dtype, autocast: torch.dtype | None, tolerance: float
) -> None:
    model = make_model(kind, dtype)
    expected = outcome(model, dtype, autocast)
    fuse_lora(model)
    assert isinstance(layer_of(model), FusedLora)
    actual = outcome(model, dtype, autocast)
    viewed = actual[0].grad_fn.next_functions[0][0]
    assert "_LoraLinear" in type(viewed).__name__
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert actual[0].dtype is dtype
    assert actual[2].dtype is torch.float32  # the adapter's dtype
    assert_near(actual, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_narrows_what_it_does_in_a_linear_layer(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    layer_of(model).to(dtype)
    expected = outcome(model, dtype, torch.bfloat16)
    fuse_lora(model)
    actual = outcome(model, dtype, torch.bfloat16)
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert_near(actual, expected, 1.5e-2 if dtype is torch.float32 else 1e-12)


def test_codes_in_4_bit_give_what_their_weight_gives() -> None:
    model = make_model("nf4")
    fuse_lora(model)
    actual = outcome(model, torch.float32)
    layer = layer_of(model)
    base = layer.base_layer
    whole = from_nf4(base.weight, base)
    assert whole.shape == (24, 64)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = randn(2, 20, 64, seed=3, dtype=torch.float32).requires_grad_()
    y = (x @ whole.T + base.bias + layer.scaling["default"] * (x @ down.T) @ up.T).double()
    expected = [y, *torch.autograd.grad(y, [x, down, up], randn(*y.shape, seed=5))]
    assert_near(actual, expected, 1e-5)


def _with_two(model: PeftModel) -> None:
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["linear"]))
    _spread_adapters(model)
    model.base_model.set_adapter(["default", "other"])


def _merge(model: PeftModel) -> None:
    model.merge_adapter()


def _unfreeze(model: PeftModel) -> None:
    layer_of(model).base_layer.weight.requires_grad_()


CHANGES = {
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": _merge,
    "two adapters": _with_two,
    "a trained base": _unfreeze,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_plain_adapter_any_more_runs_as_peft_does(change: str) -> None:
    plain, fused = make_model(), make_model()
    fuse_lora(fused)
    with_adapter = outcome(fused, torch.float32)[0]
    results = []
    for model in (plain, fused):
        CHANGES[change](model)
        results.append(outcome(model, torch.float32))
    assert isinstance(layer_of(fused), FusedLora)
    assert_near(results[1], results[0], 0.0)
    if change in ("disabled", "two adapters"):
        assert (results[1][0] - with_adapter).abs().max() > 0.01


def test_a_batch_with_adapters_by_row_runs_as_peft_does() -> None:
    plain, fused = make_model(), make_model()
    fuse_lora(fused)
    names = ["default", "__base__"]
    results = [outcome(model, torch.float32, adapter_names=names) for model in (plain, fused)]
    assert_near(results[1], results[0], 0.0)
    assert (results[1][0] - outcome(fused, torch.float32)[0])[1].abs().max() > 0.01


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}])
def test_layers_with_more_than_two_matrices_stay_those_of_peft(options: dict[str, Any]) -> None:
    model = make_model(**options)
    kind = type(layer_of(model))
    fuse_lora(model)
    assert type(layer_of(model)) is kind


def test_the_adapter_switched_off_and_on_and_merged_is_the_same_layer() -> None:
    model = make_model()
    fuse_lora(model)
    layer, x = layer_of(model), randn(5, 64, seed=1, dtype=torch.float32)
    before = layer(x)
    with model.disable_adapter():
        torch.testing.assert_close(layer(x), layer.base_layer(x), rtol=0, atol=0)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)
    torch.testing.assert_close(model.merge_and_unload().linear(x), before, rtol=0, atol=1e-5)
