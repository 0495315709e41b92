"""Tests of ``passes_tests`` in its sandbox against programs that cheat, and against honest ones of many kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.scoring.sandbox.sandbox import Sandbox, SandboxFailed
from rlpipe.scoring.sandbox.seccomp import unsupported

pytestmark = pytest.mark.skipif(unsupported() is not None, reason="this machine has no filter of system calls")

TESTS = ["assert f(3) == 9118 and f(10) == 9209", "import math\nassert math.isclose(f(2), 9113, abs_tol=0.5)"]
"""Tests of a secret function: 9109 + x * x for 3 and 10, by its values alone."""
HONEST = "def f(x):\n    return 9109 + x * x\n"
READ = "import re, os, sys\ndef found(text):\n    return [int(n) for n in re.findall(r'\\b9\\d{3}\\b', text)]\n"
EQUAL = "class E:\n    __hash__ = None\n" + "".join(
    f"    def __{name}__(self, *_): return True\n" for name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "contains")
)

CHEATS: dict[str, str] = {
    # Tokens, and early ends that look like success.
    "prints a token of its file": "import re, os\nprint(re.findall('[0-9a-f]{32}', open(__file__).read())[-1], flush=True)\nos._exit(0)",
    "ends with 0": "import os\nos._exit(0)",
    "exits with 0": "raise SystemExit(0)",
    "exits in the call": "def f(x): raise SystemExit(0)",
    "ends in the call": "import os\ndef f(x): os._exit(0)",
    "prints passed": "print('passed', 'OK', 1, flush=True)",
    "ends in atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "ends from a thread": "import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(.05), os._exit(0))).start()\ndef f(x): time.sleep(1)",
    "ends in a finaliser": "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A()\ndel a",
    "forks and goes on": "import os\nif os.fork(): os._exit(0)\ndef f(x): return 0",
    "forks in the call": "import os\ndef f(x):\n    if os.fork(): os._exit(0)\n    return 0",
    "starts again without asserts": "import os, sys\nos.execv(sys.executable, [sys.executable, '-O', '-c', 'pass'])",
    "a line that continues": "def f(x): return 0\nx = 1 + \\",
    "raises AssertionError's rival": "import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef f(x): return 0",
    "jumps by tracing": "import sys\ndef t(frame, *_):\n    return t\nsys.settrace(t)\ndef f(x): return 0",
    "turns asserts off": "import sys, builtins\nbuiltins.__debug__ = False"
    if False
    else "import sys\nsys.flags\ndef f(x): return 0",
    # Values that claim to equal everything.
    "an object equal to all": f"{EQUAL}def f(x): return E()",
    "an int equal to all": "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n    def __sub__(self, o): return 0\n    __rsub__ = __sub__\ndef f(x): return I(1)",
    "a float equal to all": "class F(float):\n    def __eq__(self, o): return True\n    __hash__ = float.__hash__\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\ndef f(x): return F(1)",
    "a str equal to all": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): return S('a')",
    "a list equal to all": "class L(list):\n    def __eq__(self, o): return True\ndef f(x): return L([1])",
    "a dict equal to all": "class D(dict):\n    def __eq__(self, o): return True\ndef f(x): return D()",
    "a tuple equal to all": "class T(tuple):\n    def __eq__(self, o): return True\n    __hash__ = tuple.__hash__\ndef f(x): return T()",
    "a class equal to all": "class M(type):\n    def __eq__(self, o): return True\n    __hash__ = type.__hash__\nclass C(metaclass=M): pass\ndef f(x): return C",
    "a false class": f"{EQUAL}class P(E):\n    __class__ = property(lambda self: int)\ndef f(x): return P()",
    "a Decimal equal to all": "from decimal import Decimal\nclass D(Decimal):\n    def __eq__(self, o): return True\n    __hash__ = Decimal.__hash__\ndef f(x): return D(1)",
    "a Fraction equal to all": "from fractions import Fraction\nclass D(Fraction):\n    def __eq__(self, o): return True\n    __hash__ = Fraction.__hash__\ndef f(x): return D(1)",
    "a complex equal to all": "class C(complex):\n    def __eq__(self, o): return True\n    __hash__ = complex.__hash__\ndef f(x): return C(1)",
    "an index equal to all": f"{EQUAL}class X(E):\n    def __index__(self): return 1\ndef f(x): return X()",
    "NotImplemented": "def f(x): return NotImplemented",
    "not a number": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "True": "def f(x): return True",
    "None": "def f(x): return None",
    "itself": "def f(x): return f",
    "a callable equal to all": f"{EQUAL}class C(E):\n    def __call__(self, *a): return self\nf = C()",
    "a generator": "def f(x): yield True",
    # Python's own functions, replaced.
    "its own isclose": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
    "its own math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
    "its own isclose in sys.modules": "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = m\ndef f(x): return 0",
    "its own abs": "def abs(x): return 0\ndef f(x): return 0",
    "its own builtins": "import builtins\nbuiltins.abs = builtins.set = builtins.sorted = lambda *a: 0\ndef f(x): return 0",
    "its own comparison": "import operator\noperator.eq = lambda a, b: True\ndef f(x): return 0",
    "its own print": "import builtins\nbuiltins.print = lambda *a: None\ndef f(x): return 0",
    # A search for the expected values.
    "reads its file": READ
    + "v = found(open(__file__).read()) if '__file__' in globals() else []\ndef f(x): return v.pop(0)",
    "reads frames": READ
    + "def f(x):\n    frame, seen = sys._getframe(), []\n    while frame:\n        seen += found(repr(frame.f_locals) + repr(frame.f_code.co_consts) + repr(frame.f_globals))\n        frame = frame.f_back\n    return (seen or [0])[-1]",
    "reads the collector": READ
    + "import gc\ndef f(x):\n    seen = [n for o in gc.get_objects() if isinstance(o, (tuple, list, dict)) for n in found(repr(o)[:2000])]\n    return (seen or [0])[-1]",
    "reads constants": READ
    + "import gc, types\ndef f(x):\n    seen = [c for o in gc.get_objects() if isinstance(o, types.FunctionType) for c in o.__code__.co_consts if isinstance(c, int) and 9000 < c < 9999]\n    return (seen or [0])[-1]",
    "reads the interpreter's command": READ + "def f(x): return (found(open('/proc/self/cmdline').read()) or [0])[-1]",
    "reads its environment": READ + "def f(x): return (found(repr(dict(os.environ))) or [0])[-1]",
    "reads the parent's command": READ
    + "def f(x): return (found(open(f'/proc/{os.getppid()}/cmdline').read()) or [0])[-1]",
    "reads the parent's environment": READ
    + "def f(x): return (found(open(f'/proc/{os.getppid()}/environ').read()) or [0])[-1]",
    "reads the parent's memory": READ
    + "def f(x):\n    maps = open(f'/proc/{os.getppid()}/maps').read()\n    return 9109 + x * x",
    "writes the parent's memory": "import os\ndef f(x):\n    open(f'/proc/{os.getppid()}/mem', 'r+b')\n    return 9109 + x * x",
    "opens the parent's pipes": "import os\ndef f(x):\n    os.open(f'/proc/{os.getppid()}/fd/3', os.O_RDONLY)\n    return 9109 + x * x",
    "traces the parent": "import ctypes, os\ndef f(x):\n    assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\n    return 9109 + x * x",
    "searches the folder": READ
    + "def f(x):\n    seen = [n for d, _, names in os.walk('.') for name in names for n in found(open(os.path.join(d, name)).read())]\n    return (seen or [0])[-1]",
    "searches the other folders": READ
    + "import glob\ndef f(x):\n    seen = [n for p in glob.glob(os.environ['TMPDIR'] + '/../*/program*') for n in found(open(p).read())]\n    return (seen or [0])[-1]",
    # The channel between the two processes.
    "writes answers": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'{\"value\": true}\\n' * 20)\n    except OSError: pass\ndef f(x): return 0",
    "writes numbers as answers": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'{\"value\": 9118}\\n' * 3)\n    except OSError: pass\nos._exit(0)",
    "writes other answers": 'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"raised": ["SystemExit"], "text": "0"}\\n\')\n    except OSError: pass\ndef f(x): return 0',
    "gives names that are not asked for": 'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"value": null}\\n{"value": {"dict": [["math", 1], ["f", 9118]]}}\\n\')\n    except OSError: pass\ndef f(x): return 0',
    "calls functions that are not there": 'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"function": 0, "arguments": {"list": []}}\\n\')\n    except OSError: pass\ndef f(x): return 0',
    "closes the channel": "import os\nos.closerange(3, 50)\ndef f(x): return 0",
    "answers with depth": "v = []\nfor _ in range(900): v = [v]\ndef f(x): return v",
    "answers with itself": "v = []\nv.append(v)\ndef f(x): return v",
    "answers with a long number": "def f(x): return 10 ** 500_000",
    "answers with length": "def f(x): return 'x' * 50_000_000",
    "changes its argument's type": "def f(x): return type(x)",
    "raises what tests might catch": "def f(x): raise AssertionError",
    "raises an interrupt": "def f(x): raise KeyboardInterrupt",
    "raises a false StopIteration": "def f(x): raise StopIteration(9118)",
    # Time.
    "never returns": "def f(x):\n    while True: pass",
    "never ends": "while True: pass",
    "sleeps": "import time\ndef f(x): time.sleep(60)",
    "prints without end": "def f(x):\n    while True: print('x' * 1000)",
    "stops itself": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)",
    "kills its group": "import os, signal\ndef f(x): os.killpg(0, signal.SIGKILL)",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    path = "rlpipe.scoring.code_execution:passes_tests"
    shared = Sandbox({"tests": RewardConfig(path=path, isolation="sandbox", timeout_s=30, memory_gb=0.5)})
    yield shared
    shared.close()


def score(sandbox: Sandbox, program: str, tests: Any = TESTS, **options: Any) -> float:
    arguments = {"completions": [program], "tests": [tests], "timeout_s": 2.0, **options}
    (value,) = sandbox.call("tests", arguments, 1).values
    assert isinstance(value, float)
    return value


def test_the_secret_function_passes(sandbox: Sandbox) -> None:
    assert score(sandbox, HONEST, timeout_s=20.0) == 1


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_score_0(sandbox: Sandbox, name: str) -> None:
    assert score(sandbox, CHEATS[name]) == 0


STOPS = "def f(x): raise StopIteration"
RIGHT_CASES = "[(3, 9), (4, 16)]"


@pytest.mark.parametrize(
    "test",
    [
        f"assert all(map(lambda c: f(c[0]) == c[1], {RIGHT_CASES}))",
        "for got, want in zip(map(f, [3, 4]), [9, 16]):\n    assert got == want",
        f"assert not list(filter(lambda c: f(c[0]) != c[1], {RIGHT_CASES}))",
        "assert next(map(f, [3]), 9) == 9",
    ],
)
@pytest.mark.parametrize("program", [STOPS, "class Own(StopIteration): pass\ndef f(x): raise Own"])
def test_a_program_does_not_end_the_iterations_of_its_test(sandbox: Sandbox, program: str, test: str) -> None:
    assert score(sandbox, "def f(x): return x * x", test, timeout_s=20.0) == 1
    assert score(sandbox, program, test) == 0


def test_a_test_that_works_without_end_on_an_answer_is_killed(sandbox: Sandbox) -> None:
    started = time.monotonic()
    with pytest.raises(SandboxFailed, match="SIGALRM") as caught:
        score(sandbox, "def f(x): return range(10**15)", "assert sum(f(3)) == 6", timeout_s=1.0)
    assert caught.value.is_crash
    assert time.monotonic() - started < 15, "the reward's own limit is 30 s"


def test_there_are_many_cheats() -> None:
    assert len(CHEATS) >= 60
    assert len(set(CHEATS.values())) == len(CHEATS)


COUNTS = """
from collections import Counter, defaultdict
d, c = defaultdict(int), Counter()
f(d, c)
assert d == {"x": 1} and d["z"] == 0 and c == Counter("y") and type(c) is Counter
"""
HONEST_CASES: list[tuple[str, str]] = [
    ("def f(a): a.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
    ("def f(d): d['a'] = 1", "x = {}\nf(x)\nassert x == {'a': 1}"),
    ("def f(*a, **k): return a, k", "assert f(1, 2, z=3) == ((1, 2), {'z': 3})"),
    ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2)"),
    ("def f(x):\n    yield from range(x)", "assert list(f(3)) == [0, 1, 2]"),
    ("def f(x): return map(str, x)", "assert list(f([1])) == ['1']"),
    ("def f(x): return x > 1", "assert f(2) is True and f(1) is False"),
    ("def f(x): return 2 ** x", "assert f(5000) == 2 ** 5000 and type(f(1)) is int"),
    ("def f(x): return x / 3", "assert abs(f(1) - 0.333333) < 1e-5"),
    ("def f(x): return -0.0", "import math\nassert math.copysign(1, f(0)) == -1"),
    ("def f(x): return float('nan')", "assert f(0) != f(0)"),
    ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"),
    (
        "def f(x): return {1, 2}, frozenset([3]), b'a', bytearray(b'b'), 1j, range(3), None, '\\ud800'",
        "assert f(0) == ({1, 2}, frozenset([3]), b'a', bytearray(b'b'), 1j, range(3), None, '\\ud800')",
    ),
    ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    ("def add(n): return lambda x: x + n", "assert add(2)(3) == 5"),
    (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]",
        "s = Stack()\ns.push(4)\nassert s.items == [4] and len(s) == 1 and s[0] == 4",
    ),
    (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __str__(self): return f'P{self.x}'",
        "assert P(1) == P(1) and P(1) != P(2) and str(P(3)) == 'P3'",
    ),
    (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)",
    ),
    (
        "class Own(KeyError): pass\ndef f(x): raise Own(x)",
        "try:\n    f(1)\nexcept LookupError:\n    pass\nelse:\n    assert False",
    ),
    ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
    ("def set(x): return 0\ndef f(x): return [1, 2]", "assert set(f(0)) == {1, 2}"),
    (
        "def f(x): return x",
        "def check(candidate):\n    assert candidate(3) == 3\n    assert candidate('a') == 'a'\ncheck(f)",
    ),
    ("class No:\n    def __bool__(self): return False\ndef f(): return No()", "assert not f()"),
    (
        "import numpy as np\ndef f(x): return np.int64(x), np.float32(0.5), np.bool_(False)",
        "assert f(3) == (3, 0.5, False)",
    ),
    ("import numpy as np\ndef f(x): return np.arange(x)", "assert list(f(3)) == [0, 1, 2] and len(f(3)) == 3"),
    (
        "def total(n): return 0 if n is None else n.value + total(n.left) + total(n.right)",
        "class Node:\n    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, left, right\nroot = Node(1, Node(2), Node(3))\nassert total(root) == 6 and total(root.left) == 2",
    ),
    (
        "def f(node): node.value = 5\ndef g(node): return node",
        "class Node: value = 1\nn = Node()\nf(n)\nassert n.value == 5 and g(n) is n",
    ),
    (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef last(n):\n    while n.next: n = n.next\n    return n.v",
        "a = Node(1)\na.next = Node(2)\nassert last(a) == 2",
    ),
    ("def f(xs): return sum(xs)", "assert f(x for x in [1, 2]) == 3"),
    (
        "class Item:\n    def __init__(self, c): self.c = c\ndef best(items, key): return min(items, key=key)",
        "a, b = Item(3), Item(1)\nassert best([a, b], lambda i: i.c) == b and best([a, b], lambda i: Item(i.c).c) == b",
    ),
    ("def half(x): return x / 2\ndef apply(g, x): return g(x)", "assert apply(lambda v: half(v) + 1, 4) == 3"),
    ("def f(x): return x * x\nif __name__ == '__main__':\n    print(f(int(input())))", "assert f(3) == 9"),
    ("def f(d, c):\n    d['x'] += 1\n    c['y'] += 1", COUNTS),
    (
        "import datetime as d\ndef f(day, hours): return d.datetime(day.year, 1, 2), day + d.timedelta(hours=hours)",
        "from datetime import date, datetime, timedelta\nassert f(date(2020, 3, 1), 48) == (datetime(2020, 1, 2), date(2020, 3, 3))",
    ),
    (
        "import datetime as d\ndef f(a, b): return b - a, a.time(), b.astimezone(d.timezone.utc)",
        "from datetime import datetime, time, timedelta, timezone\n"
        "a = datetime(2020, 1, 1, 12, 30, 0, 5, timezone(timedelta(hours=2)))\n"
        "assert f(a, a + timedelta(1)) == (timedelta(1), time(12, 30, 0, 5), a + timedelta(1))",
    ),
    ("LIMIT = 7\ndef f(): return LIMIT", "assert f() == LIMIT"),
    (
        "from decimal import Decimal\ndef f(): return Decimal('1.10')",
        "from decimal import Decimal\nassert f() == Decimal('1.1')",
    ),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(): return A(3)", "assert f().x == 3"),
    (
        "def f(x): print('noise'); return x\nprint('more noise')\nif __name__ == '__main__': print('main')",
        "assert f(1) == 1",
    ),
    (
        "def f(a):\n    b = [r[:] for r in a]\n    return b",
        "x = [[1], [2]]\ny = f(x)\ny[0].append(5)\nassert x == [[1], [2]]",
    ),
]


@pytest.mark.parametrize("index", range(len(HONEST_CASES)))
def test_honest_programs_score_1(sandbox: Sandbox, index: int) -> None:
    program, test = HONEST_CASES[index]
    assert score(sandbox, program, test, timeout_s=20.0) == 1


KILLERS = {
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "stops its parent": "import os\nos.kill(os.getppid(), 19)",
    "ends its parent": "import os\nos.kill(os.getppid(), 15)",
    # One process after the other: a bomb that doubles may outrun what ends it, and takes the machine down.
    "forks many times": "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(30)",
    "fills the memory": "x = []\nwhile True: x.append(bytearray(2 ** 24))",
}


@pytest.mark.parametrize("name", KILLERS)
def test_what_takes_its_sandbox_down_fails_alone(sandbox: Sandbox, name: str) -> None:
    assert score_or_crash(sandbox, KILLERS[name]) == 0
    assert score(sandbox, HONEST, timeout_s=20.0) == 1


def score_or_crash(sandbox: Sandbox, program: str) -> float:
    """Return the program's score, which is 0 if it takes its sandbox down."""
    try:
        return score(sandbox, program)
    except SandboxFailed as failure:
        return 0.0 if failure.is_crash else 1.0


@pytest.mark.parametrize("name", ["__globals__", "__code__", "__class__", "__dict__", "__init__", "gi_frame", "value"])
def test_the_test_can_not_be_reached_from_its_objects(sandbox: Sandbox, name: str) -> None:
    program = f"def f(x):\n    try: type(x).__getattr__(x, {name!r})\n    except AttributeError: return False\n    return True"
    test = "class N: value = 1\nopen = [f(x) for x in (N(), lambda: 9118, (i for i in [1]), N)]\n"
    expected = [True, False, False, True] if name == "value" else [False] * 4
    assert score(sandbox, program, f"{test}assert open == {expected}", timeout_s=20.0) == 1
