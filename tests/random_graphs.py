"""Random step graphs, built op by op: not the derivative of anything, but shaped like training in every dependency."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from wholestep import _torch
from wholestep.capture.layouts import new_fake_mode
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, nodes_in, ops

aten = torch.ops.aten

SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (3, 3))
ROWS, WIDTH = 2, 3
UPDATES = ("sgd", "momentum", "adam", "decay", "foreach", "fused", "transposed", "neighbour", "none", "frozen")
AVERAGES = ("none", "none", "of the new value", "of the old value", "hard copy", "read by the forward")

OUTPUTS = [frozenset(names) for names in ((), (), (), ("hidden",), ("old value",), ("gradient",), ("new value",))]

_SELDOM = [False] * 7 + [True]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter: how it is updated, with which learning rate, and what else follows it.

    `shares`: its gradient is the very node of another parameter's, as for two biases added to the same value.
    """

    shape: tuple[int, ...] = (3,)
    update: str = "sgd"
    rate: int = 0
    average: str = "none"
    is_half: bool = False
    shares: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: in each round a forward over some weights (by position), a backward and the update of what it used."""

    weights: tuple[Weight, ...] = (Weight(),)
    rounds: tuple[tuple[int, ...], ...] = ((0,),)
    clip: bool = False
    dropout: bool = False
    counts: bool = False
    accumulates: bool = False
    outputs: frozenset[str] = frozenset()


@st.composite
def steps(draw: st.DrawFn) -> Step:
    weight = st.builds(
        Weight,
        shape=st.sampled_from(SHAPES),
        update=st.sampled_from(UPDATES),
        rate=st.integers(0, 1),
        average=st.sampled_from(AVERAGES),
        is_half=st.sampled_from(_SELDOM),
        shares=st.sampled_from(_SELDOM),
    )
    weights = tuple(draw(st.lists(weight, min_size=1, max_size=5)))
    layers = st.lists(st.integers(0, len(weights) - 1), min_size=1, max_size=6).map(tuple)
    return Step(
        weights=weights,
        rounds=tuple(draw(st.lists(layers, min_size=1, max_size=2 if draw(st.sampled_from(_SELDOM)) else 1))),
        clip=draw(st.sampled_from([False, False, False, True])),
        dropout=draw(st.booleans()),
        counts=draw(st.booleans()),
        accumulates=draw(st.sampled_from(_SELDOM)),
        outputs=draw(st.sampled_from(OUTPUTS)),
    )


class GraphBuilder:
    """Grows a step graph at its end; `current` holds the newest value of each slot."""

    def __init__(self) -> None:
        graph = fx.Graph()
        graph.output({"outputs": (), "updates": {}, "results": {}})
        self.graph = StepGraph(fx.GraphModule(nn.Module(), graph), {}, new_fake_mode())
        self.current: dict[str, fx.Node] = {}
        self.results: dict[str, Any] = {}
        self.phase = Phase.FORWARD
        self._num_effects = 0

    def slot(self, slot: Slot, shape: tuple[int, ...] | None = (), dtype: torch.dtype = torch.float32) -> fx.Node:
        """An input; one without a shape is a number."""
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        with self.graph.graph.inserting_before(calls[0]):
            node = self.graph.graph.placeholder(slot.id.replace(".", "_"))
        if shape is None:
            node.meta["val"] = _torch.new_symbolic_float(self.graph.fake_mode)
        else:
            with self.graph.fake_mode:
                node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.graph.slots[node.name] = slot
        self.current[slot.id] = node
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        anchor = self.graph.output_node
        like = next(iter(nodes_in((args, kwargs))), anchor)
        node = self.graph.insert(target, args, kwargs, like=like, before=anchor, phase=self.phase)
        if ops.has_effect(node):
            node.meta["effect"] = self._num_effects
            self._num_effects += 1
        return node

    def finish(self, outputs: tuple[fx.Node, ...]) -> StepGraph:
        placeholders = self.graph.placeholders()
        changed = {key: node for key, node in self.current.items() if node is not placeholders[key]}
        self.graph.set_returned(outputs=outputs, updates=changed, results=self.results)
        self.graph.eliminate_dead_code()
        self.graph.verify()
        return self.graph


class _StepBuilder(GraphBuilder):
    """The graph of a `Step`."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.plan = step
        self.views: dict[int, fx.Node] = {}
        self.gradients: dict[int, fx.Node] = {}
        for index, weight in enumerate(step.weights):
            self.slot(Slot(SlotKind.PARAM, f"w{index}"), weight.shape, _dtype(weight))
        for index, weight in enumerate(step.weights):
            for key in {"momentum": ["m"], "adam": ["t", "m", "v"], "foreach": ["m"], "fused": ["m"]}.get(
                weight.update, []
            ):
                shape = () if key == "t" else weight.shape
                self.slot(Slot(SlotKind.STATE, f"w{index}", key), shape, _dtype(weight) if shape else torch.float32)
            if weight.average != "none":
                self.slot(Slot(SlotKind.BUFFER, f"average{index}"), weight.shape, _dtype(weight))
            if step.accumulates:
                self.slot(Slot(SlotKind.GRAD, f"w{index}"), weight.shape, _dtype(weight))
        self.slot(Slot(SlotKind.BUFFER, "count"))
        self.slot(Slot(SlotKind.LR, "0"), None)
        self.slot(Slot(SlotKind.LR, "1"), (), torch.float32)
        self.slot(Slot(SlotKind.BATCH, "x"), (ROWS, WIDTH))

    def build(self) -> StepGraph:
        hidden = self.current["batch.x"]
        for number, layers in enumerate(self.plan.rounds):
            self.phase = Phase.FORWARD
            saved = self._forward(layers, hidden)
            hidden = saved[-1]
            loss = self.call(aten.sum.default, hidden)
            self.phase = Phase.BACKWARD
            used = self._backward(layers, saved, is_last=number + 1 == len(self.plan.rounds))
            self.phase = Phase.OPTIMIZER
            self._update(used)
        if self.plan.accumulates:
            self.graph.accumulating = frozenset(f"w{index}" for index in self.gradients)
        outputs = [loss]
        if "hidden" in self.plan.outputs:
            outputs.append(hidden)
        if "gradient" in self.plan.outputs and self.gradients:
            outputs.append(next(iter(self.gradients.values())))
        if "new value" in self.plan.outputs:
            outputs.append(self.current["param.w0"])
        if "old value" in self.plan.outputs:
            outputs.append(self.call(aten.clone.default, self.graph.placeholder("param.w0")))
        return self.finish(tuple(outputs))

    def _forward(self, layers: tuple[int, ...], hidden: fx.Node) -> list[fx.Node]:
        if self.plan.counts:
            self.current["buffer.count"] = self.call(aten.add.Tensor, self.current["buffer.count"], 1)
        saved = [hidden]
        for index in layers:
            weight, value = self.plan.weights[index], self.current[f"param.w{index}"]
            if weight.average == "read by the forward":
                hidden = self.call(aten.sub.Tensor, hidden, self.call(aten.mean.default, self._average(index)))
            if weight.is_half:
                value = self.call(aten._to_copy.default, value, dtype=torch.float32)
            if weight.shape == (3, 3):
                self.views[index] = self.call(aten.t.default, value)
                hidden = self.call(aten.mm.default, hidden, self.views[index])
            else:
                hidden = self.call(aten.add.Tensor, hidden, value)
            hidden = self.call(aten.tanh.default, hidden)
            saved.append(hidden)
        if self.plan.dropout:
            noise = self.call(aten.rand_like.default, hidden)
            saved.append(self.call(aten.mul.Tensor, hidden, noise))
        return saved

    def _average(self, index: int) -> fx.Node:
        return self.current[f"buffer.average{index}"]

    def _backward(self, layers: tuple[int, ...], saved: list[fx.Node], *, is_last: bool) -> list[int]:
        """Gradients of all weights of a round but the frozen ones, last layer first."""
        flow = self.call(aten.mul.Tensor, saved[-1], self.current["batch.x"])
        found: dict[int, fx.Node] = {}
        for position in reversed(range(len(layers))):
            index = layers[position]
            weight, value = self.plan.weights[index], self.current[f"param.w{index}"]
            if weight.update != "frozen":
                made = self._gradient(weight, flow, saved[position], position)
                found[index] = self.call(aten.add.Tensor, found[index], made) if index in found else made
            flow = self.call(aten.mm.default, flow, value) if weight.shape == (3, 3) and not weight.is_half else flow
            flow = self.call(aten.tanh.default, self.call(aten.mul.Tensor, flow, 1.5))
        self._share(found)
        for index, node in list(found.items()):
            if self.plan.accumulates and not self.plan.weights[index].shares:
                before = self.gradients.get(index, self.current[f"grad.w{index}"])
                found[index] = node = self.call(aten.add.Tensor, before, node)
        for index, node in found.items():
            if index in self.gradients and self.gradients[index] is not node:
                _unmark(self.gradients[index], f"w{index}")
            node.meta["gradient_of"] = (*node.meta.get("gradient_of", ()), f"w{index}")
            self.gradients[index] = self.results[f"grad.w{index}"] = node
        return list(found)

    def _gradient(self, weight: Weight, flow: fx.Node, saved: fx.Node, position: int) -> fx.Node:
        if weight.shape == (3, 3):
            made = self.call(aten.mm.default, self.call(aten.t.default, saved), flow)
            made = self.call(aten.t.default, made) if position % 2 else made  # not contiguous
        elif weight.shape == (2, 3):
            made = self.call(aten.mul.Tensor, flow, saved)
        elif weight.shape == (3,):
            made = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, flow, saved), [0])
        else:
            made = self.call(aten.sum.default, flow)
        return self.call(aten._to_copy.default, made, dtype=torch.bfloat16) if weight.is_half else made

    def _share(self, found: dict[int, fx.Node]) -> None:
        """Give weights that share a gradient the one of the first weight of their type."""
        first: dict[Any, fx.Node] = {}
        for index in sorted(found):
            weight = self.plan.weights[index]
            node = first.setdefault((weight.shape, weight.is_half), found[index])
            if weight.shares and not self.plan.accumulates:
                found[index] = node

    def _update(self, used: list[int]) -> None:
        gradients = {index: self.gradients[index] for index in used}
        if self.plan.clip and gradients:
            gradients = self._clipped(gradients)
        for update in ("foreach", "fused"):
            for rate in (0, 1):
                together = [
                    index
                    for index in used
                    if (self.plan.weights[index].update, self.plan.weights[index].rate) == (update, rate)
                    and not self.plan.weights[index].is_half
                ]
                if together:
                    self._update_list(update, rate, together, [gradients[index] for index in together])
        for index in used:
            self._update_one(index, gradients[index])
        for index in used:
            self._follow(index)

    def _clipped(self, gradients: dict[int, fx.Node]) -> dict[int, fx.Node]:
        norms = [self.call(aten.linalg_vector_norm.default, node) for node in gradients.values()]
        norms = [self.call(aten._to_copy.default, norm, dtype=torch.float32) for norm in norms]
        total = self.call(aten.linalg_vector_norm.default, self.call(aten.stack.default, norms))
        factor = self.call(aten.clamp.default, self.call(aten.reciprocal.default, total), max=1.0)
        return {index: self.call(aten.mul.Tensor, node, factor) for index, node in gradients.items()}

    def _rate(self, number: int) -> Any:
        """Minus the learning rate: a number, or a tensor that the user may write to."""
        rate = self.current[f"lr.{number}"]
        return self.call(operator.neg, rate) if number == 0 else self.call(aten.neg.default, rate)

    def _towards(self, value: fx.Node, change: fx.Node, number: int) -> fx.Node:
        rate = self._rate(number)
        if number == 0:
            return self.call(aten.add.Tensor, value, change, alpha=rate)
        return self.call(aten.add.Tensor, value, self.call(aten.mul.Tensor, change, rate))

    def _update_list(self, update: str, number: int, indices: list[int], gradients: list[fx.Node]) -> None:
        weights = [self.current[f"param.w{index}"] for index in indices]
        moments = [self.current[f"state.w{index}.m"] for index in indices]
        if update == "fused":
            options = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False}
            rate: Any = self.current[f"lr.{number}"]
            if number == 0:
                rate = self.call(aten.scalar_tensor.default, rate, dtype=torch.float64)
            node = self.call(
                aten._fused_sgd.tensor_lr, weights, gradients, moments, lr=rate, is_first_step=False, **options
            )
            new = [self.call(operator.getitem, self.call(operator.getitem, node, 0), i) for i in range(len(indices))]
            kept = [self.call(operator.getitem, self.call(operator.getitem, node, 2), i) for i in range(len(indices))]
        else:
            scaled = self.call(aten._foreach_mul.Scalar, moments, 0.9)
            scaled = [self.call(operator.getitem, scaled, i) for i in range(len(indices))]
            added = self.call(aten._foreach_add.List, scaled, gradients)
            kept = [self.call(operator.getitem, added, i) for i in range(len(indices))]
            moved = self.call(aten._foreach_sub.List, weights, kept, alpha=0.125)
            new = [self.call(operator.getitem, moved, i) for i in range(len(indices))]
        for index, weight, moment in zip(indices, new, kept, strict=True):
            self.current[f"param.w{index}"], self.current[f"state.w{index}.m"] = weight, moment

    def _update_one(self, index: int, gradient: fx.Node) -> None:
        weight, key = self.plan.weights[index], f"param.w{index}"
        value, update = self.current[key], weight.update
        if self.plan.counts:
            gradient = self.call(aten.div.Tensor, gradient, self.current["buffer.count"])
        if update in ("momentum", "foreach", "fused") and (update == "momentum" or weight.is_half):
            moment = self.call(aten.mul.Tensor, self.current[f"state.w{index}.m"], 0.9)
            gradient = self._keep(f"state.w{index}.m", self.call(aten.add.Tensor, moment, gradient))
        elif update == "adam":
            gradient = self._adam(index, gradient)
        elif update == "decay":
            value = self.call(aten.mul.Tensor, value, 0.75)
        elif update == "transposed" and weight.shape == (3, 3) and not weight.is_half:
            value = self.call(aten.mul.Tensor, value, 0.75)
            gradient = self.call(aten.mm.default, gradient, self.views[index])
        elif update == "neighbour":
            other = self.current[f"param.w{(index + 1) % len(self.plan.weights)}"]
            gradient = self.call(aten.mul.Tensor, gradient, self.call(aten.mean.default, other))
        elif update in ("none", "foreach", "fused"):
            return
        self._keep(key, self._towards(value, gradient, weight.rate))

    def _adam(self, index: int, gradient: fx.Node) -> fx.Node:
        time, first, second = (f"state.w{index}.{key}" for key in "tmv")
        count = self._keep(time, self.call(aten.add.Tensor, self.current[time], 1))
        mean = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, self.current[first], 0.9), gradient)
        square = self.call(aten.mul.Tensor, self.current[second], 0.9)
        square = self.call(aten.addcmul.default, square, gradient, gradient, value=0.1)
        mean, square = self._keep(first, mean), self._keep(second, square)
        below = self.call(aten.add.Tensor, self.call(aten.sqrt.default, square), 0.1)
        return self.call(aten.div.Tensor, self.call(aten.div.Tensor, mean, below), count)

    def _keep(self, slot_id: str, value: fx.Node) -> fx.Node:
        """A new value of a slot, in its dtype."""
        dtype = self.graph.placeholder(slot_id).meta["val"].dtype
        if value.meta["val"].dtype != dtype:
            value = self.call(aten._to_copy.default, value, dtype=dtype)
        self.current[slot_id] = value
        return value

    def _follow(self, index: int) -> None:
        """Averages of weights, made behind the update."""
        average, key = self.plan.weights[index].average, f"buffer.average{index}"
        if average == "hard copy":
            self.current[key] = self.current[f"param.w{index}"]
        elif average == "of the old value":
            self.current[key] = self.call(
                aten.lerp.Scalar, self.current[key], self.graph.placeholder(f"param.w{index}"), 0.5
            )
        elif average != "none":
            self.current[key] = self.call(aten.lerp.Scalar, self.current[key], self.current[f"param.w{index}"], 0.5)


