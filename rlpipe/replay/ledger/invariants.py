"""The invariants of a run's ledger, with SQL queries that select their contradictions."""

from __future__ import annotations

from typing import NamedTuple

from rlpipe.replay.ledger.run_ledger import COMPARED

TABLES = """
WITH RECURSIVE
run(epoch, position, num_rows, checkpoint_step, finished, refill_attempts, has_epochs) AS (
    VALUES (?, ?, ?, ?, ?, ?, ?)),
limits(first, beyond, groups_per_step, max_staleness, reuse_groups, one_sum) AS (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]') FROM json_each(?)),
entries(epoch, position, prompt_id, group_id) AS (
    SELECT epoch, position, prompt_id, group_id FROM groups WHERE reroll = 0
    UNION ALL SELECT epoch, position, prompt_id, NULL FROM skipped),
epochs(epoch, length) AS (
    SELECT 0, iif(run.epoch > 0, num_rows, position) FROM run
    UNION ALL SELECT epochs.epoch + 1, iif(run.epoch > epochs.epoch + 1, num_rows, position) FROM epochs, run
    WHERE epochs.epoch < run.epoch),
reached(epoch, beyond) AS (SELECT epoch, max(position) + 1 FROM entries GROUP BY epoch),
checkpointed(step) AS (
    SELECT 0 FROM run WHERE checkpoint_step > 0
    UNION ALL SELECT step + 1 FROM checkpointed, run WHERE step + 1 < checkpoint_step),
sizes(step, num_groups, num_flat) AS (
    SELECT step, count(*), sum(reward_std IS NULL OR reward_std < 1e-8) FROM groups WHERE step IS NOT NULL
    GROUP BY step)
"""
"""Tables that the queries below share; ``rlpipe.replay.ledger.audit`` supplies the parameters."""


class Check(NamedTuple):
    """Invariant that holds in every sound ledger."""

    claim: str
    contradictions: str
    """Query that selects a line of text for each contradiction."""


