# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""Reinforcement learning: updates of policies and critics."""

from __future__ import annotations

import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from benchmarks.loops import World, edit, loop
from benchmarks.loops.pieces import SummaryWriter, integers, mlp, normal

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Policy(nn.Module):
    """Of pytorch/examples: a policy that keeps what it did."""

    def __init__(self, value: bool) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 8)
        self.action_head = nn.Linear(8, 2)
        self.value_head = nn.Linear(8, 1) if value else None
        self.saved_log_probs = []
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        probs = F.softmax(self.action_head(x), dim=-1)
        return probs if self.value_head is None else (probs, self.value_head(x))


class CartPole:
    """An environment in Python: rewards 1 until the state leaves its bounds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self):
        self.state = np.full(4, 0.1, dtype=np.float32)
        return self.state

    def step(self, action):
        self.state = (self.state * 1.3 + (0.1 if action else -0.1)).astype(np.float32)
        return self.state, 1.0, bool(abs(self.state).max() > 1.0)


def reinforce_world() -> World:
    policy = Policy(value=False)
    return World(
        policy=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2),
        env=CartPole(),
        eps=np.finfo(np.float32).eps.item(),
        running_reward=10,
    )


@loop(
    "REINFORCE, an episode",
    kind="reinforcement learning",
    source="pytorch/examples reinforcement_learning/reinforce.py",
    build=reinforce_world,
    batch=lambda n: (),
)
def reinforce(w):
    state, ep_reward = w.env.reset(), 0
    for _ in range(1, 6):
        state = torch.from_numpy(state).float().unsqueeze(0)
        m = Categorical(w.policy(state))
        action = m.sample()
        w.policy.saved_log_probs.append(m.log_prob(action))
        state, reward, done = w.env.step(action.item())
        w.policy.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    w.running_reward = 0.05 * ep_reward + (1 - 0.05) * w.running_reward
    finish_episode(w)


def finish_episode(w):
    R = 0
    policy_loss = []
    returns = deque()
    for r in w.policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + w.eps)
    for log_prob, R in zip(w.policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    w.optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    w.optimizer.step()
    del w.policy.rewards[:]
    del w.policy.saved_log_probs[:]


def play(w, *_) -> None:
    """An episode by the policy, without a graph; what was seen and done is kept for the update."""
    state, w.states, w.actions, rewards = w.env.reset(), [], [], []
    with torch.no_grad():
        for _ in range(1, 6):
            w.states.append(torch.from_numpy(state))
            output = w.policy(w.states[-1])
            w.actions.append(Categorical(output if w.policy.value_head is None else output[0]).sample())
            state, reward, _ = w.env.step(w.actions[-1].item())
            rewards.append(reward)
    w.returns, w.states, w.actions = returns_of(rewards, w.eps), torch.stack(w.states), torch.stack(w.actions)


def returns_of(rewards, eps):
    R = 0
    returns = deque()
    for r in rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    return (returns - returns.mean()) / (returns.std() + eps)


def played(build):
    def built() -> World:
        world = build()
        play(world)
        return world

    return built


@edit(
    "REINFORCE, an episode",
    "play the episode outside under `no_grad`, keep states and actions, take their log-probabilities in the step",
    between=play,
    build=played(reinforce_world),
)
def reinforce_replayed(w):
    log_probs = Categorical(w.policy(w.states)).log_prob(w.actions)
    w.optimizer.zero_grad()
    (-log_probs * w.returns).sum().backward()
    w.optimizer.step()


def actor_critic_world() -> World:
    model = Policy(value=True)
    world = World(
        policy=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-2),
        env=CartPole(),
        eps=1e-7,
        running_reward=10,
    )
    select_actions(world)
    return world


def select_actions(w):
    """An episode as the script plays it: log-probabilities and values keep their graph for the update."""
    state = w.env.reset()
    for _ in range(1, 6):
        probs, state_value = w.policy(torch.from_numpy(state).float())
        m = Categorical(probs)
        action = m.sample()
        w.policy.saved_actions.append(SavedAction(m.log_prob(action), state_value))
        state, reward, _ = w.env.step(action.item())
        w.policy.rewards.append(reward)


@loop(
    "actor-critic, saved log-probabilities",
    kind="reinforcement learning",
    source="pytorch/examples reinforcement_learning/actor_critic.py",
    build=actor_critic_world,
    batch=lambda n: (),
    between=lambda w, returned, n: select_actions(w),
)
def actor_critic(w):
    R = 0
    saved_actions = w.policy.saved_actions
    policy_losses = []
    value_losses = []
    returns = []
    for r in w.policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + w.eps)
    for (log_prob, value), R in zip(saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    w.optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    w.optimizer.step()
    del w.policy.rewards[:]
    del w.policy.saved_actions[:]


@edit(
    "actor-critic, saved log-probabilities",
    "keep states and actions instead of what has a graph, take log-probabilities and values in the step",
    between=play,
    build=lambda: played(actor_critic_world)(),
)
def actor_critic_replayed(w):
    probs, values = w.policy(w.states)
    values = values.squeeze(-1)
    log_probs = Categorical(probs).log_prob(w.actions)
    w.optimizer.zero_grad()
    loss = (-log_probs * (w.returns - values.detach())).sum() + F.smooth_l1_loss(values, w.returns, reduction="sum")
    loss.backward()
    w.optimizer.step()


class ActorCritic(nn.Module):
    """Policy and value on one body, as in the PPO of ikostrikov and cleanrl."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def get_value(self, x):
        return self.critic(self.network(x))

    def get_action_and_value(self, x, action=None):
        hidden = self.network(x)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def a2c_world() -> World:
    model = ActorCritic()
    return World(
        actor_critic=model,
        optimizer=torch.optim.RMSprop(model.parameters(), 7e-4, eps=1e-5, alpha=0.99),
        value_loss_coef=0.5,
        entropy_coef=0.01,
        max_grad_norm=0.5,
    )


