"""The operator, linear and patch give torch's values and gradients, eagerly and compiled, and patch can be undone."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from dispatch_fakes import CONFIG, SKINNY, FakeMachine, dispatcher_of, measured, operands, predicted, with_algorithm
from torch.nn import functional

import autogemm.dispatch as module
from autogemm.dispatch import Dispatcher
from autogemm.errors import InputError
from autogemm.layers import AutogemmLinear, linear, patch

# Shapes (tokens, out, in) of the block below: 2 sequences of 16 tokens, width 64, and its MLP.
TOKENS, WIDTH, INNER = 32, 64, 128


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def shared(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatcher]:
    """A Dispatcher with rows for the block's products but the one from INNER to WIDTH, where cuBLAS is faster."""
    rows = [
        measured(TOKENS, WIDTH, WIDTH, ratio=1.2), measured(TOKENS, INNER, WIDTH, config=SKINNY),
        measured(TOKENS, WIDTH, INNER, ratio=0.9), measured(TOKENS, 3 * WIDTH, WIDTH),
    ]  # fmt: skip
    made = dispatcher_of(rows, machine=machine)
    monkeypatch.setattr(module, "_current", made)
    yield made
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """A small transformer block without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(x)))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(3)
    return Block().half()


def test_the_operator_passes_torchs_own_checks(shared: Dispatcher) -> None:
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    result = torch.library.opcheck(torch.ops.autogemm.matmul.default, (a, b.t()))
    assert set(result.values()) == {"SUCCESS"}


def test_the_operators_gradients_and_their_gradients_are_right(shared: Dispatcher) -> None:
    a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (4, 5)))
    assert torch.autograd.gradcheck(torch.ops.autogemm.matmul.default, (a, b))
    assert torch.autograd.gradgradcheck(torch.ops.autogemm.matmul.default, (a, b))


def test_the_operator_refuses_what_is_no_product_before_running(shared: Dispatcher) -> None:
    with torch._subclasses.FakeTensorMode():
        for a, b in (
            (torch.empty(3, 4), torch.empty(5, 6)),
            (torch.empty(2, 3, 4), torch.empty(4, 5)),
            (torch.empty(3, 4), torch.empty(4, 5).half()),
        ):
            with pytest.raises(RuntimeError):
                torch.ops.autogemm.matmul.default(a, b)
        result = torch.ops.autogemm.matmul.default(torch.empty(3, 4), torch.empty(4, 5))
        assert result.shape == (3, 5) and result.stride() == (5, 1)


def test_the_operator_launches_kernels_and_survives_being_called_below_autograd(
    shared: Dispatcher, machine: FakeMachine
) -> None:
    a, b = operands(TOKENS, WIDTH, WIDTH)
    product = torch.ops.autogemm.matmul.default
    torch.testing.assert_close(product(a, b), a @ b, rtol=1e-2, atol=1e-2)
    assert machine.launches[-1]["config"] == CONFIG.binary
    a.requires_grad_()
    below = module._operator(a, b, None)
    torch.testing.assert_close(below, a.detach() @ b, rtol=1e-2, atol=1e-2)
    assert len(machine.launches) == 2 and not below.requires_grad


@pytest.mark.parametrize("shape", [(TOKENS, WIDTH), (2, 16, WIDTH), (2, 2, 8, WIDTH), (WIDTH,), (0, WIDTH)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_torchs_linear(shared: Dispatcher, shape: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape).half(), torch.randn(WIDTH, WIDTH).half()
    bias = torch.randn(WIDTH).half() if biased else None
    got, expected = linear(x, w, bias), functional.linear(x, w, bias)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-2)


def test_linear_launches_a_kernel_for_a_tuned_shape_and_follows_autocast(shared: Dispatcher, machine: FakeMachine) -> None:
    x, w = torch.randn(2, 16, WIDTH).half(), torch.randn(WIDTH, WIDTH).half()
    linear(x, w)
    assert len(machine.launches) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w).dtype == torch.bfloat16
    assert len(machine.launches) == 1


def test_patch_swaps_the_layers_that_gain_and_says_which_and_why_not(
    shared: Dispatcher, machine: FakeMachine, block: Block
) -> None:
    report = patch(block)
    assert [layer.name for layer in report.swapped] == ["qkv", "out", "up"]
    assert [gain.tokens for gain in report.swapped[1].gains] == [TOKENS]
    assert report.swapped[1].gains[0].ratio == pytest.approx(1.2)
    (kept,) = report.kept
    assert kept.name == "down" and "cuBLAS is faster" in kept.reason
    text = str(report)
    assert "3 layers swapped, 1 kept" in text and "out: 64x64 float16 swapped: M=32 1.200x" in text
    block(torch.randn(2, 16, WIDTH).half())
    assert len(machine.launches) == 3


def test_undo_restores_every_layer_with_parameters_hooks_and_state(shared: Dispatcher, block: Block) -> None:
    calls: list[int] = []
    block.up.register_forward_hook(lambda *_: calls.append(1))
    weights = {name: parameter.data_ptr() for name, parameter in block.named_parameters()}
    saved = io.BytesIO()
    x = torch.randn(2, 16, WIDTH).half()
    before = block(x)
    report = patch(block)
    torch.testing.assert_close(block(x), before, rtol=2e-2, atol=2e-2)
    torch.save(block.state_dict(), saved)
    assert report.undo() == 3 and report.undo() == 0
    assert not any(isinstance(layer, AutogemmLinear) for layer in block.modules())
    torch.testing.assert_close(block(x), before, rtol=0, atol=0)
    assert len(calls) == 3
    assert {name: parameter.data_ptr() for name, parameter in block.named_parameters()} == weights
    saved.seek(0)
    block.load_state_dict(torch.load(saved))
    with patch(block) as again:
        assert len(again.swapped) == 3
    assert type(block.up) is torch.nn.Linear


def test_patch_leaves_what_it_does_not_understand_with_a_reason(shared: Dispatcher) -> None:
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(
        {
            "bias": torch.nn.Linear(WIDTH, WIDTH).half(),
            "special": Special(WIDTH, WIDTH, bias=False).half(),
            "wide": torch.nn.Linear(WIDTH, WIDTH, bias=False),
            "unknown": torch.nn.Linear(WIDTH, 72, bias=False).half(),
        }
    )
    report = patch(model)
    assert report.swapped == ()
    reasons = {layer.name: layer.reason for layer in report.kept}
    assert "bias" in reasons["bias"] and "Special" in reasons["special"] and "float32" in reasons["wide"]
    assert "no row" in reasons["unknown"]
    assert [type(layer) for layer in model.values()] == [torch.nn.Linear, Special, torch.nn.Linear, torch.nn.Linear]


def test_patch_counts_only_the_token_counts_it_is_given(shared: Dispatcher, block: Block) -> None:
    report = patch(block, tokens=[1, 8192])
    assert report.swapped == () and "M=1" in report.kept[0].reason
    with pytest.raises(InputError, match="tokens"):
        patch(block, tokens=[0])


def test_patch_does_not_take_a_prediction_for_a_gain(machine: FakeMachine, block: Block) -> None:
    using = dispatcher_of([predicted(TOKENS, WIDTH, WIDTH)], machine=machine, unmeasured=True)
    assert patch(block, using=using).swapped == ()


def test_a_swapped_layer_trains_like_before(shared: Dispatcher, machine: FakeMachine, block: Block) -> None:
    x, y = torch.randn(2, 16, WIDTH).half(), torch.randn(2, 16, WIDTH).half()

    def gradients() -> list[torch.Tensor]:
        block.zero_grad()
        functional.mse_loss(block(x).float(), y.float()).backward()
        return [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]

    plain = gradients()
    patch(block)
    swapped = gradients()
    assert len(machine.launches) >= 3
    for got, expected in zip(swapped, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_patched_block_compiles_without_graph_breaks_and_launches(
    shared: Dispatcher, machine: FakeMachine, block: Block, dynamic: bool
) -> None:
    patch(block)
    x = torch.randn(2, 16, WIDTH).half()
    with torch.no_grad():
        expected = block(x)
        explained = torch._dynamo.explain(block)(x)
        assert explained.graph_break_count == 0, explained.break_reasons
        machine.launches.clear()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(x), expected, rtol=2e-2, atol=2e-2)
        assert len(machine.launches) == 3
        other = torch.randn(3, 16, WIDTH).half()
        torch.testing.assert_close(compiled(other), block(other), rtol=2e-2, atol=2e-2)


def test_layers_that_gain_by_an_algorithm_are_swapped_and_compile(
    machine: FakeMachine, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = measured(TOKENS, WIDTH, INNER, ratio=0.9)
    rows = [with_algorithm(row, lead=1.2) for row in (measured(TOKENS, 3 * WIDTH, WIDTH), slow)]
    rows.append(measured(TOKENS, WIDTH, WIDTH))
    made = dispatcher_of(rows, machine=machine)
    monkeypatch.setattr(module, "_current", made)
    report = patch(block)
    assert {layer.name: layer.gains[0].ratio for layer in report.swapped} == {
        "qkv": pytest.approx(1.32), "down": pytest.approx(1.08), "out": pytest.approx(1.1)
    }  # fmt: skip
    x = torch.randn(2, 16, WIDTH).half()
    with torch.no_grad():
        expected = block(x)
        machine.launches.clear()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=2e-2, atol=2e-2)
    assert ["algorithm" in launch for launch in machine.launches] == [True, False, True]
    torch._dynamo.reset()


def test_a_compiled_step_trains_through_the_kernels(shared: Dispatcher, machine: FakeMachine, block: Block) -> None:
    x = torch.randn(2, 16, WIDTH).half()
    block(x).float().square().mean().backward()
    expected = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    block.zero_grad()
    patch(block)
    torch.compile(block, backend="aot_eager", fullgraph=True)(x).float().square().mean().backward()
    assert len(machine.launches) >= 3
    got = [parameter.grad for parameter in block.parameters()]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=1e-3)


def test_matmul_compiles_with_out_an_sm_budget_and_types_no_kernel_takes(shared: Dispatcher, machine: FakeMachine) -> None:
    def work(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return module.matmul(a, b), module.matmul(a, b, out), module.matmul(a, b, sm_count=64) + 1, module.matmul(c, c)

    a, b = operands(TOKENS, WIDTH, WIDTH)
    c, out = torch.randn(8, 8), torch.empty(TOKENS, WIDTH, dtype=torch.float16)
    with torch.no_grad():
        results = torch.compile(work, backend="aot_eager", fullgraph=True)(a, b, out, c)
    for result, expected in zip(results, (a @ b, a @ b, a @ b + 1, c @ c), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(out, a @ b, rtol=1e-2, atol=2e-2)
    assert [launch["sm_count"] for launch in machine.launches] == [132, 132, 64]


def test_export_keeps_the_operator(shared: Dispatcher, block: Block) -> None:
    patch(block)
    x = torch.randn(2, 16, WIDTH).half()
    exported = torch.export.export(block, (x,), strict=True)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("autogemm.matmul.default") == 3
    torch.testing.assert_close(exported.module()(x), block(x), rtol=2e-2, atol=2e-2)
