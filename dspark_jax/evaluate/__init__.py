"""How good a draft is on given prompts: accepted length, acceptance along the block, and how true its confidences are."""

from dspark_jax.evaluate.report import Comparison, Evaluation, GroupResult, PromptResult, Rounds, TemperatureResult, compare
from dspark_jax.evaluate.run import evaluate

__all__ = [
    "Comparison",
    "Evaluation",
    "GroupResult",
    "PromptResult",
    "Rounds",
    "TemperatureResult",
    "compare",
    "evaluate",
]
