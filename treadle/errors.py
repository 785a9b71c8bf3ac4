"""Every error a person can meet, as one tree.

TreadleError                  one clear line: what, where, what to do; the command exits with 2
├── ConfigError               a key, a value or a combination of them that cannot work
├── DataError                 a corpus, token file or tokenizer that cannot be used
│   └── TokenizerError        text or files that the tokenizer cannot take
├── GraphError                a graph that is not well formed
│   ├── ShapeError            shapes that do not fit an op: `[op] expected X, got Y; hint`
│   └── DTypeError            dtypes that do not fit an op
├── BackendError              a device, driver or kernel that is missing or failed
│   └── OutOfMemoryError      a program that does not fit a device's memory
├── CheckpointError           files that are missing, damaged, or of another run
│   ├── CorruptError          a digest, header or length that is not what it should be
│   └── MismatchError         a checkpoint of another configuration, field by field
├── LockError                 a run directory in use by another process
└── TrainingError             training that cannot go on
    ├── NonFiniteError        a loss or gradient that is NaN or infinite
    └── RankError             a process of several that does not answer
"""

from __future__ import annotations


class TreadleError(Exception):
    """Base of all errors; `str(error)` is the single line that the person reads."""

    exit_code = 2


class ConfigError(TreadleError):
    """A key, a value or a combination of them that cannot work."""


class DataError(TreadleError):
    """A corpus, token file or tokenizer that cannot be used."""


class TokenizerError(DataError):
    """Text or files that the tokenizer cannot take."""


class GraphError(TreadleError):
    """A graph that is not well formed."""


class ShapeError(GraphError):
    """Shapes that do not fit an op."""


class DTypeError(GraphError):
    """Dtypes that do not fit an op."""


class BackendError(TreadleError):
    """A device, driver or kernel that is missing or failed."""


class OutOfMemoryError(BackendError):
    """A program that does not fit a device's memory. room: the bytes that there are for it."""

    def __init__(self, message: str, room: float) -> None:
        super().__init__(message)
        self.room = room


class CheckpointError(TreadleError):
    """Checkpoint files that are missing, damaged, or of another run."""


class CorruptError(CheckpointError):
    """A digest, header or length that is not what it should be."""


class MismatchError(CheckpointError):
    """A checkpoint of another configuration; the message lists the fields."""


class LockError(TreadleError):
    """A run directory in use by another process."""


class TrainingError(TreadleError):
    """Training that cannot go on."""


class NonFiniteError(TrainingError):
    """A loss or gradient that is NaN or infinite."""


class RankError(TrainingError):
    """A process of several that train together does not answer."""