def rollout(n):
    return normal(n, 6, 2, 4), integers(n, 3, 5, 2), normal(n, 6, 2, 1, seed=1), normal(n, 5, 2, seed=2)


@loop(
    "A2C, a rollout of several environments",
    kind="reinforcement learning",
    source="ikostrikov/pytorch-a2c-ppo-acktr-gail a2c_ppo_acktr/algo/a2c_acktr.py",
    build=a2c_world,
    batch=rollout,
)
def a2c(w, obs, actions, returns, _rewards):
    obs_shape = obs.size()[2:]
    num_steps, num_processes = actions.size()
    _, action_log_probs, dist_entropy, values = w.actor_critic.get_action_and_value(
        obs[:-1].view(-1, *obs_shape), actions.view(-1)
    )
    values = values.view(num_steps, num_processes, 1)
    action_log_probs = action_log_probs.view(num_steps, num_processes, 1)
    advantages = returns[:-1] - values
    value_loss = advantages.pow(2).mean()
    action_loss = -(advantages.detach() * action_log_probs).mean()
    dist_entropy = dist_entropy.mean()
    w.optimizer.zero_grad()
    (value_loss * w.value_loss_coef + action_loss - dist_entropy * w.entropy_coef).backward()
    nn.utils.clip_grad_norm_(w.actor_critic.parameters(), w.max_grad_norm)
    w.optimizer.step()
    return value_loss.item(), action_loss.item(), dist_entropy.item()


def ppo_world() -> World:
    agent = ActorCritic()
    args = World(
        clip_coef=0.2, norm_adv=True, clip_vloss=True, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, target_kl=0.5
    )
    return World(
        agent=agent,
        optimizer=torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5),
        args=args,
        clipfracs=[],
        writer=SummaryWriter(),
        global_step=0,
        stopped=[],
    )


def minibatch(n):
    return (
        normal(n, 8, 4),
        integers(n, 3, 8),
        -normal(n, 8, seed=3).abs(),
        normal(n, 8, seed=4),
        normal(n, 8, seed=5),
        normal(n, 8, seed=6),
    )


def log_update(w, returned, n) -> None:
    """What the script does after the minibatches of an update: it writes its scalars, and may stop early."""
    v_loss, old_approx_kl, approx_kl = returned
    w.writer.add_scalar("losses/value_loss", v_loss.item(), w.global_step)
    w.writer.add_scalar("losses/old_approx_kl", old_approx_kl.item(), w.global_step)
    w.writer.add_scalar("losses/clipfrac", np.mean(w.clipfracs), w.global_step)
    w.stopped.append(bool(w.args.target_kl is not None and approx_kl > w.args.target_kl))


@loop(
    "PPO, a minibatch",
    kind="reinforcement learning",
    source="vwxyzjn/cleanrl cleanrl/ppo.py",
    build=ppo_world,
    batch=minibatch,
    between=log_update,
)
def ppo(w, b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values):
    args = w.args
    _, newlogprob, entropy, newvalue = w.agent.get_action_and_value(b_obs, b_actions.long())
    logratio = newlogprob - b_logprobs
    ratio = logratio.exp()
    with torch.no_grad():
        old_approx_kl = (-logratio).mean()
        approx_kl = ((ratio - 1) - logratio).mean()
        w.clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
    mb_advantages = b_advantages
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    pg_loss1 = -mb_advantages * ratio
    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    newvalue = newvalue.view(-1)
    if args.clip_vloss:
        v_loss_unclipped = (newvalue - b_returns) ** 2
        v_clipped = b_values + torch.clamp(newvalue - b_values, -args.clip_coef, args.clip_coef)
        v_loss_clipped = (v_clipped - b_returns) ** 2
        v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
    else:
        v_loss = 0.5 * ((newvalue - b_returns) ** 2).mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
    w.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(w.agent.parameters(), args.max_grad_norm)
    w.optimizer.step()
    w.global_step += 8
    return v_loss, old_approx_kl, approx_kl


