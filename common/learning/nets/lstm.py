"""Recurrent nets for LEAF's text tasks: token rows, int64 [B, L], to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.learning.inputs import Inputs


def char_lstm(inputs: Inputs) -> nn.Module:
    """Return a model of the next character, as for Shakespeare: embedding of 8, two layers of 256."""
    return _Recurrent(inputs, width=8, hidden=256, narrow=None)


def sent_lstm(inputs: Inputs) -> nn.Module:
    """Return LEAF's sentiment model for Sent140: embedding of 100, two layers of 100, 128 without activation."""
    return _Recurrent(inputs, width=100, hidden=100, narrow=128)


class _Recurrent(nn.Module):
    def __init__(self, inputs: Inputs, *, width: int, hidden: int, narrow: int | None) -> None:
        super().__init__()
        # nn.Embedding would initialise it at once, which without storage imports torch's compiler: 2.4 s, 115 MB.
        empty = torch.empty(inputs.tokens, width)
        self.embedding = nn.Embedding.from_pretrained(empty, freeze=False)  # type: ignore[no-untyped-call]
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.between = nn.Identity() if narrow is None else nn.Linear(hidden, narrow)
        self.fc = nn.Linear(narrow or hidden, inputs.classes)

    def forward(self, x_BL: Tensor) -> Tensor:
        steps_BLH, _ = self.lstm(self.embedding(x_BL))
        logits: Tensor = self.fc(self.between(steps_BLH[:, -1]))
        return logits
