"""Kernels compile wherever the executor is started: with no cache yet, and with one that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from executor_svc.kernel_cache import prepare_kernel_cache


def test_a_folder_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    prepare_kernel_cache(environment)
    assert environment == {"HOME": str(tmp_path)}
    assert list((tmp_path / ".triton" / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_replaced_while_the_process_lives(tmp_path: Path) -> None:
    """Below a file nothing can be made, not even by root."""
    (tmp_path / "file").touch()
    script = (
        "import os; from pathlib import Path; from executor_svc.kernel_cache import prepare_kernel_cache\n"
        "from executor_svc.__main__ import end\n"
        "prepare_kernel_cache()\n"
        "folder = Path(os.environ['TRITON_CACHE_DIR']); (folder / 'kernel').mkdir(); print(folder); end(0)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_CACHE_DIR", "TRITON_HOME")}
    environment |= {"HOME": str(tmp_path / "file"), "TMPDIR": str(temporary)}
    output = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    assert str(temporary) in output
    assert list(temporary.iterdir()) == []
