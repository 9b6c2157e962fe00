"""Which page holds what: keys, the index, the pool and a request's view of it. No tensors live here."""

from kvcontract.pool.handles import Entitlement, Hold, Later, Never, Reservation
from kvcontract.pool.keys import FleetSecret, Keyer, PageKeys, TokenIds
from kvcontract.pool.ledger import Gauges
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.request import Chunk, Prefix, RequestKv, admit

__all__ = [
    "BlockPool",
    "Chunk",
    "Entitlement",
    "FleetSecret",
    "Gauges",
    "Hold",
    "Keyer",
    "Later",
    "Never",
    "PageKeys",
    "Prefix",
    "RequestKv",
    "Reservation",
    "TokenIds",
    "admit",
]
