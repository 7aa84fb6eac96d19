"""What all builders of schedules ask of their arguments."""

from __future__ import annotations

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import MAX_ACTIONS, MAX_MICRO_BATCHES, MAX_RANKS, MAX_STAGES


def check_shape(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> None:
    """Refuse numbers of which there is no schedule, or none that anybody could run."""
    limits = (
        ("ranks", num_ranks, MAX_RANKS),
        ("micro-batches", num_micro_batches, MAX_MICRO_BATCHES),
        ("stages per rank", stages_per_rank, MAX_STAGES // max(num_ranks, 1)),
    )
    for what, number, most in limits:
        if not 1 <= number <= most:
            raise ScheduleError(f"schedule '{name}' takes 1 to {most} {what}, not {number}")
    num_actions = 3 * num_ranks * stages_per_rank * num_micro_batches
    if num_actions > MAX_ACTIONS:
        raise ScheduleError(f"schedule '{name}' would have {num_actions} actions; at most {MAX_ACTIONS} are built")
