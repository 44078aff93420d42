"""What every rank but 0 does: it runs the orders of rank 0, one after another."""

from __future__ import annotations

import torch

from ..executor import Executor
from ..layers.batch import StepArrays
from .expert_copies import ExpertCopies
from .group import Group
from .lost import GangLost
from .order_line import OrderLine
from .orders import Beat, End, HeadInput, Likeliest, ReviewExperts, Whole
from .tensor import SplitHead


@torch.inference_mode()
def follow(executor: Executor, group: Group, *, num_tokens: int, copies: ExpertCopies | None = None) -> int:
    """Run until rank 0 says that no orders follow; returns their number. ``num_tokens``: of the vocabulary.
    ``copies``: None where no experts are copied.

    Raises GangLost when rank 0 is silent for longer than the group's timeout, has ended, or an order is missing.
    """
    line, head = OrderLine(group), executor.model.head
    assert isinstance(head, SplitHead)
    features = torch.empty(0)
    while True:
        match line.receive():
            case StepArrays() as step:
                if step.num_fed:
                    assert executor.inputs is not None
                    group.broadcast(executor.inputs.drawn[: step.num_fed])
                features = executor.run(step)
            case Whole(num_rows=num_rows):
                if num_rows != len(features):
                    raise GangLost(f"rank {group.rank} has {len(features)} rows of logits, rank 0 has {num_rows}")
                head.send_whole(features)
            case Likeliest(k=k, rows=rows, words=words):
                head.send_shortlist(features, k, num_tokens=num_tokens, rows=rows, words=words)
            case HeadInput():
                head.send_input(features)
            case ReviewExperts():
                assert copies is not None, "rank 0 has another config"
                copies.review()
            case Beat():
                pass
            case End():
                return line.num_orders
