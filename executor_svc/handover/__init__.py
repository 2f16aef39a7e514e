"""Hand-overs: other executors read KV blocks here, and blocks are read from them."""

from executor_svc.handover.exchange import Exchange
from executor_svc.handover.store import BlockStore
from executor_svc.handover.transfer_socket import TransferSocket

__all__ = ["BlockStore", "Exchange", "TransferSocket"]
