"""Commands from plain functions: options from signatures and dataclass fields, help as plain text.

Parameters of a command before `*` are arguments, those after it are options. `Annotated[int, "Help.", {"min": 1}]` has
the help, and more for typer (min, metavar …). The docstring is the help of the command; its examples are in
commands.toml. A parameter whose type is a dataclass, or `Fields`, stands for one option per field: see `Fields`.
"""

import ast
import inspect
import json
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, wraps
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from everybert.cli.common import report
from everybert.errors import EverybertError

TABLE: dict[str, dict[str, Any]] = tomllib.loads((files("everybert.cli") / "commands.toml").read_text("utf-8"))
EXAMPLES: dict[str, str] = TABLE.pop("examples")
"""Command → command lines for the end of its help."""
SHORT = {"model": "-m", "file": "-f", "context": "-c"}
VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
ARGUMENTS, OPTIONS = "Arguments", "Options"
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Fields:
    """Options for the fields of a dataclass; their docstrings are the help.

    They are read from the source file, so that help does not import torch. Options that are not given keep the default
    of the dataclass. `Annotated[Class, Fields(…)]` gives an instance, `Annotated[dict, Fields(source=…)]` a dict.
    """

    only: str = ""
    """The fields that have an option; field=option renames it. If empty: all fields."""
    panel: str = OPTIONS
    """The heading in the help."""
    source: str = ""
    """module:Class"""
    without: str = ""
    """Fields that have no option."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Field → parameter of the command, in the order of `only`."""
        module, _, name = self.source.partition(":")
        known = {"Literal": Literal, "Path": Path, **vars(sys.modules.get(module, types))}
        fields = read_fields(module, name)
        names = {entry.partition("=")[0]: entry.rpartition("=")[2] for entry in self.only.split() or fields}
        parameters = {}
        for key in (key for key in names if key not in self.without.split()):
            kind, default, doc = fields[key]
            try:
                annotation = eval(kind, known)
            except NameError:  # a type of the library's own, given as text
                annotation = str
            shown = "" if default in (None, False, REQUIRED) else f" [default: {default}]"
            start = default if default is REQUIRED or default is False else None
            parameters[key] = parameter(names[key], annotation, start, doc + shown, self.panel)
        return parameters


@cache
def read_fields(module: str, name: str) -> dict[str, tuple[str, Any, str]]:
    """Field → (type, default, docstring) of a dataclass and its bases in the file. Computed defaults are None."""
    path = Path(find_spec(module).origin)  # type: ignore[union-attr, arg-type]
    classes = {node.name: node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}
    table: dict[str, tuple[str, Any, str]] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            table |= read_fields(module, base.id)
    for statement, doc in pairwise([*classes[name].body, ast.Pass()]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = doc.value.value if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) else ""
            default = REQUIRED if statement.value is None else getattr(statement.value, "value", None)
            table[statement.target.id] = (ast.unparse(statement.annotation), default, " ".join(str(text).split()))
    return table


