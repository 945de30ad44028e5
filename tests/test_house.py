"""The rules of the house: small files, short functions, few settings. Warns first, then fails."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from stretto.config import Config, Section, recipes

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "stretto"
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = TESTS.parent
FILE_LINES, FILE_LIMIT = 500, 600
FUNCTION_LINES, FUNCTION_LIMIT = 60, 80
OVER_AIM = 9, 16
"""Files and functions that are longer than their aim; these numbers only fall."""
LAYOUT_FILES = 15
"""Files that name a kind of parallelism; this number only falls."""
SETTINGS = 162
PROSE = {r";": 1.8, r"\bwhat\b": 0.4, r"\bwhere\b": 0.3, r"\bthat (it|is|are|they)\b": 1.6}
"""Habits of wording in docstrings, and their rates per 1,000 words; these rates only fall."""
DOCS_PROSE = {r";": 0.9, r"\bwhat\b": 0.9, r"\bwhere\b": 0.4, r"\bthat (it|is|are|they)\b": 1.1}
"""The same for README and docs."""
VAGUE = re.compile(
    "found|own|made|kept|asked|given|left|known|named|ended|chosen|most|whole|told|came|said|taken|"
    "held|brought|wanted|shown|others|each|every|here|there|apart|beside|alone|several|sent|moved|"
    "answered|got|had|picked|stored|drawn|written|measured|labelled|served|used"
)
"""Participles and adverbs that say nothing about what a variable holds."""
VAGUE_SHARE = 0.004
"""Share of variables with such a name; it only falls."""


Trees = Mapping[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The parsed files of the source, by their names."""
    return {str(file.relative_to(SOURCE)): ast.parse(file.read_text()) for file in FILES}


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and length of each function, decorators not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            yield node.name, node.end_lineno - node.lineno + 1


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those under assignments too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


# Methods that are documented at the protocols, or in the base class.
DOCUMENTED_ELSEWHERE = [
    "models/devices.py",
    "scoring/*.py",
    "runtime/*.py",
    "rollout/*.py",
    "workers/*.py",
    *(f"training/{name}.py" for name in ("backprop", "pipelined", "sharded", "trained")),
    "testing/__init__.py",
    *(
        f"schedules/{name}.py"
        for name in ("chunking", "controller", "hold", "migration", "overcommit", "predictors")
    ),
]


