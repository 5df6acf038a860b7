"""Verdicts of the reward for code: given for what a program answers, and for nothing else."""

import json
import re
import tempfile

import pytest

from glm46.tasks.rl.rewards.answer import Answer
from glm46.tasks.rl.rewards.code import code
from glm46.tasks.rl.rewards.label_tests import code_label_faults

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
RIGHT = "def f(x):\n    return x + 1"
LIKE_ANYTHING = """
class Like:
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __lt__(self, other): return True
    def __contains__(self, other): return True
    def __getattr__(self, name): return lambda *given: True
"""


def judged(program: str, label, **options) -> float:
    return code(Answer("", f"So:\n```python\n{program}\n```\n", label, False, 9, True), options)


@pytest.mark.parametrize(
    ("program", "label"),
    [
        (RIGHT, TESTS),
        (RIGHT, json.dumps(TESTS)),
        (f"{RIGHT}\nif __name__ == '__main__':\n    print(f(int(input())))\n    exit()", TESTS),
        (RIGHT, ["assert abs(f(1.5) - 2.5) < 1e-6", "assert f(3) in (4, 5)", "assert f(3)"]),
        (RIGHT, ["import math\nassert math.isclose(f(2), 3.0)", "assert math.isclose(f(2), 3.0)"]),
        ("def f(x): return x", ["assert f('abc').startswith('ab')", "assert isinstance(f([1]), list)"]),
        ("def f(x): x.sort()", ["a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"]),
        ("def f(g, x): return g(x)", ["assert f(lambda x: x + 1, 2) == 3"]),
        ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(3)) == 3"]),
        ("def f(x): raise ValueError('no')", ["try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"]),
        ("def f(x): return (1, {2}, {'a': 1.5}, b'x', None)", ["assert f(1) == (1, {2}, {'a': 1.5}, b'x', None)"]),
        ("from fractions import Fraction\ndef f(x): return Fraction(x, 2)",
         ["from fractions import Fraction\nassert f(1) == Fraction(1, 2)"]),
        ("def sort(x): return sorted(x)",
         ["def check(candidate):\n    assert candidate([3, 1]) == [1, 3]\ncheck(sort)"]),
        ("def total(n):\n    t = 0\n    while n:\n        t, n = t + n.val, n.next\n    return t",
         ["class Node:\n    def __init__(s, v, n=None): s.val, s.next = v, n\nassert total(Node(1, Node(2))) == 3"]),
        ("class Stack:\n    def __init__(s): s.items = []\n    def push(s, x): s.items.append(x)\n"
         "    def pop(s): return s.items.pop()\n    def __len__(s): return len(s.items)",
         ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1]\n"
          "assert isinstance(s, Stack)"]),
        ("class Vec:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return Vec(s.x + o.x)\n"
         "    def __eq__(s, o): return s.x == o.x", ["assert Vec(1) + Vec(2) == Vec(3)"]),
        ("def total(items): return sum(items)", ["assert total(x for x in range(4)) == 6"]),
        ("def day(date): return (date.year, date.weekday())",
         ["import datetime\nassert day(datetime.date(2024, 1, 1)) == (2024, 0)"]),
        ("def name(color, Color): return (color.name, Color.BLUE.value)",
         ["import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n"
          "assert name(Color.RED, Color) == ('RED', 2)"]),
        ("def append(head, Node):\n    head.next = Node(2)\n    return head",
         ["class Node:\n    def __init__(s, v): s.v, s.next = v, None\nassert append(Node(1), Node).next.v == 2"]),
        ("def first(words):\n    words[0] = 'b'\n    return len(words)",
         ["class Words:\n    def __init__(s): s.items = ['a']\n    def __len__(s): return len(s.items)\n"
          "    def __setitem__(s, k, v): s.items[k] = v\nw = Words()\nassert first(w) == 1 and w.items == ['b']"]),
        ("def bisect(a, x): return 1", ["assert bisect([1, 3], 2) == 1"]),
        ("class Solution:\n    def add(self, a, b): return a + b",
         {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
        ("def add(a, b): return (a, b)",
         json.dumps({"fn_name": "add", "inputs": ["1\n2", "[3]\n[4]"], "outputs": ["[1, 2]", "[[3], [4]]"]})),
        ("print(int(input()) + int(input()))", {"inputs": [["3", "4"], "1\n2"], "outputs": [["7"], "3\n"]}),
    ],
)  # fmt: skip
def test_a_right_program_passes(program, label):
    assert code_label_faults([label]) == [""]
    assert judged(program, label) == 1


