"""A mixture of experts against its reference: routing and the weighted sum."""

import pytest
import torch
from phloem.kernels import mix_experts, reference, route_experts


def test_route_takes_the_likeliest_and_lower_ids_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    weights, ids = route_experts(logits, 2, normalise=False)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert torch.allclose(weights, logits.softmax(-1).gather(1, ids.long()))
    shared, same = route_experts(logits, 2, normalise=True)
    assert torch.equal(ids, same)
    assert torch.allclose(shared, torch.full((2, 2), 0.5))


def test_as_many_experts_as_there_are_and_no_token() -> None:
    weights, ids = route_experts(torch.randn(3, 5), 5, normalise=False)
    assert torch.allclose(weights.sum(1), torch.ones(3)) and ids.sort(1).values.tolist() == [list(range(5))] * 3
    weights, ids = route_experts(torch.randn(0, 5), 2, normalise=True)
    assert weights.shape == ids.shape == (0, 2)
    assert mix_experts(torch.randn(0, 4), torch.randn(5, 6, 4), torch.randn(5, 4, 3), weights, ids).shape == (0, 4)
    with pytest.raises(ValueError, match="top 6 experts: must be between 1 and the layer's 5"):
        route_experts(torch.randn(3, 5), 6, normalise=True)


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_a_mixture_is_the_weighted_sum_of_its_experts(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    x, gate_up, down = torch.randn(num_tokens, 12), torch.randn(7, 10, 12), torch.randn(7, 12, 5)
    weights, ids = route_experts(torch.randn(num_tokens, 7), 3, normalise=True)
    made = mix_experts(x, gate_up, down, weights, ids)
    assert torch.allclose(made, reference.mix_experts(x, gate_up, down, weights, ids), atol=1e-4)
    for token, found in enumerate(made):
        wanted = torch.zeros(12)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).split(5)
            wanted += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(found, wanted, atol=1e-4)
