"""Every exception that rlpipe raises on purpose.

RlpipeError
├── InputError(ValueError)     wrong input from the user: exit code 2, one line, no traceback
│   ├── ConfigError            an option is unknown, out of range, or contradicts another
│   ├── DataError              a file, a row or a column is missing or can't be used
│   ├── ModelError             a model or adapter can't be loaded
│   └── RewardImportError      a reward can't be imported or has an impossible signature
└── RunError                   the run itself failed: exit code 1
    ├── WaitTimeout            something awaited did not come in time
    ├── WeightsMismatch        an engine does not serve the weights that were published
    ├── EngineFailed           a rollout engine died or raised
    │   └── EngineNotStarted   its process has taken the place of a dead one, and has no model yet
    ├── RewardFailed           a reward failed whose config says ``fail: raise``
    ├── LearnerFailed          the learner group died too often, or its steps went bad
    ├── HeadLost               Ray's head died or was cut off
    ├── Interrupted            Ctrl-C or SIGTERM: exit code 130
    ├── AccountsDiffer         `rlpipe audit` found a difference: exit code 3
    └── LedgerError            the ledger can't be read or written
        └── LedgerLost         it stayed on another machine
"""


class RlpipeError(Exception):
    """Base of all errors below."""

    exit_code = 1


class InputError(RlpipeError, ValueError):
    """Wrong input; the message names the thing and the fix."""

    exit_code = 2


class ConfigError(InputError):
    """An option is unknown, out of range, or contradicts another."""


class DataError(InputError):
    """A file, a row or a column is missing or can't be used."""


class ModelError(InputError):
    """A model, tokenizer or adapter can't be loaded."""


class RewardImportError(InputError):
    """A reward can't be imported or has an impossible signature."""


class RunError(RlpipeError):
    """The run failed after its input was found good."""


class WaitTimeout(RunError):
    """Something awaited did not come in time; says what, how long, and the other side's state."""


class WeightsMismatch(RunError):
    """An engine does not serve the weights that were published; names the engine."""


class EngineFailed(RunError):
    """A rollout engine died or raised; names the engine and the cause."""


class EngineNotStarted(EngineFailed):
    """The process of an engine has taken the place of a dead one, and has no model yet."""


class RewardFailed(RunError):
    """A reward failed whose config says ``fail: raise``."""


class LearnerFailed(RunError):
    """The learner group died, or too many of its steps in a row were not finite."""


class LedgerError(RunError):
    """The ledger can't be read or written; names the file."""


class LedgerLost(LedgerError):
    """The replay actor came up where the ledger is not; the run goes on from the copy in the last checkpoint."""


class AccountsDiffer(RunError):
    """The sums of a run's ledger do not add up."""

    exit_code = 3


class HeadLost(RunError):
    """Ray's head died or was cut off, and Ray is about to end all processes of the cluster."""


class Interrupted(RunError):
    """Somebody stopped the run, which has written a checkpoint."""

    exit_code = 130
