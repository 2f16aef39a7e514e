"""For every test process: what must stand in the environment before torch is imported."""

from __future__ import annotations

import os

from executor_svc.determinism import prepare_environment

# Test processes share the cores with the services that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_environment()