@pytest.mark.parametrize("program", [
    "def f(x): return 2",
    "def f(x): raise ValueError",
    "pass",
    "exit()",
    f"{RIGHT}\nimport sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import os\ndef f(x): os._exit(0)",
    "def f(x): raise SystemExit(0)",
    "import atexit, os\natexit.register(lambda: os._exit(0))\nraise ValueError",
    "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): return 0",
    "import os\nos.execv('/bin/true', ['true'])",
    "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
    "import unittest, sys\nunittest.TestCase.fail = sys.exit = lambda *a: None\ndef f(x): return 0",
    f"{LIKE_ANYTHING}\ndef f(x): return Like()",
    f"{LIKE_ANYTHING}\ndef f(x): return [Like()]",
    "class Like(int):\n    def __eq__(self, other): return True\ndef f(x): return Like(0)",
    "import os\nfor n in range(3, 30):\n    try: os.write(n, b'passed')\n    except OSError: pass\nos._exit(0)",
    "import os\nfor n in range(3, 30):\n    for v in (2, 3):\n"
    "        try: os.write(n, b'{\"result\": %d, \"changed\": [null], \"word\": \"\"}\\n' % v)\n"
    "        except OSError: pass",
    "import os\nfor n in range(3, 30):\n"
    "    try: os.write(n, b'{\"error\": \"eval\", \"text\": \"1\", \"word\": \"\"}\\n')\n"
    "    except OSError: pass",
    "import sys\nsys._getframe(1).f_globals['_Peer'].encode = lambda self, value: 2\ndef f(x): return 9",
    "import os, glob\nfor name in glob.glob('/proc/[0-9]*'):\n"
    "    if name != f'/proc/{os.getpid()}' and b'tested_program.py' in open(f'{name}/cmdline', 'rb').read():\n"
    "        for n in range(3, 30):\n            try: os.write(os.open(f'{name}/fd/{n}', os.O_WRONLY), b'passed')\n"
    "            except OSError: pass",
    "print('passed')",
])  # fmt: skip
def test_a_program_that_does_not_answer_right_has_not_passed(program):
    assert judged(program, TESTS) == 0
    assert judged(program, {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]}) == 0


@pytest.mark.parametrize("test", [
    "assert abs(f(1) - 2) < 1e-6", "assert 2 in f(1)", "assert f('ab').startswith('a')", "assert f(1) == 2",
    "assert f(1) < 5", "assert f('1').isdigit()",
])  # fmt: skip
def test_an_object_that_is_like_anything_has_not_passed(test):
    assert judged(f"{LIKE_ANYTHING}\ndef f(x): return Like()", [test]) == 0


@pytest.mark.parametrize(("program", "label"), [
    ("import os\ndef f(x): os._exit(0)", ["try:\n    f(1)\nexcept BaseException:\n    pass\nassert True or f"]),
    ("class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 1",
     ["assert math.isclose(f(2), 7.0)"]),
    ("def sum(x): return 0", ["assert sum([1, 2]) == 3"]),
    ("import sys\nsys.exit(0)", {"inputs": ["3\n"], "outputs": ["3"]}),
    ("print(3)\nraise ValueError", {"inputs": ["3\n"], "outputs": ["3"]}),
    ("def f(a): return 3", {"fn_name": "f", "inputs": [[1]], "outputs": [4]}),
])  # fmt: skip
def test_other_ways_around_a_test_fail(program, label):
    assert judged(program, label) == 0


WRITES_VERDICT = """
import sys, os
frame = sys._getframe()
while frame is not None:
    if isinstance(frame.f_locals.get("verdict"), int):
        os.write(frame.f_locals["verdict"], b"passed"); os._exit(0)
    frame = frame.f_back
"""
NODE = """
class Node:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def get(self): return self.n
"""
PEER = "peer = object.__getattribute__(x, '_peer')\n    "


