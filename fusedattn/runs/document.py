"""A YAML text with the line of each key, which refuses keys that are there twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fusedattn.errors import RunFileError

_MERGE_TAG = "tag:yaml.org,2002:merge"


class Document:
    """One YAML file: its data, and faults told by path and line.

    >>> document = Document(Path("run.yaml"), "kind: verify\\nproblems: [{name: a}]")
    >>> document.data
    {'kind': 'verify', 'problems': [{'name': 'a'}]}
    >>> document.line("problems[0].name")
    2
    """

    def __init__(self, file: Path, text: str) -> None:
        """Parses `text`.

        Args:
            file: Names the file in messages.
            text: The YAML text, of one document.

        Raises:
            RunFileError: not YAML, a tag that the safe loader refuses, or a key that is there twice.
        """
        self.file = file
        self._lines: dict[str, int] = {}
        self._twice: list[tuple[str, str]] = []
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None:
                self._walk(node, "", set())
                self.refuse(self._twice)
            self.data: Any = None if node is None else yaml.SafeLoader("").construct_document(node)
        except yaml.MarkedYAMLError as err:
            mark = err.problem_mark or err.context_mark
            self._fail(f"{'' if mark is None else f'{mark.line + 1}: '}not YAML: {err.problem or err.context}")
        except (yaml.YAMLError, ValueError, RecursionError) as err:
            if isinstance(err, RunFileError):
                raise
            self._fail(f" not YAML: {' '.join(str(err).split())}")

    def _fail(self, message: str) -> NoReturn:
        raise RunFileError(f"{self.file}:{message}") from None

    def _walk(self, node: yaml.Node, path: str, parents: set[int]) -> None:
        if id(node) in parents:  # an anchor that holds itself
            raise yaml.MarkedYAMLError(problem="an alias inside its own anchor", problem_mark=node.start_mark)
        parents = parents | {id(node)}
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines.setdefault(f"{path}[{index}]", item.start_mark.line + 1)
                self._walk(item, f"{path}[{index}]", parents)
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                name = str(key.value)
                where = f"{path}.{name}" if path else name
                if key.tag != _MERGE_TAG and name in first:
                    self._twice.append((where, f"this key is there twice, in lines {first[name]} and {line}"))
                first.setdefault(name, line)
                self._lines.setdefault(where, line)
                self._walk(value, where, parents)

    def line(self, path: str) -> int | None:
        """The line of a path such as `problems[0].mask`, or of the nearest key above it, if there is one."""
        while path and path not in self._lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._lines.get(path)

    def error(self, faults: Iterable[tuple[str, str]]) -> RunFileError:
        """The exception that tells faults, pairs of path and message, in lines `file:line: path: message`."""
        told = sorted((self.line(path) or 0, path, message) for path, message in faults)
        lines = (f"{self.file}:{f'{line}:' if line else ''} {path}: {message}" for line, path, message in told)
        return RunFileError("\n".join(lines))

    def refuse(self, faults: Iterable[tuple[str, str]]) -> None:
        """Raises for faults.

        Args:
            faults: Pairs of path and message.

        Raises:
            RunFileError: there is a fault.
        """
        found = list(faults)
        if found:
            raise self.error(found)
