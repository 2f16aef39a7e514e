"""What `import kernels` gives, and to whom: without Triton, and beside `transformers`, which looks for a package of the
same name on PyPI (hub kernels).

`transformers` takes a package called `kernels` for that one when the distribution that carries it has a version in the
range it accepts. Ours is carried by `gilir`: so what matters is that our version stays outside that range.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers.utils import import_utils

from kernels import compiler

ROOT = Path(__file__).parents[2]


def run(program: str) -> str:
    """Runs `program` in a fresh process with the repository first on its path, as the services are."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


TINY_LLAMA = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=100, **sizes))
out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
import kernels, sys
print(out.shape[1], kernels.__file__, kernels.paged_attention.__name__)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["", "import kernels"])
def test_transformers_works_beside_our_package(first: str) -> None:
    tokens, file, name = run(first + TINY_LLAMA).split()
    assert tokens == "7" and Path(file) == ROOT / "kernels" / "__init__.py" and name == "paged_attention"


def test_transformers_does_not_take_our_package_for_its_own() -> None:
    with pytest.raises(PackageNotFoundError):
        version("kernels")  # the package on PyPI would hide ours, or ours would hide it
    assert not import_utils.is_kernels_available()
    ours = Version(version("gilir"))
    assert not Version(import_utils.KERNELS_MIN_VERSION) <= ours < Version(import_utils.KERNELS_MAX_VERSION)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, kernels
from kernels.compiler import TRITON_AVAILABLE
assert not TRITON_AVAILABLE
x = torch.ones(2, 2, 8)
cache = torch.zeros(1, 4, 2, 8)
table = torch.cat([torch.ones(4, 4), torch.zeros(4, 4)], dim=1)
kernels.rope_and_cache(x, x, x, table, torch.arange(2), torch.arange(2), cache, cache)
rows = torch.tensor([0, 2], dtype=torch.int32)
batch = kernels.AttentionBatch(rows, rows[1:], torch.zeros(1, 1, dtype=torch.int32), 2, 2, 0)
print(kernels.rms_norm(kernels.paged_attention(x, cache, cache, batch, 1.0), torch.ones(8), 0.0).sum().item())
"""


def test_serves_the_cpu_without_triton() -> None:
    assert run(WITHOUT_TRITON) == "32.0"


class OnAGpu:
    """As much of a CUDA tensor as the dispatch looks at."""

    is_cuda = True
    device = torch.device("cuda:0")


def test_a_gpu_without_triton_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler.use_triton(OnAGpu()) == compiler.TRITON_AVAILABLE  # type: ignore[arg-type]
    monkeypatch.setattr(compiler, "TRITON_AVAILABLE", False)
    with pytest.raises(RuntimeError, match="cuda:0 needs the Triton kernels"):
        compiler.use_triton(OnAGpu())  # type: ignore[arg-type]
    assert not compiler.use_triton(torch.ones(1))
