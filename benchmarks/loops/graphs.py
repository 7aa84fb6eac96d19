# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Graph neural networks in plain PyTorch, as PyG's and DGL's examples train them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, loop
from benchmarks.loops.pieces import integers, mlp, normal

KIND = "graphs"
NODES, EDGES = 12, 30


def data_of_a_graph() -> World:
    order = torch.randperm(NODES)
    masks = {name: torch.zeros(NODES, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    for number, mask in enumerate(masks.values()):
        mask[order[4 * number : 4 * number + 4]] = True
    return World(
        x=torch.randn(NODES, 6),
        edge_index=torch.randint(NODES, (2, EDGES)),
        y=torch.randint(3, (NODES,)),
        num_nodes=NODES,
        **masks,
    )


def add_self_loops(edge_index, num_nodes):
    loops = torch.arange(num_nodes)
    return torch.cat([edge_index, torch.stack([loops, loops])], dim=1)


class GCNConv(nn.Module):
    """Messages weighted by degrees and summed; the normalised graph is cached, as PyG's `cached=True` does."""

    def __init__(self, in_channels, out_channels, cached=False) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(in_channels, out_channels, bias=False), nn.Parameter(torch.zeros(out_channels))
        self.cached, self._cached_edge_index = cached, None

    def forward(self, x, edge_index):
        cache = self._cached_edge_index
        if cache is None:
            num_nodes = x.size(0)
            edge_index = add_self_loops(edge_index, num_nodes)
            row, col = edge_index[0], edge_index[1]
            deg = torch.zeros(num_nodes).index_add_(0, col, torch.ones(edge_index.size(1)))
            deg_inv_sqrt = deg.pow_(-0.5)
            deg_inv_sqrt.masked_fill_(deg_inv_sqrt == float("inf"), 0)
            edge_weight = deg_inv_sqrt[row] * deg_inv_sqrt[col]
            if self.cached:
                self._cached_edge_index = (edge_index, edge_weight)
        else:
            edge_index, edge_weight = cache[0], cache[1]
        x = self.lin(x)
        messages = edge_weight.view(-1, 1) * x.index_select(0, edge_index[0])
        out = torch.zeros_like(x).index_add_(0, edge_index[1], messages)
        return out + self.bias


class GCN(nn.Module):
    """Two convolutions with dropout."""

    def __init__(self, cached=False) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(6, 8, cached), GCNConv(8, 3, cached)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def gcn_world() -> World:
    model = GCN(cached=True)
    groups = [
        dict(params=model.conv1.parameters(), weight_decay=5e-4),
        dict(params=model.conv2.parameters(), weight_decay=0),
    ]
    return World(model=model, optimizer=torch.optim.Adam(groups, lr=0.01), data=data_of_a_graph(), accs=[])


@torch.no_grad()
def evaluate(w, returned, n) -> None:
    w.model.eval()
    pred = w.model(w.data.x, w.data.edge_index).argmax(dim=-1)
    for mask in (w.data.train_mask, w.data.val_mask, w.data.test_mask):
        w.accs.append(int((pred[mask] == w.data.y[mask]).sum()) / int(mask.sum()))


@loop(
    "GCN, a training mask and cached degrees",
    kind=KIND,
    source="pyg-team/pytorch_geometric examples/gcn.py",
    build=gcn_world,
    batch=lambda n: (),
    between=evaluate,
)
def gcn(w):
    w.model.train()
    w.optimizer.zero_grad()
    out = w.model(w.data.x, w.data.edge_index)
    loss = F.cross_entropy(out[w.data.train_mask], w.data.y[w.data.train_mask])
    loss.backward()
    w.optimizer.step()
    return float(loss.detach())


class GraphAttention(nn.Module):
    """Dense attention over neighbours."""

    def __init__(self, in_features, n_hidden, n_heads, concat, dropout=0.4) -> None:
        super().__init__()
        self.n_heads, self.n_hidden, self.concat, self.dropout = n_heads, n_hidden, concat, dropout
        self.W = nn.Parameter(torch.randn(in_features, n_hidden * n_heads) * 0.3)
        self.a = nn.Parameter(torch.randn(n_heads, 2 * n_hidden, 1) * 0.3)
        self.leakyrelu = nn.LeakyReLU(0.2)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h_transformed = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h_transformed = h_transformed.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source_scores = torch.matmul(h_transformed, self.a[:, : self.n_hidden, :])
        target_scores = torch.matmul(h_transformed, self.a[:, self.n_hidden :, :])
        e = self.leakyrelu(source_scores + target_scores.mT)
        connectivity_mask = -9e16 * torch.ones_like(e)
        e = torch.where(adj_mat > 0, e, connectivity_mask)
        attention = F.dropout(F.softmax(e, dim=-1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h_transformed)
        if self.concat:
            return h_prime.permute(1, 0, 2).contiguous().view(n_nodes, self.n_heads * self.n_hidden)
        return h_prime.mean(dim=0)


class GAT(nn.Module):
    """Two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gat1, self.gat2 = GraphAttention(6, 4, 2, True), GraphAttention(8, 3, 1, False)

    def forward(self, x, adj_mat):
        return F.log_softmax(self.gat2(F.elu(self.gat1(x, adj_mat)), adj_mat), dim=1)


def gat_world() -> World:
    model, data = GAT(), data_of_a_graph()
    adj = torch.zeros(NODES, NODES).index_put_((data.edge_index[0], data.edge_index[1]), torch.ones(EDGES)) + torch.eye(
        NODES
    )
    return World(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4),
        criterion=nn.NLLLoss(),
        data=data,
        adj=adj,
        mask_train=data.train_mask.nonzero().squeeze(1),
        mask_val=data.val_mask.nonzero().squeeze(1),
    )


def test_gat(w, input, target, mask):
    w.model.eval()
    with torch.no_grad():
        output = w.model(*input)
        output, target = output[mask], target[mask]
        loss = w.criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


@loop(
    "GAT, evaluated in the step",
    kind=KIND,
    source="pytorch/examples gat/main.py",
    build=gat_world,
    batch=lambda n: (n,),
)
def gat(w, epoch):
    w.model.train()
    w.optimizer.zero_grad()
    input, target = (w.data.x, w.adj), w.data.y
    output = w.model(*input)
    loss = w.criterion(output[w.mask_train], target[w.mask_train])
    loss.backward()
    w.optimizer.step()
    loss_train, acc_train = test_gat(w, input, target, w.mask_train)
    loss_val, acc_val = test_gat(w, input, target, w.mask_val)
    if epoch % 3 == 0:
        print(
            f"Epoch: {epoch:04d} loss_train: {loss_train:.4f} acc_train: {acc_train:.4f} "
            f"loss_val: {loss_val:.4f} acc_val: {acc_val:.4f}"
        )


class SAGE(nn.Module):
    """Means of neighbours, encoded; edges decoded by dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.self1, self.neighbours1 = nn.Linear(6, 8), nn.Linear(6, 8)
        self.self2, self.neighbours2 = nn.Linear(8, 4), nn.Linear(8, 4)

    def mean(self, x, edge_index):
        row, col = edge_index
        total = x.new_zeros(x.size()).scatter_add_(0, col.unsqueeze(-1).expand(-1, x.size(1)), x[row])
        count = x.new_zeros(x.size(0)).scatter_add_(0, col, torch.ones_like(col, dtype=x.dtype)).clamp_(min=1)
        return total / count.unsqueeze(-1)

    def encode(self, x, edge_index):
        x = (self.self1(x) + self.neighbours1(self.mean(x, edge_index))).relu()
        return self.self2(x) + self.neighbours2(self.mean(x, edge_index))

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


def link_world() -> World:
    model, data = SAGE(), data_of_a_graph()
    data.edge_label_index, data.edge_label = torch.randint(NODES, (2, 10)), torch.ones(10)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01)
    return World(model=model, optimizer=optimizer, criterion=nn.BCEWithLogitsLoss(), train_data=data)


def negative_sampling(edge_index, num_nodes, num_neg_samples):
    """Drawn densely: of twice as many pairs, those that are no edges come first."""
    candidates = torch.randint(num_nodes, (2, 2 * num_neg_samples))
    known = torch.zeros(num_nodes * num_nodes, dtype=torch.bool)
    known[edge_index[0] * num_nodes + edge_index[1]] = True
    is_edge = known[candidates[0] * num_nodes + candidates[1]]
    return candidates[:, torch.argsort(is_edge.int(), stable=True)[:num_neg_samples]]


@loop(
    "GraphSAGE, link prediction",
    kind=KIND,
    source="pyg-team/pytorch_geometric examples/link_pred.py",
    build=link_world,
    batch=lambda n: (),
)
def link_prediction(w):
    w.model.train()
    w.optimizer.zero_grad()
    z = w.model.encode(w.train_data.x, w.train_data.edge_index)
    neg_edge_index = negative_sampling(
        edge_index=w.train_data.edge_index,
        num_nodes=w.train_data.num_nodes,
        num_neg_samples=w.train_data.edge_label_index.size(1),
    )
    edge_label_index = torch.cat([w.train_data.edge_label_index, neg_edge_index], dim=-1)
    edge_label = torch.cat([w.train_data.edge_label, w.train_data.edge_label.new_zeros(neg_edge_index.size(1))], dim=0)
    out = w.model.decode(z, edge_label_index).view(-1)
    loss = w.criterion(out, edge_label)
    loss.backward()
    w.optimizer.step()
    return loss


class GIN(nn.Module):
    """Sums of neighbours through MLPs with batch norms, pooled by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.nn1, self.nn2, self.eps = mlp(5, 8, 8, norm=True), mlp(8, 8, 8, norm=True), nn.Parameter(torch.zeros(2))
        self.lin = mlp(8, 8, 2)

    def forward(self, x, edge_index, batch, batch_size):
        for number, layer in enumerate((self.nn1, self.nn2)):
            out = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
            x = layer(out + (1 + self.eps[number]) * x).relu()
        x = x.new_zeros(batch_size, x.size(1)).index_add_(0, batch, x)
        return self.lin(F.dropout(x, p=0.5, training=self.training))


def gin_world() -> World:
    model = GIN()
    return World(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), total_loss=0.0)


def graphs(n):
    """Four graphs in one; the last batch of an epoch has another number of nodes and edges."""
    nodes, edges = (11, 24) if n % 4 != 3 else (9, 20)
    return normal(n, nodes, 5), integers(n, nodes, 2, edges), torch.arange(nodes) * 4 // nodes, integers(n, 2, 4)


@loop(
    "GIN, whole graphs",
    kind=KIND,
    source="pyg-team/pytorch_geometric examples/mutag_gin.py",
    build=gin_world,
    batch=graphs,
)
def gin(w, x, edge_index, batch, y):
    w.model.train()
    w.optimizer.zero_grad()
    out = w.model(x, edge_index, batch, 4)
    loss = F.cross_entropy(out, y)
    loss.backward()
    w.optimizer.step()
    w.total_loss += float(loss.detach()) * 4


@loop(
    "GIN, the number of graphs asked of the batch",
    kind=KIND,
    source="pyg-team/pytorch_geometric torch_geometric/nn/pool/glob.py (`size` not given)",
    build=gin_world,
    batch=graphs,
)
def gin_size(w, x, edge_index, batch, y):
    w.model.train()
    w.optimizer.zero_grad()
    out = w.model(x, edge_index, batch, int(batch.max().item() + 1))
    loss = F.cross_entropy(out, y)
    loss.backward()
    w.optimizer.step()
    w.total_loss += float(loss.detach()) * math.ceil(4)
