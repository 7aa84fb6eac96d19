"""Maximum flow and minimum cut in a directed graph with integer capacities: Dinic's algorithm on flat lists.

    repeat:  level(v) = number of residual edges from the source to v        (`_levels`, breadth first)
             push flow along edges from level i to level i + 1 until blocked (`_push`, depth first, without recursion)

The flow is maximal when the sink has no level any more; its value is the capacity of the cut. Of all minimum cuts the
one nearest to the sink is returned. It is unique, so that every solver and every rank finds the same.
"""

from __future__ import annotations

from collections import deque


class FlowNetwork:
    """Vertices are numbers from 0; edges are added in pairs, `edge ^ 1` is the way back."""

    def __init__(self, num_vertices: int) -> None:
        self.edges_of: list[list[int]] = [[] for _ in range(num_vertices)]
        self.head: list[int] = []
        self.room: list[int] = []

    def add_vertex(self) -> int:
        self.edges_of.append([])
        return len(self.edges_of) - 1

    def add_edge(self, tail: int, head: int, capacity: int) -> int:
        """Add an edge and return its number."""
        edge = len(self.head)
        self.head += [head, tail]
        self.room += [capacity, 0]
        self.edges_of[tail].append(edge)
        self.edges_of[head].append(edge + 1)
        return edge

    def maximum_flow(self, source: int, sink: int) -> int:
        """Fill the network; what is left of each capacity is in `room`."""
        total = 0
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return total
            next_edge = [0] * len(self.edges_of)
            while pushed := self._push(source, sink, level, next_edge):
                total += pushed

    def sink_side(self, sink: int) -> set[int]:
        """After `maximum_flow`: vertices from which the sink can still be reached."""
        reached, queue = {sink}, deque([sink])
        while queue:
            vertex = queue.popleft()
            for edge in self.edges_of[vertex]:
                tail = self.head[edge]
                if self.room[edge ^ 1] > 0 and tail not in reached:
                    reached.add(tail)
                    queue.append(tail)
        return reached

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * len(self.edges_of)
        level[source] = 0
        queue = deque([source])
        while queue:
            vertex = queue.popleft()
            if vertex == sink:
                break
            for edge in self.edges_of[vertex]:
                head = self.head[edge]
                if self.room[edge] > 0 and level[head] < 0:
                    level[head] = level[vertex] + 1
                    queue.append(head)
        return level

    def _push(self, source: int, sink: int, level: list[int], next_edge: list[int]) -> int:
        """Find one path through the levels and push as much along it as it takes; 0 if there is none left."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self.edges_of[vertex]
            while next_edge[vertex] < len(edges):
                edge = edges[next_edge[vertex]]
                if self.room[edge] > 0 and level[self.head[edge]] == level[vertex] + 1:
                    break
                next_edge[vertex] += 1
            else:
                if not path:
                    return 0
                vertex = self.head[path.pop() ^ 1]
                next_edge[vertex] += 1
                continue
            path.append(edge)
            vertex = self.head[edge]
        pushed = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= pushed
            self.room[edge ^ 1] += pushed
        return pushed
