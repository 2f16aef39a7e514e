from __future__ import annotations

import math

import pytest
import torch

from kernels import apply_penalties, sample, sampling_torch, token_logprobs
from kernels.philox import gumbel_noise_at
from kernels.topk import ordered_topk
from tests.kernels.sampling_cases import MIXED, OFF, Parameters, columns, expected_draw, kept_tokens


@pytest.mark.parametrize("vocab_size, candidates", [(300, 1024), (300, 16), (3000, 1024)])
def test_follows_the_rule(vocab_size: int, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_torch, "CANDIDATES", candidates)
    torch.manual_seed(vocab_size)
    rows = MIXED * 6
    logits = torch.randn(len(rows), vocab_size) * 2
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (len(rows),)).tolist(), list(range(100, 100 + len(rows)))
    drawn = sample(logits.clone(), columns(rows, seeds, positions)).tolist()
    expected = [expected_draw(*row) for row in zip(logits, rows, seeds, positions, strict=True)]
    assert drawn == expected


FILTERS: list[Parameters] = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.01, 0.8, 50.0)
    for top_k in (0, 1, 15, 16, 17, 256, 257, 2999, 3000, 3001)
    for top_p in (1e-30, 0.5, 0.999999, 1.0)
    for min_p in (0.0, 1e-8, 0.5, 1.0)
]


def adversarial_rows(vocab_size: int) -> torch.Tensor:
    """fp32 [6, V]: ties in plenty, all equal, both zeros, a flat and a steep row, and one of which little is finite."""
    coarse = torch.randint(-3, 4, (vocab_size,)).float()
    zeros = torch.where(coarse > 0, 0.0, -0.0)
    few = torch.where(coarse == 3, coarse * torch.randn(vocab_size), -math.inf)
    return torch.stack((coarse, torch.full_like(coarse, 2.5), zeros, coarse * 1e-4, torch.randn(vocab_size) * 9, few))


@pytest.mark.parametrize("candidates", [16, 1024])
def test_a_prefix_gives_the_tokens_that_the_whole_row_sorted_does(
    candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_torch, "CANDIDATES", candidates)
    torch.manual_seed(5)
    rows = [parameters for parameters in FILTERS if parameters[1] % 3000 or parameters[2] < 1 or parameters[3] > 0]
    kinds = adversarial_rows(3000)
    for kind in kinds:
        table, logits = columns(rows), kind.repeat(len(rows), 1)
        drawn = sample(logits.clone(), table)
        scaled = logits / table.temperature[:, None]
        values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        mass = 1.0 / torch.softmax(scaled, -1).gather(1, tokens[:, :1]).double()
        keep, _ = sampling_torch.kept_prefix(values, mass, table, 3000)
        scores = gumbel_noise_at(table.seed, table.position, tokens) + values
        best = scores.masked_fill(~keep, -math.inf).argmax(-1, keepdim=True)
        assert torch.equal(drawn, tokens.gather(1, best).squeeze(1))


def test_a_row_does_not_depend_on_its_mates() -> None:
    torch.manual_seed(2)
    rows = MIXED * 4
    logits = torch.randn(len(rows), 4099) * 3
    seeds, positions = list(range(50, 50 + len(rows))), list(range(len(rows)))
    alone = [
        sample(logits[row : row + 1].clone(), columns(rows[row : row + 1], [seeds[row]], [positions[row]])).item()
        for row in range(len(rows))
    ]
    for size in (len(rows), 33, 7):
        for order in (torch.randperm(len(rows))[:size], torch.arange(size)):
            places = order.tolist()
            picked = columns(*([values[place] for place in places] for values in (rows, seeds, positions)))
            assert sample(logits[order].clone(), picked).tolist() == [alone[place] for place in places]


def test_same_seed_in_two_rows_draws_the_same_and_positions_differ() -> None:
    logits = torch.zeros(1, 1000).expand(6, -1)
    drawn = sample(logits.clone(), columns([OFF] * 6, [9] * 6, [0, 1, 2, 0, 1, 2])).tolist()
    assert drawn[:3] == drawn[3:] and len(set(drawn)) == 3


