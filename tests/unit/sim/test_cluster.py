"""Cluster and cost model files, and what all-reduces take: formulas against rings of single messages."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sim.rings import ring_us, two_level_us
from tests.unit.sim.strategies import DEVICE, clusters, wires

from wholestep.cost import DeviceModel, Wire
from wholestep.errors import SimulationError
from wholestep.sim import Cluster, CostModel

DESCRIPTION: dict[str, Any] = {
    "format": "wholestep-cluster",
    "version": 1,
    "nodes": 4,
    "ranks_per_node": 8,
    "device": "h200",
    "inside": "nvlink4",
    "between": "400gbit,6us",
}


def read(**changes: Any) -> Cluster:
    body = {key: value for key, value in {**DESCRIPTION, **changes}.items() if value is not None}
    return Cluster.from_json(json.dumps(body).encode())


@settings(max_examples=80, deadline=None)
@given(cluster=clusters(max_ranks=9), num_bytes=st.integers(0, 10_000), data=st.data())
def test_a_ring_takes_what_its_messages_take(cluster: Cluster, num_bytes: int, data: st.DataObject) -> None:
    ranks = range(cluster.num_ranks)
    if cluster.num_ranks == 1:
        assert cluster.all_reduce(ranks, num_bytes).time_us == 0
        return
    ready = [0.0] * cluster.num_ranks
    if cluster.num_nodes == 1:  # equal hops: then it does not matter that ranks begin at different times
        ready = data.draw(st.lists(st.floats(0, 500), min_size=cluster.num_ranks, max_size=cluster.num_ranks))
    slow = [ring_us(cluster, ranks, num_bytes, ready)]
    if cluster.num_nodes > 1:
        slow.append(two_level_us(cluster, ranks, num_bytes, ready))
    assert cluster.all_reduce(ranks, num_bytes).time_us + max(ready) == pytest.approx(min(slow))


def test_an_all_reduce_by_hand() -> None:
    cluster = Cluster(2, 2, DEVICE, Wire(1.0, 100.0), Wire(10.0, 10.0))
    assert cluster.all_reduce([0, 1], 1000).time_us == 2 * (1 + 5)
    assert cluster.all_reduce([0, 2], 1000).time_us == 2 * (10 + 50)
    both = cluster.all_reduce([0, 1, 2, 3], 1000)
    assert both.time_us == 2 * (1 + 5) + 2 * (10 + 25)
    assert (both.inside_bytes, both.between_bytes) == (1000, 500)
    uneven = cluster.all_reduce([0, 1, 2], 900)
    assert uneven.time_us == 4 * (10 + 30)


def test_trees_save_latency_between_many_nodes() -> None:
    rings = Cluster(64, 2, DEVICE, Wire(1.0, 100.0), Wire(10.0, 10.0))
    trees = replace(rings, trees=True)
    ranks = range(128)
    assert rings.all_reduce(ranks, 1000).time_us == 2 * (1 + 5) + 126 * (10 + 1000 / 128 / 10)
    assert trees.all_reduce(ranks, 1000).time_us == 2 * (1 + 5) + 2 * 6 * 10 + 2 * 500 / 10
    # Of many bytes the ring sends a little less.
    assert trees.all_reduce(ranks, 10**9) == rings.all_reduce(ranks, 10**9)
    assert Cluster.from_json(trees.to_json().encode()) == trees


def test_a_description_is_read() -> None:
    cluster = read()
    assert cluster.num_ranks == 32
    assert cluster.device.memory_bytes == 141 * 10**9
    assert cluster.between == Wire(6.0, 50_000.0)
    assert Cluster.from_json(cluster.to_json().encode()) == cluster
    assert read(inside={"latency_us": 1, "bytes_per_us": 2, "cpu_us_per_byte": 0.5}).inside == Wire(1, 2, 0.5)
    assert read(nodes=1, between=None).num_ranks == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is no wholestep-cluster file"),
        ({"version": 2}, "has version 2; this release reads 1"),
        ({"version": True}, "is a whole number, not a truth value"),
        ({"nodes": 0}, "which is out of range"),
        ({"nodes": 2**19}, "at most 1048576 are simulated"),
        ({"device": "h2000"}, "there is no device 'h2000'; known are h200, a100, cpu"),
        ({"between": None}, "has no 'between': say what joins ranks between nodes"),
        ({"between": "fast"}, "write one like '25gbit,10us', or one of nvlink4"),
        ({"between": {"latency_us": -1, "bytes_per_us": 1}}, "latency_us of the link between nodes"),
        ({"between": {"latency_us": 1, "bytes_per_us": 0}}, "bytes_per_us of the link between nodes"),
        ({"between": {"latency_us": "1", "bytes_per_us": 1}}, "is a number, not 1"),
        ({"device": {"flops_per_us": 0, "bytes_per_us": 1, "overhead_us": 1}}, "give a number above 0"),
        ({"trees": 1}, "trees of the cluster is true or false, not 1"),
        ({"between": {"latency_us": 10**400, "bytes_per_us": 1}}, "latency_us of the link between nodes"),
        ({"colour": "red"}, "has a key that is not known: 'colour'"),
    ],
)
def test_what_is_no_cluster_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        read(**changes)


def test_large_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="cannot be read: No such file"):
        Cluster.load(tmp_path / "none.json")
    (tmp_path / "large.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(SimulationError, match="has more than 1048576 bytes"):
        Cluster.load(tmp_path / "large.json")
    (tmp_path / "deep.json").write_bytes(b"[" * 2**19)
    with pytest.raises(SimulationError):
        CostModel.load(tmp_path / "deep.json")


@settings(max_examples=50, deadline=None)
@given(
    devices=st.dictionaries(st.text("abc", min_size=1), st.builds(DeviceModel, *[st.floats(1, 1e12)] * 3)), link=wires()
)
def test_a_cost_model_survives_its_file(devices: dict[str, DeviceModel], link: Wire) -> None:
    model = CostModel(devices, {"wire": link})
    assert CostModel.from_json(model.to_json().encode()) == model


def test_a_cost_model_names_devices_and_links(tmp_path: Path) -> None:
    own = CostModel({"mine": DEVICE}, {"wire": Wire(1.0, 2.0)})
    own.save(tmp_path / "costs.json")
    known = CostModel.builtin().with_others(CostModel.load(tmp_path / "costs.json"))
    body = json.dumps({**DESCRIPTION, "device": "mine", "inside": "wire"}).encode()
    cluster = Cluster.from_json(body, known)
    assert (cluster.device, cluster.inside) == (DEVICE, Wire(1.0, 2.0))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["h200", "1gbit,1us"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def hostile_files(draw: st.DrawFn) -> bytes:
    """Plain noise, torn files, and files with something else in the place of some values."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=60))
    cost_model = json.loads(CostModel({"a": DEVICE}, {"b": Wire(1.0, 1.0)}).to_json())
    body: Any = draw(st.sampled_from([DESCRIPTION, cost_model, json.loads(read().to_json())]))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(0, 3))):
        place = body
        while isinstance(place, dict) and place:
            key = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or draw(st.booleans()):
                place[key] = draw(json_values)
                break
            place = place[key]
    data = json.dumps(body).encode()
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 3)) == 0 else data


def check_hostile_file(data: bytes) -> None:
    for load in (Cluster.from_json, CostModel.from_json):
        with contextlib.suppress(SimulationError):
            load(data)


@settings(max_examples=200, deadline=None)
@given(data=hostile_files())
def test_hostile_files_are_refused_or_read(data: bytes) -> None:
    check_hostile_file(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(data=hostile_files())
def test_ten_thousand_hostile_files_are_refused_or_read(data: bytes) -> None:
    check_hostile_file(data)