def parameter(name: str, kind: Any, default: Any, doc: str = "", panel: str = OPTIONS) -> inspect.Parameter:
    """A parameter as typer reads it."""
    kind, *more = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    plain = name.strip("_").replace("_", "-")
    about: dict[str, Any] = {"help": "", "metavar": value_name(kind, plain)}
    for extra in more:  # of nested annotations, the last has precedence
        about |= extra if isinstance(extra, dict) else {"help": extra}
    about["help"] += doc
    also = about.pop("also", SHORT.get(plain))
    if panel == ARGUMENTS:
        info: Any = typer.Argument(**about)
    else:
        flag = f"--{plain}" + (f"/--no-{plain}" if about["metavar"] is None and default is None else "")
        info = typer.Option(about.pop("flag", flag), *([also] if also else []), rich_help_panel=panel, **about)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def value_name(kind: Any, name: str) -> str | None:
    """The placeholder of a value in the help: N, PATH, a|b; None for a flag."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        return value_name(get_args(kind)[0], name)
    return None if kind is bool else VALUES.get(kind, name.upper())


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Output:
    """What a command prints."""

    data: Any
    """With --json. A generator is printed as a list."""
    text: Iterable[str] | None = None
    """Without it. None is a report of the data."""
    code: int = 0
    """The exit code."""

    def show(self, as_json: bool) -> None:
        """Print the result."""
        if as_json:
            print(json.dumps(list(self.data) if isinstance(self.data, Iterator) else self.data, ensure_ascii=False))
        else:
            for line in report(self.data) if self.text is None else self.text:
                print(line)
        if self.code:
            raise typer.Exit(self.code)


def command(app: typer.Typer) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as a command. One that returns `Output` gets the option --json."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[Any, dict[str, inspect.Parameter]]] = {}
        for name, declared in inspect.signature(function).parameters.items():
            inner, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            group = next((each for each in more if isinstance(each, Fields)), None)
            if is_dataclass(inner):
                group = group or Fields(panel=inspect.cleandoc(inner.__doc__ or "").strip("."))
                group = replace(group, source=f"{inner.__module__}:{getattr(inner, '__name__', '')}")
            if group is not None:
                groups[name] = (inner, group.parameters())
                parameters += groups[name][1].values()
            else:
                panel = ARGUMENTS if declared.kind is declared.POSITIONAL_OR_KEYWORD else OPTIONS
                parameters.append(parameter(name, hints[name], declared.default, panel=panel))
        if prints := hints["return"] is Output:
            parameters.append(parameter("json_", bool, False, "Print the result as JSON."))

        @wraps(function)
        def run(**values: Any) -> None:
            as_json = values.pop("json_") if prints else False
            for name, (kind, fields) in groups.items():
                options = {key: values.pop(declared.name) for key, declared in fields.items()}
                values[name] = kind(**{k: v for k, v in options.items() if v is not None and v is not False})
            try:
                result = function(**values)
            except EverybertError as error:
                text = str(error)
                for option in parameters:  # skip_bad=True and class_weights=2 are --skip-bad and --class-weights 2 here
                    flag = f"--{option.name.replace('_', '-')}"
                    text = text.replace(f"{option.name}=True", flag).replace(f" {option.name}=", f" {flag} ")
                raise EverybertError(text) from error
            if prints:
                result.show(as_json)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        app.command(function.__name__.strip("_"), cls=Command, help=inspect.cleandoc(function.__doc__ or ""))(run)
        return function

    return register


# ── help ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Command(TyperCommand):
    """A command with plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, description, parameters by heading, examples."""
        write_help(self, ctx, formatter, parameter_rows(self, ctx))


class Group(TyperGroup):
    """A group of commands with plain help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, description, commands by heading, options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            entry: Any = self.get_command(ctx, name)
            panel = entry.rich_help_panel if isinstance(entry.rich_help_panel, str) else "Commands"
            sections.setdefault(panel, []).append((entry.name, (entry.help or "").partition("\n\n")[0]))
        write_help(self, ctx, formatter, sections | parameter_rows(self, ctx))


def write_help(command: Any, ctx: Any, formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
    """Write help as plain text."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    for panel, rows in sections.items():
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=24)
    if examples := EXAMPLES.get(ctx.command_path.partition(" ")[2]):
        with formatter.section("Examples"):
            for line in examples.splitlines():
                formatter.write(f"  {line}\n")


def parameter_rows(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Heading → (flags and value, help) of each parameter."""
    sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
    for entry in command.get_params(ctx):
        option = entry.param_type_name == "option"
        panel = getattr(entry, "rich_help_panel", None) or (OPTIONS if option else ARGUMENTS)
        sections.setdefault(panel, []).append(entry.get_help_record(ctx) if option else (entry.metavar, entry.help))
    return {panel: rows for panel, rows in sections.items() if rows}
