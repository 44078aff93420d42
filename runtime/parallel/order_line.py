"""The numbered line of orders from rank 0 to the other ranks: one message an order, two for long ones."""

from __future__ import annotations

import numpy as np
import torch

from .group import Group
from .lost import GangLost
from .orders import Order, decode, encode

FRAME_BYTES = 32_768  # of an order's first message: a step of 256 prompts of 32 tokens fits, or of 1,000 decodes
_HEAD_BYTES = 3 * 8


class OrderLine:
    """One rank's end. Rank 0 sends, the others receive; each counts the orders, and a gap ends the gang."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._bytes = self._frame.numpy()
        self._head = self._bytes[:_HEAD_BYTES].view(np.int64)
        self.num_orders = 0

    def send(self, order: Order) -> None:
        kind, payload = encode(order)
        packed = payload.view(np.uint8)
        self._head[:] = self.num_orders, kind, len(packed)
        room = FRAME_BYTES - _HEAD_BYTES
        first = packed[:room]
        self._bytes[_HEAD_BYTES : _HEAD_BYTES + len(first)] = first
        self.num_orders += 1
        self._group.broadcast(self._frame)
        if len(packed) > room:
            self._group.broadcast(torch.from_numpy(packed[room:]))

    def receive(self) -> Order:
        """Wait for the next order. Raises GangLost where rank 0 is silent or an order is missing."""
        self._group.broadcast(self._frame)
        number, kind, size_bytes = self._head.tolist()
        if number != self.num_orders:
            raise GangLost(f"rank {self._group.rank} received order {number} and expected {self.num_orders}")
        self.num_orders += 1
        room = FRAME_BYTES - _HEAD_BYTES
        packed = np.empty(size_bytes, np.uint8)
        packed[:room] = self._bytes[_HEAD_BYTES : _HEAD_BYTES + size_bytes]
        if size_bytes > room:
            self._group.broadcast(torch.from_numpy(packed[room:]))
        return decode(kind, packed.view(np.int32))