@pytest.mark.parametrize(("body", "test"), [
    *((f"{PEER}peer.ask('call', x.gi_frame.{name}['__builtins__']['exec'], [{WRITES_VERDICT!r}], {{}})",
       "assert f(i for i in [])") for name in ("f_globals", "f_builtins", "f_back.f_globals")),
    (f"return x.codecs.builtins.exec({WRITES_VERDICT!r})", "import json\nassert f(json) == 1"),
    (f"return x['exec']({WRITES_VERDICT!r})", "assert f(globals()['__builtins__']) == 1"),
    (f"return x({WRITES_VERDICT!r})", "assert f(exec) == 1"),
    (f"return x.f_globals['__builtins__']['exec']({WRITES_VERDICT!r})", "import sys\nassert f(sys._getframe()) == 1"),
    ("x.__eq__ = lambda *given: True\n    return x(0)", f"{NODE}assert f(Node) == Node(3)"),
    ("x.get = lambda *given: 3", f"{NODE}n = Node(1)\nf(n)\nassert n.get() == 3"),
    ("x.get = lambda *given: 3", f"{NODE}f(Node)\nassert Node(1).get() == 3"),
    ("x.limit = 9", "def g(): pass\ng.limit = 1\nf(g)\nassert g.limit == 9"),
    ("x.mro()[-1]", f"{NODE}assert f(Node) == 1"),
    ("return x.__code__.co_consts[1]", "assert f(lambda: 5) == 5"),
])  # fmt: skip
def test_an_object_of_the_test_leads_to_nothing_else(body, test):
    assert judged(f"def f(x):\n    {body}", [test]) == 0


