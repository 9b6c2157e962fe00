"""Which page holds what: keys, the index, the pool and a request's view of it. No tensors live here."""

from kvcontract.pool.chunk import Chunk, Prefix
from kvcontract.pool.events import Cleared, Content, EventLog, Removed, Stored
from kvcontract.pool.handles import Entitlement, Hold, Later, Never, Reservation
from kvcontract.pool.keys import FleetSecret, Keyer, PageKeys, TokenIds
from kvcontract.pool.ledger import Gauges
from kvcontract.pool.media import Media, MediaItem
from kvcontract.pool.pool import BlockPool
from kvcontract.pool.queue import AdmissionQueue, Waiter
from kvcontract.pool.request import RequestKv, admit

__all__ = [
    "AdmissionQueue",
    "BlockPool",
    "Chunk",
    "Cleared",
    "Content",
    "Entitlement",
    "EventLog",
    "FleetSecret",
    "Gauges",
    "Hold",
    "Keyer",
    "Later",
    "Media",
    "MediaItem",
    "Never",
    "PageKeys",
    "Prefix",
    "Removed",
    "RequestKv",
    "Reservation",
    "Stored",
    "TokenIds",
    "Waiter",
    "admit",
]
