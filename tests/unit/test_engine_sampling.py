import torch

from qurl_megatron.engines.embedded.sampling import SamplingState, blocks, draw, sample, uniform


def state(
    batch: int, *, temperature=1.0, greedy=False, seeds=None, position=0, top_p=1.0, top_k=None
):
    top_k = 10**9 if top_k is None else top_k
    return SamplingState(
        temperature_B=torch.full((batch,), temperature),
        greedy_B=torch.full((batch,), greedy),
        seed_B=torch.arange(batch) if seeds is None else torch.tensor(seeds),
        position_B=torch.full((batch,), position),
        top_p_B=torch.full((batch,), top_p),
        top_k_B=torch.full((batch,), top_k),
        any_sampled=not greedy,
        any_filtered=top_p < 1 or top_k < 10**9,
    )


def test_frequencies_follow_the_tempered_softmax():
    torch.manual_seed(0)
    logits = torch.randn(300) * 2  # more than one block, and not a multiple of it
    draws = 60_000
    tokens, _ = sample(logits.expand(draws, -1), state(draws, temperature=0.7))
    probs = (logits / 0.7).softmax(-1).double()
    likely = probs * draws >= 5
    counts = torch.bincount(tokens, minlength=300).double()
    pooled = torch.cat((counts[likely], counts[~likely].sum()[None]))
    expected = torch.cat((probs[likely], probs[~likely].sum()[None])) * draws
    freedom = len(pooled) - 1
    # Mean of chi-square is its degrees of freedom, its deviation sqrt(2 * freedom): five of them.
    chi_square = float(((pooled - expected).square() / expected).sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_the_tail_of_a_150k_vocabulary_is_drawn_as_often_as_it_should_be():
    vocab, draws = 151_936, 64
    weights = torch.full((1, vocab), 1.0)
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = draw(*blocks(weights.expand(draws, -1)), grid)
    assert torch.equal(tokens, (grid * vocab).long())


def test_a_token_of_probability_zero_is_never_drawn_not_even_at_the_ends():
    weights = torch.zeros(3, 600)
    weights[:, 257] = 1e-30
    weights[:, 300] = 1.0
    ends = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(*blocks(weights), ends).tolist() == [257, 300, 300]


def test_log_probs_are_those_of_the_whole_tempered_distribution():
    torch.manual_seed(0)
    logits = torch.randn(16, 5000) * 5
    tokens, log_probs = sample(logits, state(16, temperature=1.3, top_p=0.5, top_k=10))
    expected = (logits.double() / 1.3).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    # Logits reach 16, whose neighbours in FP32 lie 2e-6 apart; CPUs sum in different orders.
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=6e-6)


def test_top_p_and_top_k_keep_the_smallest_set_that_is_asked_for():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, -1)
    assert set(sample(logits, state(4000, top_p=0.7))[0].tolist()) == {0, 1}
    assert set(sample(logits, state(4000, top_k=3))[0].tolist()) == {0, 1, 2}


def test_splitmix64_gives_its_published_numbers():
    # First outputs of SplitMix64 from state 0: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4.
    drawn = uniform(torch.tensor([0, 0]), torch.tensor([0, 1]))
    expected = [(x >> 11) * 2.0**-53 for x in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)]
    assert drawn.tolist() == expected
