"""A script as its source has it, for those who look for mistakes in it, and what they find."""

import ast
from collections.abc import Iterator

from msgspec import Struct


class Mistake(Struct, frozen=True, kw_only=True):
    """Names what a line of a script does wrong."""

    line: int
    found: str
    advice: str


class ScriptSource:
    """Holds a script as it is asked by the rules."""

    def __init__(self, tree: ast.AST) -> None:
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.loops = [node for node in self.nodes if isinstance(node, (ast.For, ast.While))]

    def called(self, *names: str) -> list[ast.Call]:
        """Returns calls of functions and methods of these names."""
        return [call for call in self.calls if name_of(call.func) in names]

    @property
    def is_distributed(self) -> bool:
        """Tells whether several processes run this script."""
        return bool(self.called("DistributedDataParallel", "DDP", "fully_shard", "Accelerator", "init_process_group"))

    def within(self, *managers: str) -> Iterator[ast.AST]:
        """Yields all that lies in a `with` of one of these names, or in a function that one of them decorates."""
        for node in self.nodes:
            if isinstance(node, (ast.With, ast.AsyncWith)):
                around = [item.context_expr for item in node.items]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                around = node.decorator_list
            else:
                continue
            if any(name_of(one.func if isinstance(one, ast.Call) else one) in managers for one in around):
                yield from ast.walk(node)


def name_of(node: ast.AST) -> str:
    """Returns the last part of a dotted name; "" of anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Returns what a call gives by keyword."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
