"""A small GPT: pre-norm transformer blocks, tied embeddings, dropout.

Small enough for two CPU cores, and with the features that make exact resumption hard: one
weight under two names, and dropout, whose masks come from the random state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benches.corpus import VOCABULARY


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of the model; the default has 1.8 million parameters.

    Attributes:
        vocabulary: Number of different tokens.
        context: Longest input, in tokens.
        layers: Number of transformer blocks.
        heads: Attention heads per block; divides ``width``.
        width: Size of the residual stream.
        dropout: Share of activations dropped in training, in ``[0, 1)``.
    """

    vocabulary: int = VOCABULARY
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 192
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal multi-head self-attention; ``[batch, time, width]`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix every position with those before it."""
        batch, time, width = x.shape
        shape = (batch, time, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer of the stream, ``[batch, time, width]``."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: one parameter under two names
        self._initialise()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the predictions of ``targets``; a scalar."""
        return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of shape ``[batch, time, vocabulary]`` for int64 tokens ``[batch, time]``."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(positions))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialise(self) -> None:
        """GPT-2's scheme: what writes to the stream starts smaller the deeper the model."""
        stream_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=stream_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
