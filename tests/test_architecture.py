"""What must hold of the source's structure, found in its syntax trees: each rule has a list of what is known.

A rule fails when it finds what its list does not name, and when the list names what is not there any more.
So the lists only get shorter.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

NAMES: dict[str, Any] = {
    # A module imports only lower floors, and siblings on a floor leave each other alone.
    "floors": [
        ["errors", "environment", "_moved", "torch_compat", "torch_fsdp"],
        [
            *("contracts", "checks", "described", "exports", "files", "json_lines"),
            *("kernels", "links", "model", "moments", "own_modules", "ranges", "scripts", "timelines"),
        ],
        [
            "rounds",
            "compressors",
            "topologies",
            "overlap",
            "merges",
            "exchange",
            "transports",
            "prediction",
            "optim",
        ],
        ["strategy", "failure"],
        ["algorithms", "members", "session"],
        ["gradients"],
        ["fsdp", "optimizer_hooks"],
        ["replicas"],
        ["stores"],
        ["levels"],
        ["checkpoint"],
        ["attaching"],
        ["planning"],
        ["reporting"],
        ["api", "testing"],
        ["__main__", "diagnose", "probe", "integrations"],
        ["tacit_lab"],
    ],
    # Everything may use the errors. A check knows what a compressor is. Compressors, topologies and
    # transports combine or check exchanges; what is predicted is sent by compressors. A learning rate may
    # follow what all ranks have seen.
    "beneath": {
        "checks": ["contracts"],
        "described": ["files"],
        "links": ["described"],
        "timelines": ["json_lines"],
        "compressors": ["exchange"],
        "topologies": ["exchange"],
        "transports": ["exchange"],
        "prediction": ["compressors", "exchange"],
        "optim": ["transports"],
    },
    # What measures, and what nothing else may import.
    "lab": ["tacit_lab"],
    # Where torch.distributed is called: files, or folders with all that is in them.
    "network": ["torch_compat.py", "transports", "stores/server", "tacit_lab"],
    # Where torch's private names stand.
    "torch's own": ["torch_compat.py", "torch_fsdp.py"],
    # Private names of the standard library, which are documented.
    "documented": ["_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"],
    "contracts": ["contracts"],
    # The five answers, and where each one's values are defined.
    "answers": {
        "Compressor": "compressors",
        "Topology": "topologies",
        "Rounds": "rounds",
        "Overlap": "overlap.py",
        "Merge": "merges",
    },
    # What a tensor, an error of typer and the like let others assign.
    "theirs": ["data", "grad", "message", "requires_grad"],
    # What each door to a framework calls its callback: whoever trains has one framework.
    "in each door": ["Tacit"],
    # Which run in processes of tacit's own.
    "of their own": ["tacit_lab", "testing"],
    "lines": 500,
    # Folders of variants, a variant a file; and the root, where the rooms are.
    "variants": ["", "algorithms", "compressors", "kernels", "topologies"],
    "modules": 16,
    "depth": 6,
    "parameters": 9,
    # What may take more. Kernels take what a loop needs. The parameters of an algorithm's function are the
    # options of its text form (`daso`, `mp2`, `lowbit`), and those of a command are its options; `attach`
    # has the arguments of a training script.
    "wide": ["kernels", "algorithms", "tacit_lab/cli", "api/attach.py"],
}
"""All that is a path or a name in the rules; paths are relative to src/tacit, those of the lab to src."""

KNOWN: dict[str, dict[str, list[str]]] = {}
"""What each rule finds today, by file: a line for each time."""

Tree: TypeAlias = dict[str, ast.Module]
Found: TypeAlias = Iterator[tuple[str, str]]
Rule: TypeAlias = Callable[[Tree], Found]


def within(path: str, places: list[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") or path == f"{place}.py" for place in places)


def part(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


@functools.cache
def walk(module: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module))


@functools.cache
def classes_in(module: ast.Module) -> tuple[ast.ClassDef, ...]:
    return tuple(node for node in walk(module) if isinstance(node, ast.ClassDef))


def imports(module: ast.Module) -> Iterator[str]:
    """What it imports, in full; anywhere, also for types alone."""
    for node in walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts(module: ast.Module) -> set[str]:
    names = {".".join(name.split(".")[:2]) for name in imports(module)}
    return {name.split(".")[-1] for name in names if name.startswith("tacit.")} | {
        "tacit_lab" for name in names if name.split(".")[0] == "tacit_lab"
    }


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; empty if it is anything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else ""


def calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def classes(tree: Tree) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, module in tree.items():
        yield from ((path, node) for node in classes_in(module))


def bases(node: ast.ClassDef) -> set[str]:
    each = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {dotted(base).split(".")[-1] for base in each} - {""}


def heirs(tree: Tree, root: str) -> dict[str, str]:
    """The classes below this one, and the file of each."""
    found: dict[str, str] = {}
    while more := {
        node.name: path
        for path, node in classes(tree)
        if node.name not in found and bases(node) & {root, *found} and node.name != root
    }:
        found |= more
    return found


def members(node: ast.ClassDef) -> set[str]:
    """Methods, and attributes of the class; no magic ones."""
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in node.body:
        targets = (
            each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]  # AnnAssign
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("__")}


# ---- the rules ----------------------------------------------------------------------------------------


def imports_point_up(tree: Tree) -> Found:
    floor = {name: i for i, names in enumerate(NAMES["floors"]) for name in names}
    for path, module in tree.items():
        here = part(path)
        if here == "__init__":
            continue
        if here not in floor:
            yield path, "stands on no floor"
            continue
        for other in sorted(parts(module) & floor.keys()):
            lower = floor[other] < floor[here] or other in {here, "errors", *NAMES["beneath"].get(here, [])}
            if not lower:
                yield path, f"{here} (floor {floor[here]}) imports {other} ({floor[other]})"


def the_core_imports_the_lab(tree: Tree) -> Found:
    for path, module in tree.items():
        if part(path) not in {"__init__", *NAMES["lab"]}:
            yield from ((path, each) for each in sorted(parts(module)) if each in NAMES["lab"])


def in_full(module: ast.Module) -> Callable[[ast.AST], str]:
    """Names a node as `dotted` does, by what the module imports."""
    named = {}  # as it is called here, and in full
    for node in walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                top = alias.name if source or alias.asname else alias.name.split(".")[0]
                named[alias.asname or top] = source + top

    def name(node: ast.AST) -> str:
        first, *rest = dotted(node).split(".")
        return ".".join([named.get(first, first), *rest])

    return name


def calls_of_torch_distributed(tree: Tree) -> Found:
    for path, module in tree.items():
        if within(path, NAMES["network"]):
            continue
        name = in_full(module)
        for node in walk(module):
            if isinstance(node, ast.Call) and name(node.func).startswith("torch.distributed."):
                yield path, name(node.func).removeprefix("torch.distributed.")


def own_private_names(tree: Tree) -> set[str]:
    """What is defined anywhere here with an underscore."""
    found = set()
    for module in tree.values():
        for node in walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                found.add(node.attr)
    return found | {*NAMES["documented"]}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names_of_others(tree: Tree) -> Found:
    """Of a library: what nothing here defines."""
    own = own_private_names(tree)
    for path, module in tree.items():
        if within(path, NAMES["torch's own"]):
            continue
        for name in imports(module):
            if not name.startswith("tacit") and any(map(private, name.split("."))):
                yield path, name
        full = in_full(module)
        for node in walk(module):
            if not isinstance(node, ast.Attribute) or not private(node.attr):
                continue
            if node.attr not in own or full(node).startswith("torch."):
                yield path, node.attr
        for name in ("getattr", "setattr", "hasattr"):
            for call in calls(module, name):
                given = call.args[1]
                if isinstance(given, ast.Constant) and private(given.value) and given.value not in own:
                    yield path, given.value


def long_files(tree: Tree) -> Found:
    for path, module in tree.items():
        last = max((node.end_lineno or 0 for node in module.body), default=0)
        if last > NAMES["lines"]:
            yield path, f"above {NAMES['lines']} lines"


def many_parameters(tree: Tree) -> Found:
    for path, module in tree.items():
        for node in walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or within(path, NAMES["wide"]):
                continue
            given = node.args
            names = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
            if len([name for name in names if name not in ("self", "cls")]) > NAMES["parameters"]:
                yield path, node.name


def crowded_folders(tree: Tree) -> Found:
    folders = Counter(path.rpartition("/")[0] for path in tree if not path.endswith("__init__.py"))
    for folder, modules in folders.items():
        if modules > NAMES["modules"] and folder.split("/")[0] not in NAMES["variants"]:
            yield folder, f"{modules} modules, more than {NAMES['modules']}"


def imported_files(tree: Tree) -> dict[str, set[str]]:
    """What each file imports, types too; importing a package imports what stands in its `__init__.py`."""
    modules = {
        (path if path.startswith("tacit_lab/") else f"tacit/{path}")
        .removesuffix(".py")
        .removesuffix("/__init__")
        .replace("/", "."): path
        for path in tree
    }

    def home(name: str) -> str | None:
        return modules.get(name) or modules.get(name.rpartition(".")[0])

    return {path: {*map(home, imports(module))} - {None, path} for path, module in tree.items()}  # type: ignore[misc]


def depths(files: Mapping[str, set[str]], loops: list[list[str]]) -> dict[str, int]:
    """On which floor each file stands, of files that import each other; loops are gathered on the way."""
    found: dict[str, int] = {}
    below: list[str] = []

    def depth(path: str) -> int:
        if path in below:
            loops.append([*below[below.index(path) :], path])
            return 0
        if path not in found:
            below.append(path)
            found[path] = 1 + max(map(depth, sorted(files[path] & files.keys())), default=0)
            below.pop()
        return found[path]

    for path in files:
        depth(path)
    return found


def cycles_of_files(tree: Tree) -> Found:
    loops: list[list[str]] = []
    depths(imported_files(tree), loops)
    yield from ((loop[0], " imports ".join(loop)) for loop in loops)


def deep_rooms(tree: Tree) -> Found:
    files = imported_files(tree)
    for room in sorted({path.rpartition("/")[0] for path in tree} - {*NAMES["variants"]}):
        inside = {path: files[path] for path in tree if path.rpartition("/")[0] == room}
        floors = max(depths(inside, []).values())
        if floors > NAMES["depth"]:
            yield room, f"{floors} floors, more than {NAMES['depth']}"


def kinds_asked(module: ast.Module) -> Iterator[str]:
    """Classes by which it tells values apart."""
    for call in calls(module, "isinstance"):
        for node in ast.walk(call.args[1]):
            if isinstance(node, ast.Name | ast.Attribute):
                yield dotted(node).split(".")[-1]
    for node in walk(module):
        if isinstance(node, ast.MatchClass):
            yield dotted(node.cls).split(".")[-1]
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Call) and dotted(s.func) == "type" for s in sides):
                yield from (dotted(s).split(".")[-1] for s in sides)


def answers_told_apart(tree: Tree) -> Found:
    """By their concrete class, outside of where such answers are, and of the part that defines it."""
    concrete = {
        name: [home, part(path), f"{part(path)}.py"]
        for answer, home in NAMES["answers"].items()
        for name, path in heirs(tree, answer).items()
        if not within(path, NAMES["contracts"])
    }
    for path, module in tree.items():
        for kind in kinds_asked(module):
            if kind in concrete and not within(path, concrete[kind]):
                yield path, kind


def assigned(target: ast.expr) -> Iterator[ast.Attribute]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from assigned(each)
    elif isinstance(target, ast.Starred):
        yield from assigned(target.value)
    elif isinstance(target, ast.Attribute):
        yield target


def assignments(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes assigned by this statement."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from assigned(target)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        yield from assigned(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from assigned(node.optional_vars)


def attributes(node: ast.ClassDef) -> set[str]:
    """What its values have: fields, and what its methods assign to `self`."""
    own = {target.attr for each in ast.walk(node) for target in assignments(each) if is_own(target)}
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and is_name(each.target)
    }
    return own | fields  # type: ignore[return-value]


def is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def is_own(target: ast.Attribute) -> bool:
    return dotted(target.value) in ("self", "cls")


def attributes_assigned_from_outside(tree: Tree) -> Found:
    """Of an object whose class is here, by code that is not in this class."""
    ours = set().union(*(attributes(node) for _, node in classes(tree))) - {*NAMES["theirs"]}

    def search(path: str, node: ast.AST, inside: set[str]) -> Found:
        if isinstance(node, ast.ClassDef):
            inside = attributes(node)
        for target in assignments(node):
            if not is_own(target) and target.attr in ours - inside:
                yield path, target.attr
        for each in ast.iter_child_nodes(node):
            yield from search(path, each, inside)

    for path, module in tree.items():
        yield from search(path, module, set())
        for call in calls(module, "setattr"):
            given = call.args[1]
            if isinstance(given, ast.Constant) and given.value in ours and dotted(call.args[0]) != "self":
                yield path, given.value


def classes_of_one_name(tree: Tree) -> Found:
    found = [*classes(tree)]
    times = Counter(node.name for _, node in found)
    twice = ((path, node.name) for path, node in found if times[node.name] > 1)
    yield from (each for each in twice if each[1] not in NAMES["in each door"])


def methods_without_docstring(tree: Tree) -> Found:
    """Public ones of public classes, unless they override a method of a class that is here."""
    by_name = {node.name: node for _, node in classes(tree)}

    def inherited(node: ast.ClassDef) -> set[str]:
        above = [by_name[name] for name in bases(node) & by_name.keys()]
        return set().union(*(members(base) | inherited(base) for base in above))

    for path, module in tree.items():
        for node in module.body:
            if not isinstance(node, ast.ClassDef) or private(node.name):
                continue
            for each in node.body:
                if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(each):
                    continue
                marks = {dotted(mark).split(".")[-1] for mark in each.decorator_list}
                if not (
                    each.name.startswith("_")
                    or marks & {"overload", "setter"}
                    or each.name in inherited(node)
                ):
                    yield path, f"{node.name}.{each.name}"


def tensors_of_the_scripts_type(tree: Tree) -> Found:
    """Made of numbers whose type is not said: a script may have set another default type."""
    made = {f"torch.{name}" for name in ("empty", "eye", "linspace", "ones", "rand", "randn", "zeros")}
    for path, module in tree.items():
        for node in walk(module):
            if not isinstance(node, ast.Call) or part(path) in NAMES["of their own"]:
                continue
            said = {each.arg for each in node.keywords} & {"dtype", "out", None}
            if dotted(node.func) in made and not said:
                yield path, dotted(node.func)


RULES: tuple[Rule, ...] = (
    imports_point_up,
    the_core_imports_the_lab,
    calls_of_torch_distributed,
    private_names_of_others,
    long_files,
    many_parameters,
    crowded_folders,
    cycles_of_files,
    deep_rooms,
    answers_told_apart,
    attributes_assigned_from_outside,
    classes_of_one_name,
    methods_without_docstring,
    tensors_of_the_scripts_type,
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@pytest.fixture(scope="module")
def src() -> Tree:
    files = {p: ast.parse(p.read_text()) for p in sorted(SRC.rglob("*.py"))}
    homes = ((p, p.relative_to(SRC)) for p in files)
    return {
        str(home.relative_to("tacit") if home.parts[0] == "tacit" else home): files[p] for p, home in homes
    }


def by_file(found: Found) -> dict[str, list[str]]:
    gathered: dict[str, list[str]] = {}
    for path, what in sorted(found):
        gathered.setdefault(path, []).append(what)
    return gathered


def beyond(some: Mapping[str, list[str]], others: Mapping[str, list[str]]) -> list[str]:
    """What the first has more often than the others."""
    more = {path: Counter(each) - Counter(others.get(path, [])) for path, each in some.items()}
    return [f"{path}: {what}" for path, each in more.items() for what in each.elements()]


@every_rule
def test_the_rule_holds_but_for_what_is_known(rule: Rule, src: Tree) -> None:
    found, known = by_file(rule(src)), KNOWN.get(rule.__name__, {})
    assert not beyond(found, known), "against the rule"
    assert not beyond(known, found), "no longer there: take it out of KNOWN"


def test_no_list_is_of_a_rule_that_is_not() -> None:
    assert not KNOWN.keys() - {rule.__name__ for rule in RULES}


MADE_UP: dict[str, Any] = {
    "floors": [["errors", "words", "checks", "low"], ["mid", "side"], ["high"], ["tacit_lab"]],
    "beneath": {"checks": ["words"]},
    "lab": ["tacit_lab", "tools"],
    "network": ["wires", "high/agree.py"],
    "torch's own": ["compat.py"],
    "documented": ["_asdict"],
    "contracts": ["words"],
    "answers": {"Answer": "mid"},
    "theirs": ["grad"],
    # What each door to a framework calls its callback: whoever trains has one framework.
    "in each door": ["Tacit"],
    "of their own": ["tacit_lab"],
    "lines": 400,
    "variants": ["kinds"],
    "modules": 2,
    "depth": 2,
    "parameters": 2,
    "wide": ["kinds"],
}
"""What `NAMES` is to the trees below."""

OFFENCES: dict[str, tuple[dict[str, str], list[tuple[str, str]]]] = {
    "imports_point_up": (
        {
            "errors.py": "import os",
            "mid/a.py": "from tacit.errors import X\nfrom tacit import side",
            "high/a.py": "import tacit.low\ndef f():\n    import tacit_lab.main",
            "checks.py": "from tacit.words import Y\nfrom tacit import low",
            "new.py": "",
        },
        [
            ("checks.py", "checks (floor 0) imports low (0)"),
            ("high/a.py", "high (floor 2) imports tacit_lab (3)"),
            ("mid/a.py", "mid (floor 1) imports side (1)"),
            ("new.py", "stands on no floor"),
        ],
    ),
    "the_core_imports_the_lab": (
        {
            "high/a.py": "def f():\n    from tacit_lab.links import X",
            "tools/a.py": "import tacit_lab",
            "tacit_lab/a.py": "import tacit.tools",
            "low.py": "import tacit.mid, lab",
        },
        [("high/a.py", "tacit_lab")],
    ),
    "calls_of_torch_distributed": (
        {
            "a.py": "import torch.distributed as dist\ndist.barrier()\nx = dist.ReduceOp.SUM",
            "b.py": "from torch import distributed\ndistributed.get_rank(None)",
            "c.py": "import torch\nimport torch.distributed.elastic\ntorch.distributed.barrier()",
            "d.py": "from torch.distributed import barrier as wait\nwait()\ndist.barrier()",
            "wires/a.py": "import torch.distributed as dist\ndist.barrier()",
            "high/agree.py": "import torch.distributed as dist\ndist.barrier()",
        },
        [("a.py", "barrier"), ("b.py", "get_rank"), ("c.py", "barrier"), ("d.py", "barrier")],
    ),
    "private_names_of_others": (
        {
            "a.py": "from torch._C import X\nimport torch._inductor\nx.ours._mine()\nt._version\ny._asdict()",
            "b.py": "class A:\n    def _mine(self): self._too = 1\nx._too, getattr(x, '_theirs'), x.__len__",
            "c.py": "import torch.distributed as dist\ndist.core._mine",
            "compat.py": "import torch._dynamo\nt._version",
        },
        [
            ("a.py", "_version"),
            ("a.py", "torch._C.X"),
            ("a.py", "torch._inductor"),
            ("b.py", "_theirs"),
            ("c.py", "_mine"),
        ],
    ),
    "long_files": (
        {"a.py": "x = 1\n" * 401, "b.py": "x = 1\n" * 400},
        [("a.py", "above 400 lines")],
    ),
    "many_parameters": (
        {
            "a.py": "def f(a, b): ...\ndef g(a, b, *, c): ...\nclass A:\n    def h(self, a, b, *c): ...",
            "b.py": "class B:\n    async def i(self, a, /, b, c): ...",
            "kinds/a.py": "def j(a, b, c): ...",
        },
        [("a.py", "g"), ("b.py", "i")],
    ),
    "crowded_folders": (
        {f"{folder}/{name}.py": "" for folder in ("mid", "kinds") for name in ("__init__", *"abc")}
        | {"high/a.py": "", "high/b.py": ""},
        [("mid", "3 modules, more than 2")],
    ),
    "cycles_of_files": (
        {
            "mid/a.py": "from tacit.mid import b",
            "mid/b.py": "def f():\n    from tacit.low import X",
            "low.py": "if TYPE_CHECKING:\n    from tacit.mid.a import Y",
            "high/a.py": "import tacit.mid.a",
        },
        [("mid/a.py", "mid/a.py imports mid/b.py imports low.py imports mid/a.py")],
    ),
    "deep_rooms": (
        {
            "mid/a.py": "from tacit.mid import b",
            "mid/b.py": "from tacit.mid.c import X",
            "mid/c.py": "import tacit.high.b",
            "high/a.py": "import tacit.mid.a",
            "high/b.py": "import tacit.low",
            "kinds/a.py": "import tacit.kinds.b",
        },
        [("mid", "3 floors, more than 2")],
    ),
    "answers_told_apart": (
        {
            "words.py": "class Answer: ...\nclass Short(Answer): ...",
            "mid/a.py": "class A(Short): ...\nclass B(A): ...\nisinstance(x, A)",
            "mid/b.py": "isinstance(x, B)",
            "high/a.py": "isinstance(x, Short), isinstance(x, a.A | int), isinstance(x, (int, B))",
            "high/b.py": "match x:\n    case A(): ...\ntype(x) is B",
            "high/c.py": "class C(A): ...\nisinstance(x, C)",
            "low.py": "isinstance(x, C)",
        },
        [("high/a.py", "A"), ("high/a.py", "B"), ("high/b.py", "A"), ("high/b.py", "B"), ("low.py", "C")],
    ),
    "attributes_assigned_from_outside": (
        {
            "a.py": "class A:\n    z: int\n    def f(self, other): self.x, other.x = 1, 2\n",
            "b.py": "a.x = 3\na.b.x += 1\na.y = 4\nt.grad = None\nsetattr(a, 'z', 1)",
            "c.py": "class C:\n    def f(self): self.a.z = 5\n",
            "d.py": "class D:\n    def f(self): self.grad = 6\n",
        },
        [("b.py", "x"), ("b.py", "x"), ("b.py", "z"), ("c.py", "z")],
    ),
    "classes_of_one_name": (
        {"a.py": "class A: ...\nclass B: ...", "b.py": "def f():\n    class A: ..."},
        [("a.py", "A"), ("b.py", "A")],
    ),
    "methods_without_docstring": (
        {
            "a.py": "class A:\n    def f(self): 'Told.'\n    def g(self): ...\n    def _h(self): ...",
            "b.py": "class B(a.A):\n    def f(self): ...\n    def i(self): ...\n"
            "class C(B[int]):\n    def g(self): ...",
            "c.py": "class _D:\n    def f(self): ...\nclass E(_D):\n    @overload\n    def k(self): ...",
        },
        [("a.py", "A.g"), ("b.py", "B.i")],
    ),
    "tensors_of_the_scripts_type": (
        {
            "a.py": "torch.zeros(3), torch.ones(2, dtype=kind), torch.eye(2, out=x), torch.arange(4)",
            "tacit_lab/a.py": "torch.zeros(3)",
        },
        [("a.py", "torch.zeros")],
    ),
}
"""For each rule a tree that breaks it, and what it finds there."""


@every_rule
def test_a_rule_finds_what_is_against_it(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NAMES", MADE_UP)
    files, expected = OFFENCES[rule.__name__]
    assert sorted(rule({path: ast.parse(text) for path, text in files.items()})) == expected
