from __future__ import annotations

import math

import pytest
import torch

from benches.gpt import GPT, GPTConfig

SMALL = GPTConfig(context=8, layers=2, heads=2, width=16)


def make(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_the_default_model_has_about_two_million_parameters() -> None:
    count = sum(p.numel() for p in make(GPTConfig()).parameters())
    assert 1_000_000 < count < 2_000_000


def test_logits_cover_the_vocabulary_at_every_position() -> None:
    assert make().logits(tokens(3, 8)).shape == (3, 8, 256)


def test_shorter_inputs_are_accepted() -> None:
    assert make().logits(tokens(3, 5)).shape == (3, 5, 256)


def test_input_and_output_embedding_are_one_parameter_under_two_names() -> None:
    model = make()
    assert model.head.weight is model.tokens.weight
    assert {"head.weight", "tokens.weight"} <= model.state_dict().keys()
    assert "head.weight" not in dict(model.named_parameters())


def test_no_position_sees_a_later_one() -> None:
    model = make().eval()
    first = tokens(1, 8)
    second = first.clone()
    second[0, -1] += 1
    before, after = model.logits(first)[0], model.logits(second)[0]
    assert torch.equal(before[:-1], after[:-1])
    assert not torch.equal(before[-1], after[-1])


def test_an_untrained_model_guesses() -> None:
    model = make(GPTConfig()).eval()
    inputs = tokens(4, 64)
    with torch.no_grad():
        loss = model(inputs, inputs.roll(1, dims=1))
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_training_draws_from_the_random_state_and_evaluation_does_not() -> None:
    model, inputs = make(), tokens(2, 8)
    before = torch.get_rng_state()
    model.eval()(inputs, inputs)
    assert torch.equal(torch.get_rng_state(), before)
    model.train()(inputs, inputs)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_model_learns() -> None:
    model, inputs = make(), tokens(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(inputs[:, :-1], inputs[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
