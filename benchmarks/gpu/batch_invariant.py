"""What answers that do not depend on the batch cost: decode steps with the setting on and off."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.context import Context, Row, SkippedError


def rows(context: Context) -> Iterator[Row]:
    try:
        from executor_svc.settings import ExecutorSettings
    except ImportError as error:
        raise SkippedError(f"the settings cannot be read: {error}") from error
    if "batch_invariant" not in ExecutorSettings.model_fields:
        raise SkippedError("there is no setting batch-invariant")
    raise SkippedError("the setting exists, but this part does not know yet how a model is told of it")
    yield {}
