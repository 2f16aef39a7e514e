"""Operations of the native step one by one, against their torch references: eight-bit weights, mixtures of experts."""

from __future__ import annotations

import functools

import pytest
import torch

from kernels import quantize_weight
from kernels.moe import ExpertActivation, moe_mlp_reference, route_topk_reference
from kernels.native.build import build
from kernels.native.isa import usable_isas
from kernels.native.library import ACTIVATIONS, EIGHT_BIT_C_TYPES, LOGITS, Batch, Kind, Library, Op, load
from kernels.quantized_linear import QUANTIZED_DTYPES, WeightKind, quantized_linear_reference

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the native step is not for this machine")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Steps:
    """A program over the rows of `x` [M, K], which buffer 0 holds first."""

    def __init__(self, library: Library, x: torch.Tensor, widths: list[int]) -> None:
        self.library, self.rows, self.widths = library, len(x), [x.shape[1], *widths]
        self._kept: list[torch.Tensor] = []
        packed = self.pack(x.to(library.dtype))
        self.ops = [Op(kind=Kind.EMBED, output=0, n=len(x), k=x.shape[1], scale=1.0, weight=packed)]

    def keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()

    def pack(self, *matrices: torch.Tensor) -> int:
        """Address of the packed [N, K] matrices, one behind the other."""
        size = self.library.packed_size(*matrices[0].shape)
        target = torch.empty(len(matrices), size, dtype=matrices[0].dtype)
        for matrix, place in zip(matrices, target, strict=True):
            self.library.pack(matrix, place)
        self._kept.append(target)
        return target.data_ptr()

    def run(self, columns: int, threads: int = 1) -> torch.Tensor:
        """fp32 [M, columns], which the last operation writes as logits."""
        logits, ids = torch.empty(self.rows, columns), torch.arange(self.rows)
        pointers = {"token_ids": ids.data_ptr(), "logits": logits.data_ptr()}
        batch = Batch(tokens=self.rows, taken=self.rows, threads=threads, **pointers)
        self.library.program(self.ops, self.widths).run(batch)
        return logits


