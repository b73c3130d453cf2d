"""Writes docs/reference.md: public names, commands with their options, and the schemas of memwall's files.

Everything is read from the code, so that the page says what is there; `make reference` writes it, and a test compares.
"""

import ast
import enum
import inspect
import textwrap
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from msgspec import Struct

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"

_INTRODUCTION = """\
# Reference

Made by `make reference` from the code: [Python names](#python-names), [commands](#commands), [files](#files).
"""

_PYTHON = """\
## Python names

What is not here is not public, and may change with any release. Fields of plans and traces are under [files](#files).
"""

_COMMANDS = """\
## Commands

Every command also takes `-v`/`--verbose` (log what is done and why; `-vv` more) and `--help`.
"""

_FILES = """\
## Files

A file says which schema it has, with a version. Another version is refused with the way out, and so is a field that is
unknown, missing or of another type; the message names the path inside the file.

Bytes are integers, seconds are floating-point numbers, indices count from 0, and a field with a default may be left
out.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join([_INTRODUCTION, _PYTHON, *_names(), _COMMANDS, *_commands(), _FILES, *_files()]).rstrip() + "\n"


# -- Python names ------------------------------------------------------------------------------------------------------


def _names() -> Iterator[str]:
    for module in ("memwall", "memwall.integrations"):
        package = import_module(module)
        yield f"### {module}\n"
        public = [(f"{module}.{name}", getattr(package, name)) for name in package.__all__]
        errors = [(path, found) for path, found in public if _is_error(found)]
        rows = [
            (f"`{path}`", f"`{found.__base__.__name__}`", str(found.exit_status), _sentence(found))
            for path, found in errors
        ]
        yield from _table(("error", "is a", "exit status", "what it means"), rows)
        for path, found in public:
            if not _is_error(found) and (inspect.isclass(found) or inspect.isfunction(found)):
                yield from _described(path, found)


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Exception)


def _described(path: str, found: Any) -> Iterator[str]:
    node = _node(found)
    yield f"#### `{path}`\n"
    yield f"{_sentence(found)}\n"
    call = _call(node)
    if call is not None:
        yield f"```text\n{textwrap.fill(path.rpartition('.')[2] + call, 110, subsequent_indent='    ')}\n```\n"
    if isinstance(node, ast.ClassDef):
        is_file = "schema" in getattr(found, "__struct_fields__", ())
        yield from _table(("member", "what it is"), list(_members(node, is_file=is_file)))


def _node(found: Any) -> ast.ClassDef | ast.FunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), found
    return node


def _call(node: ast.ClassDef | ast.FunctionDef) -> str | None:
    """Returns how it is called, as its source says; None for a class that is not made by its user."""
    if isinstance(node, ast.FunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        return f"({ast.unparse(_without_self(node.args))}){returned}"
    made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return f"({ast.unparse(_without_self(made[0].args))})" if made else None


def _without_self(arguments: ast.arguments) -> ast.arguments:
    arguments.args = [argument for argument in arguments.args if argument.arg not in ("self", "cls")]
    return arguments


def _members(node: ast.ClassDef, *, is_file: bool) -> Iterator[tuple[str, str]]:
    for (name, annotation, default), text in () if is_file else _fields(node):
        yield f"`{name}: {annotation}{f' = {default}' if default else ''}`", text
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in part.decorator_list)
            shown = part.name if is_property else part.name + (_call(part) or "")
            yield f"`{shown}`", _first_paragraph(ast.get_docstring(part) or "")


def _fields(node: ast.ClassDef) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Gives name, type and default of each field, and the text under it."""
    for number, part in enumerate(node.body):
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        if part.target.id.startswith("_"):
            continue
        below = node.body[number + 1] if number + 1 < len(node.body) else None
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = inspect.cleandoc(str(below.value.value))
        default = "" if part.value is None else ast.unparse(part.value)
        yield (part.target.id, ast.unparse(part.annotation), default), " ".join(text.split())