def _unmark(node: fx.Node, name: str) -> None:
    """A later backward has left another gradient."""
    node.meta["gradient_of"] = tuple(other for other in node.meta["gradient_of"] if other != name)
    node.meta["earlier_gradient_of"] = (*node.meta.get("earlier_gradient_of", ()), name)


def _dtype(weight: Weight) -> torch.dtype:
    return torch.bfloat16 if weight.is_half else torch.float32


def build(step: Step) -> StepGraph:
    """The functional graph of a step."""
    return _StepBuilder(step).build()


def initial_state(graph: StepGraph, seed: int) -> dict[str, Any]:
    """A value for every slot that is kept between calls."""
    generator = torch.Generator().manual_seed(seed)
    kept = (SlotKind.PARAM, SlotKind.STATE, SlotKind.BUFFER, SlotKind.GRAD)
    state: dict[str, Any] = {}
    for slot_id, node in graph.placeholders().items():
        if graph.slots[node.name].kind in kept:
            value: Tensor = node.meta["val"]
            state[slot_id] = torch.rand(value.shape, generator=generator).add(0.5).to(value.dtype)
    return state


def batch(graph: StepGraph, seed: int) -> dict[str, Any]:
    """What a call brings along: data and learning rates, other ones each time."""
    generator = torch.Generator().manual_seed(1000 + seed)
    given = {
        "batch.x": torch.randn(ROWS, WIDTH, generator=generator),
        "lr.0": 0.1 / (1 + seed),
        "lr.1": torch.tensor(0.2 / (1 + seed)),
    }
    return {slot_id: given[slot_id] for slot_id in graph.placeholders() if slot_id in given}
