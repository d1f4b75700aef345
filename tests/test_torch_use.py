"""What of torch is used where: collectives in few places, and torch's private names in one."""

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src" / "tacit"
COLLECTIVES = ("transports", "parameter_server", "server", "lab")
PRIVATE = "torch_compat.py"
ROOTS = {"torch", "dist", "nn"}
PYTHONS = {"os", "sys"}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(SRC)): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; of another expression those behind it."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names that a module of ours gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("tacit"):
                yield from (alias.name for alias in names)


def private_uses(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Private names of others that a module uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and chain(node)[0] not in PYTHONS:
                if name not in ours or chain(node)[0] in ROOTS:
                    yield ".".join(chain(node))
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                found = [*module.split("."), *(alias.name for alias in names)]
                yield from filter(is_private, found)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(name), *_]
            ):
                if isinstance(name, str) and is_private(name) and name not in ours:
                    yield name


def test_torchs_private_names_are_used_in_one_module() -> None:
    trees = modules()
    compat = trees.pop(PRIVATE)
    ours = {name for tree in trees.values() for name in defined(tree)}
    found = {name: sorted(set(private_uses(tree, ours))) for name, tree in trees.items()}
    assert not {name: uses for name, uses in found.items() if uses}
    assert len(set(private_uses(compat, ours))) > 10  # they are found where they are


def test_only_transports_servers_and_the_lab_call_torch_distributed() -> None:
    found: dict[str, list[str]] = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and chain(node.func)[:-1] and chain(node.func)[0] == "dist":
                found.setdefault(name, []).append(".".join(chain(node.func)))
    outside = {name: calls for name, calls in found.items() if name.split("/")[0] not in COLLECTIVES}
    outside.pop(PRIVATE, None)
    assert not outside
    assert "transports/process_groups.py" in found
