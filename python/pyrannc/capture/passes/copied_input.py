"""A copy of an input, for a model in which no other Op would divide its rows over the Replicas."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from pyrannc.capture.nodes.dims import AffineReader
from pyrannc.capture.nodes.facts import FACTS, TensorFacts, memory
from pyrannc.capture.nodes.leaf import Apart


def copy_input(graph: fx.Graph, inputs: Collection[fx.Node], reader: AffineReader) -> fx.Node | None:
    """Copies the first input with rows that is used, by an Op that nothing is known of but that it keeps rows apart.

    Args:
        graph: of the call, which is changed.
        inputs: its placeholders for tensors of the arguments.
        reader: of numbers in the symbol for the rows.

    Returns:
        The new node, if there is one.
    """
    for node in inputs:
        tensor = node.meta["val"]
        extent = reader.read(tensor.shape[0]) if tensor.dim() else None
        users = [user for user in node.users if user.op != "output"]
        if extent is None or not extent.per_row or not users:
            continue
        with graph.inserting_before(next(other for other in graph.nodes if other.op != "placeholder")):
            copied = graph.call_function(Apart(), (node,))
        # What was traced as a view of the input is one of the copy.
        facts = node.meta.get(FACTS, {}).get(None) or TensorFacts(True, None)
        copied.meta = {"val": tensor, FACTS: {None: facts}}
        node.meta[FACTS] = {None: facts._replace(storage=None)}
        for user in users:
            user.replace_input_with(node, copied)
        if facts.storage is not None and any(facts.storage in memory(other) for other in inputs):
            _part(copied, facts.storage)
        return copied
    return None


def _part(copied: fx.Node, shared: int) -> None:
    """Gives a copy, and what are views of it, memory apart from that which another input shared with the original."""
    # An address that nothing else has while the node lives.
    own, parted = id(copied), {copied}
    copied.meta[FACTS] = _moved(copied.meta[FACTS], shared, own)
    for node in copied.graph.nodes:
        given = [operand for operand in node.all_input_nodes if operand in parted or shared in memory(operand)]
        if given and given[0] in parted and shared in memory(node):
            parted.add(node)
            if FACTS in node.meta:
                node.meta[FACTS] = _moved(node.meta[FACTS], shared, own)


def _moved(facts: dict[int | None, TensorFacts], shared: int, own: int) -> dict[int | None, TensorFacts]:
    return {place: found._replace(storage=own) if found.storage == shared else found for place, found in facts.items()}
