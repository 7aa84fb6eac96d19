# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Reinforcement learning from replayed data: critics with targets, actors that are updated later."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, integers, mlp, normal

KIND = "reinforcement learning"


class QNetwork(nn.Module):
    """The value of an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x, a):
        return self.fc2(F.relu(self.fc1(torch.cat([x, a], 1))))


class Actor(nn.Module):
    """A deterministic policy, scaled to the bounds of the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc_mu = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("action_scale", torch.tensor([2.0, 2.0]))
        self.register_buffer("action_bias", torch.zeros(2))

    def forward(self, x):
        return torch.tanh(self.fc_mu(F.relu(self.fc1(x)))) * self.action_scale + self.action_bias


class GaussianActor(Actor):
    """The policy of SAC: squashed normals."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_logstd = nn.Linear(8, 2)

    def get_action(self, x):
        x = F.relu(self.fc1(x))
        mean, log_std = self.fc_mu(x), torch.tanh(self.fc_logstd(x))
        log_std = -5 + 0.5 * (2 - -5) * (log_std + 1)
        normal_ = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal_.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal_.log_prob(x_t)
        log_prob -= torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        log_prob = log_prob.sum(1, keepdim=True)
        mean = torch.tanh(mean) * self.action_scale + self.action_bias
        return action, log_prob, mean


def replayed(n):
    """Observations, actions, rewards, next observations, whether the episode ended."""
    return (
        normal(n, 6, 4),
        normal(n, 6, 2, seed=1).clamp(-2, 2),
        normal(n, 6, 1, seed=2),
        normal(n, 6, 4, seed=3),
        integers(n, 2, 6, 1).float(),
    )


def count(w, returned, n) -> None:
    w.global_step += 1


def dqn_world() -> World:
    q_network = mlp(4, 8, 3)
    return World(
        q_network=q_network,
        target_network=copy.deepcopy(q_network),
        optimizer=torch.optim.Adam(q_network.parameters(), lr=2.5e-3),
        args=World(gamma=0.99, tau=0.9, target_network_frequency=3, train_frequency=2, learning_starts=0),
        writer=SummaryWriter(),
        global_step=0,
    )


@loop(
    "DQN, target network every few steps",
    kind=KIND,
    source="vwxyzjn/cleanrl cleanrl/dqn.py",
    build=dqn_world,
    batch=lambda n: (
        normal(n, 6, 4),
        integers(n, 3, 6, 1),
        normal(n, 6, 1, seed=2),
        normal(n, 6, 4, seed=3),
        integers(n, 2, 6, 1, seed=4).float(),
    ),
    calls=14,
)
def dqn(w, observations, actions, rewards, next_observations, dones):
    args = w.args
    w.global_step += 1
    if w.global_step > args.learning_starts:
        if w.global_step % args.train_frequency == 0:
            with torch.no_grad():
                target_max, _ = w.target_network(next_observations).max(dim=1)
                td_target = rewards.flatten() + args.gamma * target_max * (1 - dones.flatten())
            old_val = w.q_network(observations).gather(1, actions).squeeze()
            loss = F.mse_loss(td_target, old_val)
            if w.global_step % 4 == 0:
                w.writer.add_scalar("losses/td_loss", loss, w.global_step)
                w.writer.add_scalar("losses/q_values", old_val.mean().item(), w.global_step)
            w.optimizer.zero_grad()
            loss.backward()
            w.optimizer.step()
        if w.global_step % args.target_network_frequency == 0:
            for target_network_param, q_network_param in zip(w.target_network.parameters(), w.q_network.parameters()):
                target_network_param.data.copy_(
                    args.tau * q_network_param.data + (1.0 - args.tau) * target_network_param.data
                )


def td3_world(actor: type[Actor] = Actor, delay: int = 2) -> World:
    actor_, qf1, qf2 = actor(), QNetwork(), QNetwork()
    return World(
        actor=actor_,
        target_actor=copy.deepcopy(actor_),
        qf1=qf1,
        qf2=qf2,
        qf1_target=copy.deepcopy(qf1),
        qf2_target=copy.deepcopy(qf2),
        q_optimizer=torch.optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=3e-3),
        actor_optimizer=torch.optim.Adam(list(actor_.parameters()), lr=3e-3),
        args=World(
            gamma=0.99, tau=0.05, policy_noise=0.2, noise_clip=0.5, policy_frequency=delay, target_network_frequency=1
        ),
        writer=SummaryWriter(),
        global_step=1,
    )


@loop(
    "TD3, delayed policy updates",
    kind=KIND,
    source="vwxyzjn/cleanrl cleanrl/td3_continuous_action.py",
    build=td3_world,
    batch=replayed,
    between=count,
    calls=10,
)
def td3(w, observations, actions, rewards, next_observations, dones):
    args = w.args
    with torch.no_grad():
        clipped_noise = (torch.randn_like(actions) * args.policy_noise).clamp(
            -args.noise_clip, args.noise_clip
        ) * w.target_actor.action_scale
        next_state_actions = (w.target_actor(next_observations) + clipped_noise).clamp(-2.0, 2.0)
        qf1_next_target = w.qf1_target(next_observations, next_state_actions)
        qf2_next_target = w.qf2_target(next_observations, next_state_actions)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target)
        next_q_value = rewards.flatten() + (1 - dones.flatten()) * args.gamma * (min_qf_next_target).view(-1)
    qf1_a_values = w.qf1(observations, actions).view(-1)
    qf2_a_values = w.qf2(observations, actions).view(-1)
    qf1_loss = F.mse_loss(qf1_a_values, next_q_value)
    qf2_loss = F.mse_loss(qf2_a_values, next_q_value)
    qf_loss = qf1_loss + qf2_loss
    w.q_optimizer.zero_grad()
    qf_loss.backward()
    w.q_optimizer.step()
    if w.global_step % args.policy_frequency == 0:
        actor_loss = -w.qf1(observations, w.actor(observations)).mean()
        w.actor_optimizer.zero_grad()
        actor_loss.backward()
        w.actor_optimizer.step()
        for param, target_param in zip(w.actor.parameters(), w.target_actor.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
        for param, target_param in zip(w.qf1.parameters(), w.qf1_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
        for param, target_param in zip(w.qf2.parameters(), w.qf2_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
    if w.global_step % 4 == 0:
        w.writer.add_scalar("losses/qf1_values", qf1_a_values.mean().item(), w.global_step)
        w.writer.add_scalar("losses/qf_loss", qf_loss.item() / 2.0, w.global_step)
        w.writer.add_scalar("losses/actor_loss", actor_loss.item(), w.global_step)


def sac_world() -> World:
    world = td3_world(GaussianActor, delay=2)
    world.target_entropy = -torch.prod(torch.Tensor((2,))).item()
    world.log_alpha = torch.zeros(1, requires_grad=True)
    world.alpha = world.log_alpha.exp().item()
    world.a_optimizer = torch.optim.Adam([world.log_alpha], lr=3e-3)
    return world


@loop(
    "SAC, the entropy coefficient learned",
    kind=KIND,
    source="vwxyzjn/cleanrl cleanrl/sac_continuous_action.py",
    build=sac_world,
    batch=replayed,
    between=count,
    calls=10,
)
def sac(w, observations, actions, rewards, next_observations, dones):
    args = w.args
    with torch.no_grad():
        next_state_actions, next_state_log_pi, _ = w.actor.get_action(next_observations)
        qf1_next_target = w.qf1_target(next_observations, next_state_actions)
        qf2_next_target = w.qf2_target(next_observations, next_state_actions)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target) - w.alpha * next_state_log_pi
        next_q_value = rewards.flatten() + (1 - dones.flatten()) * args.gamma * (min_qf_next_target).view(-1)
    qf1_a_values = w.qf1(observations, actions).view(-1)
    qf2_a_values = w.qf2(observations, actions).view(-1)
    qf_loss = F.mse_loss(qf1_a_values, next_q_value) + F.mse_loss(qf2_a_values, next_q_value)
    w.q_optimizer.zero_grad()
    qf_loss.backward()
    w.q_optimizer.step()
    if w.global_step % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):
            pi, log_pi, _ = w.actor.get_action(observations)
            min_qf_pi = torch.min(w.qf1(observations, pi), w.qf2(observations, pi))
            actor_loss = ((w.alpha * log_pi) - min_qf_pi).mean()
            w.actor_optimizer.zero_grad()
            actor_loss.backward()
            w.actor_optimizer.step()
            with torch.no_grad():
                _, log_pi, _ = w.actor.get_action(observations)
            alpha_loss = (-w.log_alpha.exp() * (log_pi + w.target_entropy)).mean()
            w.a_optimizer.zero_grad()
            alpha_loss.backward()
            w.a_optimizer.step()
            w.alpha = w.log_alpha.exp().item()
    if w.global_step % args.target_network_frequency == 0:
        for param, target_param in zip(w.qf1.parameters(), w.qf1_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
        for param, target_param in zip(w.qf2.parameters(), w.qf2_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
    if w.global_step % 4 == 0:
        w.writer.add_scalar("losses/actor_loss", actor_loss.item(), w.global_step)
        w.writer.add_scalar("losses/alpha", w.alpha, w.global_step)
        w.writer.add_scalar("losses/alpha_loss", alpha_loss.item(), w.global_step)


def sac_tensor_world() -> World:
    world = sac_world()
    world.alpha = world.log_alpha.exp().detach()
    return world


@edit(
    "SAC, the entropy coefficient learned",
    "`alpha = log_alpha.exp().detach()` instead of `.item()`, which the next loss multiplies with",
    build=sac_tensor_world,
)
def sac_tensor(w, observations, actions, rewards, next_observations, dones):
    args = w.args
    with torch.no_grad():
        next_state_actions, next_state_log_pi, _ = w.actor.get_action(next_observations)
        qf1_next_target = w.qf1_target(next_observations, next_state_actions)
        qf2_next_target = w.qf2_target(next_observations, next_state_actions)
        min_qf_next_target = torch.min(qf1_next_target, qf2_next_target) - w.alpha * next_state_log_pi
        next_q_value = rewards.flatten() + (1 - dones.flatten()) * args.gamma * (min_qf_next_target).view(-1)
    qf1_a_values = w.qf1(observations, actions).view(-1)
    qf2_a_values = w.qf2(observations, actions).view(-1)
    qf_loss = F.mse_loss(qf1_a_values, next_q_value) + F.mse_loss(qf2_a_values, next_q_value)
    w.q_optimizer.zero_grad()
    qf_loss.backward()
    w.q_optimizer.step()
    if w.global_step % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):
            pi, log_pi, _ = w.actor.get_action(observations)
            min_qf_pi = torch.min(w.qf1(observations, pi), w.qf2(observations, pi))
            actor_loss = ((w.alpha * log_pi) - min_qf_pi).mean()
            w.actor_optimizer.zero_grad()
            actor_loss.backward()
            w.actor_optimizer.step()
            with torch.no_grad():
                _, log_pi, _ = w.actor.get_action(observations)
            alpha_loss = (-w.log_alpha.exp() * (log_pi + w.target_entropy)).mean()
            w.a_optimizer.zero_grad()
            alpha_loss.backward()
            w.a_optimizer.step()
            w.alpha = w.log_alpha.exp().detach()
    if w.global_step % args.target_network_frequency == 0:
        for param, target_param in zip(w.qf1.parameters(), w.qf1_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
        for param, target_param in zip(w.qf2.parameters(), w.qf2_target.parameters()):
            target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
    if w.global_step % 4 == 0:
        w.writer.add_scalar("losses/actor_loss", actor_loss.item(), w.global_step)
        w.writer.add_scalar("losses/alpha", w.alpha.item(), w.global_step)
        w.writer.add_scalar("losses/alpha_loss", alpha_loss.item(), w.global_step)


class ImplicitQLearning:
    """Of CORL: a trainer object that counts its iterations and keeps a log of each update."""

    def __init__(self) -> None:
        self.qf, self.vf, self.actor = QNetwork(), mlp(4, 8, 1), Actor()
        self.q_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.v_optimizer = torch.optim.Adam(self.vf.parameters(), lr=3e-3)
        self.q_optimizer = torch.optim.Adam(self.qf.parameters(), lr=3e-3)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.iql_tau, self.beta, self.discount, self.tau = 0.7, 3.0, 0.99, 0.005
        self.total_it = 0

    def _update_v(self, observations, actions, log_dict):
        with torch.no_grad():
            target_q = self.q_target(observations, actions).squeeze(-1)
        v = self.vf(observations).squeeze(-1)
        adv = target_q - v
        v_loss = torch.mean(torch.abs(self.iql_tau - (adv < 0).float()) * adv**2)
        log_dict["value_loss"] = v_loss.item()
        self.v_optimizer.zero_grad()
        v_loss.backward()
        self.v_optimizer.step()
        return adv

    def _update_q(self, next_v, observations, actions, rewards, terminals, log_dict):
        targets = rewards + (1.0 - terminals.float()) * self.discount * next_v.detach()
        qs = [self.qf(observations, actions).squeeze(-1)]
        q_loss = sum(F.mse_loss(q, targets) for q in qs) / len(qs)
        log_dict["q_loss"] = q_loss.item()
        self.q_optimizer.zero_grad()
        q_loss.backward()
        self.q_optimizer.step()
        for target_param, source_param in zip(self.q_target.parameters(), self.qf.parameters()):
            target_param.data.copy_((1 - self.tau) * target_param.data + self.tau * source_param.data)

    def _update_policy(self, adv, observations, actions, log_dict):
        exp_adv = torch.exp(self.beta * adv.detach()).clamp(max=100.0)
        bc_losses = torch.sum((self.actor(observations) - actions) ** 2, dim=1)
        policy_loss = torch.mean(exp_adv * bc_losses)
        log_dict["actor_loss"] = policy_loss.item()
        self.actor_optimizer.zero_grad()
        policy_loss.backward()
        self.actor_optimizer.step()

    def train(self, batch):
        self.total_it += 1
        observations, actions, rewards, next_observations, dones = batch
        log_dict = {}
        with torch.no_grad():
            next_v = self.vf(next_observations).squeeze(-1)
        adv = self._update_v(observations, actions, log_dict)
        rewards = rewards.squeeze(dim=-1)
        dones = dones.squeeze(dim=-1)
        self._update_q(next_v, observations, actions, rewards, dones, log_dict)
        self._update_policy(adv, observations, actions, log_dict)
        return log_dict


@loop(
    "IQL, a trainer with a log",
    kind=KIND,
    source="tinkoff-ai/CORL algorithms/offline/iql.py",
    build=lambda: World(trainer=ImplicitQLearning()),
    batch=lambda n: (list(replayed(n)),),
    closure=True,
)
def iql(w):
    return w.trainer.train
