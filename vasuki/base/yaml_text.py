"""YAML as people mean it: words are words, every key is there once, and no more of it than they wrote.

PyYAML keeps the last of two equal keys, lets a few aliases stand for billions of values, and follows brackets until
Python's stack ends.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_MOST_VALUES = 100_000  # with every alias written out


class _Loader(yaml.SafeLoader):
    """Truth values as in YAML 1.2: `off`, `no` and the like are words, since settings and columns may be called so. A
    setting that is true or false takes them all the same. Dates are words too, since no setting is one. A word may end
    with a question mark within brackets as well, as YAML 1.2 has it: `{due: date?}`."""

    def scan_plain(self) -> yaml.ScalarToken:
        word: yaml.ScalarToken = super().scan_plain()
        if self.flow_level and self.peek() == "?" and self.peek(1) in " \t\r\n,]}":
            self.forward()
            return yaml.ScalarToken(word.value + "?", word.plain, word.start_mark, self.get_mark())
        return word


_TRUTH, _DATE = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TRUTH, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TRUTH, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def read_yaml(text: str) -> Any:
    """The value that YAML text describes.

    Raises:
        ValueError: it is not YAML, names a key twice, or holds more than any job, or deeper. The message is one line.
    """
    try:
        return _document(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _document(text: str) -> Any:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(root, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases stand for over {_MOST_VALUES:,} values")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, with aliases written out. Refuses keys that are there twice."""
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("an alias stands for something that holds it")
        return known[id(node)]
    known[id(node)] = 0  # while it is being counted
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_double_keys(node)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def _refuse_double_keys(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise ValueError(f"line {key.start_mark.line + 1} has the key '{key.value}' a second time")
            seen.add((key.tag, key.value))