def quantized(
    library: Library, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [M, N] of the native linear layer with a weight in eight bits."""
    steps = Steps(library, x, [])
    steps.ops.append(
        Op(
            kind=Kind.LINEAR,
            input=0,
            output=LOGITS,
            n=len(weight),
            k=x.shape[1],
            scale=1.0,
            eight_bits=1,
            weight=steps.pack(weight),
            bias=steps.keep(bias),
            table=steps.keep(scale),
        )
    )
    return steps.run(len(weight))


@pytest.fixture(params=DTYPES, ids=str)
def library(request: pytest.FixtureRequest) -> Library:
    return load(usable_isas()[0], request.param)


@functools.cache
def eight_bits(kind: WeightKind, dtype: torch.dtype) -> Library:
    """In bf16 of an emulated machine: that is compiled quickly, and what vectors do here, loops do there."""
    stored = QUANTIZED_DTYPES[kind]
    if dtype == torch.float32:
        return load(usable_isas()[0], dtype, stored)
    quick = ("-O0", "-DGILIR_DTYPE=bf16", f"-DGILIR_WEIGHTS={EIGHT_BIT_C_TYPES[stored]}", "-DGILIR_EMULATE=16")
    return Library(build((*quick, "-mfma", "-mf16c")), dtype, stored)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_code(kind: WeightKind) -> torch.Tensor:
    """[16, 256]: channels of all codes but NaN's."""
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "fp8":
        codes[[0x7F, 0xFF]] = 0
    return torch.stack([codes.view(QUANTIZED_DTYPES[kind])] * 16)


CASES = [("int8", torch.float32), ("int8", torch.bfloat16), ("fp8", torch.float32)]


class TestEightBits:
    SCALE = torch.arange(-8.0, 8.0).exp2()

    @pytest.mark.parametrize(("kind", "dtype"), CASES)
    def test_every_code_is_its_value(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """Rows of the identity pick single weights, which are exact in every dtype."""
        weight = every_code(kind)
        assert torch.equal(
            quantized(eight_bits(kind, dtype), torch.eye(256), weight, self.SCALE), weight.float().T * self.SCALE
        )

    @pytest.mark.parametrize(("kind", "dtype"), CASES)
    def test_as_the_reference(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """Odd sizes, with a bias; in half precision a result may fall to the other side of a rounding."""
        x, bias = random(7, 70).to(dtype), random(45, seed=1).to(dtype)
        weight, scale = quantize_weight(random(45, 70, seed=2), kind)
        found = quantized(eight_bits(kind, dtype), x, weight, scale, bias)
        expected = quantized_linear_reference(x, weight, scale, bias).float()
        step = torch.finfo(dtype).eps
        assert torch.allclose(found, expected, rtol=2 * step, atol=1e-5)
        assert torch.equal(found, found.to(dtype).float())


def mixture(
    library: Library,
    x: torch.Tensor,
    router: torch.Tensor,
    experts: list[torch.Tensor | None],
    k: int,
    activation: ExpertActivation,
    *,
    renormalize: bool,
    threads: int = 1,
) -> torch.Tensor:
    """fp32 [M, H] of the native sparse layer. experts: gate_up, down, gate_up_bias, down_bias of `moe_mlp`."""
    gate_up, down, gate_up_bias, down_bias = experts
    assert gate_up is not None and down is not None
    (count, inner, hidden), dtype = gate_up.shape, library.dtype
    steps = Steps(library, x, [count, hidden, inner, inner // 2, hidden, hidden])
    size = {"experts": count, "pairs": k}
    steps.ops += [
        Op(kind=Kind.LINEAR, input=0, output=1, n=count, k=hidden, scale=1.0, weight=steps.pack(router)),
        Op(kind=Kind.ROUTE, input=1, output=1, experts=count, count=k, flag=int(renormalize)),
        Op(kind=Kind.GROUP),
        Op(kind=Kind.EXPAND, input=0, output=2, pairs=k),
        Op(kind=Kind.EXPERTS, input=2, output=3, n=inner, k=hidden, weight=steps.pack(*gate_up), **size),
        Op(kind=Kind.GATED, input=3, output=4, flag=ACTIVATIONS[activation], pairs=k),
        Op(kind=Kind.EXPERTS, input=4, output=5, n=hidden, k=inner // 2, weight=steps.pack(*down), **size),
        Op(kind=Kind.COMBINE, input=5, output=6),
        Op(
            kind=Kind.LINEAR,
            input=6,
            output=LOGITS,
            n=hidden,
            k=hidden,
            scale=1.0,
            weight=steps.pack(torch.eye(hidden).to(dtype)),
        ),
    ]
    steps.ops[5].bias, steps.ops[7].bias = steps.keep(gate_up_bias), steps.keep(down_bias)
    return steps.run(hidden, threads)


class TestExperts:
    EXPERTS, HIDDEN, INNER = 9, 40, 24

    def layer(self, dtype: torch.dtype, *, biased: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Router and experts. Experts 2, 3 and 7 are always tied, and large values reach the clamps."""
        shapes = [(2 * self.INNER, self.HIDDEN), (self.HIDDEN, self.INNER), (2 * self.INNER,), (self.HIDDEN,)]
        experts = [random(self.EXPERTS, *shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
        router = random(self.EXPERTS, self.HIDDEN, seed=9)
        router[[3, 7]] = router[2].clone()
        return router.to(dtype), [*experts[:2], *(experts[2:] if biased else [None, None])]

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
    @pytest.mark.parametrize("k", [1, 2, 5])
    def test_as_the_reference(self, k: int, activation: ExpertActivation, library: Library) -> None:
        dtype, renormalize = library.dtype, k != 5
        router, experts = self.layer(dtype, biased=activation == "clamped_swiglu")
        x = random(17, self.HIDDEN, seed=10).to(dtype)
        found = mixture(library, x, router, experts, k, activation, renormalize=renormalize)
        logits = (x.float() @ router.float().T).to(dtype).float()
        assert torch.equal(logits[:, 2], logits[:, 7])
        weights, ids = route_topk_reference(logits, k, renormalize)
        assert k == 5 or bool(((ids == 2).any(1) & ~(ids == 7).any(1)).any()), "a tie was decided"
        gate_up, down, *biases = experts
        assert gate_up is not None and down is not None
        expected = moe_mlp_reference(
            x, gate_up, down, ids, weights, activation, gate_up_bias=biases[0], down_bias=biases[1]
        ).float()
        tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())

    def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(self, library: Library) -> None:
        router, experts = self.layer(library.dtype, biased=True)
        x = random(33, self.HIDDEN, seed=10).to(library.dtype)

        def run(rows: torch.Tensor, threads: int) -> torch.Tensor:
            return mixture(library, rows, router, experts, 3, "clamped_swiglu", renormalize=True, threads=threads)

        together = run(x, 2)
        for rows in ([0], [5, 9, 32], list(range(20, 33))):
            assert torch.equal(run(x[rows], 1), together[rows])

    def test_only_experts_that_were_chosen_are_read(self, library: Library) -> None:
        """All others are NaN."""
        router, experts = self.layer(library.dtype, biased=True)
        x = random(3, self.HIDDEN, seed=10).to(library.dtype)
        before = mixture(library, x, router, experts, 2, "silu", renormalize=True)
        chosen = route_topk_reference((x.float() @ router.float().T).to(library.dtype).float(), 2, True)[1]
        others = [expert for expert in range(self.EXPERTS) if expert not in chosen]
        for tensor in experts:
            assert tensor is not None
            tensor[others] = torch.nan
        assert others and torch.equal(mixture(library, x, router, experts, 2, "silu", renormalize=True), before)
