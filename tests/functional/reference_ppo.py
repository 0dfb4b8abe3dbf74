"""Synchronous PPO in plain PyTorch and transformers: the oracle of the age-0 run.

Written from the equations (Schulman et al., arXiv:1707.06347 eq. 7; arXiv:1506.02438 eq. 16) with Python loops over
sequences and tokens. It imports nothing of the package, knows no padding and no parallelism, and is fed with the
recorded trajectories of a run.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Record = dict


@dataclass
class Hyper:
    policy_lr: float
    critic_lr: float
    gamma: float
    gae_lambda: float
    clip: float
    tis_cap: float
    minibatch_size: int
    grad_clip: float
    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    epochs: int = 1


class Critic(torch.nn.Module):
    """The policy's backbone and a scalar head that starts at zero."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(policy.model)
        self.head = torch.nn.Linear(policy.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(ids).last_hidden_state).squeeze(-1)


def response_logprobs(policy: torch.nn.Module, record: Record) -> torch.Tensor:
    ids = torch.tensor([record["prompt"] + record["response"]])
    logits = policy(ids).logits[0]
    logprobs = logits.log_softmax(-1)
    start = len(record["prompt"])
    return torch.stack([logprobs[start + i - 1, token] for i, token in enumerate(record["response"])])


def response_values(critic: Critic, record: Record) -> torch.Tensor:
    """Value of the state before each response token: read at the position of the token before it."""
    ids = torch.tensor([record["prompt"] + record["response"]])
    start = len(record["prompt"])
    return critic(ids)[0, start - 1 : start - 1 + len(record["response"])]


def advantages_and_returns(values: list[float], reward: float, gamma: float, lam: float) -> tuple[list, list]:
    count = len(values)
    rewards = [0.0] * (count - 1) + [reward]
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)
    ]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whiten(rows: list[list[float]]) -> list[torch.Tensor]:
    flat = torch.tensor([a for row in rows for a in row], dtype=torch.float64)
    return [
        ((torch.tensor(row, dtype=torch.float64) - flat.mean()) / (flat.var() + 1e-8).sqrt()).float()
        for row in rows
    ]


def read_trajectories(path: Path) -> dict[int, list[Record]]:
    """step (1-based) -> records in the order in which the learner packed them."""
    steps = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        steps[record["step"]].append(record)
    return dict(steps)


def run_reference(
    model_folder: Path, trajectories: dict[int, list[Record]], hyper: Hyper
) -> tuple[list[dict], list[torch.nn.Module]]:
    """Per step, its metrics and the policy after it."""
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    critic = Critic(policy)
    options = {"betas": hyper.betas, "eps": hyper.eps, "weight_decay": 0.0}
    policy_optimizer = torch.optim.AdamW(policy.parameters(), lr=hyper.policy_lr, **options)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=hyper.critic_lr, **options)
    history, policies = [], []
    for step in sorted(trajectories):
        records = trajectories[step]
        with torch.no_grad():
            values = [response_values(critic, r).tolist() for r in records]
            old = [response_logprobs(policy, r) for r in records]
        pairs = [
            advantages_and_returns(v, r["reward"], hyper.gamma, hyper.gae_lambda)
            for v, r in zip(values, records, strict=True)
        ]
        advantages = whiten([pair[0] for pair in pairs])
        returns = [torch.tensor(pair[1]) for pair in pairs]
        row = {"reward": sum(r["reward"] for r in records) / len(records)}
        batches = [range(i, i + hyper.minibatch_size) for i in range(0, len(records), hyper.minibatch_size)]

        for _ in range(hyper.epochs):  # a row has the means of the last epoch
            losses, norms = [], []
            for batch in batches:
                tokens = sum(len(records[i]["response"]) for i in batch)
                errors = (response_values(critic, records[i]) - returns[i] for i in batch)
                loss = sum((0.5 * error**2).sum() for error in errors) / tokens
                losses.append(float(loss.detach()))
                norms.append(_step(critic, critic_optimizer, loss, hyper.grad_clip))
            row |= {"critic_loss": _mean(losses), "critic_grad_norm": _mean(norms)}

            if step > hyper.warmup_steps:
                losses, norms = [], []
                for batch in batches:
                    tokens = sum(len(records[i]["response"]) for i in batch)
                    terms = (_policy_loss(policy, records[i], old[i], advantages[i], hyper) for i in batch)
                    loss = sum(terms) / tokens
                    losses.append(float(loss.detach()))
                    norms.append(_step(policy, policy_optimizer, loss, hyper.grad_clip))
                row |= {"loss": _mean(losses), "grad_norm": _mean(norms)}
        history.append(row)
        policies.append(copy.deepcopy(policy).eval())
    return history, policies


def _policy_loss(policy, record, old, advantage, hyper) -> torch.Tensor:
    ratio = (response_logprobs(policy, record) - old).exp()
    clipped = ratio.clamp(1 - hyper.clip, 1 + hyper.clip)
    weight = (old - torch.tensor(record["logprobs"])).exp().clamp(max=hyper.tis_cap)
    return (weight * torch.maximum(-advantage * ratio, -advantage * clipped)).sum()


def _step(model, optimizer, loss, grad_clip) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    return float(norm)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
