"""A row's bits do not depend on its company, on any setting of the math library (C26)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from executor_svc import determinism
from executor_svc.determinism import reproducible_branch
from executor_svc.model import load_model
from executor_svc.model.linear import Linear
from kernels.linear import ROW_TILE, RowTiling, tiled_linear
from tests.executor.paged_driver import generate
from tests.executor.tiny_models import make_model, save_model

ROOT = Path(__file__).parents[2]
FLAGS = "fpu sse2 avx avx2 fma"
AVX512 = f"{FLAGS} avx512f avx512cd avx512bw avx512dq avx512vl"

PROBE = """
import sys
from executor_svc.determinism import prepare_environment
prepare_environment()
import torch
from executor_svc.model.linear import Linear

torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(0)
total = 100 if sys.argv[1] == "1" else 70
counts = [n for n in (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 200) if n <= total]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for outputs, inputs in ((64, 64), (960, 576), (36, 100), (640, 1024)):
        weight = (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)
        rows = torch.randn(total, inputs, generator=generator).to(dtype)
        linear = Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if outputs == 64 else None)
        linear.settle()
        alone = torch.cat([linear(row) for row in torch.split(rows, 1)])
        for count in counts:
            assert torch.equal(linear(rows[:count]), alone[:count]), (dtype, outputs, inputs, count)
            assert torch.equal(linear(rows[-count:]), alone[-count:]), (dtype, outputs, inputs, count)
    print(dtype, linear.tiling.name)
"""


@pytest.mark.parametrize(
    ("setting", "threads"),
    [("", 1), pytest.param("", 2, marks=pytest.mark.nightly), pytest.param("COMPATIBLE", 1, marks=pytest.mark.nightly)],
)
def test_every_row_of_a_linear_layer_is_the_same_in_any_batch(setting: str, threads: int) -> None:
    """An empty setting: what `prepare_environment` chooses. The other does not promise it: tiling has to."""
    environment = {name: value for name, value in os.environ.items() if name != determinism.VARIABLE}
    if setting:
        environment[determinism.VARIABLE] = setting
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(threads)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {
        "torch.float32",
        "torch.bfloat16",
        "torch.float16",
    }


WHOLE_MODEL = """
import sys
from executor_svc.determinism import prepare_environment
prepare_environment()
import torch
from executor_svc.model import load_model
from tests.executor.paged_driver import generate

torch.set_num_threads(1)
decoder = load_model(sys.argv[1], cpu_step="torch").decoder
generator = torch.Generator().manual_seed(2)
prompts = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in (1, 5, 16, 40, 41, 150)]
alone = [generate(decoder, [prompt], 12, chunk=1000, block_size=16)[0] for prompt in prompts]
for chunk, block_size in ((1000, 16), (7, 16), (33, 1), (64, 32)):
    for stream, other in zip(generate(decoder, prompts, 12, chunk=chunk, block_size=block_size), alone):
        assert stream.tokens == other.tokens
        assert torch.equal(torch.stack(stream.logits), torch.stack(other.logits)), (chunk, block_size)
"""


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_logits_have_the_same_bits_alone_in_a_batch_and_in_chunks(family: str, tmp_path: Path) -> None:
    save_model(make_model(family), tmp_path)
    done = subprocess.run([sys.executable, "-c", WHOLE_MODEL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestTiling:
    @pytest.mark.parametrize("tiling", RowTiling)
    @pytest.mark.parametrize("rows", [0, 1, ROW_TILE - 1, ROW_TILE, ROW_TILE + 1, 3 * ROW_TILE])
    def test_all_compute_the_same(self, tiling: RowTiling, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 24), (10, 24), (10,)))
        torch.testing.assert_close(tiled_linear(x, weight, bias, tiling), x @ weight.T + bias)

    def test_padding_does_not_reach_the_rows(self) -> None:
        generator = torch.Generator().manual_seed(1)
        x, weight = torch.randn(40, 24, generator=generator), torch.randn(10, 24, generator=generator)
        whole = tiled_linear(x, weight, None, RowTiling.PADDED)
        for begin, end in ((0, 1), (3, 9), (0, 33), (39, 40)):
            assert torch.equal(tiled_linear(x[begin:end], weight, None, RowTiling.PADDED), whole[begin:end])

    def test_nan_weights_settle(self) -> None:
        Linear(torch.full((4, 4), torch.nan)).settle()


class TestEnvironment:
    @pytest.mark.parametrize(
        ("cpu_info", "branch"),
        [
            (f"vendor_id\t: GenuineIntel\nflags\t\t: {AVX512}\n", "AVX512,STRICT"),
            (f"vendor_id\t: GenuineIntel\nflags\t\t: {FLAGS}\n", "AVX2,STRICT"),
            (f"vendor_id\t: GenuineIntel\nflags\t\t: {FLAGS} avx512f\n", "AVX2,STRICT"),
            ("vendor_id\t: GenuineIntel\nflags\t\t: fpu sse2\n", "COMPATIBLE"),
            (f"vendor_id\t: AuthenticAMD\nflags\t\t: {AVX512}\n", "COMPATIBLE"),
            ("CPU implementer\t: 0x41\nFeatures\t: fp asimd\n", "COMPATIBLE"),
            ("", "COMPATIBLE"),
        ],
    )
    def test_branch(self, cpu_info: str, branch: str) -> None:
        assert reproducible_branch(cpu_info) == branch

    def test_the_users_setting_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(determinism.VARIABLE, "AUTO")
        assert determinism.prepare_environment() == "AUTO"

    def test_too_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(determinism.VARIABLE, raising=False)
        with pytest.raises(RuntimeError, match="before torch"):
            determinism.prepare_environment("")

    def test_imports_no_torch(self) -> None:
        code = "import sys, executor_svc.determinism; assert not {'torch', 'numpy'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_stream_is_not_changed_by_those_that_come_and_go(tmp_path: Path) -> None:
    decoder = load_model(str(save_model(make_model("qwen3"), tmp_path)), cpu_step="torch").decoder
    prompts = [[10 + row, *range(20, 20 + 9 * row)] for row in range(1, 6)]
    alone = [generate(decoder, [prompt], 20, chunk=8, block_size=16)[0].tokens for prompt in prompts]
    together = generate(decoder, prompts, 20, chunk=5, block_size=16)
    assert [stream.tokens for stream in together] == alone