def _sentence(found: Any) -> str:
    return _first_paragraph(inspect.getdoc(found) or "")


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        lines = [heads, tuple("---" for _ in heads), *rows]
        yield "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    from memwall.cli.app import app

    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        arguments = [part for part in command.params if part.param_type_name == "argument"]
        options = [part for part in command.params if part.param_type_name == "option"]
        takes = "".join(f" {argument.metavar or argument.name}" for argument in arguments)
        yield f"### `memwall {name}{takes}`\n"
        yield "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.help).split("\n\n")) + "\n"
        rows = [(f"`{argument.metavar or argument.name}`", argument.help or "") for argument in arguments]
        rows += [
            (f"`{', '.join(option.opts)}{_value(option)}`", _with_default(option))
            for option in options
            if option.name not in ("verbose", "help")
        ]
        yield from _table(("argument or option", "what it does"), rows)


def _value(option: Any) -> str:
    return "" if option.is_flag or option.count else f" {option.metavar or 'VALUE'}"


def _with_default(option: Any) -> str:
    default = option.default
    if isinstance(default, enum.Enum):
        default = default.value
    text = option.help or ""
    if default in (None, False, ()) or option.is_flag:
        return text + (" Required." if option.required else "")
    return f"{text} By default `{default}`."


# -- files -------------------------------------------------------------------------------------------------------------


def _files() -> Iterator[str]:
    from memwall.observe.run_report import RunReport
    from memwall.planning.planfile import Plan
    from memwall.planning.technique import techniques
    from memwall.session.watch.step_metrics import StepMetrics
    from memwall.trace.records import Trace

    seen: set[type[Struct]] = set()
    yield "### Plan (`memwall plan -o`)\n"
    yield "JSON with sorted keys; SHA-256 over its bytes is the plan's hash.\n"
    yield from _records(Plan, seen)
    yield "### Actions of a plan\n"
    yield "Each object of `forecast.actions` is one of these, told apart by `kind`.\n"
    for technique in techniques():
        yield from _records(technique.record, seen)
    yield "### Run report (`memwall run --report`)\n"
    yield "JSON with sorted keys; its forecast is that of a plan.\n"
    yield from _records(RunReport, seen)
    yield "### Steps (`memwall run --metrics`)\n"
    yield "One object a line; a field that is not known is null.\n"
    yield from _records(StepMetrics, seen)
    yield "### Trace (`memwall profile -o`)\n"
    (schema,) = typing.get_args(typing.get_type_hints(Trace)["schema"])
    yield f"A first line `{schema}`, then the record as MessagePack, compressed with zstandard and its checksum."
    yield "Records that many of are kept are arrays of their fields in this order.\n"
    yield from _records(Trace, seen)


def _records(kind: type[Struct], seen: set[type[Struct]]) -> Iterator[str]:
    """Gives the fields of a record, then those of the records in it, each once."""
    if kind in seen:
        return
    seen.add(kind)
    tag = kind.__struct_config__.tag
    yield f"#### `{kind.__name__}`{f', kind `{tag}`' if tag else ''}\n"
    yield f"{_sentence(kind)}\n"
    rows = []
    for ancestor in reversed(kind.__mro__):
        if issubclass(ancestor, Struct) and ancestor is not Struct and inspect.getmodule(ancestor) is not None:
            rows += [
                (f"`{name}`", f"`{annotation}`", f"`{default}`" if default else "", text)
                for (name, annotation, default), text in _fields(_node(ancestor))
            ]
    yield from _table(("field", "type", "default", "what it is"), rows)
    for hint in typing.get_type_hints(kind).values():
        for inner in _structs_in(hint):
            yield from _records(inner, seen)


def _structs_in(hint: Any) -> Iterator[type[Struct]]:
    if inspect.isclass(hint) and issubclass(hint, Struct):
        if not isinstance(hint, ModuleType) and typing.get_type_hints(hint):
            yield hint
        return
    for inner in typing.get_args(hint):
        yield from _structs_in(inner)


if __name__ == "__main__":
    PAGE.write_text(page())
