"""The native kernels as a library: how they are compiled, kept and chosen, and that each variant of them computes the
same."""

from __future__ import annotations

import subprocess
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
FLAGS = "fma avx2 f16c"
AVX512 = f"{FLAGS} avx512f avx512bw avx512dq avx512vl"


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


def reference_bits(library: Library, rows: int, k: int = 70) -> torch.Tensor:
    """fp32 [rows <= 100, 90]: a linear layer of odd sizes behind a gate, all rows at once."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((90, k), (100, 2 * k))
    weight, table = (torch.randn(shape, generator=generator).to(library.dtype) for shape in shapes)
    table = table[:rows]
    packed = [torch.empty(library.packed_size(*part.shape), dtype=library.dtype) for part in (table, weight)]
    for part, target in zip((table, weight), packed, strict=True):
        library.pack(part, target)
    logits, ids = torch.empty(rows, 90), torch.arange(rows)
    program = library.program(
        [
            Op(kind=Kind.EMBED, output=0, n=rows, k=2 * k, scale=1.0, weight=packed[0].data_ptr()),
            Op(kind=Kind.GATED, input=0, output=1),
            Op(kind=Kind.LINEAR, input=1, output=LOGITS, n=90, k=k, scale=1.0, weight=packed[1].data_ptr()),
        ],
        [2 * k, k],
    )
    program.run(
        Batch(
            tokens=rows, taken=rows, threads=torch.get_num_threads(), token_ids=ids.data_ptr(), logits=logits.data_ptr()
        )
    )
    return logits


needs_avx2 = pytest.mark.skipif("avx2" not in {isa.name for isa in usable_isas()}, reason="no AVX2 here")


@pytest.fixture
def avx2() -> Library:
    return load(next(isa for isa in ISAS if isa.name == "avx2"), torch.bfloat16)


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
        threads = torch.get_num_threads()
        try:
            for rows in (1, 2, 15, 16, 17, 31, 32, 33, 64):
                torch.set_num_threads(1 + rows % 2)
                assert torch.equal(reference_bits(emulated, rows), whole[:rows]), rows
        finally:
            torch.set_num_threads(threads)

    def test_emulated_dot_products(self, avx2: Library) -> None:
        """AVX512-BF16 by the arithmetic of its manual: near the other kernels, and each row as alone, on one thread or
        two, in one piece of K or several, in one tile of rows or several."""
        emulated = Library(build((*QUICK, "-mavx2", "-mfma", "-mf16c", "-DGILIR_EMULATE_DOT")), torch.bfloat16)
        assert self_check(emulated)
        whole = reference_bits(emulated, 100, k=330)
        torch.testing.assert_close(whole, reference_bits(avx2, 100, k=330), rtol=1e-2, atol=1e-1)
        threads = torch.get_num_threads()
        try:
            for rows in range(1, 34):
                torch.set_num_threads(1 + rows % 2)
                assert torch.equal(reference_bits(emulated, rows, k=330), whole[:rows]), rows
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.name != "avx2"], ids=lambda isa: isa.name)
    def test_compiles_for_machines_that_are_not_here(self, isa: isa_module.Isa) -> None:
        library = build((*isa.compiler_flags, *QUICK))
        symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
        assert " T gilir_run" in symbols
