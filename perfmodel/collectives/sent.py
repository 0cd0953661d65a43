"""What each member of a group sends to each other: a whole matrix, or few different rows of one for thousands of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.topology.flat import FloatArray, IntArray

Matrix = FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """Bytes from the i-th member to the j-th: `rows[row_of[i], j]`, and nothing to itself.

    Of a matrix every row is its own; of an exchange in which all send alike there is one.
    """

    rows: Matrix
    row_of: IntArray

    @classmethod
    def of_matrix(cls, matrix: Matrix) -> Sent:
        """All rows of a matrix."""
        return cls(rows=matrix, row_of=np.arange(len(matrix)))

    @classmethod
    def of_tuples(cls, send_bytes: tuple[tuple[int, ...], ...]) -> Sent:
        """Rows that are one object are one row."""
        places: dict[int, int] = {}
        row_of = [places.setdefault(id(row), len(places)) for row in send_bytes]
        first = np.unique(row_of, return_index=True)[1].tolist()
        return cls(rows=np.array([send_bytes[at] for at in first], dtype=float), row_of=np.array(row_of))

    def block(self, members: IntArray) -> Matrix:
        """What some members send each other."""
        found: Matrix = self.rows[np.ix_(self.row_of[members], members)]
        np.fill_diagonal(found, 0.0)
        return found

    @property
    def _to_itself(self) -> FloatArray:
        return self.rows[self.row_of, np.arange(len(self.row_of))]

    def sent(self) -> FloatArray:
        """Bytes that each member sends to all others."""
        found: FloatArray = self.rows.sum(axis=1)[self.row_of] - self._to_itself
        return found

    def received(self) -> FloatArray:
        """Bytes that each member gets from all others."""
        counts = np.bincount(self.row_of, minlength=len(self.rows)).astype(float)
        found: FloatArray = counts @ self.rows - self._to_itself
        return found

    def within(self, leaf: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bytes that each member sends to, and gets from, members of the same leaf."""
        n_leaves, n_rows = int(leaf.max()) + 1, len(self.rows)
        to_leaf = self.rows @ (leaf[:, np.newaxis] == np.arange(n_leaves)).astype(float)
        senders = np.bincount(leaf * n_rows + self.row_of, minlength=n_leaves * n_rows).reshape(n_leaves, n_rows)
        sent = to_leaf[self.row_of, leaf] - self._to_itself
        received = np.einsum("jr,rj->j", senders[leaf].astype(float), self.rows) - self._to_itself
        return sent, received