CHECKS = (
    Check(
        "every place up to the prompt source's has a group, or a row that was skipped",
        """SELECT 'epoch ' || epoch || ', position ' || first || iif(last > first, '-' || last, '') FROM (
            SELECT epoch, before + 1 AS first, position - 1 AS last FROM (
                SELECT epoch, position, lag(position, 1, -1) OVER (PARTITION BY epoch ORDER BY position) AS before
                FROM entries) WHERE position > before + 1
            UNION ALL
            SELECT epochs.epoch, coalesce(beyond, 0), length - 1 FROM epochs LEFT JOIN reached USING (epoch)
            WHERE coalesce(beyond, 0) < length)""",
    ),
    Check(
        "no place has two",
        """SELECT 'epoch ' || epoch || ', position ' || position || ': '
            || group_concat(coalesce('group ' || group_id, 'a skipped row'), ', ')
            FROM entries GROUP BY epoch, position HAVING count(*) > 1""",
    ),
    Check(
        "nothing lies beyond the prompt source's place",
        """SELECT coalesce('group ' || group_id, 'a skipped row') || ' at epoch ' || entries.epoch || ', position '
            || entries.position FROM entries, run WHERE entries.epoch NOT BETWEEN 0 AND run.epoch
            OR entries.position < 0 OR entries.position >= iif(entries.epoch < run.epoch, num_rows, run.position)""",
    ),
    Check(
        "no prompt has two places in an epoch",
        """SELECT 'prompt ' || prompt_id || ' in epoch ' || entries.epoch || ', positions ' || min(entries.position)
            || ' and ' || max(entries.position) FROM entries, run WHERE has_epochs
            GROUP BY entries.epoch, prompt_id HAVING count(*) > 1 AND min(entries.position) < max(entries.position)""",
    ),
    Check(
        "prompts that were put back are numbered 1, 2, ... behind their first group",
        """SELECT 'epoch ' || epoch || ', position ' || position || ': groups ' || group_concat(group_id, ', ')
            FROM groups WHERE (epoch, position) IN (SELECT epoch, position FROM groups WHERE reroll != 0)
            GROUP BY epoch, position
            HAVING min(reroll) != 0 OR max(reroll) != count(*) - 1 OR count(DISTINCT reroll) != count(*)
            OR min(prompt_id) != max(prompt_id)""",
    ),
    Check(
        "every group is in one of the states, and in no step before it is assigned",
        """SELECT 'group ' || group_id || ' is ' || coalesce(state, 'in none')
            || coalesce(' and in step ' || step, '') FROM groups WHERE state IS NULL
            OR state NOT IN ('ADMITTED', 'GENERATED', 'SCORED', 'ASSIGNED', 'TRAINED', 'DISCARDED')
            OR state IN ('ADMITTED', 'GENERATED', 'SCORED') AND step IS NOT NULL""",
    ),
    Check(
        "ASSIGNED groups are in a step behind the newest checkpoint",
        """SELECT 'group ' || group_id || ' in ' || coalesce('step ' || step, 'no step') FROM groups, run
            WHERE state = 'ASSIGNED' AND (step IS NULL OR step < checkpoint_step)""",
    ),
    Check(
        "TRAINED groups are in a step that a checkpoint holds, and have the time when it did",
        """SELECT 'group ' || group_id || ' in ' || coalesce('step ' || step, 'no step')
            || iif(trained_at IS NULL, ', without a time', '') FROM groups, run
            WHERE state = 'TRAINED' AND (step IS NULL OR step >= checkpoint_step OR trained_at IS NULL)""",
    ),
    Check(
        "DISCARDED groups have a reason, and no step but the one that was only compared; others have no reason",
        f"""SELECT 'group ' || group_id || ', ' || state || coalesce(', in step ' || step, '')
            || iif(coalesce(reason, '') = '', ', without a reason', ': ' || reason) FROM groups
            WHERE state = 'DISCARDED' AND (coalesce(reason, '') = '' OR step IS NOT NULL AND reason != '{COMPARED}')
            OR state != 'DISCARDED' AND reason IS NOT NULL""",
    ),
    Check(
        "the tokens of groups that are still to be trained, or trained again, are there",
        """SELECT 'group ' || group_id || ', ' || state FROM groups
            WHERE state IN ('GENERATED', 'SCORED', 'ASSIGNED') AND group_id NOT IN (SELECT group_id FROM tokens)
            UNION ALL SELECT 'group ' || group_id || ', again in step ' || step FROM replays, run
            WHERE step >= checkpoint_step AND group_id NOT IN (SELECT group_id FROM tokens)""",
    ),
    Check(
        "every step has algorithm.groups_per_step groups",
        """SELECT 'step ' || step || ': ' || coalesce(num_groups, 0) || ' of ' || groups_per_step FROM (
                SELECT step FROM checkpointed UNION SELECT step FROM sizes
                UNION SELECT step FROM steps WHERE ended_at IS NOT NULL)
            LEFT JOIN sizes USING (step) JOIN limits ON step >= first AND step < beyond
            WHERE coalesce(num_groups, 0) != groups_per_step""",
    ),
    Check(
        "no group is trained more than replay.max_staleness versions behind the one that it was admitted with",
        """SELECT 'group ' || group_id || ' of version ' || coalesce(version, 'none') || ' in step ' || step
            || ', at most ' || max_staleness || ' later' FROM groups JOIN limits ON step >= first AND step < beyond
            WHERE state IN ('ASSIGNED', 'TRAINED')
            AND (version IS NULL OR step < version OR step - version > max_staleness)""",
    ),
    Check(
        "no token is older than the version that its group was admitted with, or newer than its step",
        """SELECT 'group ' || group_id || ' of version ' || version || ': a token of version ' || oldest_version
            || coalesce(', step ' || step, '') FROM groups WHERE oldest_version >= 0
            AND (oldest_version < version OR state IN ('ASSIGNED', 'TRAINED') AND oldest_version > step)""",
    ),
    Check(
        "groups that are trained twice (replay.reuse_groups) stand in later steps for groups without reward variance",
        """SELECT 'group ' || group_id || ', ' || coalesce(state || coalesce(' in step ' || groups.step, ''), 'unknown')
            || ', again in step ' || replays.step FROM replays LEFT JOIN groups USING (group_id)
            WHERE state IS NULL OR state NOT IN ('ASSIGNED', 'TRAINED') OR replays.step <= groups.step
            UNION ALL
            SELECT 'step ' || step || ': ' || again || ' groups again, at most ' || most FROM (
                SELECT step, count(*) AS again, min(reuse_groups, iif(one_sum, num_flat, num_groups)) AS most
                FROM replays JOIN sizes USING (step) JOIN limits ON step >= first AND step < beyond GROUP BY step)
            WHERE again > most""",
    ),
    Check(
        "groups without reward variance are replaced at most replay.refill_attempts times, and each once",
        """SELECT 'group ' || group_id || ': attempt ' || attempt || ' of ' || refill_attempts FROM groups, run
            WHERE attempt NOT BETWEEN 0 AND refill_attempts
            UNION ALL
            SELECT 'attempt ' || later.attempt || ': ' || later.num || ' groups, of which '
            || coalesce(earlier.num, 0) || ' replace another' FROM
                (SELECT attempt, count(*) AS num FROM groups WHERE attempt > 0 GROUP BY attempt) AS later
            LEFT JOIN
                (SELECT attempt + 1 AS attempt, count(*) AS num FROM groups
                WHERE state = 'DISCARDED' AND reason LIKE 'no reward variance%' GROUP BY attempt) AS earlier
            USING (attempt) WHERE later.num > coalesce(earlier.num, 0)""",
    ),
    Check(
        "nothing is in flight once the run has ended",
        """SELECT 'group ' || group_id || ' is ' || state FROM groups, run
            WHERE finished AND state NOT IN ('TRAINED', 'DISCARDED')""",
    ),
)
