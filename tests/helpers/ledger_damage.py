"""Kinds of damage to a ledger's file, each chosen in detail by a random generator."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

VALUES = ["'x'", "''", "x'00ff'", "NULL", "9e999", "-9e999", "1e300", "1.5", "-1", "0", "9223372036854775807"]
JUNK: list[Any] = [None, True, "x", "", -1, 1.5, 10**30, float("nan"), float("inf"), [], [1], {}, {"a": 1}]
TEXTS = ["{", "", "NaN", "null", "[]", "{}", '"x"', "-1", "1e999", "9" * 5000, "[" * 100_000, '{"a":' * 50_000]
JSON_COLUMNS = [("payloads", "record"), ("steps", "metrics"), ("meta", "value")]

Damage = Callable[[Path, Random], None]


def change(path: Path, *statements: str, values: tuple[Any, ...] = ()) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement, values)


def ask(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute(query)]


def pick(path: Path, random: Random) -> tuple[str, str, str]:
    """Return a table, one of its columns, and a condition that selects one of its rows."""
    tables = ask(path, "SELECT name FROM sqlite_master WHERE type = 'table'")
    table = random.choice([name for name in tables if ask(path, f"SELECT 1 FROM {name}")])
    columns = ask(path, f"SELECT name FROM pragma_table_info('{table}')")
    rows = ask(path, f"SELECT quote({columns[0]}) FROM {table}")
    return table, random.choice(columns), f"{columns[0]} = {random.choice(rows)}"


def flipped_bytes(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    first = random.randrange(len(content))
    for _ in range(random.choice([1, 4, 40])):
        content[min(len(content) - 1, first + random.randrange(random.choice([1, 100, 4096])))] = random.randrange(256)
    path.write_bytes(content)


def flipped_header(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(100)] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def truncated(path: Path, random: Random) -> None:
    size = path.stat().st_size
    os.truncate(path, random.choice([random.randrange(size), random.randrange(size // 4096) * 4096]))


def zeroed_page(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    page = random.choice([0, random.randrange(len(content) // 4096)])
    content[page * 4096 : page * 4096 + random.choice([16, 100, 4096])] = b"\0" * random.choice([16, 100, 4096])
    path.write_bytes(content)


def exchanged_pages(path: Path, random: Random) -> None:
    content = path.read_bytes()
    pages = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    one, other = random.sample(range(1, len(pages)), 2)
    pages[one], pages[other] = pages[other], pages[one]
    path.write_bytes(b"".join(pages))


def wrong_value(path: Path, random: Random) -> None:
    table, column, row = pick(path, random)
    where = random.choice(["1", row, row])
    with suppress(sqlite3.IntegrityError):  # SQLite keeps INTEGER PRIMARY KEYs whole
        change(path, f"UPDATE OR IGNORE {table} SET {column} = {random.choice(VALUES)} WHERE {where}")


def wrong_json(path: Path, random: Random) -> None:
    table, column = random.choice(JSON_COLUMNS)
    row = random.choice(ask(path, f"SELECT quote({column}) FROM {table}"))
    change(path, f"UPDATE {table} SET {column} = ? WHERE {column} = {row}", values=(random.choice(TEXTS),))


def wrong_leaf(path: Path, random: Random) -> None:
    """Replace or remove one value somewhere in a JSON text."""
    table, column = random.choice(JSON_COLUMNS)
    text = random.choice(ask(path, f"SELECT {column} FROM {table}"))
    tree = [json.loads(text)]
    parent: Any = tree
    while True:
        key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if not isinstance(parent[key], dict | list) or not parent[key] or random.random() < 0.2:
            break
        parent = parent[key]
    if parent is not tree and random.random() < 0.3:
        del parent[key]
    else:
        parent[key] = random.choice(JUNK)
    change(path, f"UPDATE {table} SET {column} = ? WHERE {column} = ?", values=(json.dumps(tree[0]), text))


def huge_numbers(path: Path, random: Random) -> None:
    huge = random.choice([2**63 - 1, 10**15, -(2**63), 10**30])
    change(
        path,
        f"UPDATE meta SET value = '[{abs(huge)}, 0]' WHERE key = 'place'",
        f"UPDATE meta SET value = '{huge}' WHERE key IN ('checkpoint_step', 'num_rows')",
        f"UPDATE groups SET epoch = {huge}, step = {huge} WHERE group_id = 0",
    )


def unknown_state(path: Path, random: Random) -> None:
    state, part = random.choice(["'LOST'", "'trained'", "NULL"]), random.choice([1, 5])
    change(path, f"UPDATE groups SET state = {state} WHERE group_id % {part} = 0")


def other_tables(path: Path, random: Random) -> None:
    table, column, row = pick(path, random)
    indices = ask(path, "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    change(path, *(f"DROP INDEX {name}" for name in indices))
    key = ask(path, f"SELECT name FROM pragma_table_info('{table}')")[0]
    changes = [
        [f"DROP TABLE {table}"],
        [f"ALTER TABLE {table} RENAME TO old"],
        [f"ALTER TABLE {table} RENAME TO old", f"CREATE VIEW {table} AS SELECT * FROM old"],
        [f"ALTER TABLE {table} RENAME COLUMN {column} TO old"],
        [f"ALTER TABLE {table} ADD COLUMN more TEXT"],
        [f"ALTER TABLE {table} DROP COLUMN {column}"] if column not in (key, "position") else [],
        [f"DELETE FROM {table}"],
        [f"DELETE FROM {table} WHERE {row}"],
        [f"UPDATE sqlite_master SET sql = replace(sql, '{column}', 'x') WHERE name = '{table}'"],
        [f"UPDATE sqlite_master SET rootpage = {random.randrange(40)} WHERE name = '{table}'"],
    ]
    change(path, *random.choice(changes))


def other_schema(path: Path, random: Random) -> None:
    schema = random.choice(["2", "99", "-1", "1.0", '"x"', "null", "[1]"])
    change(path, f"UPDATE meta SET value = '{schema}' WHERE key = 'schema'")


def no_file(path: Path, random: Random) -> None:
    """Put something else in the file's place."""
    content = path.read_bytes()
    path.unlink()
    match random.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.write_bytes(b"")
        case 2:
            path.write_text("no database\n" * random.choice([1, 1000]))
        case 3:
            path.symlink_to(path.name)
        case 4:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("CREATE TABLE other (x)")
        case 5:
            path.write_bytes(content)
            path.chmod(0)


def strange_log(path: Path, random: Random) -> None:
    """Put the log of another database, or something else, beside the file."""
    log = path.with_name(f"{path.name}-wal")
    with closing(sqlite3.connect(path.with_name("other.sqlite"), isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE other (x)")
        other.executemany("INSERT INTO other VALUES (?)", [("y" * random.randrange(3000),) for _ in range(40)])
        content = path.with_name("other.sqlite-wal").read_bytes()
    match random.randrange(4):
        case 0:
            log.write_bytes(content)
        case 1:
            log.write_bytes(content[: random.randrange(len(content))])
        case 2:
            log.write_bytes(random.randbytes(5000))
        case 3:
            log.mkdir()


DAMAGES: list[Damage] = [
    flipped_bytes,
    flipped_header,
    truncated,
    zeroed_page,
    exchanged_pages,
    wrong_value,
    wrong_value,
    wrong_json,
    wrong_leaf,
    wrong_leaf,
    huge_numbers,
    unknown_state,
    other_tables,
    other_schema,
    no_file,
    strange_log,
]
