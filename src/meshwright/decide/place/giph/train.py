"""GiPH's policy gradient: episodes of moves on random problems, several at once, and the weights that are best on problems held back.

Cite: Hu et al., "GiPH", MLSys 2023, section 4.4; sizes and constants from its public code (card: giph, 3.4).
Deviations: rewards are in shares of the problem's shortest path, so that problems of all sizes count alike; one step of Adam for `TOGETHER` episodes,
with advantages divided by their spread and the gradient's norm capped; the rate falls to nothing along a cosine; no-ops stay masked to the end.
The discount is 0.5, the paper's 0.97: after 50 steps problems held back took 1.10 of their shortest path instead of 1.21.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ....cost_models.moves import MoveNet
from ....kernels.effort import time_is_up
from ..bound import longest_path_s
from ..problem import PlaceProblem
from .episodes import Episodes, random_start
from .net import ScoringNet, log_chances

__all__ = ["STEPS_PER_TASK", "fit_moves", "searched"]

STEPS_PER_TASK = 2  # of an episode (paper, section 5)
TOGETHER = 16  # episodes of one step of the optimizer
DISCOUNT = 0.5
RATE = 0.01
MAX_NORM = 1.0  # of a gradient
HELD_BACK, LOOK_EVERY = 20, 10  # problems to choose weights by, and steps of the optimizer between looks at them

Draw = Callable[[np.random.Generator], PlaceProblem]


def searched(
    net: ScoringNet, episodes: Episodes, steps: Sequence[int], rng: np.random.Generator
) -> tuple[list[NDArray[np.float64]], list[torch.Tensor]]:
    """So many moves of each search, drawn by the net's chances: what every move gained [steps][problems] in seconds, and the moves' log chances."""
    gained, chances = [], []
    for step in range(max(steps)):
        allowed = episodes.allowed()
        log_chance = log_chances(net(episodes.graph()), allowed, episodes.owner, len(steps))
        drawn = log_chance.detach().numpy() + rng.gumbel(size=len(allowed))
        now, chosen = np.zeros(len(steps)), []
        for b, s in enumerate(episodes.searches):
            v = episodes.nodes[b][np.argmax(drawn[episodes.nodes[b]])]
            chosen.append(int(v))
            if step < steps[b]:
                now[b] = s.move(int(episodes.task[v]), int(episodes.device[v]))
        gained.append(now)
        chances.append(log_chance[chosen])
    return gained, chances


def _best(net: ScoringNet, problems: Sequence[PlaceProblem], scale: NDArray[np.float64], seed: int) -> float:
    """Mean over the problems of the shortest makespan of an episode, in shares of the shortest path."""
    rng = np.random.default_rng(seed)
    episodes = Episodes(problems, [random_start(p, rng) for p in problems])
    with torch.no_grad():
        searched(net, episodes, [STEPS_PER_TASK * len(p.graph.tasks) for p in problems], rng)
    return float((np.array([s.best_s for s in episodes.searches]) / scale).mean())


def fit_moves(draw: Draw, *, updates: int = 100, seed: int = 0, told: Callable[[int, float], None] | None = None) -> MoveNet:
    """A net trained by `updates` steps of `TOGETHER` episodes on problems that `draw` gives. Equal seeds give equal weights on one machine.

    Ends early where time is up, with the best so far. `told`: called with every look at the held-back problems: (update, mean of shortest makespans
    over shortest paths)."""
    rng = np.random.default_rng([seed, 0])
    held = [draw(rng) for _ in range(HELD_BACK)]
    held_scale = np.array([longest_path_s(p) for p in held])
    net = ScoringNet(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, updates))
    best, kept, first = float("inf"), net.weights(), 0.0
    for update in range(updates + 1):
        late = time_is_up()
        if update % LOOK_EVERY == 0 or update == updates or late:
            now = _best(net, held, held_scale, seed)
            first = first or now
            if told is not None:
                told(update, now)
            if now < best:
                best, kept = now, net.weights()
        if late:
            break
        if update < updates:
            _learn(net, optimizer, [draw(rng) for _ in range(TOGETHER)], rng)
            schedule.step()
    trained = {"updates": update, "episodes": update * TOGETHER, "seed": seed, "held_back": best, "held_back_untrained": first}
    return MoveNet(kept, trained)


def _learn(net: ScoringNet, optimizer: torch.optim.Optimizer, problems: Sequence[PlaceProblem], rng: np.random.Generator) -> None:
    episodes = Episodes(problems, [random_start(p, rng) for p in problems])
    steps = np.array([STEPS_PER_TASK * len(p.graph.tasks) for p in problems])
    gained, chances = searched(net, episodes, steps.tolist(), rng)
    rewards = np.array(gained) / np.array([longest_path_s(p) for p in problems])
    to_go = np.zeros_like(rewards)
    later = np.zeros(len(problems))
    for t in reversed(range(len(rewards))):
        later = to_go[t] = rewards[t] + DISCOUNT * later
    so_far = np.cumsum(rewards, 0) / np.arange(1, len(rewards) + 1)[:, None]  # the episode's own mean reward up to now, its baseline
    counts = np.arange(len(rewards))[:, None] < steps
    advantage = np.where(counts, to_go - so_far, 0.0)
    advantage /= advantage[counts].std() + 1e-9
    optimizer.zero_grad()
    loss = -(torch.stack(chances) * torch.from_numpy(advantage.astype(np.float32))).sum() / counts.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
    optimizer.step()
