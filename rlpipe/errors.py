"""The exceptions that rlpipe raises.

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
    │   └── EngineNotStarted   its process has replaced a dead one, and has no model yet
    ├── RewardFailed           a reward with ``fail: raise`` failed, or rewards of a whole step
    ├── EnvironmentFailed      an environment with ``on_error: raise`` failed, or episodes of a whole step
    ├── LearnerFailed          the learner group died, or too many steps were not finite
    ├── Unhealthy              a metric is beyond the ``stop`` of its health rule
    ├── HeadLost               Ray's head died or was cut off
    ├── Interrupted            Ctrl-C or SIGTERM: exit code 130
    ├── AuditFailed            `rlpipe audit` found an inconsistency: exit code 3
    └── LedgerError            the ledger can't be read or written
        ├── LedgerDamaged      its content is damaged, or of another version: exit code 2
        └── LedgerLost         the ledger is on a machine that was lost
"""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown word: "; did you mean NEAREST?", or OTHERWISE if none is near."""
    nearest = get_close_matches(word, [*known], n=1, cutoff=cutoff)
    hint = f"did you mean {nearest[0]}?" if nearest else otherwise
    return hint and f"; {hint}"


class RlpipeError(Exception):
    """Base class of all of rlpipe's errors."""

    exit_code = 1


class InputError(RlpipeError, ValueError):
    """Wrong input; the message names the option or file and the fix."""

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
    """Failure of a run whose input was valid."""


class WaitTimeout(RunError):
    """Timeout of a wait; the message names what was awaited, the limit, and the other side's state."""


class WeightsMismatch(RunError):
    """An engine does not serve the weights that were published; the message names the engine."""


class EngineFailed(RunError):
    """A rollout engine died or raised; the message names the engine and the cause."""


class EngineNotStarted(EngineFailed):
    """An engine's process has replaced a dead one, and has no model yet."""


class RewardFailed(RunError):
    """A reward failed: one with ``fail: raise`` in its config, or any for a step's worth of groups in a row."""


class EnvironmentFailed(RunError):
    """An environment failed: one with ``on_error: raise``, its processes, or a step's worth of groups in a row."""


class LearnerFailed(RunError):
    """The learner group died, or too many of its steps in a row were not finite."""


class Unhealthy(RunError):
    """A metric is beyond the ``stop`` of its health rule; the learner has written a checkpoint."""


class LedgerError(RunError):
    """The ledger can't be read or written; the message names the file."""


class LedgerDamaged(LedgerError):
    """The ledger's content is damaged, or of another version; the message names the file, the problem and the fix."""

    exit_code = 2

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem


class LedgerLost(LedgerError):
    """The replay actor restarted on a machine without the ledger; the run resumes from the last checkpoint's copy."""


class AuditFailed(RunError):
    """The audit of a run's ledger found an inconsistency."""

    exit_code = 3


class HeadLost(RunError):
    """Ray's head died or was cut off, and Ray is about to end all processes of the cluster."""


class Interrupted(RunError):
    """A signal stopped the run; once training has begun, the learner writes a checkpoint first."""

    exit_code = 130
