"""Whose turn it is: tenants take turns, and among a tenant's batches these do."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Rota:
    """Batches by tenant, each in the order in which they were served last."""

    def __init__(self) -> None:
        self._tenants: dict[str, list[str]] = {}

    def update(self, batches: Iterable[tuple[str, str]]) -> None:
        """From now on there are these: (batch, tenant). A tenant's new ones come first."""
        wanted = dict(batches)
        known = {batch for line in self._tenants.values() for batch in line}
        for tenant, line in list(self._tenants.items()):
            line[:] = [batch for batch in line if batch in wanted]
            if not line:
                del self._tenants[tenant]
        for batch, tenant in reversed(wanted.items()):
            if batch not in known:
                self._tenants.setdefault(tenant, []).insert(0, batch)

    def next(self, ready: Callable[[str], bool]) -> str | None:
        """The batch whose turn it is among those that are ready; its tenant and itself go to the end."""
        for tenant, line in self._tenants.items():
            for batch in line:
                if ready(batch):
                    line.remove(batch)
                    line.append(batch)
                    self._tenants[tenant] = self._tenants.pop(tenant)
                    return batch
        return None
