"""Parameters that several stages use, and their gradients, which are sums over these stages.

*Replicated*: every stage has the parameter and makes its own share of the gradient. The sum is taken across stages once
all micro-batches are done, not for each of them: adding up commutes.

    stage 0   g0 = ...                              stage 0   g0 = ...        share of stage 0
    stage 2   g2 = ...                      ->      stage 2   g2 = ...        share of stage 2
    stage 0   gradient = g2 + g0

*Transmitted*: the first stage has the parameter. It hands it on like any other value, and gets gradients back.

    stage 0   embedding(weight, x)                  stage 0   sent = alias(weight); embedding(weight, x)
    stage 2   w = t(weight); mm(y, w)       ->      stage 2   w = t(sent); mm(y, w)
    stage 0   gradient = g2 + g0                    stage 0   gradient = g2 + g0          g2 travels, as it did before
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from wholestep.graph import SlotKind, StepGraph

aten = torch.ops.aten

Shares = dict[tuple[int, str], fx.Node]

_LINEAR = frozenset({aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default})


def parameter_of(slot_id: str) -> str:
    """The slot of the parameter that a slot for a gradient belongs to."""
    return f"{SlotKind.PARAM}.{slot_id.removeprefix(f'{SlotKind.GRAD}.')}"


def gradient_shares(graph: StepGraph, stage_of: dict[fx.Node, int]) -> Shares:
    """By stage and parameter: the stage's share of the gradient, all of it where no other stage has one.

    Adds calls for shares that the graph does not have, places them in `stage_of`, and leaves the sums without readers.
    """
    found: Shares = {}
    for slot_id, node in graph.results.items():
        _add_shares(graph, stage_of, found, parameter_of(slot_id), node)
    return found


def _add_shares(graph: StepGraph, stage_of: dict[fx.Node, int], found: Shares, slot: str, node: fx.Node) -> None:
    for leaf, casts in _leaves(node, (), stage_of):
        stage = stage_of.get(leaf, 0)
        # What no stage has made yet (a part of the batch, say) becomes a value of the first one.
        share = leaf if leaf in stage_of else _insert(graph, aten.alias.default, (leaf,), node, stage, stage_of)
        for cast in reversed(casts):
            share = _insert(graph, cast.target, (share, *cast.args[1:]), cast, stage, stage_of, **cast.kwargs)
        if (stage, slot) in found:
            share = _insert(graph, aten.add.Tensor, (found[stage, slot], share), node, stage, stage_of)
        found[stage, slot] = share


def _leaves(
    node: fx.Node, casts: tuple[fx.Node, ...], stage_of: Mapping[fx.Node, int]
) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """What a sum over stages is made of, each with the casts that are applied to it; the node itself if it is none."""
    if not _is_spread(node, stage_of):
        return [(node, casts)]
    inner = (*casts, node) if node.target in _LINEAR else casts
    return [leaf for source in _terms(node) for leaf in _leaves(source, inner, stage_of)]


def _is_spread(node: fx.Node, stage_of: Mapping[fx.Node, int]) -> bool:
    """Whether a value is a sum whose terms come from several stages, or the cast of one, and is read once."""
    terms = _terms(node)
    if node not in stage_of or not terms:
        return False
    stages = {stage_of.get(term) for term in terms}
    return len(stages) > 1 or any(_is_spread(term, stage_of) for term in terms)


def _terms(node: fx.Node) -> list[fx.Node]:
    """The operands of a plain sum or cast that is read once; none for everything else."""
    if len(node.users) > 1:
        return []
    if node.target in _LINEAR:
        return node.all_input_nodes
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return []
    values = [value.meta["val"] for value in (node, *node.all_input_nodes)]
    return node.all_input_nodes if len({(value.shape, value.dtype) for value in values}) == 1 else []


def summed(gradient: Any) -> list[fx.Node]:
    """The sums and casts at the end of a gradient: what they read need not travel, wherever it is made."""
    if not isinstance(gradient, fx.Node) or not _terms(gradient):
        return []
    return [gradient, *(inner for term in _terms(gradient) for inner in summed(term))]


def _insert(
    graph: StepGraph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    stage: int,
    stage_of: dict[fx.Node, int],
    **kwargs: Any,
) -> fx.Node:
    node = graph.insert(target, args, kwargs, like=like, before=graph.output_node)
    stage_of[node] = stage
    return node


# Transmitted parameters


def transmitted(graph: StepGraph, stage_of: dict[fx.Node, int]) -> Shares:
    """Let each parameter that several stages use be an input of one of them only; returns gradients like the above.

    That is the first stage which reads it, or that of its gradient if it comes earlier still: gradients travel towards
    the first stage only.
    """
    gradients = {parameter_of(slot_id): node for slot_id, node in graph.results.items()}
    parameters = {slot: node for slot, node in graph.placeholders().items() if slot.startswith(f"{SlotKind.PARAM}.")}
    found: Shares = {}
    owners: dict[fx.Node, int] = {}
    for slot, node in parameters.items():
        gradient = gradients.get(slot)
        stages = _reading_stages(node, stage_of)
        if len(stages) < 2:
            if gradient is not None:
                _add_shares(graph, stage_of, found, slot, gradient)
            continue
        owners[node] = min(stages) if gradient is None else min(*stages, stage_of.get(gradient, 0))
        if gradient is None:
            continue
        is_there = stage_of.get(gradient) == owners[node]
        brought = (aten.alias.default, (gradient,), gradient, owners[node], stage_of)
        found[owners[node], slot] = gradient if is_there else _insert(graph, *brought)
    _send(graph, owners, stage_of)
    return found


def _reading_stages(node: fx.Node, stage_of: Mapping[fx.Node, int]) -> set[int]:
    """The stages that read an input, also through values that are rebuilt where they are read."""
    found: set[int] = set()
    for user in node.users:
        if user in stage_of:
            found.add(stage_of[user])
        elif user.op == "call_function":
            found |= _reading_stages(user, stage_of)
    return found


def _send(graph: StepGraph, owners: Mapping[fx.Node, int], stage_of: dict[fx.Node, int]) -> None:
    """Let stages that do not own a parameter read a value in its place, and rebuild what they rebuild from that."""
    bound = [node for node in graph.calls() if node in stage_of]
    sent: dict[fx.Node, fx.Node] = {}
    for parameter, owner in owners.items():
        sent[parameter] = graph.insert(aten.alias.default, (parameter,), like=parameter, after=parameter)
        stage_of[sent[parameter]] = owner

    def foreign(source: fx.Node, stage: int) -> bool:
        """Whether a stage needs a parameter of another one for a value that is no stage's."""
        if source in owners:
            return owners[source] != stage
        is_rebuilt = source.op == "call_function" and source not in stage_of
        return is_rebuilt and any(foreign(inner, stage) for inner in source.all_input_nodes)

    def from_sent(source: fx.Node) -> fx.Node:
        """The same value, computed from what is sent."""
        if source in sent or source.op == "placeholder" or source in stage_of:
            return sent.get(source, source)
        with graph.graph.inserting_after(source):
            sent[source] = graph.graph.node_copy(source, from_sent)
        return sent[source]

    for node in bound:
        for source in node.all_input_nodes:
            if foreign(source, stage_of[node]):
                node.replace_input_with(source, from_sent(source))