@pytest.mark.parametrize("parameters", [OFF, (0.8, 6, 0.95, 0.01)])
def test_draws_follow_the_distribution(parameters: Parameters) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.5])
    kept = kept_tokens(logits, parameters)
    probabilities = torch.softmax(logits[kept].double() / parameters[0], 0)
    draws = 20000
    table = columns([parameters] * draws, [77] * draws, list(range(draws)))
    counts = torch.bincount(sample(logits.repeat(draws, 1), table), minlength=8)
    assert counts.sum() == counts[kept].sum() == draws
    chi_square = ((counts[kept] - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    assert chi_square < 30  # at most 7 degrees of freedom: p < 1e-4 beyond


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert sample(logits.clone(), columns([(0.0, 0, 1.0, 0.0)] * 2)).tolist() == [1, 0]
    assert sample(logits.clone(), columns([(1.0, 1, 1.0, 0.0)] * 2)).tolist() == [1, 0]


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((200, 64), -math.inf)
    logits[:, [3, 60]] = torch.tensor([-500.0, -501.0])
    for parameters in (OFF, (1.0, 10, 1.0, 0.0), (1.0, 0, 0.999, 0.0), (3.0, 0, 1.0, 1e-9), (0.0, 0, 1.0, 0.0)):
        drawn = sample(logits.clone(), columns([parameters] * 200)).tolist()
        assert set(drawn) <= {3, 60}


def test_ordered_topk_breaks_ties_by_id() -> None:
    values = torch.tensor([[1.0, -0.0, 0.0, 1.0, -2.0, -math.inf, 0.0, -1e-30, math.inf]])
    top, ids = ordered_topk(values, 9)
    assert ids.tolist() == [[8, 0, 3, 1, 2, 6, 7, 4, 5]]
    assert torch.equal(top, values.gather(1, ids))
    coarse = torch.randint(-3, 4, (5, 2000)).float()
    expected = coarse.sort(dim=-1, descending=True, stable=True)
    top, ids = ordered_topk(coarse, 777)
    assert torch.equal(ids, expected.indices[:, :777]) and torch.equal(top, expected.values[:, :777])


def test_penalties() -> None:
    """Prompt 1 1 2, output 2 3 3 in row 1; row 0 has occurrences but neutral penalties; row 2 has none."""
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 4.0]] * 3)
    before = logits.clone()
    rows, tokens = torch.tensor([1, 1, 1, 0]), torch.tensor([1, 2, 3, 4])
    counts, in_prompt = torch.tensor([0, 1, 2, 5], dtype=torch.int32), torch.tensor([True, True, False, False])
    repetition, presence = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.5, 9.0])
    frequency = torch.tensor([0.0, 0.25, 9.0])
    apply_penalties(logits, rows, tokens, counts, in_prompt, repetition, presence, frequency)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].tolist() == [1.0, -2.0, 2.0 / 2 - 0.5 - 0.25, -2.0 * 2 - 0.5 - 2 * 0.25, 4.0]


def test_no_penalties_to_apply() -> None:
    logits, none = torch.ones(1, 5), torch.zeros(0, dtype=torch.int64)
    one = torch.ones(1)
    apply_penalties(logits, none, none, none.int(), none.bool(), one * 2, one, one)
    assert torch.equal(logits, torch.ones(1, 5))


def test_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -math.inf], [5.0, 5.0, 5.0, 5.0]])
    chosen, values, ids = token_logprobs(logits, torch.tensor([3, 2]), 3)
    exact = torch.log_softmax(logits.double(), -1)
    assert chosen[0] == -math.inf and chosen[1] == values[1, 0]
    assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    torch.testing.assert_close(values.double(), exact.gather(1, ids))
    assert token_logprobs(logits, torch.tensor([0, 0]), 0)[1].shape == (2, 0)
    assert token_logprobs(logits, torch.tensor([0, 0]), 20)[2].shape == (2, 4)


def test_logprobs_do_not_depend_on_batch_mates() -> None:
    torch.manual_seed(3)
    logits, tokens = torch.randn(37, 5003), torch.randint(0, 5003, (37,))
    together = token_logprobs(logits, tokens, 20)
    for row in range(37):
        alone = token_logprobs(logits[row : row + 1].clone(), tokens[row : row + 1], 20)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