def test_a_program_that_nests_folders_has_not_passed(tmp_path, monkeypatch):
    """Python's own removal of folders recurses, and would drop the sample."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nests = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\nprint(1)"
    options = {"seconds": 60, "timeout_seconds": 150}
    assert judged(nests, {"inputs": ["1"], "outputs": ["2"]}, **options) == 0
    assert judged(nests, TESTS, **options) == 0
    assert not list(tmp_path.iterdir())


GOOD, BAD = "print(input())", "print(0)"


@pytest.mark.parametrize(("text", "expected"), [
    (f"```python3\n{GOOD}\n```", 1), (f"```Python\n{GOOD}\n```", 1), (f"```py\n{GOOD}\n```", 1),
    (f'```python title="a.py"\n{GOOD}\n```', 1), (f"```python:a.py\n{GOOD}\n```", 1),
    (f"``` python\n{GOOD}\n```", 1), (f"```{{.python}}\n{GOOD}\n```", 1),
    (f"```python\r\n{GOOD}\r\n```\r\n", 1), (f"~~~python\n{GOOD}\n~~~", 1), (f"````python\n{GOOD}\n````", 1),
    (f"1. So:\n   ```python\n   {GOOD}\n   ```", 1), (f"```\n{GOOD}\n```", 1),
    (f"```python\n{GOOD}\n```\nIt prints\n```\n5\n```", 1), (f"```\n{GOOD}\n```\nIt prints\n```\n5\n```", 1),
    (f"```python\n{GOOD}\n```\nRun it:\n```bash\npython a.py\n```", 1),
    (f"```python\n{BAD}\n```\nBetter:\n```python\n{GOOD}\n```", 1),
    (f"```python\n{GOOD}\n```\nBetter:\n```python\n{BAD}\n```", 0),
    (f"```javascript\n{GOOD}\n```", 0), (f"```python\n{GOOD}", 0), (GOOD, 0), ("", 0), ("```python\n```", 0),
])  # fmt: skip
def test_the_last_program_of_an_answer_is_judged(text, expected):
    assert code(Answer("", text, {"inputs": ["5"], "outputs": ["5"]}, False, 9, True), {}) == expected


@pytest.mark.parametrize(("label", "said"), [
    (["pass"], "each program passes"), (["f(1)"], "assert"), (["assert True"], "name of the program"),
    (["x = 1\nassert x == 1"], "name of the program"), (["def f(:"], "not Python"), ([], "list of tests"),
    ("", "list of tests"), ("print(1)", "list of tests"), (None, "list of tests"), (3, "list of tests"),
    ([1], "list of tests"), ({"inputs": ["1"], "outputs": []}, "one length"),
    ({"inputs": [], "outputs": []}, "above 0"),
    ({"inputs": "ab", "outputs": "cd"}, "two lists"), ({"inputs": ["1"], "outputs": [" \n"]}, "output is empty"),
    ({"inputs": [None], "outputs": ["1"]}, "list of lines"), ({"inputs": [[[1]]], "outputs": ["1"]}, "fn_name"),
    ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "name of a function"),
    ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "lists of arguments"),
    ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "not JSON"),
    *(
        ({"fn_name": name, "inputs": [[1]], "outputs": [1]}, "name of a function")
        for name in (3, 0, ["f"], {}, "def", "f.g")
    ),
    ({"fn_name": False, "inputs": ["1"], "outputs": ["1"]}, "name of a function"),
    ({"fn_name": "f", "inputs": [[float("nan")]], "outputs": [1]}, "JSON has"),
    ({"fn_name": "f", "inputs": [[1]], "outputs": [{1, 2}]}, "JSON has"),
    *(([test], "can end the test before it has passed") for test in (
        "exit()\nassert f(1) == 2", "import sys\nassert f(1) == 2\nsys.exit()",
        "import os\nos._exit(0)\nassert f(1) == 2",
        "from os import _exit\n_exit(0)\nassert f(1) == 2", "raise SystemExit\nassert f(1) == 2",
        "raise SystemExit(0)\nassert f(1) == 2", "if f(1) == 2:\n    quit()\nassert False",
        "import os\nos.kill(os.getpid(), 9)\nassert f(1) == 2",
    )),
    ({"inputs": ["1", "2"], "outputs": ["Yes", "Yes"]}, "all are Yes"),
    ({"inputs": ["1"], "outputs": ["NO\n"]}, "all are NO"),
])  # fmt: skip
def test_a_label_that_cannot_be_judged_is_refused(label, said):
    (fault,) = code_label_faults([label])
    assert re.search(said, fault)


@pytest.mark.parametrize("label", [
    ["f(1)\nassert True"], ["assert f"], ["assert (f(1)==2,'m')"], ["assert f(1) or True"],
    ["if False:\n    assert f(1)==2"], ["try:\n    assert f(1)==2\nexcept:\n    pass"],
    ["try:\n    assert f(1)==2\nexcept Exception:\n    pass"],
    ["try:\n    assert f(1)==2\nexcept AssertionError:\n    pass"],
    {"fn_name": "f", "inputs": [[1]], "outputs": [None]},
    {"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, None]}, ["for x in []:\n    assert f(x)==2"],
    ["for x in ():\n    assert f(x)==2"], ["while False:\n    assert f(1)==2"], ["assert True or f(1)==2"],
    ["assert f(1) == 2 or True"], ["assert not False, f(1)"], ["assert callable(f)"], ["assert f is not None"],
    ["assert f(1) is None"], ["assert f(1)"], ["assert f(1) == True"], ["assert f(1) is True"],
    ["assert f(1) == False"], ["assert not f(1)"], ["def t():\n    assert f(1)==2"],
    ["class T:\n    def test(self):\n        assert f(1)==2"], ["lambda: f(1)\nassert True"],
    ["assert lambda: f(1)==2"], ["assert [f(1)==2]"], ["assert f(1) != 5"], ["assert f(1) is not None"],
    ["import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1)==2"], ["assert f(1)==2", "assert f"],
    ["assert f(1)==2", "assert True or f"], ["def test_f():\n    assert f(1) == 2\n"],
    ["assert all(f(x)==2 for x in [])"], ["assert all(x > 0 for x in f(3))"], ["assert 'f(1)' or f"],
    ["def check(c):\n    assert c(1)==2\ncheck"], ["assert isinstance(f, object)"], ["assert f(1) == f(1) or f"],
    ["assert hasattr(f, '__call__')"], ["assert str(f(1))"], {"inputs": ["1"], "outputs": [""]},
    {"fn_name": "f", "inputs": ["1"], "outputs": ["null"]}, {"fn_name": "f", "inputs": [[1]], "outputs": [True]},
    ["return_value = f(1)\nassert 1 == 1"], ["try:\n    f(1)\n    assert False\nexcept Exception:\n    pass"],
    ["if 0:\n    assert f(1) == 3\nelse:\n    f(1)"], ["assert f(1) == f(1)"], ["x = f(1)\nassert x == x"],
    ["assert type(f(1))"],
])  # fmt: skip
def test_a_label_that_a_program_without_an_answer_passes_is_refused(label):
    (fault,) = code_label_faults([label])
    assert re.search("passes|each program|all are|output is empty|needs an assert", fault)


@pytest.mark.parametrize("label", [
    ["assert f(1) == 2"], ["assert f(1) == 1"], ["assert f(0) == 1"], ["assert f(0) == 0"],
    ["assert is_prime(7) == True", "assert is_prime(8) == False"], ["assert is_prime(7)", "assert not is_prime(8)"],
    ["assert f(1) is None and g(1) == 2"], ["def check(c):\n    assert c(1)==2\ncheck(f)"],
    ["def test_f():\n    assert f(1) == 2\ntest_f()"], ["for x in [1,2]:\n    assert f(x)==x+1"],
    ["import math\nassert math.isclose(f(1), 2.5)"], ["assert abs(f(1)-2) < 1e-6"],
    ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"], ["assert f('a') == 'b'"],
    ["assert sorted(f([2,1])) == [1,2]"], ["assert set(f(1)) == {1}"], ["assert len(f(3)) == 3"],
    ["assert f([]) == []"], ["assert f('') == ''"], ["assert 2 in f(1)"], ["assert 2 == f(1)"],
    ["s = Stack()\ns.push(1)\nassert s.pop() == 1"], ["assert Vec(1)+Vec(2) == Vec(3)"], ["assert f(1) > 0"],
    ["assert isinstance(f(1), int)"], ["a=[3,1]\nassert f(a) is None\nassert a == [1,3]"],
    ["a=[3,1]\nf(a)\nassert a == [1,3]"], ["assert f(1) == (1, 2)"], ["assert f(1) == 1.0"],
    ["assert str(f(1)) == '2'"], ["assert (f(1) == 2)"], ["assert f(1) == 2, 'message'"],
    {"fn_name": "f", "inputs": [[1], [2]], "outputs": [True, False]},
    {"fn_name": "f", "inputs": [[1]], "outputs": [0]}, ["candidate = f\nassert candidate(1) == 2"],
    ["assert sum([1,2]) == 3"], ["assert f(1)[0] == 2"], ["assert f(1)['a'] == 2"], ["x = f(1)\nassert x == 2"],
    ["if f(1) != 2:\n    raise ValueError\nassert f(2) == 3"], ["assert np.allclose(f(1), [1,2])"],
    ["class Solution2: pass\nassert Solution().add(1,2) == 3"],
])  # fmt: skip
def test_a_label_that_only_an_answer_passes_is_taken(label):
    assert code_label_faults([label]) == [""]


def test_a_test_that_ends_its_process_does_not_hide_those_behind_it():
    killer = "import os\ngetattr(os, '_exit')(0)\nassert f(1)"
    assert [bool(fault) for fault in code_label_faults([[killer], ["assert f or 1"], [killer], ["assert f or 2"]])] == [
        False, True, False, True,
    ]  # fmt: skip


@pytest.mark.slow
def test_many_labels_share_a_process_and_one_that_hangs_has_no_fault():
    labels = [["while True:\n    f(1)\nassert f(1)"], *([f"assert f or {n}"] for n in range(1200)), ["assert f(1)"]]
    found = code_label_faults(labels)
    assert not found[0] and all("passes whatever" in fault for fault in found[1:-1])
    assert "give True passes all tests" in found[-1]
