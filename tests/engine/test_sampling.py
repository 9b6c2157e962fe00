"""Greedy, temperature, top-p."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvcontract.contract.errors import UsageFault
from kvcontract.engine.sampling import Sampler, Sampling

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0]).log_softmax(-1)


def draw(sampling: Sampling, count: int = 400) -> Counter[int]:
    """How often each token came."""
    sampler = Sampler(sampling)
    return Counter(sampler(LOGITS) for _ in range(count))


def test_greedy_takes_the_likeliest() -> None:
    """Temperature 0 is greedy, whatever top-p says."""
    assert draw(Sampling(), 5) == {1: 5}
    assert draw(Sampling(top_p=0.01, seed=3), 5) == {1: 5}


def test_a_seed_gives_the_same_tokens() -> None:
    """Equal seeds, equal tokens; other seeds and no seed are other draws."""
    hot = [Sampler(Sampling(temperature=3.0, seed=seed)) for seed in (1, 1, 2)]
    first, again, other = ([sampler(LOGITS) for _ in range(40)] for sampler in hot)
    assert first == again != other


def test_temperature_follows_the_softmax() -> None:
    """Frequencies are those of the scaled softmax."""
    counts = draw(Sampling(temperature=2.0, seed=0), 4000)
    expected = torch.softmax(LOGITS / 2.0, -1)
    for token, share in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    """The token that crosses the mass is kept, later ones never come; the first is always there."""
    likely = LOGITS.exp()
    assert set(draw(Sampling(temperature=1.0, top_p=float(likely[1]) - 0.01, seed=0))) == {1}
    assert set(draw(Sampling(temperature=1.0, top_p=float(likely[1]) + 0.01, seed=0))) == {1, 2}
    assert set(draw(Sampling(temperature=5.0, top_p=1.0, seed=0))) == {0, 1, 2, 3}


def test_every_value_out_of_range_is_named() -> None:
    """Both faults stand in one message."""
    with pytest.raises(UsageFault, match=r"temperature -1.0.*top_p 0.0"):
        Sampling(temperature=-1.0, top_p=0.0)
    with pytest.raises(UsageFault, match="temperature nan"):
        Sampling(temperature=float("nan"))
