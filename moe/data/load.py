"""From the `data` section to the two texts of a run: open, verify, split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe.data.config import CPYTHON, DataConfig
from moe.data.cpython_text import cpython_source
from moe.data.source import TokenSource, check_tokens
from moe.data.split import TokenView, split_held_out
from moe.data.stream import num_sequences
from moe.data.token_file import open_token_file, verify_token_file
from ops.errors import DataError

# Up to this size a token file is read as a whole at the start of a run; above it that would take
# minutes, so there only header and size are verified here and each batch's tokens when read.
VERIFIED_BYTES_MAX = 4 << 30


@dataclass(frozen=True, eq=False)
class RunData:
    """The text of a run: `source` as a whole, and its disjoint `train` and `held_out` parts."""

    source: TokenSource
    train: TokenView
    held_out: TokenView

    def describe(self) -> str:
        """One line for a report."""
        return (
            f"{self.source.describe()}; {self.train.num_tokens:,} to train, "
            f"{self.held_out.num_tokens:,} held out"
        )


def load_data(config: DataConfig, *, vocab_size: int, seq_len: int) -> RunData:
    """Open `config.source` for a model of `vocab_size` tokens and split it.

    Raises `DataError` when the source cannot be used, holds a token that the model does not know,
    or when train or held-out text is shorter than one sequence of `seq_len` + 1 tokens. Blocks
    for one pass over the source, if that is at most `VERIFIED_BYTES_MAX`.
    """
    source = _open(config.source)
    if source.tokens.nbytes <= VERIFIED_BYTES_MAX:
        check_tokens(source, vocab_size)
    split = split_held_out(source, config.held_out_fraction)
    for view in (split.train, split.held_out):
        if num_sequences(view, seq_len) == 0:
            raise DataError(
                f"{view.name} holds {view.num_tokens} of {source.num_tokens} tokens with "
                f"data.held_out_fraction {config.held_out_fraction}, one sequence needs "
                f"{seq_len + 1}; use more text, shorter sequences or another fraction"
            )
    return RunData(source, split.train, split.held_out)


def _open(name: str) -> TokenSource:
    if name == CPYTHON:
        return cpython_source()
    path = Path(name).expanduser()
    source = open_token_file(path)
    if source.tokens.nbytes <= VERIFIED_BYTES_MAX:
        verify_token_file(path)
    return source
