"""Kernels compile wherever the executor is started: with no cache yet, and with one that cannot be written."""

from __future__ import annotations

from pathlib import Path

from executor_svc.kernel_cache import prepare_kernel_cache


def test_a_folder_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    prepare_kernel_cache(environment)
    assert environment == {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    assert list((tmp_path / ".triton" / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    """Below a file nothing can be made, not even by root."""
    (tmp_path / "file").touch()
    environment = {"HOME": str(tmp_path / "file"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "torch")}
    prepare_kernel_cache(environment)
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folder = Path(environment[variable])
        assert folder.is_dir() and tmp_path not in folder.parents
        folder.rmdir()
