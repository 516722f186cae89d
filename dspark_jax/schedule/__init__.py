"""Policies: how many drafted tokens of each row the target checks (SPEC section 5).

A policy is a frozen pytree; numbers and tables in it are data, so that new ones never recompile. Every policy decides about
slot k from what was known before the token of slot k was drawn, which keeps the output law (PITFALLS L16); ``FullSearch``
does not, and is for coupled and greedy requests only.
"""

from dspark_jax.schedule.adaptive import Adaptive, Observed
from dspark_jax.schedule.algorithm1 import Algorithm1, FullSearch
from dspark_jax.schedule.base import Policy, Priced, RoundView, check_policy, pass_sizes
from dspark_jax.schedule.lagged import Lagged
from dspark_jax.schedule.static import Autoregressive, FixedLength, Threshold

__all__ = [
    "Adaptive",
    "Algorithm1",
    "Autoregressive",
    "FixedLength",
    "FullSearch",
    "Lagged",
    "Observed",
    "Policy",
    "Priced",
    "RoundView",
    "Threshold",
    "check_policy",
    "pass_sizes",
]
