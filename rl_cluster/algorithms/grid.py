"""Ragged tokens [T] go in and out; in between, the drawn tokens lie in a right-padded grid [N, L].

N rows, L the largest number of actions in a row. Tokens that are not actions (prompt, tool output)
leave no gap: column j is the row's j-th action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ActionGrid:
    """Where each of the A actions lies. token: int64 [A], its index in T. row, column: int64 [A].

    counts: int64 [N], actions per row. num_tokens: T.
    """

    token: np.ndarray
    row: np.ndarray
    column: np.ndarray
    counts: np.ndarray
    num_tokens: int

    @staticmethod
    def of(action_mask: np.ndarray, lengths: np.ndarray) -> ActionGrid:
        """action_mask: bool [T]. lengths: int [N], their sum is T."""
        token = np.flatnonzero(action_mask)
        row = np.repeat(np.arange(len(lengths)), lengths)[token]
        counts = np.bincount(row, minlength=len(lengths)).astype(np.int64)
        first = np.cumsum(counts) - counts
        return ActionGrid(token, row, np.arange(len(token)) - first[row], counts, len(action_mask))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.counts), int(self.counts.max(initial=0))

    @property
    def mask(self) -> np.ndarray:
        """bool [N, L]: True where there is an action."""
        return np.arange(self.shape[1]) < self.counts[:, None]

    def pad(self, tokens_T: np.ndarray) -> np.ndarray:
        """float64 [N, L] from [T]; 0 in the padding."""
        grid = np.zeros(self.shape)
        grid[self.row, self.column] = tokens_T[self.token]
        return grid

    def on_last(self, scores_N: np.ndarray) -> np.ndarray:
        """float64 [N, L]: each row's score on its last action (nowhere, if it has none), 0 elsewhere."""
        grid = np.zeros(self.shape)
        rows = np.flatnonzero(self.counts)
        grid[rows, self.counts[rows] - 1] = scores_N[rows]
        return grid

    def flatten(self, grid_NL: np.ndarray) -> np.ndarray:
        """float32 [T] from [N, L], or from [N, 1] given to every action of the row; 0 where not an action."""
        tokens = np.zeros(self.num_tokens, dtype=np.float32)
        tokens[self.token] = np.broadcast_to(grid_NL, self.shape)[self.row, self.column]
        return tokens
