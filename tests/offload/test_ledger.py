"""The ledger makes the scalars of missed steps again, and forgets what nobody needs."""

from __future__ import annotations

import numpy as np
import pytest

from offload.ledger import Ledger
from ops.kernels.adamw import AdamW

ADAMW = AdamW(0.9, 0.95, 1e-8)


def filled(num_steps: int) -> Ledger:
    ledger = Ledger(ADAMW)
    for step in range(1, num_steps + 1):
        assert ledger.add(0.1 / step) == step
    return ledger


def test_missed_steps_are_the_rows_the_step_itself_used():
    ledger = filled(5)
    table = ledger.table(2, 5, 0.1)
    assert table.dtype == np.float32 and len(table) == 3
    for row, step in zip(table, (3, 4, 5)):
        assert row.tobytes() == ledger.table(step - 1, step, 0.1)[0].tobytes()


def test_nothing_missed_is_an_empty_table():
    assert len(filled(3).table(3, 3, 0.1)) == 0


def test_decay_and_rate_change_the_scalars():
    ledger = filled(2)
    assert ledger.table(0, 1, 0.1).tobytes() != ledger.table(0, 1, 0.0).tobytes()
    assert ledger.table(0, 1, 0.1).tobytes() != ledger.table(1, 2, 0.1).tobytes()


def test_pruning_forgets_only_what_everybody_has_applied():
    ledger = filled(5)
    after = ledger.table(3, 5, 0.1).tobytes()
    ledger.prune(3)
    assert len(ledger) == 2 and ledger.step == 5
    assert ledger.table(3, 5, 0.1).tobytes() == after
    with pytest.raises(KeyError):
        ledger.table(2, 5, 0.1)
    ledger.prune(5)
    assert len(ledger) == 0
