"""TOML tables to frozen dataclasses: every key is checked, and a wrong one is named together with its line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from everybert.errors import EverybertError

T = TypeVar("T")


class KeyProblem(EverybertError):
    """A setting that cannot be: raised by a dataclass about its own field, completed with file and line here."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key, self.why = key, why


class Source:
    """A TOML file with its text, so that a complaint about a key can name the line."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        try:
            self.table: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise EverybertError(f"{name} is not valid TOML: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Source:
        """A file's contents."""
        try:
            return cls(path.read_text("utf-8"), str(path))
        except OSError as error:
            raise EverybertError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EverybertError(f"{path} is not UTF-8 text (byte {error.start})") from error

    def refuse(self, key: str, why: str, table: str = "", index: int = 0) -> EverybertError:
        """The error that names a key and where it stands."""
        line = self.line(key, table, index)
        where = f"{self.name}, line {line}" if line else self.name
        shown = f"[{table}] {key}" if table else key
        return EverybertError(f"{where}: {shown}: {why}")

    def line(self, key: str, table: str = "", index: int = 0) -> int | None:
        """The line on which a key of a table stands (the index-th such table where there are several), or None."""
        here, seen = table == "", -1
        fallback = None
        key = key.split(".")[0]
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$", line)
            if header:
                seen += header[1] == table
                here = header[1] == table and seen == index
                fallback = number if here or (not table and header[1] == key) else fallback
            elif here and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""", line):
                return number
            elif not here and table and re.match(rf"\s*{re.escape(table)}\s*\.\s*{re.escape(key)}\s*=", line):
                return number
        return fallback

    def build(self, kind: type[T], values: dict[str, Any], table: str = "", index: int = 0, **fixed: Any) -> T:
        """A dataclass from a table's values; `fixed` are fields that the table does not hold."""
        hints = get_type_hints(kind)
        known = [f.name for f in dataclasses.fields(kind) if f.name not in fixed]  # type: ignore[arg-type]
        ready: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise self.refuse(key, unknown(key, known), table, index)
            try:
                ready[key] = fit(value, hints[key])
            except TypeError as error:
                raise self.refuse(key, str(error), table, index) from error
        try:
            return kind(**ready, **fixed)
        except KeyProblem as problem:
            raise self.refuse(problem.key, problem.why, table, index) from problem
        except EverybertError as problem:  # a dataclass of another room, whose message names the field
            key = next((k for k in ready if k in str(problem)), next(iter(ready), table))
            raise self.refuse(key, str(problem), table, index) from problem


def unknown(key: str, known: Sequence[str]) -> str:
    """What to say of a key nobody knows."""
    close = difflib.get_close_matches(key, known, n=1)
    return (
        f"there is no such key; did you mean {close[0]}?"
        if close
        else f"there is no such key; known: {', '.join(known)}"
    )


def fit(value: Any, hint: Any) -> Any:
    """A TOML value as a field's type asks (lists become tuples, whole numbers floats); TypeError if it cannot."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value in parts:
            return value
        raise TypeError(f"must be one of {', '.join(map(str, parts))}, not {value!r}")
    if origin in (Union, types.UnionType):
        problems = []
        for part in parts:
            try:
                return fit(value, part)
            except TypeError as error:
                problems.append(str(error))
        raise TypeError(" or ".join(dict.fromkeys(p for p in problems if "nothing" not in p)))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"must be a list, not {value!r}")
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(fit(v, parts[0]) for v in value)
        if len(value) != len(parts):
            raise TypeError(f"must be a list of {len(parts)}, not {value!r}")
        return tuple(fit(v, p) for v, p in zip(value, parts))
    return _plain(value, hint)


def _plain(value: Any, hint: Any) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "nothing"}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise TypeError(f"must be {names.get(hint, hint)}, not {value!r}")
