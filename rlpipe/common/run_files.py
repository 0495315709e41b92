"""Names of the files and folders that a run writes to its output folder, and who writes them.

Besides these, ``atomic_io.held`` locks the folder with a file in it, and Weights & Biases writes its own folder.
"""

CONFIG = "config.yaml"
"""The resolved value of every option, written by ``open_output`` before all other files."""
OUTPUT_ID = "output_id.txt"
"""The folder's random id, written once by ``mark_output``; its ledger records it, and both move together."""
OUTCOME = "outcome.json"
"""How the latest commands of the run ended, or that one is active, written by ``recorded_outcome``."""

LEDGER = "ledger.sqlite"
"""The history of every group, written by the replay actor, here or in ``ledger.folder``; checkpoints have copies."""
EVENTS = "events.jsonl"
"""Events of a run that has no ledger, which keeps those of others, written by ``RunMonitor``."""
PARTS = "parts.json"
"""States of the run's processes, which ``RunMonitor`` replaces every few seconds."""

METRICS = "metrics.jsonl"
"""Metrics of every step and evaluation, a line for each, written by ``JsonlTracker``."""
COMPLETIONS = "completions.jsonl"
"""Texts, rewards and advantages of some groups of each step, written by a ``CompletionsLog``."""
EVALUATIONS = "evaluations.jsonl"
"""Answers to held-out prompts, in the form of the completions; a version's rows have its number as their step."""
TENSORBOARD, MLRUNS = "tensorboard", "mlruns"
"""Folders of the trackers of TensorBoard and MLflow."""
WANDB_ID, MLFLOW_ID, TRACKIO_NAME = "wandb_run_id.txt", "mlflow_run_id.txt", "trackio_run_name.txt"
"""Ids of the run in the services of trackers, which write them, so that a resumed run continues the same one."""

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, ``step_<n>``, written by the learner's ranks; ``checkpoint_files`` knows their files."""
POLICY = "policy"
"""Folder of the trained model or adapter, written by the learner's ranks after the last step."""
PROFILES = "profiles"
"""Folder of the traces of ``learner.profile_steps``, written by ``StepProfiler``."""
RAY_TRAIN = "ray_train"
"""Folder of Ray Train's own files."""

SUMMARY = "summary.json"
"""Figures of the whole run, written by ``train`` at its end."""
REWARD_PLOT, LOSS_PLOT = "reward.png", "loss.png"
"""Plots of the metrics, of which ``train`` writes one at its end: the first if there are rewards."""
