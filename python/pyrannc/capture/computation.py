"""What a Graph computes, whatever its Ops and Values are numbered: two calls may differ in draws that nothing uses."""

from __future__ import annotations

from typing import Any


def compute_the_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two Graphs of one model come to the same results and changes.

    An Op that draws random numbers stays in a Graph though nothing uses them, so that later ones draw what they draw
    in one process: the parameters of a sub-module that takes over those of another one, for instance.
    """
    return one == other or _computation(one) == _computation(other)


def _computation(graph: dict[str, Any]) -> Any:
    """The Ops that something comes of, results and new contents of buffers, with Values named by what they are."""
    updates = {number: item["update"] for number, item in enumerate(graph["buffers"]) if "update" in item}
    results = [*graph["outputs"], *updates.values()]
    place = {number: place for place, number in enumerate(_used(graph, results))}

    def name(value: int) -> Any:
        ((kind, made),) = graph["values"][value]["def"].items()
        if kind == "op":
            return kind, place[made["op"]], made["result"]
        return kind, graph["constants"][made]["data"] if kind == "constant" else made

    def named(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: name(part) if _is_value(key, part) else named(part) for key, part in item.items()}
        return [*map(named, item)] if isinstance(item, list) else item

    ops = [graph["ops"][number] for number in place]
    told = [
        {**op, "args": named(op["args"]), "kwargs": named(op.get("kwargs")), "results": len(op["results"]),
         "mutates": [*map(name, op.get("mutates", ()))], "source": None}
        for op in ops
    ]  # fmt: skip
    return told, [*updates], [*map(name, results)]


def _used(graph: dict[str, Any], results: list[int]) -> list[int]:
    """The Ops that results come from, or what the call changes."""

    def memory(value: int) -> int:
        while "alias_of" in graph["values"][value]:
            value = graph["values"][value]["alias_of"]
        return value

    wanted = {memory(value) for value, item in enumerate(graph["values"]) if "op" not in item["def"]}
    wanted.update(map(memory, results))
    used = []
    for number, op in reversed([*enumerate(graph["ops"])]):
        if "opaque" in op or not wanted.isdisjoint(map(memory, [*op["results"], *op.get("mutates", ())])):
            used.append(number)
            wanted.update(map(memory, _values(op["args"]) | _values(op.get("kwargs"))))
    return used[::-1]


def _values(item: Any) -> set[int]:
    """Those in arguments of an Op."""
    if isinstance(item, dict):
        return set().union(*({part} if _is_value(key, part) else _values(part) for key, part in item.items()))
    return set().union(*map(_values, item)) if isinstance(item, list) else set()


def _is_value(key: str, part: Any) -> bool:
    """An argument of an operator may have that name too."""
    return key == "value" and isinstance(part, int)
