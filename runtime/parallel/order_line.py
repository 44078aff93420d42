"""The numbered line of orders from rank 0 to the other ranks: one message an order, two for long ones."""

from __future__ import annotations

import numpy as np
import torch

from .group import Group
from .lost import GangLost
from .orders import Order, decode, encode

FRAME_BYTES = 1 << 20  # of an order in one message; only the bytes that an order has are sent and touched
_HEAD_BYTES = 3 * 8


class OrderLine:
    """One rank's end. Rank 0 sends, the others receive; each counts the orders, and a gap ends the gang."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        frame = self._frame.numpy()
        self._head, self._room = frame[:_HEAD_BYTES].view(np.int64), frame[_HEAD_BYTES:].view(np.int32)
        self.num_orders = 0

    def send(self, order: Order) -> None:
        kind, payload = encode(order, self._room)
        is_long = len(payload) > len(self._room)
        self._head[:] = self.num_orders, kind, payload.nbytes
        self.num_orders += 1
        self._group.broadcast(self._frame[: _HEAD_BYTES if is_long else _HEAD_BYTES + payload.nbytes])
        if is_long:
            self._group.broadcast(torch.from_numpy(payload))

    def receive(self) -> Order:
        """Wait for the next order, which is valid until the one after it. Raises GangLost where rank 0 is silent or an
        order is missing.
        """
        self._group.broadcast(self._frame)
        number, kind, size_bytes = self._head.tolist()
        if number != self.num_orders:
            raise GangLost(f"rank {self._group.rank} received order {number} and expected {self.num_orders}")
        self.num_orders += 1
        payload = self._room[: size_bytes // 4]
        if len(payload) * 4 < size_bytes:
            payload = np.empty(size_bytes // 4, np.int32)
            self._group.broadcast(torch.from_numpy(payload))
        return decode(kind, payload)
