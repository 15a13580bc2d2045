"""Who runs next: policies, admission, buckets, and the Scheduler that plans steps and commits their tokens."""

from radix_jax.scheduler.buckets import Buckets
from radix_jax.scheduler.errors import NoRoom, QueueFull
from radix_jax.scheduler.explanation import Explanation
from radix_jax.scheduler.new_weights import OnUpdate, check_on_update
from radix_jax.scheduler.policy import QueueContext, QueueView, Rule, make_policy
from radix_jax.scheduler.request_state import RequestState
from radix_jax.scheduler.scheduler import Scheduler
from radix_jax.scheduler.stats import SchedulerStats
from radix_jax.scheduler.timeline import Timelines

__all__ = [
    "Buckets",
    "Explanation",
    "NoRoom",
    "OnUpdate",
    "QueueContext",
    "QueueFull",
    "QueueView",
    "RequestState",
    "Rule",
    "Scheduler",
    "SchedulerStats",
    "Timelines",
    "check_on_update",
    "make_policy",
]
