"""The native kernels as a library: how they are compiled, kept and chosen, and that each variant of them computes the
same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.native import build as build_module
from kernels.native import isa as isa_module
from kernels.native.build import BuildError, build, source_files
from kernels.native.isa import ISAS, VARIABLE, usable_isas
from kernels.native.library import LOGITS, Batch, Kind, Library, Op, load
from kernels.native.self_check import attention_agrees, self_check

QUICK = ("-O0", "-DGILIR_DTYPE=bf16")
"""Later flags win: what is only to be right, or to compile, need not be fast."""
PRODUCTS = {"amx-bf16": "tdpbf16ps", "avx512-bf16": "vdpbf16ps"}
"""The instruction that multiplies in bf16."""
FLAGS = "fma avx2 f16c"
AVX512 = f"{FLAGS} avx512f avx512bw avx512dq avx512vl"


ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestIsa:
    @pytest.mark.parametrize(
        ("flags", "machine", "names"),
        [
            (AVX512, "x86_64", ["avx512", "avx2"]),
            (f"{FLAGS} avx512f", "x86_64", ["avx2"]),
            (f"{AVX512} avx512_bf16", "x86_64", ["avx512-bf16", "avx512", "avx2"]),
            (f"{FLAGS} avx512f avx512_bf16", "x86_64", ["avx2"]),
            (f"{AVX512} amx_tile amx_bf16", "x86_64", ["amx-bf16", "avx512", "avx2"]),
            (f"{AVX512} avx512_bf16 amx_tile amx_bf16", "x86_64", ["amx-bf16", "avx512-bf16", "avx512", "avx2"]),
            ("sse2 avx2", "x86_64", []),
            (AVX512, "aarch64", []),
        ],
    )
    def test_what_a_cpu_runs(self, flags: str, machine: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(isa_module, "amx_permitted", lambda: True)
        assert [isa.name for isa in usable_isas(f"flags\t\t: {flags}\n", machine)] == names

    def test_tiles_that_the_system_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(isa_module, "amx_permitted", lambda: False)
        assert [isa.name for isa in usable_isas(f"flags: {AVX512} amx_tile amx_bf16\n", "x86_64")] == ["avx512", "avx2"]

    def test_the_variable_chooses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "avx2")
        assert [isa.name for isa in usable_isas(f"flags\t\t: {AVX512}\n", "x86_64")] == ["avx2"]
        for value, told in (("avx512", "lacks it"), ("neon", "not one of")):
            monkeypatch.setenv(VARIABLE, value)
            with pytest.raises(ValueError, match=told):
                usable_isas(f"flags\t\t: {FLAGS}\n", "x86_64")


class TestBuild:
    @pytest.fixture
    def quick(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A compiler that takes no time: it writes the name of its output into it. Returns the cache folder."""

        def compile_(_compiler: tuple[str, ...], _flags: tuple[str, ...], _source: str, target: Path) -> None:
            target.write_text(str(target))

        monkeypatch.setattr(build_module, "_compile", compile_)
        monkeypatch.setenv(build_module.CACHE_VARIABLE, str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_is_kept_by_flags_and_sources(self, quick: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        first = build(("-A",))
        assert first.parent == quick and build(("-A",)) == first
        assert first.read_bytes()[:-16] != bytes(first), "it was renamed into place"
        assert build(("-B",)) != first
        changed = tmp_path / "step.cpp"
        changed.write_text("// other")
        monkeypatch.setattr(build_module, "source_files", lambda: [changed])
        assert build(("-A",)) != first

    def test_many_at_once_leave_one_whole_file(self, quick: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(build, [("-A",)] * 16))
        assert [*quick.iterdir()] == [*found]

    def test_what_a_killed_build_left_is_cleared(self, quick: Path) -> None:
        quick.mkdir()
        old, young, other = (quick / name for name in ("a.so.x.part", "b.so.y.part", "c.so"))
        for path, age_s in ((old, 601), (young, 590), (other, 10_000)):
            path.touch()
            os.utime(path, (time.time() - age_s,) * 2)
        path = build(("-A",))
        assert {*quick.iterdir()} == {young, other, path}

    def test_the_compiler_and_its_children_end_with_a_killed_parent(self, tmp_path: Path) -> None:
        compiler, pids = tmp_path / "compiler", tmp_path / "pids"
        compiler.write_text(f"#!/bin/sh\nsleep 60 &\necho $$ $! > {pids}.part; mv {pids}.part {pids}\nwait\n")
        compiler.chmod(0o755)
        program = "from kernels.native.build import build; build(('-A',))"
        environment = os.environ | {"CXX": str(compiler), build_module.CACHE_VARIABLE: str(tmp_path / "cache")}
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) as parent:
            wait_until(pids.exists)
            parent.kill()
        children = [int(pid) for pid in pids.read_text().split()]
        assert len(children) == 2
        wait_until(lambda: not any(is_running(pid) for pid in children))

    def test_a_compiler_that_hangs_is_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(build_module, "_TIMEOUT_S", 1)
        with pytest.raises(BuildError, match=r"not done after 1 s"):
            build_module._run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"])
        child = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_running(child))

    def test_a_cache_that_cannot_be_written(self, quick: Path) -> None:
        quick.write_text("a file where the folder should be")
        path = build(("-A",))
        assert path.is_file() and path.parent != quick and path.parent.stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize("left", [0, 8, 30])
    def test_a_file_cut_short_is_built_again(self, quick: Path, left: int) -> None:
        path = build(("-A",))
        whole = path.read_bytes()
        path.write_bytes(whole[:left])
        assert build(("-A",)) == path and len(path.read_bytes()) == len(whole)
        assert path.stat().st_mode & 0o777 == 0o755

    def test_a_compiler_that_writes_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(build_module.CACHE_VARIABLE, str(tmp_path))
        monkeypatch.setenv("CXX", "true")
        with pytest.raises(BuildError, match="wrote nothing"):
            build(("-A",))
        assert not [*tmp_path.iterdir()]

    def test_a_user_without_a_home(self, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("could not determine home directory")

        monkeypatch.delenv(build_module.CACHE_VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(build_module.Path, "home", homeless)
        assert build(("-A",)).is_file()

    def test_a_compiler_behind_another_command(self, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "env g++")
        assert build_module.find_compiler()[1:] == ("g++",) and build(("-A",)).is_file()

    def test_without_a_compiler(self, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
            build(("-A",))

    def test_an_error_of_the_compiler_is_one_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(build_module.CACHE_VARIABLE, str(tmp_path))
        with pytest.raises(BuildError) as caught:
            build(("-DGILIR_DTYPE=float", "-no-such-flag"))
        assert "no-such-flag" in str(caught.value) and "\n" not in str(caught.value)
        assert not [*tmp_path.iterdir()]

    def test_the_wheel_carries_every_source(self) -> None:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert 'kernels = ["native/*.h", "native/*.cpp"]' in text
        assert {path.suffix for path in source_files()} == {".h", ".cpp"}


def product(library: Library, table: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """fp32 [M, N] of a linear layer. table: [M, K], or [M, 2 * K] where a gate comes first; weight: [N, K]."""
    (rows, width), (outputs, inputs) = table.shape, weight.shape
    packed = [torch.empty(library.packed_size(*part.shape), dtype=library.dtype) for part in (table, weight)]
    for part, target in zip((table, weight), packed, strict=True):
        library.pack(part.to(library.dtype), target)
    logits, ids = torch.empty(rows, outputs), torch.arange(rows)
    size = {"n": outputs, "k": inputs, "scale": 1.0, "weight": packed[1].data_ptr()}
    program = library.program(
        [
            Op(kind=Kind.EMBED, output=0, n=rows, k=width, scale=1.0, weight=packed[0].data_ptr()),
            *([Op(kind=Kind.GATED, input=0, output=1)] if gated else []),
            Op(kind=Kind.LINEAR, input=int(gated), output=LOGITS, **size),
        ],
        [width, inputs],
    )
    pointers = {"token_ids": ids.data_ptr(), "logits": logits.data_ptr()}
    program.run(Batch(tokens=rows, taken=rows, threads=torch.get_num_threads(), **pointers))
    return logits


def reference_bits(library: Library, rows: int, k: int = 70) -> torch.Tensor:
    """fp32 [rows <= 100, 90]: a linear layer of odd sizes behind a gate, all rows at once."""
    generator = torch.Generator().manual_seed(1)
    weight, table = (torch.randn(shape, generator=generator) for shape in ((90, k), (100, 2 * k)))
    return product(library, table[:rows], weight, gated=True)


def agrees_with_itself(library: Library, rows: Iterable[int], whole: torch.Tensor, k: int = 70) -> bool:
    """Whether each number of rows has the bits that these rows have in the whole, on one thread or two."""
    threads = torch.get_num_threads()
    try:
        for count in rows:
            torch.set_num_threads(1 + count % 2)
            if not torch.equal(reference_bits(library, count, k), whole[:count]):
                return False
    finally:
        torch.set_num_threads(threads)
    return True


needs_avx2 = pytest.mark.skipif("avx2" not in {isa.name for isa in usable_isas()}, reason="no AVX2 here")


@pytest.fixture
def avx2() -> Library:
    return load(next(isa for isa in ISAS if isa.name == "avx2"), torch.bfloat16)


@pytest.fixture
def emulated_dot() -> Library:
    """AVX512-BF16 by the arithmetic of its manual."""
    return Library(build((*QUICK, "-mavx2", "-mfma", "-mf16c", "-DGILIR_EMULATE_DOT")), torch.bfloat16)


@needs_avx2
class TestVariants:
    def test_passes_its_check(self, avx2: Library) -> None:
        assert self_check(avx2)

    @pytest.mark.parametrize("window", [0, 40])
    @pytest.mark.parametrize("head_dim", [40, 80, 96, 128])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_attention_of_every_width(self, avx2: Library, head_dim: int, window: int, threads: int) -> None:
        """Over two parts of keys, which two threads share."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            assert attention_agrees(avx2, head_dim, window)
        finally:
            torch.set_num_threads(before)

    def test_the_check_finds_a_fault(self, avx2: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        pack = Library.pack
        monkeypatch.setattr(Library, "pack", lambda self, weight, target: pack(self, weight.roll(1, 1), target))
        assert not self_check(avx2)

    def test_an_emulated_machine_gives_the_same_bits(self, avx2: Library) -> None:
        """The blocks of rows and panels that AVX-512 takes with its 32 registers, on a machine without it."""
        emulated = Library(build((*QUICK, "-mavx2", "-mfma", "-DGILIR_EMULATE=32")), torch.bfloat16)
        assert self_check(emulated)
        for rows in (1, 2, 3, 5, 6, 7, 13, 33):
            assert torch.equal(reference_bits(emulated, rows), reference_bits(avx2, rows)), rows

    def test_emulated_tiles(self, avx2: Library) -> None:
        """AMX by the arithmetic of its manual: near the other kernels, and each row as alone, on one thread or two."""
        emulated = Library(build((*QUICK, "-mavx2", "-mfma", "-mf16c", "-DGILIR_EMULATE_AMX")), torch.bfloat16)
        assert self_check(emulated)
        whole = reference_bits(emulated, 65)
        torch.testing.assert_close(whole, reference_bits(avx2, 65), rtol=1e-2, atol=1e-1)
        assert agrees_with_itself(emulated, (1, 2, 15, 16, 17, 31, 32, 33, 64), whole)

    def test_emulated_dot_products(self, avx2: Library, emulated_dot: Library) -> None:
        """Near the other kernels, and each row as alone: in one piece of K or several, in one tile of rows or two."""
        assert self_check(emulated_dot)
        whole = reference_bits(emulated_dot, 100, k=330)
        torch.testing.assert_close(whole, reference_bits(avx2, 100, k=330), rtol=1e-2, atol=1e-1)
        assert agrees_with_itself(emulated_dot, range(1, 34), whole, k=330)

    @pytest.mark.parametrize("rows", [1, 7])
    def test_the_order_and_the_rounding_of_emulated_dot_products(self, emulated_dot: Library, rows: int) -> None:
        """Of a pair the second product is added first, and each sum is rounded; subnormal numbers are zero."""
        large, small, smallest = 2.0**30, 2.0**-65, 2.0**-130
        table = torch.ones(rows, 4)
        weight = torch.tensor([[0, large, -large, 1], [0, large, 1, -large], [smallest, 0, 0, 0], [0, 0, 3, 0]])
        assert product(emulated_dot, table, weight).tolist() == [[0, 1, 0, 3]] * rows
        assert not product(emulated_dot, table * small, torch.full((1, 4), small)).any()

    @pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.name != "avx2"], ids=lambda isa: isa.name)
    def test_compiles_for_machines_that_are_not_here(self, isa: isa_module.Isa) -> None:
        library = build((*isa.compiler_flags, *QUICK))
        symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
        assert " T gilir_run" in symbols
        if isa.name in PRODUCTS:
            code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
            assert PRODUCTS[isa.name] in code