@loop(
    "PPO, all epochs, stopped early",
    kind="reinforcement learning",
    source="openai/spinningup spinup/algos/pytorch/ppo/ppo.py",
    build=ppo_world,
    batch=minibatch,
)
def spinup_ppo(w, obs, act, logp_old, adv, ret, _values):
    for i in range(3):
        w.optimizer.zero_grad()
        _, logp, ent, value = w.agent.get_action_and_value(obs, act)
        ratio = torch.exp(logp - logp_old)
        clip_adv = torch.clamp(ratio, 0.8, 1.2) * adv
        loss_pi = -(torch.min(ratio * adv, clip_adv)).mean()
        kl = (logp_old - logp).mean().item()
        if kl > 1.5 * 0.3:
            print("Early stopping at step %d due to reaching max kl." % i)
            break
        (loss_pi + ((value.view(-1) - ret) ** 2).mean()).backward()
        w.optimizer.step()
    w.writer.add_scalar("StopIter", i)


@edit("PPO, all epochs, stopped early", "compile one epoch, return `kl`, and break in the loop around it")
def spinup_ppo_epoch(w, obs, act, logp_old, adv, ret, _values):
    w.optimizer.zero_grad()
    _, logp, ent, value = w.agent.get_action_and_value(obs, act)
    ratio = torch.exp(logp - logp_old)
    clip_adv = torch.clamp(ratio, 0.8, 1.2) * adv
    loss_pi = -(torch.min(ratio * adv, clip_adv)).mean()
    (loss_pi + ((value.view(-1) - ret) ** 2).mean()).backward()
    w.optimizer.step()
    return (logp_old - logp).mean().item()


class ReplayMemory:
    """Of the DQN tutorial: a deque of transitions."""

    def __init__(self, capacity) -> None:
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


def dqn_tutorial_world() -> World:
    policy_net, target_net = mlp(4, 8, 2), mlp(4, 8, 2)
    target_net.load_state_dict(policy_net.state_dict())
    memory = ReplayMemory(20)
    for n in range(12):
        next_state = None if n % 4 == 3 else normal(n, 1, 4, seed=1)
        memory.push(normal(n, 1, 4), integers(n, 2, 1, 1), next_state, normal(n, 1, seed=2))
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-2, amsgrad=True)
    return World(policy_net=policy_net, target_net=target_net, memory=memory, optimizer=optimizer)


def soft_update(w, returned, n) -> None:
    target, policy = w.target_net.state_dict(), w.policy_net.state_dict()
    for key in policy:
        target[key] = policy[key] * 0.005 + target[key] * (1 - 0.005)
    w.target_net.load_state_dict(target)


@loop(
    "DQN, the tutorial's optimize_model",
    kind="reinforcement learning",
    source="pytorch/tutorials intermediate_source/reinforcement_q_learning.py",
    build=dqn_tutorial_world,
    batch=lambda n: (),
    between=soft_update,
)
def optimize_model(w):
    if len(w.memory) < 6:
        return
    dqn_tutorial_update(w, w.memory.sample(6))


def dqn_tutorial_update(w, transitions):
    batch = Transition(*zip(*transitions))
    non_final_mask = torch.tensor(tuple(map(lambda s: s is not None, batch.next_state)), dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch = torch.cat(batch.state)
    action_batch = torch.cat(batch.action)
    reward_batch = torch.cat(batch.reward)
    state_action_values = w.policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(6)
    with torch.no_grad():
        next_state_values[non_final_mask] = w.target_net(non_final_next_states).max(1).values
    expected_state_action_values = (next_state_values * 0.99) + reward_batch
    criterion = nn.SmoothL1Loss()
    loss = criterion(state_action_values, expected_state_action_values.unsqueeze(1))
    w.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(w.policy_net.parameters(), 100)
    w.optimizer.step()


def draw_transitions(w, *_) -> None:
    w.transitions = w.memory.sample(6)


def dqn_drawn_world() -> World:
    world = dqn_tutorial_world()
    draw_transitions(world)
    return world


@edit(
    "DQN, the tutorial's optimize_model",
    "draw from the memory before the step, and pass what was drawn",
    between=draw_transitions,
    build=dqn_drawn_world,
)
def optimize_model_drawn(w):
    dqn_tutorial_update(w, w.transitions)