def undocumented(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    """Public functions and methods without a docstring, whose bodies have more than three lines."""
    for node in body:
        public = not getattr(node, "name", "_").startswith("_")
        if isinstance(node, ast.ClassDef) and public:
            yield from undocumented(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and public:
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            described = ast.get_docstring(node) or any(
                re.search(r"\boverload$|\.(setter|deleter)$", decorator) for decorator in decorators
            )
            assert node.end_lineno
            if not described and node.end_lineno - node.body[0].lineno + 1 > 3:
                yield f"{inside}{node.name}"
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from undocumented(
                [s for s in ast.iter_child_nodes(node) if isinstance(s, ast.stmt)]
            )


def test_public_functions_of_more_than_three_lines_have_docstrings(trees: Trees) -> None:
    scripts = [*(ROOT / "tools").glob("*.py"), *ROOT.glob("examples/**/*.py")]
    assert len(scripts) > 10
    beside = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in scripts}
    for name, tree in {**trees, **beside}.items():
        names = list(undocumented(tree.body))
        if any(fnmatch(name, pattern) for pattern in DOCUMENTED_ELSEWHERE):
            names = [each for each in names if "." not in each]
        assert names == [], name


def test_a_long_public_function_without_a_docstring_is_found() -> None:
    long = "x = 0; " + "\n".join(["y = 0"] * 4)
    file = textwrap.dedent(f"""
        def f():
            {textwrap.indent(long, " " * 12).strip()}
        def _f():
            {textwrap.indent(long, " " * 12).strip()}
        def g():
            "Text."
            {textwrap.indent(long, " " * 12).strip()}
        class C:
            def h(self):
                {textwrap.indent(long, " " * 16).strip()}
            def i(self):
                return 1
        class _D:
            def h(self):
                {textwrap.indent(long, " " * 16).strip()}
        """)
    assert list(undocumented(ast.parse(file).body)) == ["f", "C.h"]


def test_files_and_functions_stay_small(trees: Trees) -> None:
    """None is over its limit, and no more than today are longer than their aim."""
    files = [(str(file), len(file.read_text().splitlines())) for file in FILES]
    short = [(f"{file}: {name}", n) for file, tree in trees.items() for name, n in functions(tree)]
    for sizes, aim, limit, above in (
        (files, FILE_LINES, FILE_LIMIT, OVER_AIM[0]),
        (short, FUNCTION_LINES, FUNCTION_LIMIT, OVER_AIM[1]),
    ):
        assert [name for name, lines in sizes if lines > limit] == []
        over = [name for name, lines in sizes if lines > aim]
        assert len(over) <= above, over


def test_few_files_name_a_kind_of_parallelism() -> None:
    """The rest of the code asks a layout, so that few files change for another kind."""
    kinds = re.compile(r"\b(tp|fsdp|pp)\b|FSDP|tensor_parallel|ShardLayout|Mesh\b")
    files = [str(f.relative_to(SOURCE)) for f in FILES if kinds.search(f.read_text())]
    assert len(files) <= LAYOUT_FILES, files


def packed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and kind of code that saves lines at the reader's cost."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[_, _, _, *_])], value=ast.Tuple()):
                yield node.lineno, "three assignments in one"
            case ast.For(iter=ast.IfExp()) | ast.comprehension(iter=ast.IfExp()):
                yield node.iter.lineno, "a loop with a condition in its iterable"
            case ast.UnaryOp(
                op=ast.USub(),
                operand=ast.BinOp(op=ast.FloorDiv(), left=ast.UnaryOp(op=ast.USub())),
            ):
                yield node.lineno, "a division rounded up by negation"


def test_no_line_is_packed(trees: Trees) -> None:
    lines = {file: list(packed(tree)) for file, tree in trees.items() if "bounds.py" not in file}
    assert {file: kinds for file, kinds in lines.items() if kinds} == {}


def test_packed_lines_are_found() -> None:
    code = (
        "a, b, c = 1, 2, 3\nfor x in y if z else (): pass\n[x for x in (y if z else w)]\n-(-a // b)"
    )
    assert sorted(line for line, _ in packed(ast.parse(code))) == [1, 2, 3, 4]


def test_each_name_of_a_file_or_class_has_one_meaning(trees: Trees) -> None:
    names = [file.name for file in FILES if file.name != "__init__.py"]
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    names += [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_docstrings_open_with_a_verb_or_the_thing_itself(trees: Trees) -> None:
    opening = re.compile(r"\s*(Of|That|Those|Whose|See the class)\b")
    texts = [(file, *each) for file, tree in trees.items() for each in docstrings(tree)]
    assert [each for each in texts if opening.match(each[-1])] == []


def too_frequent(prose: str, limits: Mapping[str, float]) -> dict[str, float]:
    per_1000 = 1000 / len(prose.split())
    rates = {habit: per_1000 * len(re.findall(habit, prose, re.I)) for habit in limits}
    return {habit: rate for habit, rate in rates.items() if rate > limits[habit]}


def test_habits_of_wording_become_no_more_frequent(trees: Trees) -> None:
    prose = "\n".join(text for tree in trees.values() for _, text in docstrings(tree))
    assert too_frequent(prose, PROSE) == {}


def test_habits_of_wording_in_docs_become_no_more_frequent() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = re.compile(r"^ *```.*?^ *```|^(\||    ).*?$", re.M | re.S)
    prose = "\n".join(code.sub("", page.read_text()) for page in pages)
    assert too_frequent(prose, DOCS_PROSE) == {}


def test_variables_are_named_by_their_content(trees: Trees) -> None:
    nodes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.Name)]
    names = [n.id for n in nodes if isinstance(n.ctx, ast.Store)]
    assert sum(map(bool, map(VAGUE.fullmatch, names))) <= VAGUE_SHARE * len(names)


def test_docstrings_of_all_kinds_are_read() -> None:
    tree = ast.parse(
        '''"""Module."""
A = 1
"""Constant."""
B: int = 2
"""Annotated."""
print("no docstring")
"nor this"
class C:
    """Class."""
    x: int = 0
    """Attribute."""
    async def f(self):
        """Method."""
def g():
    """Function."""
    "Not this."
'''
    )
    found = [(1, "Module."), (3, "Constant."), (5, "Annotated."), (9, "Class.")]
    found += [(11, "Attribute."), (13, "Method."), (15, "Function.")]
    assert sorted(docstrings(tree)) == found


def test_settings_stay_few_and_each_has_its_help() -> None:
    names = recipes.setting_names()
    assert len(names) == len(set(names)) <= SETTINGS
    sections: list[type[Section]] = [Config]
    while sections:
        section = sections.pop()
        for key, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                sections.append(info.annotation)
            else:
                assert info.description, f"{section.__name__}.{key} has no help"


@pytest.mark.parametrize(
    "module", ["stretto", "stretto.config", "stretto.config.recipes", "stretto.testing"]
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = {"torch", "transformers", "datasets", "reasoning_gym", "peft", "math_verify"}
    code = f"import sys, {module}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.split() == []


def imported(file: Path) -> set[str]:
    """The first part of every module's name that a file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_no_test_file_imports_another() -> None:
    """What several need is in a module of helpers."""
    files = sorted(TESTS.rglob("*.py"))
    tests = {file.stem for file in files if file.name.startswith("test_")}
    assert len(tests) > 50
    taken = {str(file.relative_to(TESTS)): sorted(imported(file) & tests) for file in files}
    assert {name: others for name, others in taken.items() if others} == {}


def test_the_list_of_long_tests_names_tests_that_exist() -> None:
    lines = (TESTS / "long.txt").read_text().splitlines()
    for node in (line for line in lines if not line.startswith("#")):
        file, *_, test = node.partition("[")[0].split("::")
        assert re.search(rf"def {test}\(", (ROOT / file).read_text()), node
